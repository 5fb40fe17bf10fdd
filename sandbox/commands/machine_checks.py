"""The checks of `doctor`: what this machine has, what is missing, and the command that gives it.

- A check reads the machine and changes nothing. What only an attempt can show comes from the probed layers.
- A setting counts as missing only if a layer that depends on it is in fact missing. So root is not told to change a
  setting that only restricts ordinary users.
- Inside a container a command is a flag of the engine, or a field of the pod, where there is one. Sysctls and boot
  parameters belong to the host, and their commands say so.
- `Machine.root` is a prefix of every path that is read, for tests.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from sandbox.jail import kernel, nsjail_binary, userns
from sandbox.jail.probe import NAMESPACE_LAYERS, NSJAIL, PROCESS_LIMITS, UID_PER_SLOT, ProbedLayer
from sandbox.jail.spec import FIRST_SLOT_UID, Level
from sandbox.machine import cgroup_paths, mounts, own_cgroups
from sandbox.types import DEFAULT_LIMITS

UNIT = "docker/rstar-sandbox.service"
SECCOMP_PROFILE = "docker/seccomp.json"
NAMESPACES_PER_SERVER = 64
"""User namespaces that the jails of a server need, besides those of its calls. Each jail needs two."""
LOCALHOST_PROFILE = "securityContext: {seccompProfile: {type: Localhost, localhostProfile: rstar-sandbox.json}}"
_V1_HIERARCHIES = ("memory", "pids", "cpuacct")
"""Hierarchies of cgroup version 1 in which the server creates cgroups."""
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Link of the PID namespace of the machine itself (PROC_PID_INIT_INO in linux/proc_ns.h)."""
_PTRACE_PEEKTEXT = 1
_INVALID_UNSHARE_FLAG = 0x00080000
"""CLONE_SETTLS. The kernel answers EINVAL to unshare(2) with it, so any other error comes from a seccomp filter."""


class Environment(StrEnum):
    """Where the server runs. It decides which command gives something: a sysctl, a flag or a field of the pod."""

    HOST = "host"
    DOCKER = "docker"
    PODMAN = "podman"
    KUBERNETES = "kubernetes"
    CONTAINER = "container"
    """A container of another kind."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of `doctor`."""

    name: str
    ok: bool
    found: str
    missing: str = ""
    """What the machine lacks, and what that would give. Empty if `ok`."""
    command: str = ""
    """The command, flag or field that gives it. Empty if `ok`, or if none does."""
    level: Level | None = None
    """The isolation level that is impossible without it. None: only a limit or the speed of calls depends on it."""


@dataclass(frozen=True)
class Needs:
    """What `serve` needs with its settings."""

    calls: int
    """Calls that run at once."""
    fds: int
    """Descriptors of the process that needs most."""


@dataclass(frozen=True)
class Machine:
    """What the checks read."""

    layers: Mapping[str, ProbedLayer]
    """The probed layers by name."""
    needs: Needs
    user: str
    root: str = "/"
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    capabilities: frozenset[int] = field(default_factory=kernel.effective_capabilities)
    fd_limit: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    process_limit: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NPROC)[1])

    def read(self, path: str) -> str:
        """Return the text of a file, or an empty text if it cannot be read."""
        return _read(Path(self.root, path.lstrip("/")))

    def status_field(self, name: str) -> str:
        """Return the value of a field of /proc/self/status, or an empty text if there is no such field."""
        fields = dict(line.split(":\t", 1) for line in self.read("/proc/self/status").splitlines() if ":\t" in line)
        return fields.get(name, "")

    @property
    def pids_max(self) -> int | None:
        """The lowest limit on processes of the server's cgroup and its ancestors, or None."""
        limits = [_read(directory / "pids.max") for directory in self._pids_cgroups()]
        return min((int(text) for text in limits if text.isdecimal()), default=None)

    def _pids_cgroups(self) -> Iterator[Path]:
        for name, mount_point, directory in own_cgroups(self.root):
            if name in ("", "pids"):
                yield from (path for path in (directory, *directory.parents) if path.is_relative_to(mount_point))

    @property
    def lacks_namespaces(self) -> bool:
        return any(not self.layers[name].ok for name in NAMESPACE_LAYERS & self.layers.keys())

    @property
    def environment(self) -> Environment:
        try:
            # A virtual machine whose files come from an image has the image's marks, but no container around it.
            if os.readlink(Path(self.root, "proc/self/ns/pid")) == _INITIAL_PID_NAMESPACE:
                return Environment.HOST
        except OSError:
            pass
        if "KUBERNETES_SERVICE_HOST" in self.environ:
            return Environment.KUBERNETES
        if Path(self.root, "run/.containerenv").exists() or self.environ.get("container") == "podman":
            return Environment.PODMAN
        if Path(self.root, ".dockerenv").exists():
            return Environment.DOCKER
        paths = " ".join(cgroup_paths(self.root).values())
        is_container = "container" in self.environ or self.read("/run/systemd/container") or "kubepods" in paths
        return Environment.CONTAINER if is_container else Environment.HOST

    def command(self, on_host: str, engine_flags: str, pod_field: str) -> str:
        """Return what gives something here: a command on a host, flags of the engine in a container, a field in a pod.
        In a container of an unknown kind it is the command."""
        match self.environment:
            case Environment.DOCKER | Environment.PODMAN:
                return f"{self.environment.value} run {engine_flags} ..." if engine_flags else ""
            case Environment.KUBERNETES:
                return pod_field
        return on_host

    def as_root(self, *commands: str) -> str:
        """Return commands of root, which in a container have to run on the container's host."""
        is_host = self.environment is Environment.HOST
        text = " && ".join(commands if is_host and self.user == "root" else (f"sudo {command}" for command in commands))
        return text if is_host else f"{text}  # on the container's host"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""


