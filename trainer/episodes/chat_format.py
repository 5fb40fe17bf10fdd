"""Encodes conversations as tokens: the prompt, the sampled turns and the tool responses.

    encode_prompt(problem)  turn 1, sampled  encode_tool_responses(texts)  turn 2, sampled  ...

Invariants:
- Append-only: no token depends on a later message, and `encode_conversation` gives the same tokens as the calls above.
  A chat template that violates this is refused when the `ChatFormat` is created.
- Untrusted text (problems, tool output) is encoded as plain text. It never yields a token with a special meaning, such
  as the end of a turn.

Tool calls are read by `trainer.episodes.turn_parser`. Tool responses are sent in one user turn, as in rStar2-Agent
(arXiv 2508.20722, 2.1).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from trainer.episodes.chat_template import TEMPLATE_ADVICE, ChatTemplate, Render
from trainer.episodes.template_checks import check_append_only, check_earlier_turns, check_tool_call

# The words and the layout that the released model was trained with (custom_chat_template in microsoft/rStar,
# rstar2_agent/config/rstar2_agent_trainer.yaml).
RSTAR2_SYSTEM = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. "
    "The Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
    "The reasoning process is enclosed within <reason> </reason> and answer is enclosed within <answer> </answer> "
    "tags, respectively, i.e., <reason> reasoning process here </reason> <answer> answer here </answer>."
)
RSTAR2_TOOLS = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    "%s"
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
ANSWER_INSTRUCTIONS = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. "
    "And your final answer will be extracted automatically by the \\boxed{} tag.\nThis is the problem:\n"
)

Message = Mapping[str, str]
ToolSchema = Mapping[str, Any]
"""The description of a tool in the form that OpenAI-compatible servers and chat templates accept."""


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that this module uses."""

    @property
    def eos_token_id(self) -> int | None: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...
    def get_added_vocab(self) -> dict[str, int]: ...


