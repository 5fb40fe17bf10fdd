"""Tests of the parser of turns. Every text of a turn can be parsed: into tool calls, malformed calls, answer blocks and
an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sandbox.tool import TOOL_NAMES
from tests.trainer.episodes.untrusted_text import untrusted_texts
from tests.trainer.fakes import TAGS, answer_text, call_text
from trainer.episodes.episode import Episode, Problem, ToolCall, ToolCallStatus, Turn
from trainer.episodes.turn_parser import PYTHON_TOOL_NAME, MalformedCall, ParsedTurn, ToolCallRequest, parse_turn


def test_a_tool_call_is_parsed_from_the_text_around_it():
    assert parse_turn(f"so\n{call_text()} ").tool_calls == (ToolCallRequest("python", {"code": "print(1)"}),)


def test_several_tool_calls_are_returned_in_order():
    calls = parse_turn(call_text("a") + "and" + call_text("b")).tool_calls
    assert [call.arguments["code"] for call in calls] == ["a", "b"]


def test_arguments_may_be_a_string_of_json():
    text = '<tool_call>{"name": "python", "arguments": "{\\"code\\": \\"1\\"}"}</tool_call>'
    assert parse_turn(text).tool_calls == (ToolCallRequest("python", '{"code": "1"}'),)


def test_the_response_to_invalid_json_has_the_message_of_the_json_parser():
    text_without_a_brace = '\n{"name": "python", "arguments": {"code": "1"}\n'
    (malformed,) = parse_turn(f"<tool_call>{text_without_a_brace}</tool_call>").tool_calls
    assert isinstance(malformed, MalformedCall)
    assert malformed.response.startswith("JSONDecodeError: Expecting ',' delimiter: line 3 column 1")
    assert malformed.text == text_without_a_brace


def test_text_after_the_json_makes_a_call_malformed():
    (malformed,) = parse_turn('<tool_call>{"name": "p", "arguments": {}} please</tool_call>').tool_calls
    assert "Extra data" in malformed.response


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""', ', "arguments": " null "'])
def test_a_call_without_arguments_has_an_empty_object_of_them(arguments):
    text = f'<tool_call>{{"name": "list_files"{arguments}}}</tool_call>'
    assert parse_turn(text).tool_calls == (ToolCallRequest("list_files", {}),)


@pytest.mark.parametrize(
    "body", ["[]", "1", '"x"', "{}", '{"name": 1}', '{"name": "p", "arguments": 0}', '{"name": "p", "arguments": []}']
)
def test_json_that_is_not_a_tool_call_is_malformed(body):
    (malformed,) = parse_turn(f"<tool_call>{body}</tool_call>").tool_calls
    assert "TypeError" in malformed.response
    assert "arguments" in malformed.response


def test_a_call_without_a_closing_tag_is_malformed():
    (malformed,) = parse_turn(f'well <tool_call>{{"name": "p", "arguments": {{}}}} {answer_text("1")}').tool_calls
    assert "never closed" in malformed.response


def test_a_malformed_call_ends_at_the_next_closing_tag():
    malformed, valid = parse_turn(f"<tool_call>{{oops</tool_call>{call_text()}").tool_calls
    assert isinstance(malformed, MalformedCall)
    assert isinstance(valid, ToolCallRequest)


def test_a_closing_tag_inside_a_string_does_not_end_the_call():
    code = "print('<tool_call></tool_call> <answer>7</answer>')"
    turn = parse_turn(f"{call_text(code)}\n{answer_text('1')}")
    assert turn == ParsedTurn((ToolCallRequest("python", {"code": code}),), 1, "1")


def test_a_call_inside_an_answer_block_is_a_call():
    turn = parse_turn(f"<answer>{call_text()} \\boxed{{2}}</answer>")
    assert len(turn.tool_calls) == 1
    assert (turn.answer_blocks, turn.answer) == (1, "2")


def test_json_that_exceeds_the_limits_of_python_is_malformed():
    """Python limits the depth of recursion and the digits of an integer."""
    (deep,) = parse_turn("<tool_call>" + "[" * 100_000 + "</tool_call>").tool_calls
    (huge,) = parse_turn('<tool_call>{"name": "p", "arguments": {"code": ' + "1" * 5000 + "}}</tool_call>").tool_calls
    assert "RecursionError" in deep.response
    assert "ValueError" in huge.response


@pytest.mark.parametrize(
    ("text", "answer_blocks", "answer"),
    [
        ("<answer>\\boxed{42}</answer>", 1, "42"),
        ("<answer>\n\\boxed{\\frac{1}{2}}.\n</answer>", 1, "\\frac{1}{2}"),
        ("<answer>\\boxed{1}, no, \\boxed{2}</answer>", 1, "2"),
        ("<answer>\\boxed {1}, no, \\fbox{2}</answer>", 1, "2"),
        ("<answer>\\boxed{1}, no, \\boxes{2}</answer>", 1, "1"),
        ("<answer>\\boxed{1}</answer> or <answer>\\boxed{2}</answer>", 2, "2"),
        ("<answer>\\boxed{1}</answer> <answer>none</answer>", 2, None),
        ("<answer>\\boxed{\\{1, 2\\}}</answer>", 1, "\\{1, 2\\}"),
        ("<answer>\\boxed{\\{}</answer>", 1, "\\{"),
        ("<answer>\\boxed{ }</answer>", 1, None),
        ("<answer>\\boxed{1</answer>", 1, None),
        ("<answer>\\boxed{7} so \\boxed{</answer>", 1, "7"),
        ("<answer>\\boxed{7} so \\boxed{8 \\}</answer>", 1, "7"),
        ("<answer>\\boxed{{7} so \\boxed{8}</answer>", 1, "8"),
        ("<answer>\\boxed{7}} } so</answer>", 1, "7"),
        ("<answer>\\boxed{x = \\boxed{7}}</answer>", 1, "7"),
        ("<answer>\\\\boxed{7}</answer>", 1, "7"),
        ("<answer>42</answer>", 1, None),
        ("\\boxed{42}", 0, None),
        ("<answer>\\boxed{42}", 0, None),
        ("</answer><answer>\\boxed{3}</answer>", 1, "3"),
        ("<answer><answer>\\boxed{3}</answer></answer>", 1, "3"),
    ],
)
def test_the_answer_is_the_last_closed_box_of_the_last_closed_answer_block(text, answer_blocks, answer):
    turn = parse_turn(text)
    assert (turn.answer_blocks, turn.answer) == (answer_blocks, answer)


A, B = answer_text("1"), answer_text("2")


@pytest.mark.parametrize(
    ("text", "num_calls", "answer"),
    [
        (f"<think>{call_text()} {A}</think>{B}", 0, "2"),
        (f"<think>{A}</think>{call_text()}", 1, None),
        (f"{A} <reason>no: {call_text()} {B}</reason>", 0, "1"),
        (f"I try {call_text()} {A}</reason>{B}", 0, "2"),
        (f"I <think>try {A}</think> {A}</reason>{B}", 0, "2"),
        (f"<think>{A}</think>{B}</think>", 0, "2"),
        (f"<think>{call_text()}<reason>{A}</reason>{B}", 1, "2"),
        (f"<think>{A} <think> </think>{B} </think>", 0, "2"),
        (f"<reason>{A}</reason>{call_text('a')}<reason>{call_text('b')}</reason>{B}", 1, "2"),
        (f"<think>a call is in <tool_call> tags{A}</think>{call_text()}", 1, None),
        (f"<think>{call_text('</think>')}{A}</think>{call_text('<think>')}{B}</think>", 1, "2"),
        (f"<answer><think>{A}</think>\\boxed{{2}}</answer>", 0, "2"),
    ],
)
def test_calls_and_answers_inside_a_thought_do_not_count(text, num_calls, answer):
    turn = parse_turn(text)
    assert (len(turn.tool_calls), turn.answer, turn.answer_blocks) == (num_calls, answer, int(answer is not None))


@pytest.mark.parametrize("text", ["", "<think>", "so <reason>", "<think> <reason>"])
def test_a_thought_that_is_never_closed_hides_nothing(text):
    turn = parse_turn(f"{text}{call_text()}{A}")
    assert (len(turn.tool_calls), turn.answer) == (1, "1")


@pytest.mark.parametrize(
    "tag",
    ["<answer>", "<tool_call>", "<answer></answer>", "<answer>\\boxed{", "<think>", "</think>", "x<reason></reason>"],
)
def test_repeated_tags_take_linear_time(tag):
    parse_turn(tag * 200_000 + A)  # takes milliseconds; in quadratic time the test would time out


@given(
    untrusted_texts
    | st.lists(
        st.sampled_from([*TAGS, "<reason>", "</reason>", "<answer>", "</answer>", "\\boxed{", "}", "{", '"', "\\"])
    ).map("".join)
)
def test_every_text_can_be_parsed(text):
    turn = parse_turn(text)
    assert all(isinstance(call, ToolCallRequest | MalformedCall) for call in turn.tool_calls)
    assert (turn.answer is None) or turn.answer_blocks


@given(st.lists(st.tuples(untrusted_texts, untrusted_texts), min_size=1, max_size=4))
def test_rendered_tool_calls_parse_to_the_same_arguments(codes_and_inputs):
    text = "then".join(call_text(code, input=stdin) for code, stdin in codes_and_inputs)
    assert parse_turn(text).tool_calls == tuple(
        ToolCallRequest("python", {"code": code, "input": stdin}) for code, stdin in codes_and_inputs
    )


def test_the_example_in_error_responses_names_the_sandbox_tool():
    assert TOOL_NAMES[0] == PYTHON_TOOL_NAME


@pytest.mark.parametrize(
    "arguments",
    [
        r'{"code": "print(\"\ud83d\")"}',
        r'"{\"code\": \"\\ud83d\"}"',
        r'"\ud83d"',
        '{"a": ' * 300 + "1" + "}" * 300,
        '{"a": ' * 199 + "1" + "}" * 199,
    ],
    ids=["surrogate", "surrogate in text", "surrogate that is no JSON", "nested too deep", "nested a little too deep"],
)
def test_a_call_that_no_record_can_hold_is_malformed(arguments: str) -> None:
    (call,) = parse_turn(
        f'<tool_call>{{"name": "{PYTHON_TOOL_NAME}", "arguments": {arguments}}}</tool_call>'
    ).tool_calls
    assert isinstance(call, MalformedCall) and call.response
    assert TypeAdapter(MalformedCall).validate_json(TypeAdapter(MalformedCall).dump_json(call)) == call


def test_the_deepest_call_that_parses_can_be_written_and_read_back() -> None:
    def nested(depth: int) -> ToolCallRequest | MalformedCall:
        arguments = '{"a": ' * depth + "1" + "}" * depth
        (call,) = parse_turn(f'<tool_call>{{"name": "x", "arguments": {arguments}}}</tool_call>').tool_calls
        return call

    deepest = max(depth for depth in range(1, 256) if isinstance(nested(depth), ToolCallRequest))
    call = nested(deepest)
    assert isinstance(call, ToolCallRequest) and deepest > 100
    done = ToolCall(call.name, call.arguments, ToolCallStatus.OK, "")
    groups = [[Episode(Problem("p", "", "", ""), 0, turns=[Turn(0, 0, "", (done,))])]]
    adapter = TypeAdapter(list[list[Episode]])
    assert adapter.validate_json(adapter.dump_json(groups))[0][0].turns == groups[0][0].turns
