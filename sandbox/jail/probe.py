"""What this machine grants, found by trying: each layer is set up for real in a forked child that then ends.

`probe` answers for `doctor`, one `Layer` each; `decide` turns the answers into a level. Nothing is guessed from
versions or configuration, because containers refuse calls that their kernel has. A layer is missing only if the kernel
refuses it: an attempt that fails for a passing reason (a signal killed it, memory or process numbers ran out) is made
again, `TRIES` times in all.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import cgroup_tree, kernel, landlock_rules, nsjail_binary, seccomp, userns
from sandbox.jail.interpreter import Interpreter
from sandbox.jail.plan import launch_argv
from sandbox.jail.spec import JailSpec, Level
from sandbox.jail.uid_range import host_uids

AUTO = "auto"
MIB = 1 << 20
# Over this a probe's mounts are laid, in its own mount namespace: the one folder that every Linux host has.
_STAGE = "/proc"
_GUEST_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "guest")
_TRIAL_S = 60
_TRIAL_TEXT = 1000
NSJAIL = "nsjail"
TRIES = 5
RETRY_S = 0.1
REASON_CHARS = 500
SIGNALLED = 128
"""A launcher ends with this and a signal's number if that killed what it started."""
_OK, _REFUSED, _PASSING = 0, 1, 2
"""Exit statuses of an attempt."""
_PASSING_ERRORS = frozenset({errno.EAGAIN, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """One thing that a jail may rest on: whether it is there, what was found or why not, and what it is for."""

    name: str
    ok: bool
    found: str
    purpose: str


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """A level, and why `auto` took none that is stronger: empty if there is none or the level was asked for by name."""

    level: Level
    reason: str = ""


def probe(environ: Mapping[str, str] = os.environ) -> tuple[ProbedLayer, ...]:
    """Every layer, tried now; well under a second. It forks, so call it from a process with one thread."""
    return (*(_probe_in_child(*attempt) for attempt in (*_REQUIRED, *_OPTIONAL)), _nsjail(environ))


def choose_level(
    asked: str, layers: tuple[ProbedLayer, ...] | None = None, environ: Mapping[str, str] = os.environ
) -> LevelChoice:
    """The level to run at: what was asked for, or for `auto` the strongest there is, which is never `none`.

    Raises `ConfigError` for a name that is no level, `IsolationError` when the machine lacks a layer of the level, and
    when RSTAR_NSJAIL names no program.
    """
    if asked == AUTO:
        if environ.get(nsjail_binary.VARIABLE):
            nsjail_binary.find(environ)
        wanted = _STRONGEST_FIRST
    else:
        try:
            wanted = (Level(asked),)
        except ValueError:
            raise ConfigError(f"isolation={asked!r}: expected one of {AUTO}, {', '.join(Level)}") from None
    lacks: list[tuple[Level, str, str]] = []
    for level in wanted:
        lacking, remedy = _missing_layers(level, layers, environ)
        if not lacking:
            return LevelChoice(level, "; ".join(f"{other}: {why}" for other, why, _ in lacks)[:REASON_CHARS])
        if asked != AUTO or level is not Level.NSJAIL or environ.get(nsjail_binary.VARIABLE):  # else nobody misses it
            lacks.append((level, lacking, remedy))
    refusals = (f"isolation={level.value}: {why}{remedy}" for level, why, remedy in lacks)
    raise IsolationError(f"{'. '.join(refusals)}, or ask for isolation=none by name")


def _missing_layers(
    level: Level, layers: tuple[ProbedLayer, ...] | None, environ: Mapping[str, str]
) -> tuple[str, str]:
    """What a level lacks on this machine, nothing if it is all there; and how to get it."""
    if level is Level.NSJAIL:
        row = next((layer for layer in layers or (_nsjail(environ),) if layer.name == NSJAIL), None)
        if row is None or not row.ok:
            return row.found if row else "not tried", f"; or ask for isolation={Level.NAMESPACES.value}"
    needed = _NEEDED.get(level, frozenset())
    if layers is None:
        layers = tuple(_probe_in_child(*attempt) for attempt in (*_REQUIRED, *_OPTIONAL) if attempt[0] in needed)
    missing = [f"{layer.name} ({layer.found})" for layer in layers if layer.name in needed and not layer.ok]
    return f"this machine lacks {'; '.join(missing)}" if missing else "", f". {_REMEDIES.get(level, '')}"


def _probe_in_child(name: str, attempt: Callable[[], str], purpose: str) -> ProbedLayer:
    """Run `attempt` in a child, again if it fails for a passing reason: its text is what was found, its error what is
    missing."""
    status, found = _attempted(attempt)
    for _ in range(TRIES - 1):
        if status != _PASSING:
            break
        time.sleep(RETRY_S)
        status, found = _attempted(attempt)
    return ProbedLayer(name, status == _OK, found, purpose)


def _attempted(attempt: Callable[[], str]) -> tuple[int, str]:
    """How an attempt in a child ended, and what it says."""
    try:
        readable, writable = os.pipe()
        child = os.fork()
    except OSError as why:
        return _PASSING, str(why)
    if child == 0:
        try:
            status, text = _OK, attempt()
        except Exception as why:  # the end of the child: nothing may unwind into the caller's frames
            status, text = _PASSING if _is_passing(why) else _REFUSED, str(why) or type(why).__name__
        os.write(writable, text.encode(errors="replace")[:4096])
        os._exit(status)
    os.close(writable)
    with open(readable, "rb") as pipe:
        found = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        return code, found
    # SIGSYS is the answer of a seccomp filter, the same every time; whatever else kills a child is no answer.
    return _REFUSED if code == -signal.SIGSYS else _PASSING, f"killed by signal {-code}"


def _is_passing(why: BaseException | None) -> bool:
    """Whether an error, or one that it was made of, is that something has run out for now."""
    while why is not None:
        if isinstance(why, MemoryError) or (isinstance(why, OSError) and why.errno in _PASSING_ERRORS):
            return True
        why = why.__context__
    return False


def _user_namespace() -> str:
    """By the jail's own steps: which of them are refused depends on who we are, and in which user namespace."""
    proc = userns.open_proc_self()
    base, count = host_uids(0, 1)
    userns.enter_guests(base, count, proc, privileged=userns.become_privileged(base, count))
    return "single id map" if base is None else "a range of ids"


def _uid_range() -> str:
    base, count = host_uids(0, 1)
    if base is None:
        raise IsolationError(
            "needs root with CAP_SETUID and enough ids, or newuidmap with ids in /etc/subuid and /etc/subgid, and no "
            "no_new_privs; all calls share one host uid"
        )
    proc = userns.open_proc_self()
    userns.enter_guests(base, count, proc, privileged=userns.become_privileged(base, count))
    os.setresuid(count - 1, count - 1, count - 1)
    return f"host uids from {base}"


def probe_process_limits() -> ProbedLayer:
    """Whether calls that share a uid can have a limit of processes each."""
    return _probe_in_child(*_PROCESS_COUNTS)


def _process_counts() -> str:
    """With two processes of its uid outside a user namespace, one within may have two, as is the limit there, and no
    third."""
    proc = userns.open_proc_self()
    userns.become_privileged()
    userns.unshare_mapped(0, userns.id_map(None, 0, proc), proc)
    userns.become_uid_0(privileged=False)
    with ExitStack() as ends:
        ends.callback(_end, _start_one())
        kernel.unshare(kernel.CLONE_NEWUSER)
        resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
        try:
            ends.callback(_end, _start_one())
        except BlockingIOError:
            raise OSError("the kernel counts them by uid (before Linux 5.14), and all calls have one") from None
        try:
            ends.callback(_end, _start_one())
        except BlockingIOError:
            return "in a user namespace of each call"
        raise OSError("a third process was started under a limit of two")


def _start_one() -> int:
    """A process that waits to be killed."""
    pid = os.fork()
    if pid == 0:
        kernel.set_parent_death_signal()
        signal.pause()
    return pid


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _pid_namespace() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        os._exit(os.getpid())
    first = kernel.exit_status(child)
    return _found_or_raise(first == 1, "its first process is PID 1", f"its first process has PID {first}")


def _private_tmpfs() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("probe", _STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=700")
    size = (found := os.statvfs(_STAGE)).f_blocks * found.f_frsize
    return _found_or_raise(size == MIB, "sizes hold", f"asked for {MIB} bytes, got {size}")


def _pivot_root() -> str:
    _private_tmpfs()
    os.chdir(_STAGE)
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    return _found_or_raise(os.listdir("/") == [], "the old root is gone", "the old root is still there")


def _ipc_namespace() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWIPC)
    return "granted"


def _uts_namespace() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWUTS)
    kernel.set_hostname("probe")
    return _found_or_raise(os.uname().nodename == "probe", "granted", "the host name did not change")


def _net_namespace() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWNET)
    names = [name for _, name in socket.if_nameindex()]
    return _found_or_raise(names == ["lo"], "only a loopback, down", f"interfaces {names}")