class TemplateTokenizer(Tokenizer, Protocol):
    """A tokenizer that may have a chat template."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> object: ...


class ChatFormat:
    """A format of conversations, made by `rstar2_format` or `tokenizer_format`. It is immutable and can be shared."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        render: Render,
        *,
        system_prompt: str,
        answer_instructions: str,
        eos_ids: Iterable[int] = (),
        needs_answer_tags: bool = True,
    ) -> None:
        """Render conversations of placeholders, to find the text around messages. Three kinds of ids end a turn: the
        template's end of turn, the tokenizer's end token, and `eos_ids`. Raises `ValueError` if `render` is not
        append-only."""
        self._tokenizer = tokenizer
        self.needs_answer_tags = needs_answer_tags
        """Whether only the content of `<answer>` is an answer. Otherwise, a last turn without it is the answer."""
        self._system_prompt, self._answer_instructions = system_prompt, answer_instructions
        # The special tokens that `_encode_untrusted` must avoid: it splits their text in two. Two kinds are left out:
        # tokens of one character, which cannot be split, and tokens of blanks, which have no special meaning.
        added = {text: id for text, id in tokenizer.get_added_vocab().items() if len(text.strip("▁ \n")) > 1}
        self._special_token_pattern = _compile_special_token_pattern(added)
        self._encode_cached = functools.lru_cache(4096)(self._encode)  # the samples of a problem share their prompt

        self._template = ChatTemplate(
            render, system_prompt=system_prompt, answer_instructions=answer_instructions, special_tokens=added
        )
        check_append_only(self._template)
        stops = (added[self._template.end_of_turn], tokenizer.eos_token_id, *eos_ids)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(id for id in stops if id is not None))

    def encode_prompt(self, problem: str) -> list[int]:
        """Return the token ids before the first turn."""
        return self._interleave((self._template.prompt_prefix, self._template.generation_prompt), (problem,))

    def encode_tool_responses(self, texts: Sequence[str]) -> list[int]:
        """Return the token ids between the end token of a turn and the next turn, for its tool responses in order."""
        return self._interleave(self._template.response_segments(len(texts)), texts)

    def messages(self, prompt_ids: Sequence[int], turns: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
        """Return an episode as messages. `turns` are texts, each with the texts of its tool responses.

        The responses to the last turn are left out, so that the last message is the assistant's. If the last turn has
        an end token, `encode_conversation` gives the ids of the episode again. Raises `ValueError` if the prompt is of
        another format, for example with other tools.
        """
        prompt, before, after = self.decode(prompt_ids), self._template.prompt_prefix, self._template.generation_prompt
        if not (prompt.startswith(before) and prompt.endswith(after)):
            raise ValueError(f"expected a prompt that begins with {before[-80:]!r}, got {prompt[:200]!r}")
        problem = prompt.removeprefix(before).removesuffix(after)
        messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages.append({"role": "user", "content": self._answer_instructions + problem})
        responses: Sequence[str] = ()  # to the previous turn
        for text, next_responses in turns:
            messages += [{"role": "tool", "content": response} for response in responses]
            messages.append({"role": "assistant", "content": self._template.turn_opening + text})
            responses = next_responses
        return messages

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode_conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Return a conversation's token ids and loss mask: 1 for the assistant's tokens and their end tokens.

        Without a system message, the first user message is a problem. The ids then equal those of `encode_prompt`, of
        the turns and of `encode_tool_responses`. With a system message, no instructions are added. Raises `ValueError`
        if the roles are out of order.
        """
        template = self._template
        roles = [message["role"] for message in messages]
        contents = [message["content"] for message in messages]
        position = 2 if roles[:1] == ["system"] else 1
        if roles[:position] not in (["user"], ["system", "user"]) or roles[-1] != "assistant":
            raise ValueError(f"expected the roles (system,) user, ..., assistant; got {roles}")
        ids: list[int] = []
        mask: list[int] = []
        # `pending_texts` are the messages since the last turn. They are encoded together with the next turn. `segments`
        # is the text before, between and after them. It is empty if there are none.
        segments = template.segments(*roles[:position])
        pending_texts = contents[:position]
        for role, same_role in groupby(roles[position:]):
            count = len(list(same_role))
            if role == "assistant" and count == 1 and segments:
                turn = contents[position]
                if not turn.startswith(template.turn_opening):
                    opening = segments[-1].removesuffix(template.turn_opening) + template.finished_turn_opening
                    segments = [*segments[:-1], opening]
                context = self._interleave(segments, pending_texts)
                sampled = [*self._encode(turn.removeprefix(template.turn_opening)), self.stop_ids[0]]
                ids += context + sampled
                mask += [0] * len(context) + [1] * len(sampled)
                segments = []
            elif role in ("tool", "user") and not segments and (role == "tool" or count == 1):
                segments = template.response_segments(count) if role == "tool" else template.user_segments
                pending_texts = contents[position : position + count]
            else:
                raise ValueError(
                    f"message {position} is from {role!r}: expected the assistant to alternate with tools or the user; "
                    f"got the roles {roles}"
                )
            position += count
        return ids, mask

    def _interleave(self, segments: Sequence[str], contents: Iterable[str]) -> list[int]:
        ids = list(self._encode_cached(segments[0]))
        for text, segment in zip(contents, segments[1:], strict=True):
            ids += self._encode_untrusted(text)
            ids += self._encode_cached(segment)
        return ids

    def _encode_untrusted(self, text: str) -> list[int]:
        """Encode text that must not yield special tokens. If the text spells a special token, the spelling is split in
        two, so that it stays text."""
        text = text.encode("utf-8", "replace").decode()  # replaces lone surrogates, which tokenizers reject
        return [id for part in self._special_token_pattern.split(text) for id in self._encode_cached(part)]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def rstar2_format(
    tokenizer: Tokenizer, *, tools: Sequence[ToolSchema], system_prompt: str = "", eos_ids: Iterable[int] = ()
) -> ChatFormat:
    """Create rStar2-Agent's format: Qwen's chat tokens, turns that open with `<reason>`, and instructions of its own.

    A `system_prompt` replaces these instructions and the description of the tools. The user message is then the problem
    alone. Raises `ValueError` if the tokenizer lacks the chat tokens.
    """
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in tokenizer.get_added_vocab()]
    if missing:
        raise ValueError(f"the rstar2 format needs Qwen's chat tokens; the tokenizer has no {' and no '.join(missing)}")
    system = system_prompt or RSTAR2_SYSTEM + RSTAR2_TOOLS % "\n".join(map(json.dumps, tools))
    instructions = "" if system_prompt else ANSWER_INSTRUCTIONS
    return ChatFormat(
        tokenizer, _render_rstar2, system_prompt=system, answer_instructions=instructions, eos_ids=eos_ids
    )


def tokenizer_format(
    tokenizer: TemplateTokenizer, *, tools: Sequence[ToolSchema], system_prompt: str = "", eos_ids: Iterable[int] = ()
) -> ChatFormat:
    """Create a format from the tokenizer's own chat template. The template must write calls as JSON in `<tool_call>`.

    A `system_prompt` is the system message and replaces the answer instructions and the check of tool calls. Raises
    `ValueError` for a missing template and for one that fails, changes or removes earlier turns, does not render `tool`
    messages, or, without a system prompt, writes tool calls in another form.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer has no chat template; {TEMPLATE_ADVICE}")

    def render(messages: list[dict[str, Any]], with_tools: bool, opens_turn: bool = True) -> str:
        options = {"tools": list(tools) if with_tools else None, "add_generation_prompt": opens_turn}
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # a template is a program, which may raise any exception
            role, reason = messages[-1]["role"], f"{type(error).__name__}: {error}"
            raise ValueError(
                f"the chat template fails for a message from {role!r}: {reason}; {TEMPLATE_ADVICE}"
            ) from error

    instructions = "" if system_prompt else ANSWER_INSTRUCTIONS
    check_earlier_turns(tokenizer, render)
    if not system_prompt:
        check_tool_call(render)
    return ChatFormat(
        tokenizer,
        render,
        system_prompt=system_prompt,
        answer_instructions=instructions,
        eos_ids=eos_ids,
        needs_answer_tags=False,
    )


def _render_rstar2(messages: list[dict[str, Any]], with_tools: bool) -> str:
    parts = []
    for role, same_role in groupby(messages, key=lambda message: message["role"]):
        contents = [message["content"] for message in same_role]
        if role == "tool":
            contents = ["\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in contents)]
        role = "user" if role == "tool" else role
        parts += [f"<|im_start|>{role}\n{text}<|im_end|>\n" for text in contents]
    return "".join(parts) + "<|im_start|>assistant\n<reason>"


def _compile_special_token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a zero-width pattern that matches after the first character of each of `tokens`."""
    by_first = groupby(sorted(tokens), key=lambda token: token[0])
    splits = [
        f"(?<={re.escape(first)})(?={'|'.join(re.escape(token[1:]) for token in same_first)})"
        for first, same_first in by_first
    ]
    return re.compile("|".join(splits) or r"(?!)")