def check_machine(machine: Machine) -> tuple[Check, ...]:
    """Make all checks, in the order in which `doctor` prints them."""
    return tuple(check(machine) for check in _CHECKS)


def _environment(machine: Machine) -> Check:
    texts = {Environment.HOST: "a host, not a container", Environment.CONTAINER: "a container of an unknown kind"}
    return Check(
        "environment", True, texts.get(machine.environment, f"a container of {machine.environment.value.capitalize()}")
    )


def _namespaces(machine: Machine) -> Check:
    missing = [layer for layer in machine.layers.values() if layer.name in NAMESPACE_LAYERS and not layer.ok]
    if not missing:
        return Check("namespaces", True, f"all {len(NAMESPACE_LAYERS)} layers of level namespaces")
    others = f"; {len(missing) - 1} more layers are missing" if len(missing) > 1 else ""
    found = f"no {missing[0].name}: {missing[0].found.partition(';')[0]}{others}"
    needs, command = "level namespaces", ""
    if causes := [check.name for check in (check(machine) for check in _CAUSES_OF_MISSING_NAMESPACES) if not check.ok]:
        needs += f": see {', '.join(causes)}"
    elif "[Errno 22] unshare" in found:  # the kernel does not know the flag
        needs += ": a kernel with CONFIG_USER_NS"
    else:
        flags = f"--security-opt seccomp={SECCOMP_PROFILE} --security-opt apparmor=unconfined"
        command = machine.command(machine.as_root("rstar-sandbox serve"), flags, LOCALHOST_PROFILE)
    return Check("namespaces", False, found, needs, command, Level.NAMESPACES)


def _max_user_namespaces(machine: Machine) -> Check:
    name, sysctl = "max_user_namespaces", "user.max_user_namespaces"
    calls = 0 if machine.layers["uid range"].ok else machine.needs.calls  # calls that share a uid have a namespace each
    wanted = NAMESPACES_PER_SERVER + calls
    text = machine.read(f"/proc/sys/{sysctl.replace('.', '/')}")
    if not text.isdecimal():
        return Check(name, True, f"this kernel has no {sysctl}")
    if int(text) >= wanted:
        return Check(name, True, f"{sysctl} = {text}")
    level = Level.NAMESPACES if machine.lacks_namespaces else None
    missing = f"user namespaces: {NAMESPACES_PER_SERVER} for jails and {calls} for calls"
    return Check(name, False, f"{sysctl} = {text}", missing, machine.as_root(f"sysctl -w {sysctl}={wanted}"), level)


def _unprivileged_userns_clone(machine: Machine) -> Check:
    return _restriction(machine, "unprivileged_userns_clone", "kernel.unprivileged_userns_clone", allowed=1)


def _apparmor(machine: Machine) -> Check:
    check = _restriction(machine, "apparmor", "kernel.apparmor_restrict_unprivileged_userns", allowed=0)
    profile = machine.read("/proc/self/attr/apparmor/current") or machine.read("/proc/self/attr/current")
    if profile in ("", "unconfined"):
        return check
    check = replace(check, found=f"profile {profile}; {check.found}")
    if not check.ok or not machine.lacks_namespaces or machine.environment is Environment.HOST:
        return check
    command = machine.command(
        "", "--security-opt apparmor=unconfined", "securityContext: {appArmorProfile: {type: Unconfined}}"
    )
    return Check("apparmor", False, check.found, "mounts, for level namespaces", command, Level.NAMESPACES)


