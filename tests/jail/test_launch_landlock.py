"""Tests of the isolation level `landlock`: the rules as data, and their effect on the program that a real launcher
starts."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.errors import IsolationError
from sandbox.jail import Interpreter, JailSpec, Level, choose_level, confinement_plan, host_uids, kernel, landlock_rules
from sandbox.jail.uid_range import LANDLOCK_CAPABILITIES
from tests.jail import jails
from tests.jail.conftest import GUEST_EXIT_STATUS, find_interpreter
from tests.jail.test_plan import PYTHON

FILES_ABI_1 = (1 << 13) - 1
"""All rights on files that the first ABI version knows."""
FILES_ABI_2 = FILES_ABI_1 | landlock_rules.REFER
FILES_ABI_3 = FILES_ABI_2 | landlock_rules.TRUNCATE
FILES_ABI_5 = FILES_ABI_3 | landlock_rules.IOCTL_DEV
TCP = 0b11  # bind and connect
SCOPES = 0b11  # abstract sockets and signals


@pytest.mark.parametrize(
    ("abi", "handled"),
    [
        (1, (FILES_ABI_1, 0, 0)),
        (2, (FILES_ABI_2, 0, 0)),
        (3, (FILES_ABI_3, 0, 0)),
        (4, (FILES_ABI_3, TCP, 0)),
        (5, (FILES_ABI_5, TCP, 0)),
        (6, (FILES_ABI_5, TCP, SCOPES)),
        (99, (FILES_ABI_5, TCP, SCOPES)),
    ],
)
def test_all_rights_of_an_abi_are_handled(abi: int, handled: tuple[int, int, int]) -> None:
    assert landlock_rules.handled_rights(abi) == handled


def landlock_spec(**fields: object) -> JailSpec:
    return JailSpec(Level.LANDLOCK, PYTHON, "/src/guest", scratch_root="/tmp/calls", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("abi", range(1, 8))
def test_only_devices_are_writable_outside_the_scratch_root(abi: int) -> None:
    rules = landlock_rules.rules_for(landlock_spec(), abi)
    writable = [
        path
        for path, access in rules.paths
        if access & ~(landlock_rules.READ_FILE | landlock_rules.READ_DIR | landlock_rules.EXECUTE)
    ]
    assert writable == [f"/dev/{name}" for name in landlock_rules.DEVICES]
    assert rules.scratch_rights & landlock_rules.EXECUTE == 0
    assert all(access & ~rules.handled[0] == 0 for _, access in (*rules.paths, ("", rules.scratch_rights)))


def test_guest_at_level_landlock_uses_host_paths() -> None:
    spec = landlock_spec(env={"PATH": "/elsewhere", "A": "1"})
    assert spec.guest_argv(9) == ["/opt/guest/bin/python", "-s", "-B", "/tmp/calls/guest/zygote.py", "--fd", "9"]
    assert spec.guest_env() == {"PATH": "/opt/guest/bin", "A": "1", "PYTHONTZPATH": ""}


def test_old_landlock_abi_is_refused_for_ordinary_users() -> None:
    with pytest.raises(IsolationError, match=r"needs Landlock ABI 3 \(Linux 6.2\), got 2"):
        landlock_rules.check_requirements(landlock_spec(), 2)
    landlock_rules.check_requirements(landlock_spec(), 3)


def test_the_closed_directory_above_a_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with jails.dir_for_all_users() as directory:
        (directory / "closed").mkdir(mode=0o700)
        library = directory / "closed" / "lib"
        library.mkdir()
        python = replace(PYTHON, binary="/bin/true", mounts=((str(library), "/python/lib"),), libraries=())
        spec = replace(landlock_spec(uid_base=5000, uid_count=2000), python=python)
        monkeypatch.setattr(kernel, "effective_capabilities", lambda: LANDLOCK_CAPABILITIES)
        with pytest.raises(IsolationError, match=f"cannot reach {directory}/closed;"):
            landlock_rules.check_requirements(spec, 7)
        monkeypatch.setattr(kernel, "effective_capabilities", lambda: LANDLOCK_CAPABILITIES | {kernel.CAP_SYS_ADMIN})
        landlock_rules.check_requirements(spec, 7)  # with CAP_SYS_ADMIN the launcher makes the directory reachable
        with pytest.raises(IsolationError, match=f"cannot reach {directory}/closed;"):
            landlock_rules.check_requirements(replace(spec, scratch_root=f"{directory}/closed/calls"), 7)


@pytest.fixture(params=["own uids", "one uid"])
def spec(request: pytest.FixtureRequest, python: Interpreter, guest_dir: Path) -> Iterator[JailSpec]:
    try:
        choose_level("landlock")
    except IsolationError as error:
        pytest.skip(str(error))
    uids: tuple[int | None, int] = (None, 0)
    if request.param == "own uids":
        uids = host_uids(jail_number=3, slots=4, level=Level.LANDLOCK)
        if uids[0] is None:
            pytest.skip("own uids: needs root with Docker's default capabilities")
        python = find_interpreter(jails.reachable_python(python.executable))
    scratch_root = f"/tmp/rstar-test-{secrets.token_hex(8)}"
    spec = JailSpec(Level.LANDLOCK, python, str(guest_dir), jails.ENV, (), *uids, scratch_root)
    yield spec
    wait_until(lambda: not glob.glob(f"{scratch_root}*"))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for init, which is not a child of this process."""
    deadline = time.monotonic() + jails.DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_environment_is_clean(spec: JailSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the server")
    added = {"PATH": os.path.dirname(spec.python.executable), "PYTHONTZPATH": ""}
    assert jails.run(spec, "send(dict(os.environ))") == jails.ENV | added


def test_zygote_is_restricted_by_landlock(spec: JailSpec) -> None:
    root, denied = spec.scratch_root, os.strerror(errno.EACCES)
    results = {
        "os.listdir('/')": denied,
        "open('/etc/passwd')": denied,
        "os.listdir('/proc')": denied,
        f"os.mkdir('{root}x')": denied,
        f"open('{root}/guest/zygote.py', 'a')": denied,
        f"os.unlink('{root}/guest/zygote.py')": denied,
        f"os.mkdir('{root}/x')": denied,
        f"os.listdir('{root}')": denied,
        f"os.mkdir('{root}/calls/0')": "None",
        "os.getcwd()": "/",
    }
    if _abi() >= 6:  # the first version that restricts signals
        results[f"os.kill({os.getpid()}, 0)"] = os.strerror(errno.EPERM)
    attempts = ", ".join(f"attempt(lambda: {expression})" for expression in results)
    assert jails.run(spec, f"send([{attempts}])") == list(results.values())


def test_zygote_keeps_only_the_capabilities_it_needs(spec: JailSpec) -> None:
    with jails.running(spec, "send(os.getpid()); wait()") as jail:
        text = Path(f"/proc/{jail.receive()}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if line.startswith(("Cap", "NoNew")))
    if spec.uid_base is not None:
        needed = sum(1 << capability for capability in (0, 5, 6, 7, 8))  # CHOWN, KILL, SETGID, SETUID, SETPCAP
        assert int(fields["CapPrm"], 16) == int(fields["CapBnd"], 16) == needed
    assert fields["NoNewPrivs"] == "1"


def test_exit_status_is_forwarded(spec: JailSpec) -> None:
    with jails.running(spec) as jail:
        assert jail.process.wait(jails.DEADLINE_S) == GUEST_EXIT_STATUS


def test_a_jail_starts_before_what_earlier_jails_left_is_removed(spec: JailSpec) -> None:
    """The next jail does not wait for the removal, because a call can create files whose removal takes minutes."""
    root = Path(str(spec.scratch_root))
    files = root / "calls" / "0" / "tmp"
    being_removed, removable = (root.with_name(f"{root.name}.{number}") for number in (1, 2))
    for directory in (files, being_removed, removable / "calls" / "1"):
        directory.mkdir(parents=True)
    (files / "a").touch()  # its removal fails, because the jail has left no program for it
    with owned(being_removed):
        with jails.running(spec, "send('started'); wait()") as jail:
            assert jail.receive() == "started"
            wait_until(lambda: not removable.exists())
        wait_until(lambda: len(glob.glob(f"{root}*")) == 2)
        being_removed.rmdir()
    (unremovable,) = root.parent.glob(f"{root.name}.*")
    with owned(unremovable):
        assert [path.name for path in unremovable.glob("calls/0/tmp/*")] == ["a"]
        shutil.rmtree(unremovable)


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Wait for the lock of this directory, and hold it. Only the holder of the lock may remove the directory, so no
    launcher removes it."""
    lock = os.open(directory, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    os.close(lock)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_guest_and_its_children_die_with_the_launcher(spec: JailSpec, signum: signal.Signals) -> None:
    code = "child = os.fork()\nif child == 0: os.setsid(); wait()\nsend([os.getpid(), child]); wait()"
    with jails.running(spec, code) as jail:
        pidfds = [os.pidfd_open(pid) for pid in jail.receive()]
        jail.process.send_signal(signum)
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], jails.DEADLINE_S)[0]
            os.close(pidfd)


def test_landlock_plan_of_one_uid_limits_a_call_to_its_own_process_and_directory() -> None:
    if _abi() == 0:
        pytest.skip("needs Landlock")
    plan = confinement_plan(landlock_spec())
    assert plan["uid_base"] is None
    assert not plan["clear_bounding_set"]
    assert plan["landlock"]["slots_dir"] == "/tmp/calls/calls"
    assert len(plan["own_pid_offsets"]) == 5  # kill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, prlimit64


def _abi() -> int:
    """Return the kernel's Landlock ABI version, or 0 without Landlock."""
    try:
        return kernel.landlock_abi()
    except OSError:
        return 0
