"""Finds out which isolation layers this machine grants, by setting up each of them in a child process.

- Versions and configuration are not consulted, because containers refuse system calls that their kernel has.
- Each attempt runs in a child of a fresh interpreter, and not in a child of this process. A process with two threads
  may enter no user namespace, and a library of this process may start threads in forked children
  (`os.register_at_fork`), as OpenTelemetry does.
- A layer is missing only if the kernel refuses it. If an attempt fails for a transient reason (a signal killed it, or
  memory or process ids ran out), it is repeated, up to `MAX_TRIES` attempts.
- `level_choice` turns the result into a level.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from sandbox.errors import ConfigError, IsolationError
from sandbox.jail import cgroup_tree, kernel, landlock_rules, nsjail_binary, seccomp, userns
from sandbox.jail.interpreter import Interpreter
from sandbox.jail.plan import launch_argv
from sandbox.jail.root_fs import ROOT_STAGING_DIR
from sandbox.jail.spec import GUEST_SOURCE_DIR, JailSpec, Level
from sandbox.jail.uid_range import host_uids

MIB = 1 << 20
NSJAIL = "nsjail"
PROCESS_LIMITS = "process limits"
UID_PER_SLOT = "a uid for each slot"
MAX_TRIES = 5
"""Maximum number of attempts at a layer. If the last one also fails for a transient reason, the layer is missing."""
RETRY_DELAY_S = 0.1
MAX_REPORT_BYTES = 4096
"""Maximum size of the text that an attempt reports. It fits into a pipe, so the child never blocks."""
TRIAL_TIMEOUT_S = 60
"""Maximum number of seconds for the trial of nsjail (`_run_nsjail_trial`)."""
MAX_TRIAL_ERROR_CHARS = 1000
EXIT_SIGNAL_BASE = 128
"""If signal n killed the child of a launcher, the launcher exits with this plus n (`launcher.shell_exit_status`)."""
# Outcomes of an attempt, which are also the exit statuses of its child process
_OK = 0
_REFUSED = 1
_TRANSIENT = 2
_TRANSIENT_ERRORS = frozenset({errno.EAGAIN, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    name: str
    ok: bool
    found: str
    """Text for users: the result of the attempt, or the reason why the layer is missing."""
    purpose: str
    """Text for users: the protection or the function that the layer provides."""


def probe(environ: Mapping[str, str] = os.environ) -> tuple[ProbedLayer, ...]:
    """Try all layers, in about a second. Most of it is the trial of nsjail, if nsjail is installed."""
    return (*probe_layers(name for name, _, _ in _LAYERS), probe_nsjail(environ))


def probe_layers(names: Iterable[str]) -> tuple[ProbedLayer, ...]:
    """Try the named layers, except nsjail. Raises `IsolationError` if the interpreter that tries them fails."""
    command = [sys.executable, "-I", "-c", f"from {__name__} import _print_layers; _print_layers()", *names]
    outcome, text = _repeat_while_transient(lambda: _run_interpreter(command))
    if outcome != _OK:
        raise IsolationError(f"the isolation layers could not be tried: {text}")
    return tuple(ProbedLayer(**layer) for layer in json.loads(text))


def _run_interpreter(command: Sequence[str]) -> tuple[int, str]:
    """Return the outcome and a text: the last line of the output, or the error."""
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        return _TRANSIENT if _is_transient(error) else _REFUSED, str(error)
    if run.returncode or not run.stdout:
        message = f"{command[0]} ended with status {run.returncode}: {run.stderr.strip()}"
        return _TRANSIENT if run.returncode < 0 else _REFUSED, message
    return _OK, run.stdout.splitlines()[-1]  # `site` may have printed lines before


def _print_layers() -> None:
    """Try the layers that `sys.argv` names, and print the results as JSON."""
    layers = [_probe_in_child(*layer) for layer in _LAYERS if layer[0] in sys.argv[1:]]
    print(json.dumps([asdict(layer) for layer in layers]))


def probe_process_limits() -> ProbedLayer:
    """Try whether each call can have its own limit on processes although all calls have the same uid."""
    return probe_layers([PROCESS_LIMITS])[0]


def probe_nsjail(environ: Mapping[str, str]) -> ProbedLayer:
    def attempt() -> tuple[int, str]:
        try:
            path = nsjail_binary.find(environ)
            _run_nsjail_trial(environ)
        except (ConfigError, OSError, subprocess.TimeoutExpired) as error:
            return _TRANSIENT if _is_transient(error) else _REFUSED, str(error)
        return _OK, path

    outcome, text = _repeat_while_transient(attempt)
    return ProbedLayer(NSJAIL, outcome == _OK, text, "level nsjail")


def _probe_in_child(name: str, attempt: Callable[[], str], purpose: str) -> ProbedLayer:
    """Run `attempt` in a child process. `attempt` returns a text for users, or raises an exception with such a text if
    the layer is missing."""
    outcome, text = _repeat_while_transient(lambda: _run_in_child(attempt))
    return ProbedLayer(name, outcome == _OK, text, purpose)


def _repeat_while_transient(attempt: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    for _ in range(MAX_TRIES - 1):
        outcome, text = attempt()
        if outcome != _TRANSIENT:
            return outcome, text
        time.sleep(RETRY_DELAY_S)
    return attempt()


def _run_in_child(attempt: Callable[[], str]) -> tuple[int, str]:
    """Return the outcome of an attempt, and its text or error."""
    try:
        readable, writable = os.pipe()
        child = os.fork()
    except OSError as error:
        return _TRANSIENT, str(error)
    if child == 0:
        try:
            outcome, text = _OK, attempt()
        except Exception as error:  # the child ends here: no exception may reach the frames that it has inherited
            outcome, text = _TRANSIENT if _is_transient(error) else _REFUSED, str(error) or type(error).__name__
        os.write(writable, text.encode(errors="replace")[:MAX_REPORT_BYTES])
        os._exit(outcome)
    os.close(writable)
    with open(readable, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        return code, text
    # SIGSYS comes from a seccomp filter, which would kill the next attempt too. No other signal means a refusal.
    return _REFUSED if code == -signal.SIGSYS else _TRANSIENT, f"killed by signal {-code}"


def _is_transient(error: BaseException | None) -> bool:
    """Return whether an error, or an error that caused it, means that a resource has run out for the moment."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _TRANSIENT_ERRORS):
            return True
        error = error.__context__
    return False


