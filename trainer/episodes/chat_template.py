"""Reads a chat template: the text that it renders around the contents of messages.

A template is a function from messages to text. It is read by rendering conversations of placeholders.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CHATML_TOOLS = "chatml-tools"
"""The value of `model.chat_template` for the template that ships with the trainer."""
CHATML_TOOLS_FILE = Path(__file__).with_name("chatml_tools.jinja")
TEMPLATE_ADVICE = (
    "set model.chat_template to the file of another template (docs/training.md names some). If the tokenizer has "
    f"Qwen's chat tokens, set it to {CHATML_TOOLS}, or set model.chat_format to rstar2"
)

Render = Callable[[list[dict[str, Any]], bool], str]
"""Takes (messages, with_tools). Renders the messages and the opening of the assistant's next turn as text. If
`with_tools` is true, the text describes the tools."""


class ChatTemplate:
    """The text before, between and after the messages of a conversation, as `render` writes it."""

    def __init__(
        self, render: Render, *, system_prompt: str, answer_instructions: str, special_tokens: Iterable[str]
    ) -> None:
        """Raises `ValueError` if the template changes a content, or ends a turn with none of `special_tokens`."""
        self._render, self._system_prompt, self._answer_instructions = render, system_prompt, answer_instructions
        # The text before a problem, and the text between a problem and the first turn.
        self.prompt_prefix, self.generation_prompt = self.segments("user")
        # The segments are the text before the user's message, before the assistant's, before the first tool response,
        # between the two tool responses, and at the end.
        _, before_turn, before_responses, self.between_responses, self.after_responses = self.segments(
            "user", "assistant", "tool", "tool"
        )
        # A template may open the assistant's turn with a tag, such as `<reason>`. If a finished turn lacks this tag,
        # the template may render something else before the turn, such as an empty block of thoughts.
        #   generation prompt   <|im_start|>assistant\n + turn_opening
        #   before_turn         <|im_start|>assistant\n + finished_turn_opening
        opening_tag = re.search(r"<\w+>\s*$", self.generation_prompt)
        self.turn_opening = self.finished_turn_opening = ""
        if opening_tag:
            self.turn_opening = opening_tag[0]
            turn_start = self.generation_prompt.removesuffix(self.turn_opening)
            self.finished_turn_opening = before_turn.removeprefix(turn_start)
        self.end_of_turn = max(
            (text for text in special_tokens if before_responses.startswith(text)), key=len, default=""
        )
        """The special token that ends a turn."""
        if not self.end_of_turn:
            raise ValueError(
                f"the chat template renders {before_responses[:40]!r} after a turn; expected this text to begin with a "
                "special token that ends the turn"
            )
        self.before_responses = before_responses.removeprefix(self.end_of_turn)

    def response_segments(self, count: int) -> list[str]:
        assert count, "expected a tool response; an episode ends after a turn without tool calls"
        return [self.before_responses, *[self.between_responses] * (count - 1), self.after_responses]

    @functools.cached_property
    def user_segments(self) -> list[str]:
        """The text before and after a user message that follows a turn."""
        before, after = self.segments("user", "assistant", "user")[2:]
        return [before.removeprefix(self.end_of_turn), after]

    def segments(self, *roles: str) -> list[str]:
        """Return the text before, between and after the contents of messages with these roles.

        If a user message is first, the segments include the system prompt and the answer instructions.
        """
        marks = [f"[content-{i}]" for i in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        has_instructions = roles[0] == "user"
        if has_instructions:
            messages[0]["content"] = self._answer_instructions + marks[0]
            if self._system_prompt:
                messages.insert(0, {"role": "system", "content": self._system_prompt})
        texts, rest = [], self._render(messages, has_instructions)
        for mark, role in zip(marks, roles, strict=True):
            text, has_mark, rest = rest.partition(mark)
            if not has_mark:
                raise ValueError(f"the chat template omits or changes the content of a message from {role!r}")
            texts.append(text)
        return [*texts, rest]
