"""Forks calls from the template, a copy of the zygote that never runs Python.

This is an optimisation. A fork copies the page table of its parent, which takes 70 ns for each 4 KiB page that the
parent has written. For a huge page (2 MiB) it takes as long as for one small page. But the first write to a huge page
that a child shares splits it into 512 small pages. A zygote that serves calls writes all over its heap. So the zygote
forks the template once, before its first call. The template waits in machine code and forks the calls. It writes only
to a stack, the private copy of a job and a record, so its heap stays in huge pages.
docs/architecture.md has the CPU time that this saves.

A job is a copy of the call's record (its header and body) and a list of system calls (steps), which
`Confinement.syscall_steps` in `confine.py` chooses. `fork_batch_x86_64.S` and `fork_batch_aarch64.S` are the sources of
the machine code; the first documents the layout of a job. The zygote writes the jobs to memory that only the zygote and
the template have. The calls are children of the zygote, not of the template (CLONE_PARENT). The template has the
descriptors of the zygote (CLONE_FILES).

Where memory cannot be made executable (PR_SET_MDWE, systemd's MemoryDenyWriteExecute, SELinux), and at level `none`,
the zygote itself executes the same jobs in Python, more slowly. All levels but `none` require x86_64 or aarch64.
"""

from __future__ import annotations

import array
import ctypes
import marshal
import mmap
import os
import select
import signal
import socket
from collections.abc import Callable

import system_calls
import wiped_memory

MAX_JOBS = 32
"""Maximum number of jobs in one run."""
STEP_WORDS = 7
"""Words of a step: the number of the system call and six arguments."""
DATA_OFFSET = 260
"""Number of words of a job before its data. The steps may point to the data."""
RECORD_FD = 5
"""Descriptor of a call from which it reads its record, if the record is larger than `wiped_memory.USUAL_BYTES`."""
_JOB_WORDS = 320
"""Size of a job. Its data has at most 60 words."""
_HEADER_WORDS = 6
"""Number of words of a job before its steps: the result, the four words of the record's copy, and the size of the
header in the record. If a step fails in a child, the address of this step replaces the first word of the copy."""
_FIRST_JOB = 40
"""Number of words before the jobs. `fork_batch_x86_64.S` documents them."""
_SETUP_WORD, _READ_WORD, _COUNT_WORD, _WRITE_WORD, _COPY_WORD = 7, 22, 29, 30, 37
_COUNT_BYTES = 8
_END = -1
_CLONE_FILES = 0x400
_MACHINE_CODE = {  # printed by `make machine-code MACHINE=...`
    "x86_64": (
        "53554154415541564989fc4d8bb42428010000498d6c24c8e8be0000004885c0"
        "0f85ac00000048837d38ff7416e8a90000004885c079efbf01000000b8e70000"
        "000f05498d6c2478e88e0000004883f80875e44d8bac24e8000000498d9c2440"
        "0100004889de4c89f7b940010000f348a5488b7308488b7b10488b4b18f3a448"
        "8b4b2031c0f3aa498d6ef8e84b000000e8460000004885c0741e4889034881c3"
        "000a000049ffcd75ba498dac24b8000000e825000000eb8b48837d38ff7411e8"
        "170000004885c079ef49890649896e0831c0415e415d415c5d5bc34883c53848"
        "8b4500488b7d08488b7510488b55184c8b55204c8b45284c8b4d300f05c3"
    ),
    "aarch64": (
        "fd7bbca9f35301a9f55b02a9f71b00f9f50300aab79640f9b4e200d132000094"
        "800500b5891e40f93f0500b1c00000542d00009480ffffb6200080d2c80b80d2"
        "010000d4b4e20191270000941f2000f141ffff54b67640f9b3020591e90313aa"
        "ea0317aa0b4081d22600009469aa40a96bb241a9230000948c0000b45f150038"
        "8c0500f1c1ffff54f42200d11600009415000094000100b4600200f973022891"
        "d60600f1c1fdff54b4e202910e000094e5ffff17891e40f93f0500b180000054"
        "0900009480ffffb6e05200a9000080d2f71b40f9f55b42a9f35341a9fd7bc4a8"
        "c0035fd694e20091880240f9808640a9828e41a9849642a9010000d4c0035fd6"
        "6b2100f1830000542d8540f84d8500f8fcffff176b2100b1a00000542d154038"
        "4d1500386b0500f1a1ffff54c0035fd6"
    ),
}