def _text_or_raise(has_succeeded: bool, text: str, problem: str) -> str:
    """Return `text` if an attempt has succeeded. Otherwise raise `OSError` with `problem`."""
    if not has_succeeded:
        raise OSError(problem)
    return text


def _try_user_namespace() -> str:
    # A single unshare(2) does not suffice: for some users and in some namespaces the kernel refuses only later steps.
    base, _ = _enter_jail_namespaces()
    return "single id map" if base is None else "a range of ids"


def _try_uid_range() -> str:
    base, count = _enter_jail_namespaces()
    if base is None:
        raise IsolationError(
            "all calls share one host uid; a range needs either root with CAP_SETUID and enough ids, or newuidmap "
            "without no_new_privs and ids in /etc/subuid and /etc/subgid"
        )
    # This fails unless the last id of the range is mapped.
    os.setresuid(count - 1, count - 1, count - 1)
    return f"host uids from {base}"


def _enter_jail_namespaces() -> tuple[int | None, int]:
    base, count = host_uids(jail_number=0, slots=1)
    proc_self = userns.open_proc_self()
    privileged = userns.become_privileged(base, count)
    userns.enter_jail_namespaces(base, count, proc_self, privileged=privileged)
    return base, count


def _try_process_limits() -> str:
    """Check that RLIMIT_NPROC counts only the processes in the same user namespace.

    Another process with the same uid runs outside the namespace. With a limit of two processes, this process must be
    able to start a first child inside the namespace, but no second one.
    """
    proc_self = userns.open_proc_self()
    userns.become_privileged()
    userns.unshare_mapped(0, userns.id_map(None, 0, proc_self), proc_self)
    userns.become_uid_0(can_change_groups=False)
    with ExitStack() as stack:
        stack.callback(_kill_and_reap, _fork_sleeper())
        kernel.unshare(kernel.CLONE_NEWUSER)
        resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
        try:
            stack.callback(_kill_and_reap, _fork_sleeper())
        except BlockingIOError:
            raise OSError("the kernel counts processes per uid (before Linux 5.14), and calls share one uid") from None
        try:
            stack.callback(_kill_and_reap, _fork_sleeper())
        except BlockingIOError:
            return "in a user namespace of each call"
        raise OSError("a third process was started under a limit of two")


def _fork_sleeper() -> int:
    pid = os.fork()
    if pid == 0:
        kernel.set_parent_death_signal()
        signal.pause()
    return pid


