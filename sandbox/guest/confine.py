"""Confinement: the steps between the fork and the first line of a call's code.

A zygote forks one process per call. The executor sends the zygote a confinement plan. `Confinement` turns the plan into
one ordered list of system calls for each call. The zygote's `ForkBatch` executes this list: in machine code, and at
level `none` in Python. At level `landlock`, `finish` takes the last steps, because they need more than system calls.

    step                                          levels                      why here
    1  dup3 of output, report, input              all                         later failures are written to the report
    2  write to cgroup.procs                      all, unless clone3 is used  pages copied from here on are charged
    3  landlock_restrict_self                     landlock                    needs the slot's ruleset descriptor
    4  open /dev/null as input                    all, without input          open file flags are shared across forks
    5  sigprocmask, setpgid                       all; setpgid not landlock   no signals to the zygote's group
    6  setns into the slot's network namespace,   namespaces, nsjail          need privilege
       or unshare and loopback; unshare, mount
       of the scratch directory
    7  setgroups, setresgid, setresuid or capset  all but none                drops the privilege
    8  chdir, fchdir                              all but landlock            only the owner may enter the directory
    9  setrlimit                                  all                         RLIMIT_NPROC counts the new user
    10 prctl(PR_SET_PDEATHSIG)                    all                         setresuid clears it
    11 setsid                                     landlock                    no signals to the zygote's session
    12 prctl(PR_SET_NO_NEW_PRIVS)                 all but none                required by the filter
    13 seccomp                                    namespaces, nsjail          forbids most of the steps above
    14 finish: chdir, parent check, seccomp       landlock                    the filter contains the process id

Invariant: if a step fails, the call's code does not run.
"""

from __future__ import annotations

import array
import base64
import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
from time import CLOCK_MONOTONIC

import landlock_slots
import system_calls
from fork_batch import step
from system_calls import check

