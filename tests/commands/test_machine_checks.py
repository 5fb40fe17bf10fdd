"""Tests of the rows of `doctor`. Each takes away what a row is about, in a made-up /proc, by a limit or by a filter."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.commands import machine_checks
from sandbox.commands.machine_checks import (
    NAMESPACES_PER_SERVER,
    SECCOMP_PROFILE,
    Check,
    Machine,
    Needs,
    check_machine,
    is_chroot,
)
from sandbox.jail import ProbedLayer, bpf, kernel
from sandbox.jail.probe import _LAYERS, NSJAIL
from sandbox.jail.seccomp import ALLOW, ENOSYS, EPERM
from sandbox.jail.syscalls import NUMBERS
from sandbox.machine import own_cgroups
from sandbox.types import DEFAULT_LIMITS
from tests.jail import jails

CALLS, FDS = 100, 5000
KILL_PROCESS = 0x80000000
"""SECCOMP_RET_KILL_PROCESS, the default of systemd's SystemCallFilter."""
NAMESPACE = "user namespace"
"""The layer that is missing where a machine grants no user namespaces."""
LAYERS = {name: ProbedLayer(name, True, "granted", "") for name in (*(layer[0] for layer in _LAYERS), NSJAIL)}
MOUNTINFO = "22 1 0:20 / /proc rw - proc proc rw\n"
ENGINE_MARKS = {"docker": ".dockerenv", "podman": "run/.containerenv"}

MakeMachine = Callable[..., Machine]


@pytest.fixture
def make_machine(tmp_path: Path) -> MakeMachine:
    """Return a function that makes a machine with these files, missing layers and environment variables."""

    def make(
        files: Mapping[str, str] | None = None, missing: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
    ) -> Machine:
        for path, text in {
            "proc/self/mountinfo": f"21 0 8:1 / / rw - ext4 disk rw\n{MOUNTINFO}",
            **(files or {}),
        }.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        layers = {name: replace(layer, ok=name not in missing) for name, layer in LAYERS.items()}
        return Machine(layers, Needs(CALLS, FDS), "me", str(tmp_path), environ or {}, frozenset(), FDS, CALLS * 100)

    return make


def check_named(name: str, machine: Machine) -> Check:
    (check,) = (check for check in check_machine(machine) if check.name == name)
    return check


def test_a_machine_that_lacks_nothing_has_no_row_with_a_command(make_machine: MakeMachine) -> None:
    checks = check_machine(make_machine())
    assert [check.name for check in checks if not check.ok or check.missing or check.command] == []
    assert all(check.found for check in checks)
    assert len({check.name for check in checks}) == len(checks)