def _kill_and_reap(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _try_pid_namespace() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        os._exit(os.getpid())
    first = kernel.wait_for_exit(child)
    return _text_or_raise(first == 1, "its first process is PID 1", f"its first process has PID {first}")


def _try_tmpfs() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("probe", ROOT_STAGING_DIR, "tmpfs", flags, "size=1m,mode=700")
    stat = os.statvfs(ROOT_STAGING_DIR)
    size = stat.f_blocks * stat.f_frsize
    return _text_or_raise(size == MIB, "its size is limited as asked for", f"asked for {MIB} bytes, got {size}")


def _try_pivot_root() -> str:
    _try_tmpfs()
    os.chdir(ROOT_STAGING_DIR)
    kernel.pivot_root(".", ".")
    kernel.unmount_lazily(".")
    return _text_or_raise(os.listdir("/") == [], "the old root is gone", "the old root is still there")


def _try_ipc_namespace() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWIPC)
    return "granted"


def _try_uts_namespace() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWUTS)
    kernel.set_hostname("probe")
    return _text_or_raise(os.uname().nodename == "probe", "granted", "the host name did not change")


def _try_net_namespace() -> str:
    userns.become_privileged()
    kernel.unshare(kernel.CLONE_NEWNET)
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_UNIX) as sock:
        fd = fcntl.ioctl(sock, kernel.SIOCGSKNS)
    kernel.unshare(kernel.CLONE_NEWNET)
    kernel.setns(fd, kernel.CLONE_NEWNET)  # as each call does, into the namespace of its slot
    return _text_or_raise(names == ["lo"], "it has no interface but a loopback of its own", f"interfaces {names}")


def _try_capability_drop() -> str:
    userns.become_privileged()
    kernel.limit_bounding_set(frozenset())
    kernel.drop_capabilities()
    left = kernel.effective_capabilities()
    return _text_or_raise(not left, "all dropped", f"{len(left)} are left")


def _try_no_new_privs() -> str:
    kernel.set_no_new_privs()
    return "granted"


def _try_seccomp() -> str:
    program = seccomp.program()
    kernel.set_no_new_privs()
    kernel.load_seccomp(program)
    try:
        socket.socket().close()
    except PermissionError:
        return f"{len(program) // 8} instructions; a refused call fails"
    raise OSError("the filter was loaded but a refused call went through")


def _try_rlimits() -> str:
    resource.setrlimit(resource.RLIMIT_AS, (256 * MIB, 256 * MIB))
    try:
        bytearray(512 * MIB)
    except MemoryError:
        return "RLIMIT_AS limits memory"
    raise OSError("512 MiB were granted under an RLIMIT_AS of 256")


def _try_executable_memory() -> str:
    """Make memory executable, as `guest/fork_batch.py` does. A restriction of the server itself may forbid it."""
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        kernel.make_executable(pages)
    return "granted"


def _try_schedstat() -> str:
    os.sched_yield()  # makes the kernel update this process's numbers
    with open("/proc/self/schedstat", encoding="ascii") as file:
        cpu_ns, run_delay_ns, _ = map(int, file.read().split())
    problem = "the kernel does not count (CONFIG_SCHED_INFO)"
    return _text_or_raise(cpu_ns > 0, f"waited {run_delay_ns / 1e6:.3f} ms so far", problem)


def _try_priorities() -> str:
    if not kernel.can_restore_priority():
        os.nice(1)
        return "nice values raised; no CAP_SYS_NICE in the initial user namespace to restore them"
    for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
        os.sched_setscheduler(0, policy, os.sched_param(0))
    return "lowered and restored"


def _try_landlock() -> str:
    abi = kernel.landlock_abi()
    handled = landlock_rules.handled_rights(abi)
    has_uids = host_uids(jail_number=0, slots=1, level=Level.LANDLOCK)[0] is not None
    if abi < landlock_rules.TRUNCATE_ABI and not has_uids:
        raise IsolationError(
            f"ABI {abi}; without root and Docker's default capabilities, ABI {landlock_rules.TRUNCATE_ABI} is needed"
        )
    kernel.set_no_new_privs()
    kernel.restrict_with_landlock(handled, [("/proc", landlock_rules.READ_FILE)], 0)
    os.close(os.open("/proc/self/stat", os.O_RDONLY))
    try:
        os.close(os.open("/", os.O_RDONLY))
    except PermissionError:
        restricted = ["files", *(["TCP"] if handled[1] else []), *(["signals, abstract sockets"] if handled[2] else [])]
        return f"ABI {abi}: {', '.join(restricted)}; {UID_PER_SLOT if has_uids else 'one uid for all calls'}"
    raise OSError("a ruleset was accepted but a refused directory was opened")