def _restriction(machine: Machine, name: str, sysctl: str, allowed: int) -> Check:
    """Check a sysctl that can forbid user namespaces to ordinary users."""
    text = machine.read(f"/proc/sys/{sysctl.replace('.', '/')}")
    if not text:
        return Check(name, True, f"this kernel has no {sysctl}")
    found = f"{sysctl} = {text}"
    missing = "user namespaces of ordinary users, for level namespaces"
    if text == str(allowed):
        return Check(name, True, found)
    if not machine.lacks_namespaces or kernel.CAP_SYS_ADMIN in machine.capabilities:
        return Check(name, True, f"{found}, which does not stop this user")
    command = machine.as_root(f"sysctl -w {sysctl}={allowed}")
    return Check(name, False, found, missing, command, Level.NAMESPACES)


def _chroot(machine: Machine) -> Check:
    if not is_chroot(machine.root):
        return Check("chroot", True, "no")
    if not machine.lacks_namespaces:
        return Check("chroot", True, "yes, but namespaces are granted")
    command = "sudo systemd-nspawn --directory DIR rstar-sandbox serve  # or start it outside of the chroot"
    found = "yes, and in a chroot the kernel grants no user namespaces"
    return Check("chroot", False, found, "level namespaces", command, Level.NAMESPACES)


def is_chroot(root: str = "/") -> bool:
    """Return whether this process's root directory is not the root of its mount namespace.

    The list of mounts has the paths that this process sees. In a chroot none of them is `/`, unless the new root is a
    mount itself. Then process 1 tells, whose root directory only root can see.
    """
    mount_points = [mount_point for _, mount_point, _, _ in mounts(root)]
    if mount_points and "/" not in mount_points:
        return True
    own, first = (Path(root, "proc", process) for process in ("self", "1"))
    try:
        is_same_namespace = os.readlink(own / "ns/mnt") == os.readlink(first / "ns/mnt")
        return is_same_namespace and not os.path.samestat(os.stat(own / "root/."), os.stat(first / "root/."))
    except OSError:
        return False


def _seccomp_filter(machine: Machine) -> Check:
    """Check that calls can have a filter, and name the filter that the server itself runs under."""
    name, layer = "seccomp_filter", machine.layers["seccomp"]
    if not layer.ok:
        missing = "system call filters, which all levels need: a kernel with CONFIG_SECCOMP_FILTER"
        return Check(name, False, layer.found, missing, "", Level.LANDLOCK)
    if machine.status_field("Seccomp") != "2":
        return Check(name, True, "the server is under no filter")
    profile, refuses_namespaces = under_profile()
    if not machine.lacks_namespaces or not refuses_namespaces:
        return Check(name, True, f"the server is under {profile}")
    command = machine.command(
        f"remove RestrictNamespaces= and SystemCallFilter= from the systemd unit, as in {UNIT}",
        f"--security-opt seccomp={SECCOMP_PROFILE}",
        LOCALHOST_PROFILE,
    )
    found = f"the server is under {profile}, which refuses namespaces"
    return Check(name, False, found, "system calls for level namespaces", command, Level.NAMESPACES)


def under_profile() -> tuple[str, bool]:
    """Tell by which seccomp profile this process is filtered, and whether the profile refuses user namespaces.

    Three system calls with arguments that have no effect tell it. The kernel gives other errors than a filter.
    """
    refuses_clone3 = _is_refused_in_child(lambda: 0 if kernel.has_clone3() else errno.ENOSYS)
    refuses_ptrace = _is_refused_in_child(lambda: _error_of("ptrace", _PTRACE_PEEKTEXT, 0, 0, 0))  # the kernel: ESRCH
    flags = kernel.CLONE_NEWUSER | _INVALID_UNSHARE_FLAG  # the kernel: EINVAL
    refuses_unshare = _is_refused_in_child(lambda: _error_of("unshare", flags))
    if refuses_clone3 and refuses_ptrace:
        return SECCOMP_PROFILE, False
    if refuses_clone3 and refuses_unshare:
        return "the default profile of a container engine", True
    return "a filter that is none of the known profiles", refuses_unshare


