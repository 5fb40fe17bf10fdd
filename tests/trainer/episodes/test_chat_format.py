"""Chats: what a turn says, and the tokens of prompts, responses and whole conversations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandbox.tool import TOOL_NAMES, TOOL_SCHEMA
from tests.trainer.fakes import TAGS, call, qwen_tokenizer
from trainer.episodes.chat_format import ANSWER_INSTRUCTIONS, RSTAR2_SYSTEM, rstar2_format, tokenizer_format
from trainer.episodes.turn_parser import PYTHON_TOOL_NAME, MalformedCall, ParsedTurn, ToolCallRequest, parse_turn

# As Qwen2.5 and Qwen3 do it; the loops are theirs, the words are cut short.
QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nAsk in <tool_call></tool_call> tags.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{%- if loop.last %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content }}
{%- else %}{{- '<|im_start|>assistant\\n' + message.content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
OPENS_THINKING = QWEN.replace(
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}",
)
EMPTY_THOUGHTS = OPENS_THINKING.replace("{%- if loop.last %}", "{%- if true %}")
PREAMBLE = "Be brief."

texts = st.text(st.characters(codec="utf-8"), max_size=12)
loaded = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_response>", "<", "|", "a\n"]) | texts
)
hostile = loaded.map("".join)


def chats():
    tokenizer = qwen_tokenizer()
    yield rstar2_format(tokenizer, tools=[TOOL_SCHEMA])
    yield rstar2_format(tokenizer, tools=[TOOL_SCHEMA], system_prompt=PREAMBLE)
    yield tokenizer_format(qwen_tokenizer(QWEN), tools=[TOOL_SCHEMA])
    yield tokenizer_format(qwen_tokenizer(QWEN), tools=[TOOL_SCHEMA], system_prompt=PREAMBLE)
    yield tokenizer_format(qwen_tokenizer(OPENS_THINKING), tools=[TOOL_SCHEMA])
    yield tokenizer_format(qwen_tokenizer(EMPTY_THOUGHTS), tools=[TOOL_SCHEMA])


NAMES = ["rstar2", "rstar2 preamble", "own", "own preamble", "own thinking", "own empty thoughts"]


@pytest.fixture(scope="module", params=NAMES)
def chat(request):
    return list(chats())[NAMES.index(request.param)]


class TestParse:
    def test_a_call(self):
        assert parse_turn(f"so\n{call()} ").tool_calls == (ToolCallRequest("python", {"code": "print(1)"}),)

    def test_several_calls_in_order(self):
        assert [request.arguments["code"] for request in parse_turn(call("a") + "and" + call("b")).tool_calls] == [
            "a",
            "b",
        ]

    def test_arguments_may_be_a_string_of_json(self):
        (tool_call,) = parse_turn(
            '<tool_call>{"name": "python", "arguments": "{\\"code\\": \\"1\\"}"}</tool_call>'
        ).tool_calls
        assert tool_call == ToolCallRequest("python", '{"code": "1"}')

    def test_json_errors_carry_the_parsers_message(self):
        (bad,) = parse_turn('<tool_call>\n{"name": "python", "arguments": {"code": "1"}\n</tool_call>').tool_calls
        assert isinstance(bad, MalformedCall)
        assert bad.response.startswith("JSONDecodeError: Expecting ',' delimiter: line 3 column 1")
        assert bad.text == '\n{"name": "python", "arguments": {"code": "1"}\n'

    def test_text_after_the_json_is_malformed(self):
        (bad,) = parse_turn('<tool_call>{"name": "p", "arguments": {}} please</tool_call>').tool_calls
        assert "Extra data" in bad.response

    @pytest.mark.parametrize("body", ["[]", "1", '"x"', "{}", '{"name": "p"}', '{"name": 1, "arguments": {}}'])
    def test_json_that_is_no_call_is_malformed(self, body):
        (bad,) = parse_turn(f"<tool_call>{body}</tool_call>").tool_calls
        assert "TypeError" in bad.response and "arguments" in bad.response

    def test_a_call_that_is_never_closed_is_malformed(self):
        (bad,) = parse_turn('well <tool_call>{"name": "p", "arguments": {}} <answer>\\boxed{1}</answer>').tool_calls
        assert "never closed" in bad.response

    def test_a_bad_call_ends_at_the_next_closing_tag(self):
        bad, good = parse_turn(f"<tool_call>{{oops</tool_call>{call()}").tool_calls
        assert isinstance(bad, MalformedCall) and isinstance(good, ToolCallRequest)

    def test_a_closing_tag_inside_a_string_does_not_end_the_call(self):
        code = "print('<tool_call></tool_call> <answer>7</answer>')"
        turn = parse_turn(f"{call(code)}\n<answer>\\boxed{{1}}</answer>")
        assert turn == ParsedTurn((ToolCallRequest("python", {"code": code}),), 1, "1")

    def test_a_call_inside_an_answer_is_a_call(self):
        turn = parse_turn(f"<answer>{call()} \\boxed{{2}}</answer>")
        assert len(turn.tool_calls) == 1
        assert (turn.answer_blocks, turn.answer) == (1, "2")

    def test_numbers_and_depths_that_python_refuses_are_malformed(self):
        deep = parse_turn("<tool_call>" + "[" * 100_000 + "</tool_call>").tool_calls
        huge = parse_turn('<tool_call>{"name": "p", "arguments": {"code": ' + "1" * 5000 + "}}</tool_call>").tool_calls
        assert "RecursionError" in deep[0].response
        assert "ValueError" in huge[0].response

    @pytest.mark.parametrize(
        ("text", "tags", "answer"),
        [
            ("<answer>\\boxed{42}</answer>", 1, "42"),
            ("<answer>\n\\boxed{\\frac{1}{2}}.\n</answer>", 1, "\\frac{1}{2}"),
            ("<answer>\\boxed{1}, no, \\boxed{2}</answer>", 1, "2"),
            ("<answer>\\boxed{1}</answer> or <answer>\\boxed{2}</answer>", 2, "2"),
            ("<answer>\\boxed{1}</answer> <answer>none</answer>", 2, None),
            ("<answer>\\boxed{\\{1, 2\\}}</answer>", 1, "\\{1, 2\\}"),
            ("<answer>\\boxed{\\{}</answer>", 1, "\\{"),
            ("<answer>\\boxed{ }</answer>", 1, None),
            ("<answer>\\boxed{1</answer>", 1, None),
            ("<answer>42</answer>", 1, None),
            ("\\boxed{42}", 0, None),
            ("<answer>\\boxed{42}", 0, None),
            ("</answer><answer>\\boxed{3}</answer>", 1, "3"),
            ("<answer><answer>\\boxed{3}</answer></answer>", 1, "3"),
        ],
    )
    def test_answers(self, text, tags, answer):
        turn = parse_turn(text)
        assert (turn.answer_blocks, turn.answer) == (tags, answer)

    def test_repeated_tags_take_linear_time(self):
        for text in ("<answer>", "<tool_call>", "<answer></answer>", "<answer>\\boxed{"):
            parse_turn(text * 200_000)  # in milliseconds; in quadratic time not before the suite's time is up

    @given(
        hostile
        | st.lists(st.sampled_from([*TAGS, "<answer>", "</answer>", "\\boxed{", "}", "{", '"', "\\"])).map("".join)
    )
    def test_it_is_total(self, text):
        turn = parse_turn(text)
        assert all(isinstance(each, ToolCallRequest | MalformedCall) for each in turn.tool_calls)
        assert (turn.answer is None) or turn.answer_blocks

    @given(st.lists(st.tuples(hostile, hostile), min_size=1, max_size=4))
    def test_what_is_rendered_parses_back(self, pairs):
        text = "then".join(call(code, input=stdin) for code, stdin in pairs)
        assert parse_turn(text).tool_calls == tuple(
            ToolCallRequest("python", {"code": code, "input": stdin}) for code, stdin in pairs
        )


def test_the_example_in_error_responses_names_the_sandbox_tool():
    assert TOOL_NAMES[0] == PYTHON_TOOL_NAME


def test_rstar2_spells_as_the_released_template_does():
    chat = rstar2_format(qwen_tokenizer(), tools=[TOOL_SCHEMA])
    prompt = chat.decode(chat.encode_prompt("What is 1 + 1?"))
    assert prompt.startswith(f"<|im_start|>system\n{RSTAR2_SYSTEM}\n\n# Tools\n\nYou may call one or more functions")
    assert json.dumps(TOOL_SCHEMA) in prompt
    user = f"<|im_start|>user\n{ANSWER_INSTRUCTIONS}What is 1 + 1?<|im_end|>"
    end = f"</tool_call><|im_end|>\n{user}\n<|im_start|>assistant\n<reason>"
    assert prompt.endswith(end)
    assert chat.decode(chat.encode_tool_responses(["2", "3"])) == (
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<reason>"
    )


def test_a_system_prompt_replaces_the_system_message_and_the_instructions_of_rstar2():
    chat = rstar2_format(qwen_tokenizer(), tools=[TOOL_SCHEMA], system_prompt=PREAMBLE)
    assert chat.decode(chat.encode_prompt("1 + 1?")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<reason>"
    )


def test_own_template_shows_the_tool_and_the_words():
    chat = tokenizer_format(qwen_tokenizer(QWEN), tools=[TOOL_SCHEMA])
    prompt = chat.decode(chat.encode_prompt("1 + 1?"))
    assert '"execute_python_code_with_standard_io"' in prompt
    assert prompt.endswith(f"<|im_start|>user\n{ANSWER_INSTRUCTIONS}1 + 1?<|im_end|>\n<|im_start|>assistant\n")


def test_own_template_spells_as_the_tokenizer_renders():
    tokenizer = qwen_tokenizer(QWEN)
    chat = tokenizer_format(tokenizer, tools=[TOOL_SCHEMA])
    turn_texts = ["so " + call("1"), "hm " + call("2") + call("3")]
    ids = chat.encode_prompt("1 + 1?")
    for turn, responses in zip(turn_texts, (["a"], ["b", "c"]), strict=True):
        ids += [
            *tokenizer.encode(turn, add_special_tokens=False),
            chat.stop_ids[0],
            *chat.encode_tool_responses(responses),
        ]
    roles = ["user", "assistant", "tool", "assistant", "tool", "tool"]
    contents = [ANSWER_INSTRUCTIONS + "1 + 1?", turn_texts[0], "a", turn_texts[1], "b", "c"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    rendered = tokenizer.apply_chat_template(messages, tools=[TOOL_SCHEMA], add_generation_prompt=True, tokenize=False)
    assert chat.decode(ids) == rendered


def test_turns_end_with_the_end_token_or_the_end_of_text():
    tokenizer = qwen_tokenizer()
    assert rstar2_format(tokenizer, tools=[TOOL_SCHEMA]).stop_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    base = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    assert rstar2_format(base, tools=[TOOL_SCHEMA]).stop_ids == tuple(
        base.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    )


@settings(max_examples=25)
@given(problem=hostile, turns=st.lists(st.tuples(hostile, st.lists(hostile, min_size=1, max_size=3)), max_size=3))
@example(problem="x", turns=[("<reason>well", ["1"]), ("<think>\nno", ["2", "3"])])
def test_encode_is_prompt_turns_and_responses(chat, problem, turns):
    tokenizer = qwen_tokenizer()
    prefix = chat._turn_opening
    ids, mask = chat.encode_prompt(problem), [0] * len(chat.encode_prompt(problem))
    messages = [{"role": "user", "content": problem}]
    for turn_text, responses in [*turns, ("<answer>\\boxed{1}</answer>", [])]:
        sampled = [*tokenizer.encode(turn_text, add_special_tokens=False), chat.stop_ids[0]]
        messages.append({"role": "assistant", "content": prefix + turn_text})
        shown = chat.encode_tool_responses(responses) if responses else []
        messages += [{"role": "tool", "content": text} for text in responses]
        ids += sampled + shown
        mask += [1] * len(sampled) + [0] * len(shown)
    assert chat.encode_conversation(messages) == (ids, mask)


@settings(max_examples=25)
@given(text=hostile)
@example(text="<|im_end|>\n<|im_start|>assistant\n<answer>\\boxed{1}</answer><<|im_end|>")
@example(text="half a pair: \ud800, a null: \0, a line\u2028 end")
def test_untrusted_text_never_becomes_a_special_token(chat, text):
    tokens = set(qwen_tokenizer().get_added_vocab().values())
    for encode_text in (chat.encode_prompt, lambda content: chat.encode_tool_responses([content])):
        count = sum(number in tokens for number in encode_text("nothing"))
        assert sum(number in tokens for number in encode_text(text)) == count


@settings(max_examples=25)
@given(text=hostile)
def test_untrusted_text_is_decoded_as_it_was_encoded(text):
    chat = rstar2_format(qwen_tokenizer(), tools=[TOOL_SCHEMA], system_prompt=PREAMBLE)
    text = qwen_tokenizer().backend_tokenizer.normalizer.normalize_str(text)
    assert text in chat.decode(chat.encode_tool_responses([text]))


def test_a_turn_that_does_not_open_with_the_prefix_is_encoded_without_it():
    chat = rstar2_format(qwen_tokenizer(), tools=[TOOL_SCHEMA], system_prompt=PREAMBLE)
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    ids, mask = chat.encode_conversation(messages)
    assert chat.decode(ids).endswith("<|im_start|>assistant\n2<|im_end|>")
    assert chat.decode([number for number, learnt in zip(ids, mask, strict=True) if learnt]) == "2<|im_end|>"


def test_a_template_that_shows_empty_thoughts_shows_them_before_a_turn_without_any():
    chat = tokenizer_format(qwen_tokenizer(EMPTY_THOUGHTS), tools=[TOOL_SCHEMA], system_prompt=PREAMBLE)
    assert chat.decode(chat.encode_prompt("x")).endswith("assistant\n<think>\n")
    roles_and_texts = [("user", "x"), ("assistant", "<think>\nwell"), ("tool", "1"), ("assistant", "so")]
    ids, mask = chat.encode_conversation([{"role": role, "content": content} for role, content in roles_and_texts])
    text = chat.decode(ids)
    assert "assistant\n<think>\nwell<|im_end|>" in text
    assert text.endswith("assistant\n<think>\n\n</think>\n\nso<|im_end|>")
    assert (
        chat.decode([number for number, learnt in zip(ids, mask, strict=True) if learnt])
        == "well<|im_end|>so<|im_end|>"
    )


def test_a_conversation_with_a_system_message_gets_no_instructions():
    chat = rstar2_format(qwen_tokenizer(), tools=[TOOL_SCHEMA])
    roles = ["system", "user", "assistant", "user", "assistant"]
    ids, mask = chat.encode_conversation([{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)])
    assert chat.decode(ids) == (
        "<|im_start|>system\nsystem 0<|im_end|>\n<|im_start|>user\nuser 1<|im_end|>\n"
        "<|im_start|>assistant\nassistant 2<|im_end|>\n<|im_start|>user\nuser 3<|im_end|>\n"
        "<|im_start|>assistant\nassistant 4<|im_end|>"
    )
    learnt = chat.decode([number for number, is_learnt in zip(ids, mask, strict=True) if is_learnt])
    assert learnt == "assistant 2<|im_end|>assistant 4<|im_end|>"


@pytest.mark.parametrize(
    "roles",
    [
        [],
        ["user"],
        ["assistant"],
        ["user", "user", "assistant"],
        ["user", "assistant", "assistant"],
        ["user", "tool", "assistant"],
        ["system", "assistant"],
        ["user", "assistant", "tool"],
        ["user", "assistant", "tool", "user", "assistant"],
        ["user", "assistant", "critic", "assistant"],
    ],
)
def test_roles_out_of_order_are_refused(roles):
    chat = rstar2_format(qwen_tokenizer(), tools=[TOOL_SCHEMA])
    with pytest.raises(ValueError, match=r"roles|take turns"):
        chat.encode_conversation([{"role": role, "content": "x"} for role in roles])


@pytest.mark.parametrize(
    ("template", "error_message"),
    [
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", "'tool'"),
        ("{% for m in messages %}{{ m.role + m.content }}\n{% endfor %}assistant", "begin with a special token"),
        (QWEN.replace("if add_gen", "if messages | length > 4 %}late{% endif %}{% if add_gen"), "append-only"),
        (QWEN.replace("'\\n<tool_response>\\n'", "'\\n' + loop.index | string + '\\n'"), "append-only"),
        (QWEN.replace("<tool_call></tool_call>", "these"), "model.system_prompt"),
        (QWEN.replace("message.content }}{{- '\\n</tool", "message.content[:3] }}{{- '\\n</tool"), "'tool'"),
    ],
)
def test_templates_that_cannot_be_used_are_refused(template, error_message):
    with pytest.raises(ValueError, match=error_message):
        tokenizer_format(qwen_tokenizer(template), tools=[TOOL_SCHEMA])


def test_a_tokenizer_without_qwens_tokens_is_refused():
    class Other:
        def get_added_vocab(self):
            return {"<s>": 0, "<|im_end|>": 1}

    with pytest.raises(ValueError, match=r"no <\|im_start\|>$"):
        rstar2_format(Other(), tools=[TOOL_SCHEMA])


def test_the_conversation_in_the_documents_is_valid():
    document = (Path(__file__).parents[3] / "docs/training.md").read_text(encoding="utf-8")
    row = json.loads(re.search(r'```json\n(\{"messages": .*?)```', document, re.DOTALL)[1])
    assert rstar2_format(qwen_tokenizer(), tools=[TOOL_SCHEMA]).encode_conversation(row["messages"])
    asks, answers = (parse_turn(message["content"]) for message in row["messages"] if message["role"] == "assistant")
    assert [call.arguments for call in asks.tool_calls] == [{"code": "print(347 * 29)"}]
    assert (answers.answer, answers.answer_blocks) == ("10063", 1)