class ForkBatch:
    """Jobs of calls in memory. `add` writes a job, and `run` forks all jobs. If there is a template, it forks them."""

    def __init__(self, *, use_machine_code: bool = True) -> None:
        code = bytes.fromhex(_MACHINE_CODE.get(os.uname().machine, ""))
        self._code = wiped_memory.private_pages(max(len(code), 1))
        self._code_address = wiped_memory.address(self._code)
        self.has_machine_code = use_machine_code and bool(code) and _make_executable(self._code, code)
        # Without a template, the zygote forks the calls. They inherit private pages, and the buffer for frames is wiped
        jobs_bytes = 8 * (_FIRST_JOB + MAX_JOBS * _JOB_WORDS)
        kind, frame_bytes = mmap.MAP_PRIVATE, 0
        if self.has_machine_code:
            kind, frame_bytes = mmap.MAP_SHARED, wiped_memory.USUAL_BYTES
        self._memory = mmap.mmap(-1, jobs_bytes + frame_bytes, kind | mmap.MAP_ANONYMOUS)
        self.frame_buffer = memoryview(self._memory)[-frame_bytes:] if frame_bytes else wiped_memory.wiped_buffer()
        """Buffer for the frames that the zygote receives. The template can read it, and no call has it."""
        self.words = memoryview(self._memory)[:jobs_bytes].cast("q")
        self._address = wiped_memory.address(self._memory)
        self.time_addresses = [self._address + 8 * (_job_word(number) + DATA_OFFSET) for number in range(MAX_JOBS)]
        """Address of the first two words of the data of each job, in which the zygote reads the time of the fork."""
        self._copy = wiped_memory.private_pages(8 * _JOB_WORDS)
        self.copy = memoryview(self._copy)[: 8 * _JOB_WORDS].cast("q")
        """In a call: its job."""
        self._copy_address = wiped_memory.address(self._copy)
        self.data_address = self._copy_address + 8 * DATA_OFFSET
        """Address at which a call has the data of its job."""
        self._record = wiped_memory.CallRecord()
        # This function is a public attribute because the warm-up (`fork_warmup.py`) replaces it for a while.
        self.invoke: Callable[..., int] = system_calls.invoke
        """Function that makes a system call if there is no template."""
        self._template_fds: tuple[int, ...] = ()  # our end of its socket, the template's end, and its pidfd
        self._poll = select.poll()

    def start_template(self) -> bool:
        """Fork the template. Return False in the zygote, and True in each call that the template will fork. Raises
        `OSError`."""
        ours, theirs = (end.detach() for end in socket.socketpair())
        words, size = self.words, len(self._memory)
        count_address = self._address + 8 * _COUNT_WORD
        for start, *steps in (
            (0, step(system_calls.CLONE, _CLONE_FILES | signal.SIGCHLD)),
            (
                _SETUP_WORD,
                step(system_calls.PRCTL, system_calls.PR_SET_PDEATHSIG, signal.SIGKILL),
                step(system_calls.MADVISE, self._address, size, mmap.MADV_DONTFORK),
                (_END,),
            ),
            (_READ_WORD, step(system_calls.READ, theirs, count_address, _COUNT_BYTES)),
            (_WRITE_WORD, step(system_calls.WRITE, theirs, count_address, _COUNT_BYTES)),
            (_COPY_WORD, (self._copy_address,)),
        ):
            for part in steps:
                words[start : start + len(part)] = array.array("q", part)
                start += len(part)
        # CFUNCTYPE would release the GIL, which writes to memory; PYFUNCTYPE keeps it.
        start_code = ctypes.PYFUNCTYPE(ctypes.c_long, ctypes.c_size_t)(self._code_address)
        pid = start_code(self._address)
        if pid == 0:
            return True
        if pid < 0:
            raise OSError(-pid, f"fork of the template: {os.strerror(-pid)}")
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._template_fds = ours, theirs, os.pidfd_open(pid)
        self._poll.register(ours, select.POLLIN)
        self._poll.register(self._template_fds[-1], select.POLLIN)
        return False

    def close(self) -> None:
        """In a child zygote, which gets a template of its own: close the descriptors."""
        for fd in self._template_fds:
            os.close(fd)

    def add(self, number: int, record: memoryview, header_size: int, steps: list[int], data: list[int]) -> None:
        """Write a job. The first step must read the clock into `time_addresses[number]`, and the second step must fork.
        `record` is empty if the call reads its record from `RECORD_FD`."""
        start = _job_word(number)
        job = array.array("q", (0, *self._record.prepare_copy(record), header_size, *steps, _END))
        assert len(job) <= DATA_OFFSET and len(data) <= _JOB_WORDS - DATA_OFFSET
        self.words[start : start + len(job)] = job
        self.words[start + DATA_OFFSET : start + DATA_OFFSET + len(data)] = array.array("q", data)

    def run(self, count: int) -> bool:
        """Fork the first `count` jobs. Return whether this process is a child, which it is only without a template.
        Raises `ChildProcessError` if the template has ended."""
        if not self._template_fds:
            return self._run_in_python(count)
        ours = self._template_fds[0]
        os.write(ours, count.to_bytes(_COUNT_BYTES, "little"))
        if (ours, select.POLLIN) not in self._poll.poll():
            raise ChildProcessError("the template has ended")
        os.read(ours, _COUNT_BYTES)
        return False

    def _run_in_python(self, count: int) -> bool:
        """Do the same as the machine code (`fork_batch_*.S`). Return whether this process is a child."""
        words, copy = self.words, self.copy
        for number in range(count):
            job = _job_word(number)
            copy[:] = words[job : job + _JOB_WORDS]
            source, target, size, zeros = copy[1:5]
            ctypes.memmove(target, source, size)
            ctypes.memset(target + size, 0, zeros)
            first = _HEADER_WORDS  # word of the next step
            self.invoke(*copy[first : first + STEP_WORDS])
            first += STEP_WORDS
            words[job] = result = self.invoke(*copy[first : first + STEP_WORDS])
            if result != 0:
                continue
            first += STEP_WORDS
            while copy[first] != _END:
                result = self.invoke(*copy[first : first + STEP_WORDS])
                if result < 0:  # for `raise_if_step_failed`
                    copy[0], copy[1] = result, self._copy_address + 8 * first
                    break
                first += STEP_WORDS
            return True
        return False

    def raise_if_step_failed(self) -> None:
        """In a child: raise `OSError` if a step of its job failed."""
        error, step_address = self.copy[:2]
        if error:
            number = self.copy[(step_address - self._copy_address) // 8]
            raise OSError(-error, f"system call {number}: {os.strerror(-error)}")

    def own_call(self) -> tuple[dict, memoryview]:
        """In a child: return the header and the body of its call."""
        size, header_size = self.copy[3], self.copy[5]
        record = self._record.read(size) if size else memoryview(_mapped_file(RECORD_FD))
        return marshal.loads(record[:header_size]), record[header_size:]

    def child_pid(self, number: int) -> int:
        """In the zygote: return the process id of a job's child, or the negative error number of its fork."""
        return int(self.words[_job_word(number)])

    def forked_at(self, number: int) -> float:
        """In the zygote: return the time of a job's fork on the clock of time.monotonic, in seconds."""
        start = _job_word(number) + DATA_OFFSET
        return self.words[start] + self.words[start + 1] / 1e9


def _make_executable(pages: mmap.mmap, code: bytes) -> bool:
    """Fill new pages with machine code. Return whether they could be made executable.

    On aarch64 the kernel makes the instruction cache agree with memory when a page becomes executable for the first
    time, so new pages need no instruction for this.
    """
    pages[: len(code)] = code
    rights = mmap.PROT_READ | mmap.PROT_EXEC
    return bool(system_calls.mprotect(wiped_memory.address(pages), len(pages), rights) == 0)


def _mapped_file(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)


def step(number: int, *arguments: int) -> tuple[int, ...]:
    """Return a step: the number of a system call and its arguments, filled up with zeros."""
    return (number, *arguments, *(0,) * (STEP_WORDS - 1 - len(arguments)))


def _job_word(number: int) -> int:
    """Return the first word of a job, counted from the start of the memory."""
    return _FIRST_JOB + number * _JOB_WORDS
