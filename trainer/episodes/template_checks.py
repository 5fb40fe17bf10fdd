"""Refuses chat templates with which a conversation cannot be encoded message by message.

Each check raises `ValueError` with the reason and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

from trainer.episodes.chat_template import TEMPLATE_ADVICE, ChatTemplate, Render
from trainer.episodes.turn_parser import TOOL_CALL_OPEN, parse_turn

REASONING = "<think>\nI let Python do it.\n</think>"
"""The reasoning of the turns with which chat templates are checked."""
CALL = '<tool_call>\n{"name": "run", "arguments": {"code": "print(1)"}}\n</tool_call>'
"""The tool call of these turns."""


class Encoder(Protocol):
    """The part of a tokenizer that a check uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def check_append_only(template: ChatTemplate) -> None:
    """Compare a conversation of two turns with the same conversation after one turn."""
    before, between, after = template.response_segments(2)
    before = template.end_of_turn + before
    shorter = [template.prompt_prefix, before, between, before, after]
    # The text before a turn is not compared, since it may differ (`ChatTemplate.finished_turn_opening`).
    prefix, _, before_first, between, _, before_second, after = template.segments(
        "user", "assistant", "tool", "tool", "assistant", "tool"
    )
    if [prefix, before_first, between, before_second, after] != shorter:
        raise ValueError(
            "the chat template is not append-only: it renders a turn differently if other messages follow; "
            f"{TEMPLATE_ADVICE}"
        )


def check_earlier_turns(tokenizer: Encoder, render: Callable[[list[dict[str, Any]], bool, bool], str]) -> None:
    """Render a growing conversation. Raises `ValueError` if a rendering does not begin with the tokens of the previous
    one."""
    roles = ("user", "assistant", "tool", "assistant", "user", "assistant")
    contents = {"user": "1 + 1?", "assistant": f"{REASONING}\n\n{CALL}", "tool": "2"}
    messages: list[dict[str, Any]] = []
    shorter: list[int] = []
    for role, next_role in pairwise((*roles, "")):
        messages.append({"role": role, "content": contents[role]})
        text = render(messages, True, next_role == "assistant")
        longer = tokenizer.encode(text, add_special_tokens=False)
        if longer[: len(shorter)] != shorter:
            change = "changes" if text.count(REASONING) == len(messages) // 2 else "removes the reasoning of"
            raise ValueError(
                f"the chat template {change} earlier turns if a message from {role!r} follows; {TEMPLATE_ADVICE}"
            )
        shorter = longer


def check_tool_call(render: Render) -> None:
    """Raise `ValueError` unless the trainer reads a tool call that the template writes."""
    function = {"name": "run", "arguments": {"code": "print(1)"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
    ]
    if parse_turn(render(messages, True)).tool_calls[-1:] != parse_turn(CALL).tool_calls:
        raise ValueError(
            f"the chat template does not write tool calls as JSON in {TOOL_CALL_OPEN} tags, which the trainer reads; "
            f"set model.system_prompt to a text that asks for such calls, or {TEMPLATE_ADVICE}"
        )