def _no_capabilities() -> str:
    userns.become_privileged()
    kernel.limit_bounding_set(frozenset())
    kernel.drop_capabilities()
    left = kernel.effective_capabilities()
    return _found_or_raise(not left, "all dropped", f"{len(left)} are left")


def _no_new_privileges() -> str:
    kernel.set_no_new_privs()
    return "granted"


def _seccomp() -> str:
    program = seccomp.program()
    kernel.set_no_new_privs()
    kernel.load_seccomp(program)
    try:
        socket.socket().close()
    except PermissionError:
        return f"{len(program) // 8} instructions, loaded and obeyed"
    raise OSError("the filter was loaded but a refused call went through")


def _rlimits() -> str:
    resource.setrlimit(resource.RLIMIT_AS, (256 * MIB, 256 * MIB))
    try:
        bytearray(512 * MIB)
    except MemoryError:
        return "RLIMIT_AS holds"
    raise OSError("512 MiB were granted under an RLIMIT_AS of 256")


def _executable_memory() -> str:
    """What `guest/fork_batch.py` asks for; the jail's own rules do not forbid it, those of the server's process may."""
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        kernel.make_executable(pages)
    return "granted"


def _schedstat() -> str:
    os.sched_yield()  # brings this process's numbers up to date
    with open("/proc/self/schedstat", encoding="ascii") as file:
        ran, waited, _ = map(int, file.read().split())
    return _found_or_raise(
        ran > 0, f"waited {waited / 1e6:.3f} ms so far", "the kernel does not count (CONFIG_SCHED_INFO)"
    )