SYSCTLS = [
    ("max_user_namespaces", "user/max_user_namespaces", "0", f"{NAMESPACES_PER_SERVER}"),
    ("unprivileged_userns_clone", "kernel/unprivileged_userns_clone", "0", "1"),
    ("apparmor", "kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
]


@pytest.mark.parametrize(("name", "file", "value", "allowed"), SYSCTLS)
def test_a_sysctl_that_forbids_user_namespaces_has_the_command_that_allows_them(
    name: str, file: str, value: str, allowed: str, make_machine: MakeMachine
) -> None:
    check = check_named(name, make_machine({f"proc/sys/{file}": f"{value}\n"}, (NAMESPACE,)))
    sysctl = file.replace("/", ".")
    assert (check.ok, check.found, check.level) == (False, f"{sysctl} = {value}", "namespaces")
    assert check.command == f"sudo sysctl -w {sysctl}={allowed}"
    namespaces = check_named("namespaces", make_machine({f"proc/sys/{file}": f"{value}\n"}, (NAMESPACE,)))
    assert (namespaces.ok, namespaces.missing) == (False, f"level namespaces: see {name}")


@pytest.mark.parametrize(("name", "file", "value"), [row[:3] for row in SYSCTLS[1:]])
def test_a_restriction_is_not_missing_if_namespaces_are_granted_all_the_same(
    name: str, file: str, value: str, make_machine: MakeMachine
) -> None:
    check = check_named(name, make_machine({f"proc/sys/{file}": value}))
    assert (check.ok, check.command) == (True, "")
    assert value in check.found


@pytest.mark.parametrize(("name", "file", "value"), [row[:3] for row in SYSCTLS[1:]])
def test_a_restriction_of_ordinary_users_is_not_missing_for_root(
    name: str, file: str, value: str, make_machine: MakeMachine
) -> None:
    machine = make_machine({f"proc/sys/{file}": value}, (NAMESPACE,))
    assert check_named(name, replace(machine, capabilities=frozenset({kernel.CAP_SYS_ADMIN}))).ok


def test_calls_that_share_a_uid_need_a_user_namespace_each(make_machine: MakeMachine) -> None:
    files = {"proc/sys/user/max_user_namespaces": str(NAMESPACES_PER_SERVER)}
    assert check_named("max_user_namespaces", make_machine(files)).ok
    check = check_named("max_user_namespaces", make_machine(files, ("uid range",)))
    assert (check.ok, check.level) == (False, None), "the level holds, with fewer calls at once"
    assert check.command == f"sudo sysctl -w user.max_user_namespaces={NAMESPACES_PER_SERVER + CALLS}"


@pytest.mark.parametrize(
    ("marks", "environ", "found"),
    [
        ({}, {}, "a host, not a container"),
        ({".dockerenv": ""}, {}, "a container of Docker"),
        ({"run/.containerenv": ""}, {}, "a container of Podman"),
        ({}, {"container": "podman"}, "a container of Podman"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "a container of Kubernetes"),
        ({}, {"container": "lxc"}, "a container of an unknown kind"),
        ({"proc/self/cgroup": "0::/kubepods/besteffort/pod1\n"}, {}, "a container of an unknown kind"),
    ],
)
def test_the_kind_of_a_container_is_told_by_its_marks(
    marks: dict[str, str], environ: dict[str, str], found: str, make_machine: MakeMachine
) -> None:
    assert check_named("environment", make_machine(marks, (), environ)).found == found


def test_a_virtual_machine_with_the_files_of_an_image_is_no_container(
    tmp_path: Path, make_machine: MakeMachine
) -> None:
    machine = make_machine({".dockerenv": "", "proc/self/ns/mnt": ""})
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    assert check_named("environment", machine).found == "a host, not a container"


@pytest.mark.parametrize("engine", ENGINE_MARKS)
def test_in_a_container_the_command_is_a_flag_of_the_engine(
    engine: str, tmp_path: Path, make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "under_profile", lambda: ("a default profile", True))
    files = {ENGINE_MARKS[engine]: "", "proc/self/status": "Seccomp:\t2\n", "proc/self/cgroup": "0::/\n"}
    files["proc/self/attr/current"] = "docker-default (enforce)\n"
    files["proc/self/mountinfo"] = f"21 0 0:1 / / rw - overlay o rw\n{MOUNTINFO}9 8 0:2 / /cg ro - cgroup2 c ro\n"
    (tmp_path / "cg").mkdir()
    machine = replace(make_machine(files, (NAMESPACE, "cgroups", "uid range")), fd_limit=256)
    run = f"{engine} run"
    assert check_named("seccomp_filter", machine).command == f"{run} --security-opt seccomp={SECCOMP_PROFILE} ..."
    assert check_named("apparmor", machine).command == f"{run} --security-opt apparmor=unconfined ..."
    assert check_named("uids", machine).command == f"{run} --user 0 ..."
    assert check_named("nofile", machine).command == f"{run} --ulimit nofile={FDS}:{FDS} ..."
    option = {"docker": "writable-cgroups=true", "podman": "unmask=/sys/fs/cgroup"}[engine]
    assert check_named("cgroups", machine).command == f"{run} --user 0 --security-opt {option} ..."


def test_in_a_pod_the_command_is_a_field_of_the_pod_or_a_command_on_the_host(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "under_profile", lambda: ("a default profile", True))
    files = {"proc/self/status": "Seccomp:\t2\n", "proc/self/attr/current": "cri-containerd.apparmor.d (enforce)"}
    files["proc/sys/user/max_user_namespaces"] = "0"
    machine = make_machine(files, (NAMESPACE, "uid range"), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    profile = "securityContext: {seccompProfile: {type: Localhost, localhostProfile: rstar-sandbox.json}}"
    assert check_named("seccomp_filter", machine).command == profile
    assert check_named("apparmor", machine).command == "securityContext: {appArmorProfile: {type: Unconfined}}"
    assert check_named("uids", machine).command == "securityContext: {runAsUser: 0, runAsNonRoot: false}"
    on_host = check_named("max_user_namespaces", machine).command
    assert on_host.startswith("sudo sysctl -w user.max_user_namespaces=")
    assert on_host.endswith("  # on the container's host")


def test_missing_namespaces_without_a_known_cause_have_a_command_of_their_own(make_machine: MakeMachine) -> None:
    check = check_named("namespaces", make_machine({}, (NAMESPACE, "pivot_root")))
    assert (check.ok, check.found) == (False, "no user namespace: granted; 1 more layers are missing")
    assert (check.missing, check.command) == ("level namespaces", "sudo rstar-sandbox serve")


def test_a_kernel_without_user_namespaces_has_no_command(make_machine: MakeMachine) -> None:
    machine = make_machine({}, (NAMESPACE,))
    refused = ProbedLayer(NAMESPACE, False, "the kernel refused ([Errno 22] unshare: Invalid argument)", "")
    check = check_named("namespaces", replace(machine, layers={**machine.layers, NAMESPACE: refused}))
    assert (check.missing, check.command) == ("level namespaces: a kernel with CONFIG_USER_NS", "")


def test_at_level_landlock_the_uids_of_root_count(make_machine: MakeMachine) -> None:
    machine = make_machine({}, (NAMESPACE, "uid range"))
    assert check_named("uids", machine).command == "sudo rstar-sandbox serve"
    landlock = ProbedLayer("Landlock", True, "ABI 7: files; a uid for each slot", "")
    assert check_named("uids", replace(machine, layers={**machine.layers, "Landlock": landlock})).ok


def test_a_chroot_is_told_by_the_missing_root_mount(make_machine: MakeMachine) -> None:
    machine = make_machine({"proc/self/mountinfo": MOUNTINFO}, (NAMESPACE,))
    check = check_named("chroot", machine)
    assert (check.ok, check.level) == (False, "namespaces")
    assert check.command.startswith("sudo systemd-nspawn")
    assert check_named("chroot", make_machine({"proc/self/mountinfo": MOUNTINFO})).ok, "namespaces are granted"


def test_a_chroot_into_a_mount_is_told_by_process_1(tmp_path: Path, make_machine: MakeMachine) -> None:
    make_machine()
    for process, root in (("self", tmp_path / "sub"), ("1", tmp_path)):
        (tmp_path / "proc" / process / "ns").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / process / "ns/mnt").symlink_to("mnt:[1]")
        root.mkdir(exist_ok=True)
        (tmp_path / "proc" / process / "root").symlink_to(root)
    assert is_chroot(str(tmp_path))
    (tmp_path / "proc/1/ns/mnt").unlink()
    (tmp_path / "proc/1/ns/mnt").symlink_to("mnt:[2]")
    assert not is_chroot(str(tmp_path)), "process 1 is in another mount namespace"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for chroot(2)")
def test_a_real_chroot_is_found(tmp_path: Path) -> None:
    code = f"""
import os
from sandbox.commands.machine_checks import is_chroot
from sandbox.jail import kernel
assert not is_chroot()
kernel.unshare(kernel.CLONE_NEWNS)
kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
os.mkdir({str(tmp_path / "proc")!r})
kernel.mount("/proc", {str(tmp_path / "proc")!r}, flags=kernel.MS_BIND | kernel.MS_REC)
os.chroot({str(tmp_path)!r})
assert is_chroot()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kernel_without_filters_lacks_what_all_levels_need(make_machine: MakeMachine) -> None:
    check = check_named("seccomp_filter", make_machine({}, ("seccomp",)))
    assert (check.ok, check.level) == (False, "landlock")
    assert "CONFIG_SECCOMP_FILTER" in check.missing


def refuse(results: Mapping[str, int]) -> bytes:
    """Return a filter that gives these results of system calls, and allows all others."""
    program = [bpf.Instruction(bpf.LOAD, 0)]
    for name, result in results.items():
        program.append(bpf.Instruction(bpf.IF_EQUAL, NUMBERS[os.uname().machine][name], no=f"after {name}"))
        program.append(bpf.Instruction(bpf.RETURN, result))
        program.append(bpf.Instruction(bpf.LOAD, 0, label=f"after {name}"))
    return bpf.assemble([*program, bpf.Instruction(bpf.RETURN, ALLOW)])


@pytest.mark.parametrize(
    ("results", "profile"),
    [
        ({"clone3": ENOSYS, "ptrace": EPERM}, (SECCOMP_PROFILE, False)),
        ({"clone3": ENOSYS, "unshare": EPERM}, ("the default profile of a container engine", True)),
        ({"unshare": ENOSYS}, ("a filter that is none of the known profiles", True)),
        ({"unshare": KILL_PROCESS}, ("a filter that is none of the known profiles", True)),
        ({"keyctl": EPERM}, ("a filter that is none of the known profiles", False)),
    ],
)
def test_a_profile_is_told_by_the_system_calls_that_it_refuses(
    results: dict[str, int], profile: tuple[str, bool]
) -> None:
    code = f"""
from sandbox.commands.machine_checks import under_profile
from sandbox.jail import kernel
kernel.set_no_new_privs()
kernel.load_seccomp({refuse(results)!r})
print(repr(under_profile()))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{profile!r}\n"


def test_landlock_that_is_off_at_boot_has_the_commands_that_turn_it_on(make_machine: MakeMachine) -> None:
    lsm = {"sys/kernel/security/lsm": "lockdown,yama\n"}
    check = check_named("landlock", make_machine(lsm, ("Landlock", NAMESPACE)))
    assert (check.ok, check.level) == (False, "landlock")
    assert "lsm=landlock,lockdown,yama" in check.command
    assert check.command.endswith("&& sudo update-grub && sudo reboot")


def test_landlock_is_not_missing_where_the_stronger_level_holds(make_machine: MakeMachine) -> None:
    check = check_named("landlock", make_machine({}, ("Landlock",)))
    assert (check.ok, check.command) == (True, "")


CGROUP_CASES = {
    "nothing is mounted": ("", "", "none are mounted", "sudo mount -t cgroup2 none /sys/fs/cgroup"),
    "version 2, not delegated": (
        "5 1 0:9 / /cg rw - cgroup2 c rw\n",
        "0::/user\n",
        "version 2, not delegated to the server",
        "systemd-run --user --scope -p Delegate=yes rstar-sandbox serve",
    ),
    "version 1, not delegated": (
        "5 1 0:9 / /m rw - cgroup c rw,memory\n6 1 0:8 / /p rw - cgroup c rw,pids\n",
        "2:memory:/a\n1:pids:/b\n",
        "version 1, not delegated to this user",
        "sudo chown me {root}/m/a {root}/p/b",
    ),
}


@pytest.mark.parametrize("case", CGROUP_CASES)
def test_missing_cgroups_have_the_command_for_their_kind(case: str, tmp_path: Path, make_machine: MakeMachine) -> None:
    mounts, own, found, command = CGROUP_CASES[case]
    for directory in ("cg/user", "m/a", "p/b"):
        (tmp_path / directory).mkdir(parents=True)
    files = {"proc/self/mountinfo": f"21 0 8:1 / / rw - ext4 disk rw\n{mounts}", "proc/self/cgroup": own}
    check = check_named("cgroups", make_machine(files, ("cgroups",)))
    assert (check.ok, check.found, check.level) == (False, found, None)
    assert check.command == command.format(root=tmp_path)


CGROUP_CHECK = """
import os, sys
for path in sys.argv[1:]:
    with open(f"{path}/cgroup.procs", "w") as file:
        file.write("0")
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
from sandbox.commands.machine_checks import Machine, Needs, check_machine
from sandbox.jail import probe
layers = {layer.name: layer for layer in probe()}
(check,) = (check for check in check_machine(Machine(layers, Needs(1, 1), "nobody")) if check.name == "cgroups")
print(check.ok, check.command)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make cgroups and become another user")
def test_the_command_for_cgroups_of_version_1_gives_them_to_the_user() -> None:
    own = {name: mount_point for name, mount_point, _ in own_cgroups()}
    if not {"memory", "pids"} <= own.keys():
        pytest.skip("needs cgroup version 1")
    names = [name for name in ("memory", "pids", "cpuacct") if name in own]
    with ExitStack() as stack:
        python = jails.python_for_all_users(stack.enter_context(jails.dir_for_all_users()))
        directories = [own[name] / f"rstar-test-{os.getpid()}" for name in names]
        for directory in directories:
            directory.mkdir()
            stack.callback(directory.rmdir)

        def check() -> str:
            command = [python, "-c", CGROUP_CHECK, *map(str, directories)]
            return subprocess.run(command, cwd="/", check=True, capture_output=True, text=True).stdout.strip()

        is_ok, _, command = check().partition(" ")
        assert (is_ok, command) == ("False", f"sudo chown nobody {' '.join(map(str, directories))}")
        subprocess.run(command.removeprefix("sudo ").split(), check=True)
        assert check() == "True"


def test_the_user_of_uids_gets_the_command_for_what_is_missing(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_machine({}, ("uid range",))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert check_named("uids", machine).command == "sudo apt-get install uidmap"
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr("sandbox.jail.userns.subordinate_ids", lambda: (0, 0))
    ids = "100000-165535"
    assert check_named("uids", machine).command == f"sudo usermod --add-subuids {ids} --add-subgids {ids} me"
    monkeypatch.setattr("sandbox.jail.userns.subordinate_ids", lambda: (100_000, 165_536))
    assert check_named("uids", machine).command == "sudo rstar-sandbox serve"
    machine = make_machine({"proc/self/status": "NoNewPrivs:\t1\n"}, ("uid range",))
    assert check_named("uids", machine).command == "NoNewPrivileges=no in docker/rstar-sandbox.service"


def test_a_limit_of_this_process_on_files_or_processes_has_the_command_that_raises_it(
    make_machine: MakeMachine,
) -> None:
    machine = replace(make_machine(), fd_limit=256, process_limit=200)
    check = check_named("nofile", machine)
    assert (check.found, check.command) == ("256 open files", f"sudo prlimit --pid $$ --nofile={FDS}:{FDS}")
    check, needed = check_named("nproc", machine), CALLS * DEFAULT_LIMITS.processes
    assert (check.found, check.command) == ("200 processes", f"sudo prlimit --pid $$ --nproc={needed}:{needed}")
    unlimited = replace(machine, fd_limit=resource.RLIM_INFINITY, process_limit=resource.RLIM_INFINITY)
    assert check_named("nofile", unlimited).ok
    assert check_named("nproc", unlimited).ok


def test_the_limits_of_this_process_are_read(make_machine: MakeMachine) -> None:
    code = """
from sandbox.commands.machine_checks import Machine, Needs
machine = Machine({}, Needs(1, 1), "me")
print(machine.fd_limit, machine.process_limit)
"""
    run = ["prlimit", "--nofile=256:256", "--nproc=300:300", sys.executable, "-c", code]
    assert subprocess.run(run, check=True, capture_output=True, text=True).stdout == "256 300\n"


def test_the_lowest_limit_of_the_cgroups_on_processes_counts(make_machine: MakeMachine) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "cg/a/b/pids.max": "max\n",
        "cg/a/pids.max": "50\n",
        "cg/pids.max": "90\n",
    }
    files["proc/self/mountinfo"] = "1 0 8:1 / / rw - ext4 d rw\n5 1 0:9 / /cg rw - cgroup2 c rw\n"
    check = check_named("nproc", make_machine(files))
    assert (check.ok, check.found) == (False, "pids.max of the server's cgroup: 50")
    assert check.command == "sudo systemctl set-property rstar-sandbox.service TasksMax=infinity"


def test_hidepid_is_found(make_machine: MakeMachine) -> None:
    assert check_named("hidepid", make_machine()).found == "no"
    mounts = MOUNTINFO + "23 22 0:21 / /proc rw - proc proc rw,hidepid=invisible\n"
    assert "hidepid=invisible" in check_named("hidepid", make_machine({"proc/self/mountinfo": mounts})).found


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        (("uid range", "process limits", "cgroups"), "process_limits"),
        (("schedstat",), "schedstat"),
        (("priorities",), "priorities"),
        (("executable memory",), "executable_memory"),
    ],
)
def test_a_missing_layer_is_a_missing_row_that_no_level_needs(
    layers: tuple[str, ...], name: str, make_machine: MakeMachine
) -> None:
    assert check_named(name, make_machine()).ok
    check = check_named(name, make_machine({}, layers))
    assert (check.ok, check.level) == (False, None)
    assert check.missing


def test_at_level_landlock_the_processes_of_a_call_are_always_limited(make_machine: MakeMachine) -> None:
    machine = make_machine({}, (NAMESPACE, "uid range", "process limits", "cgroups"))
    check = check_named("process_limits", machine)
    assert (check.ok, check.found) == (True, "for each call, at level landlock")


def test_nsjail_is_missing_only_if_it_was_asked_for(make_machine: MakeMachine) -> None:
    assert check_named("nsjail", make_machine({}, (NSJAIL,))).ok
    check = check_named("nsjail", make_machine({}, (NSJAIL,), {"RSTAR_NSJAIL": "/no/nsjail"}))
    assert (check.ok, check.command) == (False, "unset RSTAR_NSJAIL")
