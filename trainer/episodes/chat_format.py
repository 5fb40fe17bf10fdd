"""How a conversation is spelt in tokens: the prompt, what the model said in a turn, and tool responses.

Invariants:
- Append-only. A conversation is `prompt`, what was sampled, `responses`, what was sampled, and so on; no token depends
  on a later one; and `encode` gives the same tokens for the same words. A template that cannot do this is refused when
  the chat is made.
- What others wrote (problems, tool output) is encoded as plain text: no token with a meaning of its own, such as an end
  of turn, comes out of it.
- `parse` is total: every text is a `ParsedTurn`.

Tool calls are rStar2-Agent's (arXiv 2508.20722, 2.1): JSON inside `<tool_call>` tags, answered in one user turn.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

_PROPERTIES = {
    "code": {
        "type": "string",
        "description": "Python code. Print what you want to see; if it prints nothing, the value of its last "
        "expression is shown. numpy, scipy and sympy are installed. Every call starts afresh.",
    },
    "input": {"type": "string", "description": "What the code reads from standard input.", "default": ""},
}
_FUNCTION = {
    "name": "execute_python_code_with_standard_io",
    "description": "Run Python code with the given standard input and return what it prints.",
    "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["code"]},
}
TOOL_SCHEMA = {"type": "function", "function": _FUNCTION}
"""As `sandbox.tool` states it."""

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
    + json.dumps(TOOL_SCHEMA)
    + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
ASK = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. "
    "And your final answer will be extracted automatically by the \\boxed{} tag.\nThis is the problem:\n"
)
CALL, CALL_END = "<tool_call>", "</tool_call>"
ANSWER, ANSWER_END = "<answer>", "</answer>"
_BLANKS, _BRACES, _JSON = re.compile(r"[ \t\n\r]*"), re.compile(r"\\.|[{}]", re.DOTALL), json.JSONDecoder()
_EXAMPLE = f'{CALL}{{"name": "{_FUNCTION["name"]}", "arguments": {{"code": "print(1)"}}}}{CALL_END}'

Message = Mapping[str, str]
Render = Callable[[list[dict[str, str]], bool], str]
"""Messages to text that ends where the assistant speaks next; the flag asks for the tool's description in it."""