def _priorities() -> str:
    if not kernel.can_restore_priority():
        raise PermissionError("no CAP_SYS_NICE in the first user namespace")
    for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
        os.sched_setscheduler(0, policy, os.sched_param(0))
    return "given up and taken back"


def _landlock() -> str:
    abi = kernel.landlock_abi()
    handled = landlock_rules.handled(abi)
    may_change_uids = host_uids(0, 1, Level.LANDLOCK)[0] is not None
    if abi < landlock_rules.TRUNCATE_ABI and not may_change_uids:
        raise IsolationError(
            f"ABI {abi}; without root and Docker's default capabilities it takes {landlock_rules.TRUNCATE_ABI}"
        )
    kernel.set_no_new_privs()
    kernel.restrict_with_landlock(handled, [(_STAGE, landlock_rules.READ_FILE)], 0)
    os.close(os.open(f"{_STAGE}/self/stat", os.O_RDONLY))
    try:
        os.close(os.open("/", os.O_RDONLY))
    except PermissionError:
        gives = ["files", *(["TCP"] if handled[1] else []), *(["signals, abstract sockets"] if handled[2] else [])]
        return f"ABI {abi}: {', '.join(gives)}; {'a uid for each slot' if may_change_uids else 'one uid for all calls'}"
    raise OSError("a ruleset was taken but a refused folder was opened")


def _control_groups() -> str:
    """A group is made, a process goes in, uses 4 MiB under a limit of one process, and is counted."""
    tree = cgroup_tree.CgroupTree()
    try:
        cgroup, doors = tree.cgroup(0), list(tree.open_procs_files(0))
        cgroup.set_limits(64 * MIB, 1)
        child = os.fork()
        if child == 0:
            os._exit(_use_memory(doors))
        if kernel.exit_status(child):
            raise OSError("a process could not enter, or its limit did not hold")
        peak = cgroup.read_usage().peak_bytes
        return _found_or_raise(peak is None or peak >= 4 * MIB, str(tree), f"4 MiB were counted as {peak} bytes")
    finally:
        tree.close()


def _use_memory(doors: list[int]) -> int:
    for door in doors:
        os.write(door, b"0")
    bytearray(b"x" * (4 * MIB))
    try:
        child = os.fork()
    except BlockingIOError:
        return 0
    if child == 0:
        os._exit(0)
    return 1


def _nsjail(environ: Mapping[str, str]) -> ProbedLayer:
    purpose, found = "level nsjail", ""
    for _ in range(TRIES):
        try:
            path = nsjail_binary.find(environ)
            _try_nsjail(environ)
            return ProbedLayer(NSJAIL, True, path, purpose)
        except (ConfigError, OSError, subprocess.TimeoutExpired) as why:
            found = str(why)
            if not _is_passing(why):
                break
        time.sleep(RETRY_S)
    return ProbedLayer(NSJAIL, False, found, purpose)


