"""Level `landlock`: its rules as data, and what they do to the guest of a real launcher."""

from __future__ import annotations

import os
import secrets
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import Interpreter, JailSpec, Level, choose_level, confinement_plan, host_uids, kernel, landlock_rules
from sandbox.jail.uid_range import LANDLOCK_CAPABILITIES
from tests.jail import jails
from tests.jail.conftest import find
from tests.jail.test_plan import PYTHON

ALL_FILES = (1 << 13) - 1


@pytest.mark.parametrize(
    ("abi", "handled"),
    [
        (1, (ALL_FILES, 0, 0)),
        (2, (ALL_FILES | landlock_rules.REFER, 0, 0)),
        (3, (ALL_FILES | landlock_rules.REFER | landlock_rules.TRUNCATE, 0, 0)),
        (4, (ALL_FILES | landlock_rules.REFER | landlock_rules.TRUNCATE, 0b11, 0)),
        (5, (ALL_FILES | landlock_rules.REFER | landlock_rules.TRUNCATE | landlock_rules.IOCTL_DEV, 0b11, 0)),
        (6, (ALL_FILES | landlock_rules.REFER | landlock_rules.TRUNCATE | landlock_rules.IOCTL_DEV, 0b11, 0b11)),
        (99, (ALL_FILES | landlock_rules.REFER | landlock_rules.TRUNCATE | landlock_rules.IOCTL_DEV, 0b11, 0b11)),
    ],
)
def test_all_that_an_abi_can_refuse_is_handled(abi: int, handled: tuple[int, int, int]) -> None:
    assert landlock_rules.handled_rights(abi) == handled


