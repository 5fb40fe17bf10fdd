"""Tests of the text of nsjail's configuration. It is complete, and no part of the spec of a jail can add a field to
it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.jail import JailSpec, Level
from sandbox.jail.nsjail_config import StartParameters, config, quoted
from tests.jail.test_plan import PYTHON

START_PARAMETERS = StartParameters(
    socket_fd=7,
    nsjail_alive_fd=9,
    root_dir="/run/root",
    log_file="/run/nsjail.log",
    id_map="0 1381171200 1064",
    nice=5,
)

EXPECTED_CONFIG = """\
name: "rstar-sandbox"
mode: ONCE
hostname: "sandbox"
cwd: "/"
log_level: WARNING
keep_env: false
keep_caps: false
cap: "CAP_SYS_ADMIN"
cap: "CAP_SETUID"
cap: "CAP_SETGID"
cap: "CAP_SETPCAP"
cap: "CAP_KILL"
cap: "CAP_NET_ADMIN"
disable_no_new_privs: false
clone_newuser: true
clone_newpid: true
clone_newns: true
clone_newnet: true
clone_newipc: true
clone_newuts: true
clone_newcgroup: false
iface_no_lo: true
mount_proc: false
time_limit: 0
disable_rl: true
log_file: "/run/nsjail.log"
nice_level: 5
uidmap { inside_id: "0" outside_id: "1381171200" count: 1064 }
gidmap { inside_id: "0" outside_id: "1381171200" count: 1064 }
mount { src: "/run/root" dst: "/" is_bind: true is_dir: true rw: false nosuid: true }
pass_fd: 7
pass_fd: 9
envar: "PYTHONPATH=/python/packages0"
envar: "GREETING=\\042h\\303\\251\\042\\012"
exec_bin { path: "/python/bin/python3" arg: "-I" arg: "-S" arg: "-B" arg: "/guest/init.py" arg: "9" \
arg: "/python/bin/python3" arg: "-s" arg: "-B" arg: "/guest/zygote.py" arg: "--fd" arg: "7" }
"""


def spec(**fields: object) -> JailSpec:
    return JailSpec(Level.NSJAIL, PYTHON, "/src/guest", **fields)  # type: ignore[arg-type]


def test_configuration_text_is_complete() -> None:
    assert config(spec(env={"GREETING": '"h\u00e9"\n'}), START_PARAMETERS) == EXPECTED_CONFIG


def unquoted(literal: str) -> str:
    """Parse a string literal of protobuf's text format, in the simplest way."""
    assert literal[0] == literal[-1] == '"'
    body = literal[1:-1]
    # three octal digits, or printable ASCII except for quotes and backslashes
    character = r"\\([0-7]{3})|([ !#-\[\]-~])"
    assert re.fullmatch(f"(?:{character})*", body)
    return bytes(int(octal, 8) if octal else ord(plain) for octal, plain in re.findall(character, body)).decode()


@given(st.text())
def test_any_text_is_one_string_literal(text: str) -> None:
    assert unquoted(quoted(text)) == text


@given(st.dictionaries(st.text(min_size=1), st.text()), st.lists(st.text(), min_size=1))
def test_no_text_adds_a_field_to_the_configuration(env: dict[str, str], argv: list[str]) -> None:
    lines = config(spec(env=env, argv=tuple(argv)), START_PARAMETERS).splitlines()
    names = [line.split()[0] for line in lines]
    expected_names = [line.split()[0] for line in EXPECTED_CONFIG.splitlines()]
    assert [name for name in names if name != "envar:"] == [name for name in expected_names if name != "envar:"]
    assert names.count("envar:") == len({"PYTHONPATH": "", **env})


@pytest.mark.parametrize("id_map", ["0 65534 1", "0 0 1"])
def test_a_map_of_one_id_is_written_for_uid_and_gid(id_map: str) -> None:
    inside, outside, count = id_map.split()
    fields = f'{{ inside_id: "{inside}" outside_id: "{outside}" count: {count} }}'
    text = config(spec(), StartParameters(7, 9, "/run/root", "/run/nsjail.log", id_map, 0))
    assert f"uidmap {fields}\ngidmap {fields}\n" in text