CLONE_PARENT = 0x8000
CLONE_CHILD_SETTID = 0x01000000
_CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_CLONE_INTO_CGROUP = 0x200000000
_AT_FDCWD = -100
_CLONE_ARGS_BYTES = 88
"""Size of struct clone_args (clone3(2)). All its fields have 8 bytes."""
_CLONE_ARG_CHILD_TID = 2
"""Index of a field of struct clone_args, as in the next two constants."""
_CLONE_ARG_EXIT_SIGNAL = 4
_CLONE_ARG_CGROUP = 10
_MOUNT_FLAGS = 0x2 | 0x4 | 0x8  # MS_NOSUID, MS_NODEV, MS_NOEXEC
_SIOCGSKNS, _SIOCSIFFLAGS = 0x894C, 0x8914
_LOOPBACK_UP = struct.pack("16sH22x", b"lo", 0x1 | 0x8)  # struct ifreq with IFF_UP and IFF_LOOPBACK (netdevice(7))
_LOOPBACK_FD = 9
"""A descriptor that is open in the zygote and that calls do not use. A call with a loopback network closes it. All
lower ones are open, so the socket that brings the network up then gets this number."""
_CAP_HEADER = struct.pack("<Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
# Offsets of the other parts of a job's data, in words of 8 bytes. It begins with the time of the fork, of 2 words.
_RLIMIT_WORD = 2  # four struct rlimit, of 2 words each
_CLONE_WORD = 10  # a struct clone_args, of 11 words
_OPTIONS_WORD = 21  # the options of the mount
_KEPT_NETWORKS = 64
"""Number of slots that keep their network namespace after a call. Others do not, because a namespace takes a descriptor
and 200 KiB of kernel memory."""
RLIMITS = {
    "file_bytes": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
    "memory_bytes": resource.RLIMIT_AS,
    "processes": resource.RLIMIT_NPROC,
}
"""Limits of a call, by their key in the frame of the call. `processes` is set only if the plan has
`limits_processes`."""


class Confinement:
    """A confinement plan as system calls: all memory to which their arguments point is prepared. Child zygotes inherit
    this object."""

    def __init__(self, plan: dict) -> None:
        self.scratch_mount: str | None = plan["scratch_mount"]
        """Directory on which each call mounts its own tmpfs, its working directory. None at the levels `landlock` and
        `none`."""
        self.landlock = landlock_slots.LandlockSlots(plan["landlock"]) if plan["landlock"] else None
        self.address_space_bytes = 0
        """Address space of the zygote, to which a call's own limit is added. The executor sends it."""
        self.cgroup_procs_fds: dict[int, list[int]] = {}
        """Descriptors of `cgroup.procs` files, by slot. A process enters a cgroup by writing to its file."""
        self.cgroup_dir_fds: dict[int, int] = {}
        """Descriptors of version 2 cgroups, by slot. clone3(2) can fork into such a cgroup (Linux 5.7)."""
        self.has_slot_networks: bool = plan["slot_networks"]
        self.network_fds: dict[int, int] = {}
        """Descriptors of the network namespaces, by slot. The calls of a slot use its namespace one after another,
        because a new namespace takes 0.9 ms, and to enter an existing one takes 1.3 us. The calls share nothing but the
        names of AF_UNIX sockets, and these names end with the processes of a call."""
        self._inodes: int = plan["max_files"]
        self._uid_base: int | None = plan["uid_base"]
        self._rlimit_names = [name for name in RLIMITS if name != "processes" or plan["limits_processes"]]
        self._buffers: list = []  # keeps the memory alive to which the steps point
        if plan["clear_bounding_set"]:
            _drop_bounding_set()
        has_namespaces: bool = plan["pid_namespace"]
        self.tid_address = _tid_address() if has_namespaces or self.landlock is not None else 0
        self._clone_flags = CLONE_NEWPID if has_namespaces else 0
        self._clone_flags |= CLONE_CHILD_SETTID if self.tid_address else 0
        self.may_have_template = has_namespaces or bool(self.tid_address)
        """Whether machine code may fork the calls. Without a PID namespace, the C library must learn the call's id."""
        self._exit_signal = int(signal.SIGCHLD)
        self._filter = _Filter.decode(plan["call_filter"], plan["own_pid_offsets"])
        self._loopback_filter = _Filter.decode(plan["loopback_filter"], plan["own_pid_offsets"])
        self._session_filter = _Filter.decode(plan["session_filter"], [])
        self._prepare_steps(plan)
        self.prepare()

    def prepare(self) -> None:
        """Prepare this process. Called once in each zygote."""
        if self.landlock is not None:
            self.landlock.become_subreaper()

    def fork_from_template(self) -> None:
        """Let a template fork the calls (`fork_batch.py`). The calls are children of its parent, the zygote. Then
        clone3(2) accepts no signal: at its end a call sends the signal that the template would send."""
        self._clone_flags |= CLONE_PARENT
        self._exit_signal = 0

    def close_cgroup_fds(self) -> None:
        """Close the descriptors of all cgroups."""
        procs = [fd for fds in self.cgroup_procs_fds.values() for fd in fds]
        for fd in (*self.cgroup_dir_fds.values(), *procs):
            os.close(fd)
        self.cgroup_dir_fds.clear()
        self.cgroup_procs_fds.clear()

    def prepare_slot(self, slot: int) -> None:
        """Create the network namespace of a slot, if it has none. Raises `OSError`."""
        if self.has_slot_networks and slot not in self.network_fds:
            check(system_calls.unshare(_CLONE_NEWNET), "unshare(NEWNET)")
            with socket.socket(socket.AF_UNIX) as sock:
                self.network_fds[slot] = fcntl.ioctl(sock, _SIOCGSKNS)

    def release_slot(self, slot: int) -> None:
        """Close the network namespace of a slot after its call. The first `_KEPT_NETWORKS` slots keep it. The executor
        prefers slots that it has used before, so the other slots have calls only while many calls run."""
        if slot >= _KEPT_NETWORKS and slot in self.network_fds:
            os.close(self.network_fds.pop(slot))

    def fork_step(self, data: int, slot: int = -1) -> tuple[int, ...]:
        """Return the step that forks, into a PID namespace if the plan has namespaces.

        If the zygote has the directory of the slot's cgroup, clone3(2) forks the call into the cgroup. Otherwise
        clone(2) is used, because the seccomp profile of common container runtimes refuses clone3. Neither of them runs
        Python's after-fork handlers, which write to 170 pages to repair the state of other threads: a zygote has only
        one thread.
        """
        if slot in self.cgroup_dir_fds:
            return step(system_calls.CLONE3, data + 8 * _CLONE_WORD, _CLONE_ARGS_BYTES)
        # The address for the child's thread id is the fourth argument on x86_64 and the fifth on aarch64. The other one
        # is the thread area, which the kernel ignores without CLONE_SETTLS.
        tid = self.tid_address
        return step(system_calls.CLONE, self._clone_flags | self._exit_signal, 0, 0, tid, tid)

    def syscall_steps(
        self, slot: int, call: dict, fds: list[tuple[int, int]], directory_fd: int, time: int, data: int
    ) -> tuple[list[int], list[int]]:
        """Return the steps of a job and its data, both in words of 8 bytes. `time` and `data` are the addresses at
        which the time of the fork and the data will lie.

        The first step reads the clock, the second step forks, and the other steps confine the child in the order of the
        table at the top. Each pair in `fds` is a descriptor in the zygote and the descriptor that it becomes in the
        call. `directory_fd` is the descriptor of the call's working directory at level `none`, and -1 at other levels.
        """
        uid = self._uid_base + slot if self._uid_base is not None else None
        steps = [
            *step(system_calls.CLOCK_GETTIME, CLOCK_MONOTONIC, time),
            *self.fork_step(data, slot),
        ]
        for fd, number in fds:
            steps += step(system_calls.DUP3, fd, number)
        if slot not in self.cgroup_dir_fds:
            for fd in self.cgroup_procs_fds.get(slot, ()):
                steps += step(system_calls.WRITE, fd, self._zero, 1)
        if self.landlock is not None:
            steps += step(system_calls.LANDLOCK_RESTRICT_SELF, *self.landlock.ruleset(slot))
        if not call["blobs"][1]:
            steps += self._empty_input
        steps += self._signals
        has_loopback = call.get("network") == "loopback" and self._loopback_filter is not None
        steps += self._enter_loopback if has_loopback else self._enter_network(slot)
        steps += self._unshare
        if self.scratch_mount is not None:
            steps += step(system_calls.MOUNT, *self._mount, data + 8 * _OPTIONS_WORD)
        if "session" in call:  # the session's first state takes the other steps (`state_steps`)
            steps += self._die_with_parent
        else:
            filter_steps = self._load_loopback_filter if has_loopback else self._load_filter
            steps += self._unprivileged_steps(uid, directory_fd, data, filter_steps)
        return steps, self._data(slot, call, uid)

    def state_steps(self, slot: int, call: dict) -> list[int]:
        """Return the steps of the first state of a session (`session.py`), from row 7 of the table on. Rows 1 to 6 were
        steps of its keeper, which keeps its privileges."""
        uid = self._uid_base + slot if self._uid_base is not None else None
        data = array.array("q", self._data(slot, call, uid))
        self._buffers.append(data)
        return [*self._signals, *self._unprivileged_steps(uid, -1, data.buffer_info()[0], self._load_session_filter)]

    def _unprivileged_steps(self, uid: int | None, directory_fd: int, data: int, filter_steps: tuple) -> list[int]:
        """Return the steps from row 7 of the table on."""
        steps: list[int] = []
        if uid is not None:
            steps += step(system_calls.SETGROUPS, 0, 0)
            steps += step(system_calls.SETRESGID, uid, uid, uid)
            steps += step(system_calls.SETRESUID, uid, uid, uid)  # uid > 0: this clears all capabilities
        else:
            steps += self._drop_capabilities
        steps += step(system_calls.FCHDIR, directory_fd) if directory_fd >= 0 else self._enter_scratch
        for index, name in enumerate(self._rlimit_names):
            steps += step(system_calls.SETRLIMIT, RLIMITS[name], data + 8 * (_RLIMIT_WORD + 2 * index))
        return [*steps, *self._last_steps, *filter_steps]

    def finish(self, slot: int) -> None:
        """In the child: take the last steps (row 14 of the table). Raises `OSError`."""
        if self.landlock is not None:
            self.landlock.exit_if_orphaned()
            directory = os.environ["HOME"] = os.environ["TMPDIR"] = self.landlock.home(slot)
            os.chdir(directory)
        if self._filter is not None and self._filter.needs_pid:
            self._filter.load_with_pid()

    def _prepare_steps(self, plan: dict) -> None:
        """Build the steps that are the same for each call."""
        calls = system_calls
        home = self._address((plan["scratch_mount"] or "").encode())
        self._zero = self._address(b"0")
        null_path = self._address(b"/dev/null")
        self._empty_input = step(calls.CLOSE, 0) + step(calls.OPENAT, _AT_FDCWD, null_path, os.O_RDONLY)
        signals = self._address(bytes(128))  # an empty sigset_t of the C library, larger than the kernel's
        self._signals = step(calls.SIGPROCMASK, signal.SIG_SETMASK, signals, 0, calls.SIGSET_BYTES)
        if self.landlock is None:
            self._signals += step(calls.SETPGID, 0, 0)
        self._unshare = step(calls.UNSHARE, plan["namespaces"]) if plan["namespaces"] else ()
        self._enter_loopback = (
            *step(calls.UNSHARE, _CLONE_NEWNET),
            *step(calls.CLOSE, _LOOPBACK_FD),
            *step(calls.SOCKET, socket.AF_INET, socket.SOCK_DGRAM),  # gets the lowest free descriptor
            *step(calls.IOCTL, _LOOPBACK_FD, _SIOCSIFFLAGS, self._address(_LOOPBACK_UP)),
        )
        self._mount = self._address(b"scratch"), home, self._address(b"tmpfs"), _MOUNT_FLAGS
        self._drop_capabilities: tuple[int, ...] = ()
        if plan["user_namespace"]:  # before RLIMIT_NPROC is set, which would limit all nested namespaces together
            self._drop_capabilities += step(calls.UNSHARE, _CLONE_NEWUSER)
        if plan["drop_capabilities"]:
            no_capabilities = self._address(bytes(24))  # three empty sets of 64 bits
            self._drop_capabilities += step(calls.CAPSET, self._address(_CAP_HEADER), no_capabilities)
        self._enter_scratch = step(calls.CHDIR, home) if plan["scratch_mount"] else ()
        self._die_with_parent = self._last_steps = step(calls.PRCTL, calls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.landlock is not None:
            self._last_steps += step(calls.SETSID)
        if plan["no_new_privs"]:
            self._last_steps += step(calls.PRCTL, calls.PR_SET_NO_NEW_PRIVS, 1)
        self._load_filter, self._load_loopback_filter, self._load_session_filter = (
            step(calls.SECCOMP, calls.SECCOMP_SET_MODE_FILTER, 0, each.address) if each and not each.needs_pid else ()
            for each in (self._filter, self._loopback_filter, self._session_filter)
        )

    def _enter_network(self, slot: int) -> tuple[int, ...]:
        if slot not in self.network_fds:
            return ()
        return step(system_calls.SETNS, self.network_fds[slot], _CLONE_NEWNET)

    def _data(self, slot: int, call: dict, uid: int | None) -> list[int]:
        """Return the data to which a job's steps point; see `_RLIMIT_WORD` for the layout."""
        data = [0] * _OPTIONS_WORD
        word = _RLIMIT_WORD
        for name in self._rlimit_names:  # soft and hard limit
            data[word] = data[word + 1] = call[name] + (self.address_space_bytes if name == "memory_bytes" else 0)
            word += 2
        if slot in self.cgroup_dir_fds:
            data[_CLONE_WORD] = self._clone_flags | _CLONE_INTO_CGROUP
            data[_CLONE_WORD + _CLONE_ARG_CHILD_TID] = self.tid_address
            data[_CLONE_WORD + _CLONE_ARG_EXIT_SIGNAL] = self._exit_signal
            data[_CLONE_WORD + _CLONE_ARG_CGROUP] = self.cgroup_dir_fds[slot]
        if self.scratch_mount is not None:
            data += _mount_options(call["disk_bytes"], self._inodes, uid)
        return data

    def _address(self, content: bytes) -> int:
        """Return the address of a copy of `content` that lives as long as this object."""
        self._buffers.append(ctypes.create_string_buffer(content))
        return ctypes.addressof(self._buffers[-1])


def restrict_zygote(plan: dict) -> None:
    """In the zygote: set the limits that are the same for each call, and load the zygote's part of the filter. Calls
    inherit both."""
    for number in (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK):
        resource.setrlimit(number, (0, 0))
    if plan["zygote_filter"]:
        check(system_calls.prctl(system_calls.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")
        _Filter(base64.b64decode(plan["zygote_filter"]), []).load()


def _tid_address() -> int:
    """Return the address where the C library keeps the id of this thread. With CLONE_CHILD_SETTID the kernel writes the
    child's id to it. Return 0 if the kernel does not tell the address (CONFIG_CHECKPOINT_RESTORE is off)."""
    tid = ctypes.c_void_p()
    found = system_calls.prctl(system_calls.PR_GET_TID_ADDRESS, ctypes.byref(tid), 0, 0, 0) == 0
    return int(tid.value or 0) if found else 0


def _mount_options(size_bytes: int, inodes: int, uid: int | None) -> memoryview:
    """Return the options of a scratch directory's mount as a C string, in words."""
    owner = f",uid={uid},gid={uid}" if uid is not None else ""
    text = f"size={size_bytes},nr_inodes={inodes},mode=0700{owner}".encode()
    return memoryview(text + bytes(8 - len(text) % 8)).cast("q")


def _drop_bounding_set() -> None:
    """Empty the capability bounding set. So no program that a call executes gains a capability, not even a set-uid
    program of root."""
    capability = 0
    while system_calls.prctl(system_calls.PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if system_calls.errno_location()[0] != errno.EINVAL:  # EINVAL: beyond the last capability of this kernel
        check(-1, f"prctl(CAPBSET_DROP, {capability})")


class _Filter:
    """A seccomp program in memory, ready to load."""

    @classmethod
    def decode(cls, program: str | None, own_pid_offsets: list) -> _Filter | None:
        """Return the filter for a program in base64; None for None."""
        return None if program is None else cls(base64.b64decode(program), own_pid_offsets)

    def __init__(self, program: bytes, own_pid_offsets: list) -> None:
        self._program = ctypes.create_string_buffer(program, len(program))
        self._own_pid_offsets = own_pid_offsets
        program_address = ctypes.addressof(self._program)
        # struct sock_fprog: number of instructions, of 8 bytes each, and their address
        self._header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, program_address))
        self.address = ctypes.addressof(self._header)
        """Address of the struct sock_fprog."""
        self.needs_pid = bool(own_pid_offsets)
        """Whether the program compares arguments with the id of the process that loads it."""

    def load_with_pid(self) -> None:
        """Write the id of this process into the program and load it."""
        for offset in self._own_pid_offsets:
            struct.pack_into("=I", self._program, offset, os.getpid())
        self.load()

    def load(self) -> None:
        """Load the program. Raises `OSError`."""
        operation, flags = system_calls.SECCOMP_SET_MODE_FILTER, 0
        result = system_calls.syscall(system_calls.SECCOMP, operation, flags, self._header)
        check(result, "seccomp(SET_MODE_FILTER)")