def pure_spec(**more: object) -> JailSpec:
    return JailSpec(Level.LANDLOCK, PYTHON, "/src/guest", scratch_root="/tmp/calls", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("abi", range(1, 8))
def test_nothing_but_devices_is_written_outside_the_folder_of_calls(abi: int) -> None:
    given = landlock_rules.rules_for(pure_spec(), abi)
    writing = [
        path
        for path, access in given.paths
        if access & ~(landlock_rules.READ_FILE | landlock_rules.READ_DIR | landlock_rules.EXECUTE)
    ]
    assert writing == [f"/dev/{name}" for name in landlock_rules.DEVICES]
    assert given.scratch & landlock_rules.EXECUTE == 0
    assert all(access & ~given.handled[0] == 0 for _, access in (*given.paths, ("", given.scratch)))


def test_guest_finds_its_things_on_the_host() -> None:
    spec = pure_spec(env={"PATH": "/elsewhere", "A": "1"})
    assert spec.guest_argv(9) == ["/opt/guest/bin/python", "-s", "-B", "/tmp/calls/guest/zygote.py", "--fd", "9"]
    assert spec.guest_env() == {"PATH": "/opt/guest/bin", "A": "1", "PYTHONTZPATH": ""}


def test_old_kernels_are_no_ground_for_ordinary_users() -> None:
    with pytest.raises(IsolationError, match=r"needs Landlock ABI 3 \(Linux 6.2\), got 2"):
        landlock_rules.check_requirements(pure_spec(), 2)
    landlock_rules.check_requirements(pure_spec(), 3)


def test_python_that_calls_cannot_reach_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with jails.open_folder() as folder:
        (folder / "closed").mkdir(mode=0o700)
        library = folder / "closed" / "lib"
        library.mkdir()
        python = replace(PYTHON, binary="/bin/true", mounts=((str(library), "/python/lib"),), libraries=())
        spec = replace(pure_spec(uid_base=5000, uid_count=2000), python=python)
        monkeypatch.setattr(kernel, "effective_capabilities", lambda: LANDLOCK_CAPABILITIES)
        with pytest.raises(IsolationError, match=f"cannot reach {folder}/closed;"):
            landlock_rules.check_requirements(spec, 7)
        monkeypatch.setattr(kernel, "effective_capabilities", lambda: LANDLOCK_CAPABILITIES | {kernel.CAP_SYS_ADMIN})
        landlock_rules.check_requirements(spec, 7)  # the launcher mounts it where calls can reach it
        with pytest.raises(IsolationError, match=f"cannot reach {folder}/closed;"):
            landlock_rules.check_requirements(replace(spec, scratch_root=f"{folder}/closed/calls"), 7)


@pytest.fixture(params=["uids of their own", "one uid"])
def spec(request: pytest.FixtureRequest, python: Interpreter, guest_dir: Path) -> Iterator[JailSpec]:
    try:
        choose_level("landlock")
    except IsolationError as why:
        pytest.skip(str(why))
    uids: tuple[int | None, int] = (None, 0)
    if request.param == "uids of their own":
        uids = host_uids(3, 4, Level.LANDLOCK)
        if uids[0] is None:
            pytest.skip("uids of their own: needs root with Docker's default capabilities")
        python = find(jails.reachable_python(python.executable))
    scratch_root = f"/tmp/rstar-test-{secrets.token_hex(8)}"
    spec = JailSpec(Level.LANDLOCK, python, str(guest_dir), jails.ENV, (), *uids, scratch_root)
    yield spec
    for _ in range(3000):  # init is no child of ours
        if not os.path.exists(scratch_root):
            return
        select.select([], [], [], 0.01)
    pytest.fail(f"{scratch_root} is left")


def test_environment_is_clean(spec: JailSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the server")
    own = {"PATH": os.path.dirname(spec.python.executable), "PYTHONTZPATH": ""}
    assert jails.ask(spec, "tell(dict(os.environ))") == jails.ENV | own


def test_zygote_is_held_too(spec: JailSpec) -> None:
    root = spec.scratch_root
    code = f"""
tell([
    tried(os.listdir, "/"), tried(open, "/etc/passwd"), tried(os.listdir, "/proc"), tried(os.mkdir, "{root}x"),
    tried(open, "{root}/guest/zygote.py", "a"), tried(os.unlink, "{root}/guest/zygote.py"),
    tried(os.mkdir, "{root}/calls/0"), tried(os.mkdir, "{root}/x"), tried(os.listdir, "{root}"),
    tried(os.kill, {os.getpid()}, 0) if {_abi() >= 6} else "Operation not permitted",
    os.getcwd(),
])
"""
    denied = "Permission denied"
    expected = [denied] * 6 + ["None", denied, denied, "Operation not permitted", "/"]
    assert jails.ask(spec, code) == expected


def test_zygote_keeps_only_what_it_needs(spec: JailSpec) -> None:
    with jails.started(spec, "tell(os.getpid()); wait()") as jail:
        text = Path(f"/proc/{jail.answer()}/status").read_text()
    held = dict(line.split(":\t", 1) for line in text.splitlines() if line.startswith(("Cap", "NoNew")))
    if spec.uid_base is not None:
        assert int(held["CapPrm"], 16) == int(held["CapBnd"], 16) == sum(1 << cap for cap in (0, 5, 6, 7, 8))
    assert held["NoNewPrivs"] == "1"


def test_exit_status_is_forwarded(spec: JailSpec) -> None:
    with jails.started(spec, None) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_guest_and_all_below_die_with_the_launcher(spec: JailSpec, number: signal.Signals) -> None:
    code = "child = os.fork()\nif child == 0: os.setsid(); wait()\ntell([os.getpid(), child]); wait()"
    with _watched(spec, code) as (jail, fds):
        jail.process.send_signal(number)
        for fd in fds:
            assert select.select([fd], [], [], jails.DEADLINE_S)[0]


@contextmanager
def _watched(spec: JailSpec, code: str) -> Iterator[tuple[jails.Jailed, list[int]]]:
    with jails.started(spec, code) as jail:
        fds = [os.pidfd_open(pid) for pid in jail.answer()]
        yield jail, fds
        for fd in fds:
            os.close(fd)


def test_places_of_the_plan_are_the_jails_own() -> None:
    if _abi() == 0:
        pytest.skip("needs Landlock")
    plan = confinement_plan(pure_spec())
    assert (plan["uid_base"], plan["drop_bounding"], plan["landlock"]["folder"]) == (None, False, "/tmp/calls/calls")
    assert len(plan["own_pid_at"]) == 5  # kill, tgkill, two of rt_sigqueueinfo, prlimit64


def _abi() -> int:
    try:
        return kernel.landlock_abi()
    except OSError:
        return 0