def _error_of(function: str, *arguments: int) -> int:
    """Call a function of the C library, and return its errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    getattr(libc, function)(*(ctypes.c_long(argument) for argument in arguments))
    return ctypes.get_errno()


def _is_refused_in_child(error_of: Callable[[], int]) -> bool:
    """Return whether a system call is refused. It is made in a child process, which some filters kill."""
    child = os.fork()
    if child == 0:
        os._exit(error_of())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (errno.EPERM, errno.ENOSYS, -signal.SIGSYS)


def _landlock(machine: Machine) -> Check:
    layer, active = machine.layers["Landlock"], machine.read("/sys/kernel/security/lsm")
    if layer.ok:
        return Check("landlock", True, layer.found)
    if not machine.lacks_namespaces:
        return Check("landlock", True, f"{layer.found}; level namespaces does without")
    command = machine.command("", f"--security-opt seccomp={SECCOMP_PROFILE}", LOCALHOST_PROFILE)
    if active and "landlock" not in active.split(","):
        line = f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX lsm=landlock,{active}"'
        command = machine.as_root(f"tee /etc/default/grub.d/landlock.cfg <<<'{line}'", "update-grub", "reboot")
    missing = "level landlock: Linux 5.13 or later with CONFIG_SECURITY_LANDLOCK and landlock in lsm= at boot"
    return Check("landlock", False, layer.found, missing, command, Level.LANDLOCK)


def _cgroups(machine: Machine) -> Check:
    layer = machine.layers["cgroups"]
    if layer.ok:
        version, _, directories = layer.found.partition(", ")
        return Check("cgroups", True, f"{version}, below {os.path.dirname(directories.split(', ')[0])}")
    own = {name: paths for name, *paths in own_cgroups(machine.root) if paths[1].is_dir()}
    hierarchies = [name for name in _V1_HIERARCHIES if name in own] if {"memory", "pids"} <= own.keys() else [""]
    read_only = sorted({str(own[name][0]) for name in hierarchies if name in own and _is_read_only(own[name][0])})
    if not own:
        found, command = "none are mounted", machine.as_root("mount -t cgroup2 none /sys/fs/cgroup")
    elif read_only:
        found = f"the cgroup tree is read-only: {read_only[0]}"
        command = machine.as_root(*(f"mount -o remount,bind,rw {path}" for path in read_only))
    elif hierarchies != [""]:
        found = "version 1, not delegated to this user"
        command = f"sudo chown {machine.user} {' '.join(str(own[name][1]) for name in hierarchies)}"
    else:
        found = "version 2, not delegated to the server"
        scope = "--scope" if machine.user == "root" else "--user --scope"
        command = f"systemd-run {scope} -p Delegate=yes rstar-sandbox serve"
    option = "unmask=/sys/fs/cgroup" if machine.environment is Environment.PODMAN else "writable-cgroups=true"
    flags = f"--user 0 --security-opt {option}" if "" in own else ""  # engines grant only cgroups of version 2
    command = machine.command(command, flags, "")
    return Check("cgroups", False, found, "the kernel's limits and counters for a whole call", command)


def _is_read_only(mount_point: Path) -> bool:
    try:
        return bool(os.statvfs(mount_point).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _uids(machine: Machine) -> Check:
    layer, landlock = machine.layers["uid range"], machine.layers["Landlock"]
    if layer.ok:
        return Check("uids", True, layer.found)
    if machine.lacks_namespaces and landlock.ok and UID_PER_SLOT in landlock.found:
        return Check("uids", True, f"{UID_PER_SLOT}, at level landlock")
    missing = "a host uid of its own for each slot"
    first, end = userns.subordinate_ids()
    if machine.environment is not Environment.HOST or machine.lacks_namespaces:
        found = "all calls share the server's uid"
        command = machine.command(
            machine.as_root("rstar-sandbox serve"), "--user 0", "securityContext: {runAsUser: 0, runAsNonRoot: false}"
        )
    elif not all(map(shutil.which, userns.MAPPING_PROGRAMS.values())):
        found, command = "newuidmap is not installed", machine.as_root("apt-get install uidmap")
    elif end - first <= (needed := FIRST_SLOT_UID + machine.needs.calls):
        found = f"{end - first} subordinate ids of {machine.user} in /etc/subuid and /etc/subgid, {needed} needed"
        ids = "100000-165535"
        command = machine.as_root(f"usermod --add-subuids {ids} --add-subgids {ids} {machine.user}")
    elif machine.status_field("NoNewPrivs") == "1":
        found, command = "no_new_privs, under which newuidmap has no privilege", f"NoNewPrivileges=no in {UNIT}"
    else:
        found, command = layer.found, machine.as_root("rstar-sandbox serve")
    return Check("uids", False, found, missing, command)


def _process_limits(machine: Machine) -> Check:
    layers = [machine.layers[name] for name in ("uid range", PROCESS_LIMITS, "cgroups")]
    if granted := [layer.name for layer in layers if layer.ok]:
        return Check("process_limits", True, f"for each call, by {', '.join(granted)}")
    if (
        machine.lacks_namespaces and machine.layers["Landlock"].ok
    ):  # by a uid for each slot, or by a filter that refuses fork
        return Check("process_limits", True, "for each call, at level landlock")
    missing = "a limit on the processes of each call, by one of uids, cgroups or Linux 5.14"
    return Check("process_limits", False, machine.layers[PROCESS_LIMITS].found, missing)


def _nofile(machine: Machine) -> Check:
    hard, needed = machine.fd_limit, machine.needs.fds
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return Check("nofile", True, "no limit" if hard == resource.RLIM_INFINITY else f"{hard} open files")
    command = machine.command(
        machine.as_root(f"prlimit --pid $$ --nofile={needed}:{needed}"),
        f"--ulimit nofile={needed}:{needed}",
        f"LimitNOFILE={needed} in the unit of the node's container runtime",
    )
    return Check("nofile", False, f"{hard} open files", f"{needed} for all connections and slots", command)


def _nproc(machine: Machine) -> Check:
    needed = machine.needs.calls * DEFAULT_LIMITS.processes
    missing = f"{needed} processes: {machine.needs.calls} calls with {DEFAULT_LIMITS.processes} each"
    if (granted := machine.pids_max) is not None and granted < needed:
        command = machine.command(
            machine.as_root("systemctl set-property rstar-sandbox.service TasksMax=infinity"),
            f"--pids-limit {needed}",
            f"podPidsLimit: {needed} in the kubelet's configuration",
        )
        return Check("nproc", False, f"pids.max of the server's cgroup: {granted}", missing, command)
    limit = resource.RLIM_INFINITY if kernel.CAP_SYS_ADMIN in machine.capabilities else machine.process_limit
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return Check("nproc", True, "no limit" if limit == resource.RLIM_INFINITY else f"{limit} processes")
    command = machine.command(
        machine.as_root(f"prlimit --pid $$ --nproc={needed}:{needed}"), f"--ulimit nproc={needed}:{needed}", ""
    )
    return Check("nproc", False, f"{limit} processes", missing, command)


def _hidepid(machine: Machine) -> Check:
    options = [options for _, mount_point, _, options in mounts(machine.root) if mount_point == "/proc"]
    hidden = [option for option in (options[-1].split(",") if options else ()) if option.startswith("hidepid")]
    return Check("hidepid", True, f"{hidden[0]}; the server sees its own calls" if hidden else "no")


def _schedstat(machine: Machine) -> Check:
    layer = machine.layers["schedstat"]
    missing = "" if layer.ok else "time limits that do not depend on load: a kernel with CONFIG_SCHED_INFO"
    return Check("schedstat", layer.ok, "the kernel counts run delay" if layer.ok else layer.found, missing)


def _priorities(machine: Machine) -> Check:
    layer = machine.layers["priorities"]
    missing = "" if layer.ok else "a lower priority of long calls"
    return Check("priorities", layer.ok, layer.found, missing)


def _executable_memory(machine: Machine) -> Check:
    layer = machine.layers["executable memory"]
    if layer.ok:
        return Check("executable_memory", True, layer.found)
    command = "MemoryDenyWriteExecute=no in the systemd unit"
    return Check("executable_memory", False, layer.found, "faster forks of batches", machine.command(command, "", ""))


def _nsjail(machine: Machine) -> Check:
    layer = machine.layers[NSJAIL]
    is_wanted = bool(machine.environ.get(nsjail_binary.VARIABLE))
    if layer.ok or not is_wanted:
        return Check(NSJAIL, True, layer.found if layer.ok else "not used; level namespaces is as strong")
    return Check(NSJAIL, False, layer.found, "level nsjail", f"unset {nsjail_binary.VARIABLE}")


_CAUSES_OF_MISSING_NAMESPACES = (
    _max_user_namespaces,
    _unprivileged_userns_clone,
    _apparmor,
    _chroot,
    _seccomp_filter,
)
_CHECKS = (
    _environment,
    _namespaces,
    *_CAUSES_OF_MISSING_NAMESPACES,
    _landlock,
    _cgroups,
    _uids,
    _process_limits,
    _nofile,
    _nproc,
    _hidepid,
    _schedstat,
    _priorities,
    _executable_memory,
    _nsjail,
)