class Tokenizer(Protocol):
    """What is used of a `transformers` tokenizer."""

    @property
    def eos_token_id(self) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...
    def get_added_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A tool call that parsed. Whether there is such a tool, with such arguments, is for the tool to say."""

    name: str
    arguments: str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A tool call that did not parse: what stood there, and what the model reads about it."""

    text: str
    response: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a turn asks for and answers."""

    calls: tuple[Asked | Malformed, ...] = ()
    answer_tags: int = 0
    """`<answer>` blocks opened and closed, outside tool calls."""
    answer: str | None = None
    """What the last `\\boxed{}` of the last of them holds, None without one."""


def parse(text: str) -> ParsedTurn:
    """What is in a turn. Never raises.

    Tool calls come first: whatever stands inside one belongs to it, so an `<answer>` in its code is no answer, and a
    `</tool_call>` inside a string of its JSON does not end it. A call inside an answer is a call all the same. A call
    whose JSON does not parse ends at the next `</tool_call>`; one that is never closed ends with the text. Both are
    malformed.
    """
    calls: list[Asked | Malformed] = []
    outside, at = [], 0
    while (start := text.find(CALL, at)) >= 0:
        outside.append(text[at:start])
        call, at = _call(text, start + len(CALL))
        calls.append(call)
    outside.append(text[at:])
    answers = _answers("\n".join(outside))
    return ParsedTurn(tuple(calls), len(answers), _boxed(answers[-1]) if answers else None)


class Chat:
    """A way of spelling conversations, made by `rstar2` or `own_template`. It is immutable and may be shared."""

    def __init__(self, tokenizer: Tokenizer, render: Render, *, system: str, ask: str) -> None:
        """`render` is asked a few times, with marks for what will be said. `ValueError` if it is not append-only."""
        self._tokenizer, self._render, self._system, self._ask = tokenizer, render, system, ask
        # A single character cannot be cut in two, and runs of blanks mean nothing.
        added = {text: number for text, number in tokenizer.get_added_vocab().items() if len(text.strip("▁ \n")) > 1}
        self._cuts = _cuts(added)
        self._encoded = functools.lru_cache(4096)(self._encode)  # samples of one problem hear the same

        self.before, self._speak = self._pieces("user")
        """What is said before a problem."""
        first, self._between, self._after = self._pieces("user", "assistant", "tool", "tool")[2:]
        before, opened, *seams = self._pieces("user", "assistant", "tool", "tool", "assistant", "tool")
        del seams[2]  # like `opened`, how a turn that is over begins
        if [before, *seams] != [self.before, first, self._between, first, self._after]:
            raise ValueError(
                "the chat template is not append-only: it spells the same turns differently once others follow. "
                "Use the rstar2 chat, or a template that leaves earlier turns as they were"
            )
        # What a template says for the model at the start of a turn, such as `<reason>`. Where a turn that is over does
        # not begin so, it may say something else, such as an empty block of thoughts.
        opens = re.search(r"<\w+>\s*$", self._speak)
        self._prefix = opens[0] if opens else ""
        self._instead = opened.removeprefix(self._speak.removesuffix(self._prefix)) if self._prefix else ""
        self._end = max((text for text in added if first.startswith(text)), key=len, default="")
        if not self._end:
            raise ValueError(f"the chat template ends a turn by {first[:40]!r}; it must begin with a token of its own")
        self._first = first.removeprefix(self._end)
        stops = (added[self._end], tokenizer.eos_token_id)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in stops if i is not None))

    def prompt(self, problem: str) -> list[int]:
        """The ids up to where the model speaks for the first time."""
        return self._fill((self.before, self._speak), (problem,))

    def responses(self, texts: Sequence[str]) -> list[int]:
        """The ids between the end token of a turn and the next turn, for what its tool calls returned, in order."""
        return self._fill(self._tools(len(texts)), texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, every token shown."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """A conversation's ids and its mask: 1 on what the assistant says and the end token of each of its turns.

        Without a system message the first user message is a problem, and the ids are those of `prompt`, turns and
        `responses`. With one, everything is said as it stands. Raises `ValueError` for roles out of order.
        """
        roles = [message["role"] for message in messages]
        said = [message["content"] for message in messages]
        at = 2 if roles[:1] == ["system"] else 1
        if roles[:at] not in (["user"], ["system", "user"]) or roles[-1] != "assistant":
            raise ValueError(f"a conversation goes from (system,) user to assistant; here the roles are {roles}")
        ids, mask = [], []
        pieces = self._pieces(*roles[:at])
        heard = said[:at]
        for role, group in groupby(roles[at:]):
            count = len(list(group))
            if role == "assistant" and count == 1 and pieces:
                if not said[at].startswith(self._prefix):
                    pieces = [*pieces[:-1], pieces[-1].removesuffix(self._prefix) + self._instead]
                shown = self._fill(pieces, heard)
                spoken = [*self._encode(said[at].removeprefix(self._prefix)), self.stop_ids[0]]
                ids += shown + spoken
                mask += [0] * len(shown) + [1] * len(spoken)
                pieces = []
            elif role in ("tool", "user") and not pieces and (role == "tool" or count == 1):
                pieces = self._tools(count) if role == "tool" else self._user
                heard = said[at : at + count]
            else:
                raise ValueError(f"message {at} is from {role!r}: assistant and others take turns; here are {roles}")
            at += count
        return ids, mask

    def _tools(self, count: int) -> list[str]:
        assert count, "a turn without tool calls is the last"
        return [self._first, *[self._between] * (count - 1), self._after]

    @functools.cached_property
    def _user(self) -> list[str]:
        """What stands around a user message that follows a turn."""
        first, after = self._pieces("user", "assistant", "user")[2:]
        return [first.removeprefix(self._end), after]

    def _pieces(self, *roles: str) -> list[str]:
        """The text before, between and after what these roles say, the chat's own words too where a user is first."""
        marks = [f"[said-{i}]" for i in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        has_own_words = roles[0] == "user"
        if has_own_words:
            messages[0]["content"] = self._ask + marks[0]
            if self._system:
                messages.insert(0, {"role": "system", "content": self._system})
        pieces, rest = [], self._render(messages, has_own_words)
        for mark, role in zip(marks, roles, strict=True):
            piece, found, rest = rest.partition(mark)
            if not found:
                raise ValueError(f"the chat template leaves out or changes what a message from {role!r} says")
            pieces.append(piece)
        return [*pieces, rest]

    def _fill(self, pieces: Sequence[str], said: Iterable[str]) -> list[int]:
        ids = list(self._encoded(pieces[0]))
        for text, piece in zip(said, pieces[1:], strict=True):
            ids += self._plain(text)
            ids += self._encoded(piece)
        return ids

    def _plain(self, text: str) -> list[int]:
        """The ids of what others wrote. What would become a token of its own is cut in two, which leaves it text."""
        text = text.encode("utf-8", "replace").decode()  # no half of a surrogate pair: a tokenizer takes only Unicode
        return [number for piece in self._cuts.split(text) for number in self._encoded(piece)]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def rstar2(tokenizer: Tokenizer, *, preamble: str = "") -> Chat:
    """rStar2-Agent's: Qwen's chat tokens, turns that open with `<reason>`, and its words around a problem.

    A `preamble` stands instead of all these words: it is the system message, and a problem is said as it stands. Raises
    `ValueError` if the tokenizer lacks the chat tokens.
    """
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if token not in tokenizer.get_added_vocab()]
    if missing:
        raise ValueError(f"the rstar2 chat needs Qwen's chat tokens; the tokenizer has no {' and no '.join(missing)}")
    system = preamble or RSTAR2_SYSTEM + RSTAR2_TOOLS
    return Chat(tokenizer, _rstar2_text, system=system, ask="" if preamble else ASK)