def _try_nsjail(environ: Mapping[str, str]) -> None:
    """A jail around a line of this Python, by the same launcher and policy as a zygote's. Takes half a second."""
    holds = "os.getuid() == 0 and os.getpid() > 1 and not os.listdir('/tmp') and not os.path.exists('/proc')"
    spec = JailSpec(Level.NSJAIL, Interpreter.find(sys.executable), _GUEST_DIR, {}, (), *host_uids(0, 1))
    spec = replace(spec, argv=(spec.guest_python, "-I", "-S", "-c", f"import os, sys; sys.exit(not ({holds}))"))
    with open(os.devnull) as null:  # in place of the socket
        argv, fd = launch_argv(spec, null.fileno()), null.fileno()
        run = subprocess.run(
            argv, pass_fds=[fd], env=environ, stdin=null, capture_output=True, timeout=_TRIAL_S, check=False
        )
    if number := -run.returncode if run.returncode < 0 else max(0, run.returncode - SIGNALLED):
        raise OSError(errno.EAGAIN, f"a trial was killed by signal {number}")
    if run.returncode:
        said = run.stderr.decode(errors="replace").strip() or f"the jail does not hold (status {run.returncode})"
        raise IsolationError(f"a trial failed: {said[:_TRIAL_TEXT]}")


def _found_or_raise(holds: bool, found: str, otherwise: str) -> str:
    if not holds:
        raise OSError(otherwise)
    return found


_Attempt = tuple[str, Callable[[], str], str]
_PROCESS_COUNTS: _Attempt = (
    "process counts",
    _process_counts,
    "a limit of processes for each call where all have one uid; else control groups bound them, or nothing",
)
_REQUIRED: tuple[_Attempt, ...] = (
    ("user namespace", _user_namespace, "root inside is nobody outside"),
    ("PID namespace", _pid_namespace, "calls see and signal only their own processes, and end with them"),
    ("mount namespace, tmpfs", _private_tmpfs, "private scratch folders of limited size"),
    ("pivot_root", _pivot_root, "none of the host's files inside"),
    ("IPC namespace", _ipc_namespace, "no shared memory between calls"),
    ("UTS namespace", _uts_namespace, "the host's name stays outside"),
    ("network namespace", _net_namespace, "no network"),
    ("capability drop", _no_capabilities, "calls hold no privilege, even inside"),
    ("no_new_privs", _no_new_privileges, "no program gives privileges back"),
    ("seccomp", _seccomp, "only the system calls that Python needs"),
    ("rlimits", _rlimits, "memory, files and processes of each call"),
)
_OPTIONAL: tuple[_Attempt, ...] = (
    ("uid range", _uid_range, "a host uid of its own for every call at once"),
    _PROCESS_COUNTS,
    ("schedstat", _schedstat, "time limits on a call's own clock, whatever the load"),
    ("priorities", _priorities, "long calls give way to short ones; else all wait for a core alike"),
    ("executable memory", _executable_memory, "calls are forked in a row by machine code; else by Python, more slowly"),
    ("Landlock", _landlock, "level landlock, for containers without namespaces"),
    (
        "control groups",
        _control_groups,
        "limits and counts of a whole call; else the executor sums its memory, a moment later",
    ),
)
_STRONGEST_FIRST: tuple[Level, ...] = (Level.NSJAIL, Level.NAMESPACES, Level.LANDLOCK)
_NEEDED = {
    Level.NSJAIL: frozenset(name for name, _, _ in _REQUIRED),
    Level.NAMESPACES: frozenset(name for name, _, _ in _REQUIRED),
    Level.LANDLOCK: frozenset({"Landlock", "no_new_privs", "seccomp", "rlimits"}),
}
_ALLOW_NAMESPACES = (
    "Start as root with CAP_SYS_ADMIN, or allow unprivileged user namespaces (sysctl user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns, and in a container its seccomp profile)"
)
_REMEDIES = {
    Level.NSJAIL: _ALLOW_NAMESPACES,
    Level.NAMESPACES: _ALLOW_NAMESPACES,
    Level.LANDLOCK: "Start on Linux 5.13 or later with CONFIG_SECURITY_LANDLOCK and landlock among lsm= at boot",
}