def _try_cgroups() -> str:
    """Check that a process can enter a cgroup, that its 4 MiB are counted, and that a limit of one process holds."""
    tree = cgroup_tree.CgroupTree()
    try:
        cgroup, procs_fds = tree.cgroup(0), list(tree.open_procs_files(0))
        cgroup.set_limits(64 * MIB, 1)
        child = os.fork()
        if child == 0:
            os._exit(_use_memory_and_fork(procs_fds))
        if kernel.wait_for_exit(child):
            raise OSError("a process could not enter, or its limit did not hold")
        peak = cgroup.read_usage().peak_bytes
        return _text_or_raise(peak is None or peak >= 4 * MIB, str(tree), f"4 MiB were counted as {peak} bytes")
    finally:
        tree.close()


def _use_memory_and_fork(procs_fds: list[int]) -> int:
    for fd in procs_fds:
        os.write(fd, b"0")
    bytearray(b"x" * (4 * MIB))
    try:
        child = os.fork()
    except BlockingIOError:
        return 0
    if child == 0:
        os._exit(0)
    return 1


def _run_nsjail_trial(environ: Mapping[str, str]) -> None:
    """Run one line of this Python in a jail, started as for a zygote. Takes half a second."""
    is_jailed = "os.getuid() == 0 and os.getpid() > 1 and not os.listdir('/tmp') and not os.path.exists('/proc')"
    python, guest_dir = Interpreter.find(sys.executable), str(GUEST_SOURCE_DIR)
    uid_base, uid_count = host_uids(jail_number=0, slots=1)
    spec = JailSpec(Level.NSJAIL, python, guest_dir, uid_base=uid_base, uid_count=uid_count)
    spec = replace(spec, argv=(spec.guest_python, "-I", "-S", "-c", f"import os, sys; sys.exit(not ({is_jailed}))"))
    with open(os.devnull) as null:  # in place of the guest's socket, which this one line does not use
        argv, fd = launch_argv(spec, null.fileno()), null.fileno()
        run = subprocess.run(
            argv, pass_fds=[fd], env=environ, stdin=null, capture_output=True, timeout=TRIAL_TIMEOUT_S, check=False
        )
    if number := -run.returncode if run.returncode < 0 else max(0, run.returncode - EXIT_SIGNAL_BASE):
        raise OSError(errno.EAGAIN, f"a trial was killed by signal {number}")
    if run.returncode:
        message = run.stderr.decode(errors="replace").strip() or f"the jail does not hold (status {run.returncode})"
        raise IsolationError(f"a trial failed: {message[:MAX_TRIAL_ERROR_CHARS]}")


_Layer = tuple[str, Callable[[], str], str]
"""Name of a layer, the attempt to set it up, and its purpose."""
_NAMESPACE_LAYERS: tuple[_Layer, ...] = (
    ("user namespace", _try_user_namespace, "root inside is nobody outside"),
    ("PID namespace", _try_pid_namespace, "calls see and signal only their own processes, and end with them"),
    ("mount namespace, tmpfs", _try_tmpfs, "private scratch directories of limited size"),
    ("pivot_root", _try_pivot_root, "none of the host's files inside"),
    ("IPC namespace", _try_ipc_namespace, "none of the host's shared memory and message queues inside"),
    ("UTS namespace", _try_uts_namespace, "the host's name stays outside"),
    ("network namespace", _try_net_namespace, "no network"),
    ("capability drop", _try_capability_drop, "calls hold no privilege, even inside"),
    ("no_new_privs", _try_no_new_privs, "no program restores privileges"),
    ("seccomp", _try_seccomp, "only the system calls that Python needs"),
    ("rlimits", _try_rlimits, "memory, files and processes of each call"),
)
NAMESPACE_LAYERS = frozenset(name for name, _, _ in _NAMESPACE_LAYERS)
"""Names of the layers that levels `nsjail` and `namespaces` require."""
_LAYERS: tuple[_Layer, ...] = (
    *_NAMESPACE_LAYERS,
    ("uid range", _try_uid_range, "a host uid of its own for every slot"),
    (
        PROCESS_LIMITS,
        _try_process_limits,
        "a limit on the processes of each call where calls share a uid; without it only cgroups limit them",
    ),
    ("schedstat", _try_schedstat, "time limits in virtual time, independent of load"),
    (
        "priorities",
        _try_priorities,
        "long calls run at SCHED_IDLE, or with a higher nice value where priorities cannot be restored",
    ),
    (
        "executable memory",
        _try_executable_memory,
        "machine code forks calls from a template; else Python does, slower",
    ),
    ("Landlock", _try_landlock, "level landlock, for containers without namespaces"),
    ("cgroups", _try_cgroups, "limits and usage of a whole call; without them the executor samples its memory"),
)