def own_template(tokenizer: Any, *, preamble: str = "") -> Chat:
    """The tokenizer's own chat template, given the tool's schema. It must make the model call in `<tool_call>` tags.

    A `preamble` is the system message, and replaces the words around a problem. Raises `ValueError` for a template that
    fails, is not append-only, has no `tool` messages, or says nothing of `<tool_call>` where no preamble does.
    """

    def render(messages: list[dict[str, str]], has_tool: bool) -> str:
        tools = [TOOL_SCHEMA] if has_tool else None
        try:
            return str(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False))
        except Exception as why:  # a template is a program of the model's authors, and raises what it likes
            raise ValueError(f"the tokenizer's chat template cannot be used: {type(why).__name__}: {why}") from why

    chat = Chat(tokenizer, render, system=preamble, ask="" if preamble else ASK)
    if not preamble and CALL not in chat.before:
        raise ValueError(f"the tokenizer's chat template does not say how to call in {CALL}; give a preamble that does")
    return chat


def _rstar2_text(messages: list[dict[str, str]], has_tool: bool) -> str:
    parts = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        said = [message["content"] for message in group]
        if role == "tool":
            said = ["\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in said)]
        parts += [f"<|im_start|>{'user' if role == 'tool' else role}\n{text}<|im_end|>\n" for text in said]
    return "".join(parts) + "<|im_start|>assistant\n<reason>"


def _cuts(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches, with no width, after the first character of each of `tokens`."""
    heads = groupby(sorted(tokens), key=lambda token: token[0])
    cuts = [f"(?<={re.escape(head)})(?={'|'.join(re.escape(token[1:]) for token in group)})" for head, group in heads]
    return re.compile("|".join(cuts) or r"(?!)")


def _call(text: str, start: int) -> tuple[Asked | Malformed, int]:
    """The call whose inside begins at `start`, and where what follows it begins."""
    try:
        value, end = _JSON.raw_decode(text, _solid(text, start))
    except (ValueError, RecursionError):
        pass
    else:
        if text.startswith(CALL_END, end := _solid(text, end)):
            return _asked(value, text[start:end]), end + len(CALL_END)
    end = text.find(CALL_END, start)
    if end < 0:
        return _malformed(text[start:], f"SyntaxError: {CALL} is never closed by {CALL_END}"), len(text)
    try:
        call = _asked(json.loads(text[start:end]), text[start:end])
    except (ValueError, RecursionError) as why:
        call = _malformed(text[start:end], f"{type(why).__name__}: {why}")
    return call, end + len(CALL_END)


def _solid(text: str, at: int) -> int:
    """Where the blanks at `at` end."""
    blanks = _BLANKS.match(text, at)
    assert blanks
    return blanks.end()


def _asked(value: Any, text: str) -> Asked | Malformed:
    match value:
        case {"name": str(name), "arguments": str() | dict() as arguments}:
            return Asked(name, arguments)
    return _malformed(text, 'TypeError: a tool call is a JSON object with a "name" and an object "arguments"')


def _malformed(text: str, why: str) -> Malformed:
    return Malformed(text, f"{why}\nA tool call is one JSON object in tags, such as {_EXAMPLE}")


def _answers(text: str) -> list[str]:
    """What is inside each `<answer>` block, in linear time: models do repeat a tag until they are stopped."""
    answers, at = [], 0
    while (start := text.find(ANSWER, at)) >= 0 and (end := text.find(ANSWER_END, start)) >= 0:
        answers.append(text[start + len(ANSWER) : end])
        at = end + len(ANSWER_END)
    return answers


def _boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` holds, the braces inside it paired (`\{` is a letter); None if it is empty or open."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for found in _BRACES.finditer(text, begin - 1):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if not depth:
            return text[begin : found.start()].strip() or None
    return None
