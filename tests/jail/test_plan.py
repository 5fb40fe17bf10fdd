"""Tests of specs of jails, confinement plans and ranges of uids. All of them are data, and no jail is started."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import FIRST_SLOT_UID, Interpreter, JailSpec, Level, confinement_plan, kernel, seccomp, userns
from sandbox.jail.uid_range import MIN_UID, RANGE_START, choose_range

PYTHON = Interpreter(
    executable="/opt/guest/bin/python",
    binary="/usr/bin/python3.11",
    version=(3, 11, 2),
    mounts=(("/usr/lib/python3.11", "/python/lib/python3.11"),),
    masked_paths=("/python/lib/python3.11/dist-packages",),
    libraries=(("/lib/libc.so.6", "/lib/libc.so.6"),),
    pythonpath=("/python/packages0",),
)


def spec(level: Level = Level.NAMESPACES, **fields: object) -> JailSpec:
    return JailSpec(level, PYTHON, "/src/guest", **fields)  # type: ignore[arg-type]


@given(st.dictionaries(st.text(), st.text()), st.lists(st.text()), st.sampled_from([(None, 0), (5000, 2000)]))
def test_spec_survives_encoding_and_decoding(
    env: dict[str, str], argv: list[str], uids: tuple[int | None, int]
) -> None:
    original = spec(env=env, argv=tuple(argv), uid_base=uids[0], uid_count=uids[1])
    assert JailSpec.decode(original.encode()) == original


def test_guest_argv_has_the_paths_of_its_level() -> None:
    assert spec().guest_argv(9) == ["/python/bin/python3", "-s", "-B", "/guest/zygote.py", "--fd", "9"]
    argv_at_level_none = spec(Level.NONE).guest_argv(9)
    assert argv_at_level_none == ["/opt/guest/bin/python", "-s", "-B", "/src/guest/zygote.py", "--fd", "9"]


def test_guest_environment_is_that_of_the_spec_and_pythonpath() -> None:
    assert spec(env={"A": "1"}).guest_env() == {"A": "1", "PYTHONPATH": "/python/packages0"}
    assert spec(Level.NONE, env={"A": "1"}).guest_env() == {"A": "1"}


@pytest.mark.parametrize(("level", "scratch_root"), [(Level.LANDLOCK, None), (Level.NAMESPACES, "/tmp/x")])
def test_only_level_landlock_has_a_scratch_root(level: Level, scratch_root: str | None) -> None:
    with pytest.raises(ConfigError, match="scratch_root="):
        spec(level, scratch_root=scratch_root)


@pytest.mark.parametrize("level", [Level.NSJAIL, Level.NAMESPACES])
def test_plan_is_json_with_all_steps(level: Level) -> None:
    plan = json.loads(json.dumps(confinement_plan(spec(level, uid_base=RANGE_START, uid_count=2000))))
    assert plan.pop("namespaces") == kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS
    assert b64decode(plan.pop("zygote_filter")) == seccomp.program(seccomp.FilterKind.ZYGOTE)
    assert b64decode(plan.pop("call_filter")) == seccomp.program(seccomp.FilterKind.NAMED_SOCKETS_ON_TOP)
    assert b64decode(plan.pop("loopback_filter")) == seccomp.program(seccomp.FilterKind.LOOPBACK_ON_TOP)
    assert b64decode(plan.pop("session_filter")) == seccomp.program(seccomp.FilterKind.SESSION_ON_TOP)
    assert plan == {
        "pid_namespace": True,
        "slot_networks": True,
        "user_namespace": False,
        "limits_processes": True,
        "scratch_mount": "/tmp",
        "max_files": 4096,
        "uid_base": FIRST_SLOT_UID,
        "drop_capabilities": True,
        "clear_bounding_set": True,
        "no_new_privs": True,
        "own_pid_offsets": [],
        "landlock": None,
    }


@pytest.mark.parametrize("level", [Level.NSJAIL, Level.NAMESPACES])
def test_calls_that_see_directories_of_the_operator_have_no_named_sockets(level: Level) -> None:
    plan = confinement_plan(spec(level, data=(("/data", "/srv/data"),)))
    assert not plan["slot_networks"] and plan["loopback_filter"] is None
    assert b64decode(plan["call_filter"] or "") == seccomp.program(seccomp.FilterKind.CALL_ON_TOP)


@pytest.mark.parametrize("level", [Level.NSJAIL, Level.NAMESPACES, Level.LANDLOCK])
def test_a_machine_without_a_seccomp_policy_has_no_plan(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(IsolationError, match=r"policy is written \(x86_64, aarch64\), got riscv64; use"):
        confinement_plan(spec(level, scratch_root="/scratch" if level is Level.LANDLOCK else None))


def test_calls_keep_the_zygotes_uid_if_there_is_no_range() -> None:
    assert confinement_plan(spec())["uid_base"] is None


@pytest.mark.parametrize("user_namespace_per_call", [True, False])
def test_calls_with_a_shared_uid_have_process_limits_only_in_own_user_namespaces(
    user_namespace_per_call: bool,
) -> None:
    plan = confinement_plan(spec(user_namespace_per_call=user_namespace_per_call))
    assert plan["user_namespace"] == plan["limits_processes"] == user_namespace_per_call


def test_plan_of_level_none_is_empty() -> None:
    plan = confinement_plan(spec(Level.NONE))
    assert not any(value for name, value in plan.items() if name != "max_files")


@pytest.mark.parametrize("uids", [(0, 2000), (5000, 0), (5000, FIRST_SLOT_UID)])
def test_a_range_without_uids_for_calls_is_refused(uids: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="host_uids"):
        spec(uid_base=uids[0], uid_count=uids[1])


@given(st.integers(1, 5000), st.integers(0, 2**32), st.integers(0, 2**32), st.integers(0, 2**28))
def test_ranges_of_jails_are_disjoint_and_exist(count: int, first: int, length: int, shift: int) -> None:
    earlier_ranges: list[range] = []
    for jail in range(5):
        base, count_returned = choose_range(jail, count, first, first + length, shift)
        if base is None:
            assert count_returned == 0
            continue
        ids = range(base, base + count_returned)
        assert count_returned == count
        assert ids.start >= max(first, MIN_UID)
        assert ids.stop <= first + length
        assert all(ids.start >= earlier.stop or ids.stop <= earlier.start for earlier in earlier_ranges)
        earlier_ranges.append(ids)


def test_subordinate_ids_are_the_largest_range_in_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subuid, subgid = tmp_path / "subuid", tmp_path / "subgid"
    monkeypatch.setattr(userns, "SUBORDINATE_ID_FILES", (str(subuid), str(subgid)))
    monkeypatch.setattr("os.geteuid", lambda: 4242)
    assert userns.subordinate_ids() == (0, 0), "the files are missing"
    subuid.write_text("other:1:9\n4242:100000:65536\n4242:300000:10\nnonsense\n4242:x:5\n")
    subgid.write_text("4242:120000:65536\n")
    assert userns.subordinate_ids() == (120_000, 165_536)
    monkeypatch.setattr("pwd.getpwuid", lambda _uid: SimpleNamespace(pw_name="other"))
    subgid.write_text("other:1:5\n")
    assert userns.subordinate_ids() == (1, 6)
    subgid.write_text("4242:400000:65536\n")
    assert userns.subordinate_ids() == (0, 0)


def test_a_shift_moves_the_uid_range_of_a_jail_and_the_range_stays_valid() -> None:
    assert choose_range(0, 1000, 0, 2**32 - 1, 77) == (RANGE_START + 77, 1000)
    assert choose_range(0, 1000, 0, 65_536, 77) == (65_536 - 1000 - 77, 1000)
    assert all(choose_range(0, 1000, 0, 65_536, shift)[0] for shift in range(0, 100_000, 999))


def test_range_is_high_on_a_host_and_at_the_top_of_a_container() -> None:
    assert choose_range(2, 1000, 0, 2**32 - 1) == (RANGE_START + 2000, 1000)
    assert choose_range(0, 1000, 0, 65_536) == (65_536 - 1000, 1000)
    assert choose_range(0, 1000, 0, 1) == (None, 0)
