"""Tests of calls and results: they are the same after encoding and decoding, and hostile input raises only
`InvalidCall`."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import InvalidCall
from sandbox.fields import MAX_ARGUMENTS, MAX_ENV_BYTES, MAX_VARIABLES
from sandbox.guest.protocol import MAX_FILES
from sandbox.types import (
    CALL_FIELDS,
    DEFAULT_LIMITS,
    LIMIT_FIELDS,
    MAX_STDIN_CHARS,
    Call,
    CallError,
    EncodedError,
    EncodedResult,
    EncodedSession,
    EncodedUsage,
    Limits,
    Outcome,
    Profile,
    Result,
    SessionState,
    Status,
    UnavailableReason,
    Usage,
    Verdict,
    check_call,
    clamp,
    invalid_result,
    unavailable_result,
    with_defaults,
)

any_text = st.text(st.characters(codec=None, categories=None), max_size=40)  # lone surrogates and NUL too
process_texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from("\udc80\udcff"), max_size=40
)
labels = st.text(st.characters(categories=["L", "N", "P"]), max_size=20)
segments = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=12)
paths = st.lists(segments, min_size=1, max_size=3).map("/".join)
patterns = st.lists(segments | st.sampled_from(["*", "*.png", "?x", "[a-c]*"]), max_size=3).map(
    lambda parts: "/".join([*parts, "**", *parts, "*"])
)
file_maps = st.dictionaries(paths, st.binary(max_size=40), max_size=3).filter(
    lambda files: not any(path.startswith(f"{other}/") for path in files for other in files)
)
limits = st.builds(
    Limits,
    timeout_s=st.floats(0.01, 1e9),
    **{name: st.integers(int(rule.low), int(rule.high)) for name, rule in LIMIT_FIELDS.items() if rule.whole},
)
calls = st.builds(
    Call,
    code=any_text,
    stdin=any_text | st.binary(max_size=40),
    files=file_maps,
    return_files=st.lists(paths | patterns, max_size=3).map(tuple),
    limits=limits,
    echo=st.booleans(),
    profile=st.sampled_from(Profile),
    id=labels,
    priority=st.integers(-100, 100),
    tenant=labels,
    env=st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True), process_texts, max_size=3),
    argv=st.lists(process_texts, max_size=3).map(tuple),
    deadline_s=st.none() | st.floats(0.01, 1e9),
    figures=st.booleans(),
)
amounts = st.floats(0, 1e9)
results = st.builds(
    Result,
    id=labels,
    status=st.sampled_from(Status),
    stdout=any_text,
    stderr=any_text,
    value=st.none() | any_text,
    error=st.none() | st.builds(CallError, labels, any_text, any_text, st.none() | st.integers(1, 9999)),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    truncated=st.lists(st.sampled_from(["stdout", "stderr", "value"]), max_size=2).map(tuple),
    files=file_maps,
    usage=st.builds(Usage, amounts, amounts, amounts, amounts),
    attempts=st.integers(0, 9),
    clamped=st.dictionaries(st.sampled_from(list(LIMIT_FIELDS)), amounts),
)
hostile = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=10,
)


def _through_msgpack(value: Any) -> Any:
    return msgpack.unpackb(
        msgpack.packb(value, unicode_errors="surrogatepass"), unicode_errors="surrogatepass", strict_map_key=True
    )


@given(calls)
def test_a_call_survives_json(call: Call) -> None:
    assert Call.decode(json.loads(json.dumps(call.encode()))) == call


@given(calls)
def test_a_call_survives_msgpack(call: Call) -> None:
    assert Call.decode(_through_msgpack(call.encode(binary=True))) == call


@given(results)
def test_a_result_survives_json(result: Result) -> None:
    assert Result.decode(json.loads(json.dumps(result.encode()))) == result


@given(results)
def test_a_result_survives_msgpack(result: Result) -> None:
    assert Result.decode(_through_msgpack(result.encode(binary=True))) == result


@given(hostile)
def test_hostile_input_raises_nothing_but_invalid_call(raw: Any) -> None:
    for decode in (Call.decode, Call.decode_defaults, Limits.decode):
        try:
            decode(raw)
        except InvalidCall as error:
            assert str(error).isprintable()
            assert len(str(error)) < 600  # the message contains only the beginning of the value


@given(st.sampled_from(list(CALL_FIELDS)), hostile)
def test_a_hostile_field_raises_nothing_but_invalid_call(name: str, value: Any) -> None:
    try:
        call = Call.decode({"code": "", name: value})
    except InvalidCall as error:
        assert str(error).startswith(f"call.{name}")
    else:
        assert Call.decode(call.encode()) == call


@pytest.mark.parametrize("huge", [10**5000, -(10**400), float("inf"), float("nan")], ids=["5000", "400", "inf", "nan"])
def test_numbers_beyond_any_float_are_refused_with_their_field(huge: float) -> None:
    with pytest.raises(InvalidCall, match=r"^call\.limits\.memory_mb: expected a whole number from 16 to"):
        Call.decode({"code": "", "limits": {"memory_mb": huge}})


@given(hostile)
def test_decoding_twice_changes_nothing(raw: Any) -> None:
    try:
        call = Call.decode({"code": "1", "limits": raw})
    except InvalidCall:
        return
    assert Call.decode(call.encode()) == call


def test_any_text_is_accepted_as_code() -> None:
    for code in ("", "\0", "\ud800", "import os; os._exit(1)"):
        assert Call.decode({"code": code}).code == code


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/.", "a\0b", "a\nb", "\ud800", "x" * 256, "a/" * 600 + "b"]
)
def test_a_path_that_is_not_relative_clean_and_short_is_refused(path: str) -> None:
    for call in ({"code": "", "files": {path: ""}}, {"code": "", "return_files": [path]}):
        with pytest.raises(InvalidCall, match="relative path"):
            Call.decode(call)


@pytest.mark.parametrize("pattern", ["/*", "../*", "*/..", "a//*", "./*", "*/", "**/../*", "*\0", "*\n"])
def test_a_pattern_that_could_leave_the_directory_is_refused(pattern: str) -> None:
    with pytest.raises(
        InvalidCall, match=r"^call\.return_files: expected a relative path without empty, '\.' or '\.\.'"
    ):
        Call.decode({"code": "", "return_files": [pattern]})


@pytest.mark.parametrize("pattern", ["**/**", "**/a/**", "a/" + "*" * 254])
def test_a_pattern_whose_matches_cost_too_much_is_refused(pattern: str) -> None:
    with pytest.raises(
        InvalidCall, match=r"^call\.return_files: expected a pattern of at most 255 bytes with at most one"
    ):
        Call.decode({"code": "", "return_files": [pattern]})


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b/c", "x", "a/b"), ("a-b", "a/b", "a")])
def test_a_path_is_a_file_or_a_directory(paths: tuple[str, ...]) -> None:
    with pytest.raises(InvalidCall, match=r"^call\.files: expected each path to be a file or a directory, but 'a"):
        Call.decode({"code": "", "files": dict.fromkeys(paths, "")})
    assert set(Call.decode({"code": "", "files": {"a-b": "", "a/b": "", "a.c": ""}}).files) == {"a-b", "a/b", "a.c"}


def test_a_file_in_json_is_base64_or_an_object_with_its_text() -> None:
    files = {"a": "cGVhcg==", "b": {"text": "pear\napple é"}, "c": {"text": "cGVhcg=="}, "d": {"text": "\ud800"}}
    decoded = {"a": b"pear", "b": "pear\napple é".encode(), "c": b"cGVhcg==", "d": b"\xed\xa0\x80"}
    assert Call.decode({"code": "", "files": files}).files == decoded


@pytest.mark.parametrize("content", ["pear\napple", 5, None, {"text": b"a"}, {"text": "a", "mode": "x"}, {}, ["a"]])
def test_the_error_of_a_malformed_file_names_both_forms(content: Any) -> None:
    with pytest.raises(
        InvalidCall, match=r"""^call\.files\['a'\]: expected base64 text, or {"text": "\.\.\."} for text"""
    ):
        Call.decode({"code": "", "files": {"a": content}})


def test_a_text_in_the_files_of_a_call_object_is_the_text_of_the_file() -> None:
    assert Call("", files={"a": "cGVhcg==", "b": b"\xff"}).files == {"a": b"cGVhcg==", "b": b"\xff"}  # type: ignore[dict-item]


def test_too_many_files_are_refused() -> None:
    with pytest.raises(InvalidCall, match=f"at most {MAX_FILES} files, got {MAX_FILES + 1}"):
        Call.decode({"code": "", "files": {f"f{i}": "" for i in range(MAX_FILES + 1)}})


def test_the_error_of_an_unknown_field_lists_the_fields() -> None:
    with pytest.raises(InvalidCall, match=r"unknown field 'timeout'; the fields are code, stdin"):
        Call.decode({"code": "", "timeout": 3})


def test_the_batch_index_is_in_the_message() -> None:
    with pytest.raises(InvalidCall, match=r"^calls\[7\]\.echo: expected true or false, got 1$"):
        Call.decode({"code": "", "echo": 1}, where="calls[7]")


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A\0", "É", "A\n", 5, None])
def test_a_name_that_is_no_variable_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidCall, match=r"^call\.env: expected names of ASCII letters, digits and '_'"):
        Call.decode({"code": "", "env": {name: "x"}})


@pytest.mark.parametrize("text", ["a\0b", "\ud800", 5, None, b"x", ["x"]])
def test_a_text_that_no_program_can_get_is_refused(text: Any) -> None:
    for field, where in (({"env": {"A": text}}, r"env\['A'\]"), ({"argv": [text]}, r"argv\[0\]")):
        with pytest.raises(
            InvalidCall, match=rf"^call\.{where}: expected text (without NUL|that UTF-8 can encode), got"
        ):
            Call.decode({"code": "", **field})


def test_variables_and_arguments_are_bounded_in_number_and_bytes() -> None:
    for field in ({"env": {f"A{i}": "" for i in range(MAX_VARIABLES + 1)}}, {"argv": [""] * (MAX_ARGUMENTS + 1)}):
        with pytest.raises(InvalidCall, match="at most 256 "):
            Call.decode({"code": "", **field})
    half = "é" * (MAX_ENV_BYTES // 4)
    fits = {"env": {"A": half, "B": half[1:]}, "argv": [half, half]}
    assert Call.decode({"code": "", **fits}).argv == (half, half)
    for field in ({"env": {"A": half, "BC": half[1:] + "x"}}, {"argv": [half, half, "x"]}):
        with pytest.raises(InvalidCall, match="at most 64 KiB together"):
            Call.decode({"code": "", **field})


def test_standard_input_is_text_or_bytes() -> None:
    assert Call.decode({"code": "", "stdin_base64": "AP8="}) == Call("", stdin=b"\0\xff")
    assert Call("", stdin=b"\0\xff").encode() == {"code": "", "stdin_base64": "AP8="}
    assert Call("", stdin=b"\0\xff").encode(binary=True) == {"code": "", "stdin": b"\0\xff"}
    defaults = Call.decode_defaults({"stdin_base64": "AP8="})
    assert (Call.decode({"code": ""}, defaults).stdin, Call.decode({"code": "", "stdin": "x"}, defaults).stdin) == (
        b"\0\xff",
        "x",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stdin_base64": "?"}, r"^call\.stdin_base64: expected base64 text, got '\?'"),
        ({"stdin_base64": b"AP8="}, r"^call\.stdin_base64: expected base64 text, got b'AP8='"),
        ({"stdin_base64": "", "stdin": ""}, r"^call\.stdin_base64: expected one of stdin and stdin_base64, got both"),
        ({"stdin": bytes(MAX_STDIN_CHARS + 1)}, rf"^call\.stdin: expected at most {MAX_STDIN_CHARS} bytes"),
    ],
)
def test_malformed_bytes_on_standard_input_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCall, match=message):
        Call.decode({"code": "", **fields})


def test_defaults_set_fields_that_a_call_omits() -> None:
    defaults = Call.decode_defaults({"limits": {"timeout_s": 2}, "tenant": "rl", "echo": False})
    own = {"code": "1", "limits": {"memory_mb": 64}}
    call = Call("1", limits=Limits(timeout_s=2.0, memory_mb=64), tenant="rl", echo=False)
    assert Call.decode(own, defaults) == call
    assert with_defaults(check_call(own), defaults.encode(binary=True)) == call.encode(binary=True)


def test_defaults_must_not_contain_code() -> None:
    with pytest.raises(InvalidCall, match="belongs to a single call"):
        Call.decode_defaults({"code": "1"})


@given(limits, limits)
def test_clamped_limits_are_at_most_the_maximum_and_list_the_lowered_fields(requested: Limits, maximum: Limits) -> None:
    clamped, lowered = clamp(Call("", limits=requested).encode(binary=True), maximum)
    limits = Limits.decode(clamped.get("limits", {}))
    for name in LIMIT_FIELDS:
        assert getattr(limits, name) == min(getattr(requested, name), getattr(maximum, name))
        assert (name in lowered) == (getattr(requested, name) > getattr(maximum, name))


def test_limits_and_fields_of_a_call_are_described_completely() -> None:
    assert {f.name: getattr(DEFAULT_LIMITS, f.name) for f in fields(Limits)} == {
        name: rule.default for name, rule in LIMIT_FIELDS.items()
    }
    assert [f.name for f in fields(Call)] == [name for name in CALL_FIELDS if name != "stdin_base64"]


def test_unavailable_and_invalid_results_have_their_own_status_and_error() -> None:
    unavailable, invalid = (
        unavailable_result("a", UnavailableReason.NODE_ERROR, "it died"),
        invalid_result("a", "no code"),
    )
    assert (unavailable.status, unavailable.error) == (Status.UNAVAILABLE, CallError("NodeError", "it died"))
    assert (invalid.status, invalid.error) == (Status.INVALID, CallError("InvalidCall", "no code"))


def test_unknown_keys_of_a_result_are_ignored() -> None:
    result = Result(id="a", status=Status.OK)
    assert Result.decode({**result.encode(), "colour": "blue"}) == result
    assert Result.decode({"id": "a", "status": "ok"}) == replace(result, usage=Usage())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"code": 5}, r"call\.code: expected text, got 5"),
        ({"stdin": 5}, r"call\.stdin: expected text, got 5"),
        ({"env": {"A": 1}}, r"call\.env\['A'\]: expected text without NUL, got 1"),
        ({"deadline_s": 0}, r"call\.deadline_s: expected a number from 0\.01 to 1000000000, got 0"),
        ({"argv": ["a", None]}, r"call\.argv\[1\]: expected text without NUL, got None"),
        (
            {"limits": Limits(timeout_s=-1)},
            r"call\.limits\.timeout_s: expected a number from 0\.01 to 1000000000, got -1",
        ),
        ({"limits": 5}, r"call\.limits: expected an object, got 5"),
        ({"files": {"../a": b""}}, r"call\.files: expected a relative path"),
        ({"return_files": "a"}, r"call\.return_files: expected a list"),
        ({"profile": "Fast!"}, r"call\.profile: expected one of auto, bare"),
        ({"priority": 0.5}, r"call\.priority: expected a whole number"),
        ({"echo": 1}, r"call\.echo: expected true or false"),
        ({"id": None}, r"call\.id: expected printable text"),
    ],
)
def test_the_constructor_of_a_call_checks_its_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Call(**{"code": "1", **fields})
    with pytest.raises(ValueError, match=message):
        replace(Call("1"), **fields)


def test_the_constructor_of_a_call_accepts_fields_in_json_form() -> None:
    call = Call("1", limits={"timeout_s": 2}, profile="bare", return_files=["a"])  # type: ignore[arg-type]
    assert call == Call("1", limits=Limits(timeout_s=2), profile=Profile.BARE, return_files=("a",))
    assert call.encode() == {"code": "1", "limits": {"timeout_s": 2}, "profile": "bare", "return_files": ["a"]}


@pytest.mark.parametrize(
    ("raw", "suggestion"),
    [
        ({"code": "", "timeout_s": 1}, "did you mean limits.timeout_s?"),
        ({"code": "", "limits": {"timeout": 1}}, "did you mean limits.timeout_s?"),
        ({"codee": ""}, "did you mean code?"),
        ({"code": "", "colour": 1}, "env, argv, figures, deadline_s, network"),
    ],
)
def test_an_unknown_field_gets_the_path_of_the_most_similar_one(raw: dict[str, Any], suggestion: str) -> None:
    with pytest.raises(InvalidCall, match="unknown field") as caught:
        Call.decode(raw)
    assert str(caught.value).endswith(suggestion)


def test_the_size_of_a_call_includes_the_names_of_its_files() -> None:
    name = "/".join(["x" * 200] * 5)
    assert Call("", return_files=(name,)).size >= 1000 + Call("").size
    assert Call("", files={name: b"1"}).size >= 1000 + Call("").size


@pytest.mark.parametrize(
    ("cls", "encoded"),
    [(Result, EncodedResult), (CallError, EncodedError), (Usage, EncodedUsage), (SessionState, EncodedSession)],
)
def test_a_mapping_of_a_result_has_the_fields_of_its_class_in_their_order(cls: Any, encoded: Any) -> None:
    assert list(encoded.__annotations__) == [item.name for item in fields(cls)]


def test_the_order_of_the_fields_of_a_result_is_that_of_the_protocol() -> None:
    assert list(Result("", Status.OK).encode()) == [
        "id", "status", "stdout", "stderr", "value", "error", "exit_code", "signal", "truncated", "files", "usage",
        "attempts", "clamped", "missing_files",
    ]  # fmt: skip
    assert list(Verdict(Outcome.EQUIVALENT).encode()) == ["outcome", "status", "message", "usage", "extracted"]


def test_an_encoded_result_shares_no_mapping_or_list_with_the_result() -> None:
    result = Result("", Status.OK, truncated=("files",), files={"a": b"b"}, clamped={"timeout_s": 1.0})
    encoded = result.encode(binary=True)
    encoded["files"].clear()
    encoded["truncated"].clear()
    encoded["usage"]["queue_ms"] = 5.0
    assert (result.files, result.truncated, result.usage) == ({"a": b"b"}, ("files",), Usage())
    assert type(result.encode()["status"]) is str
