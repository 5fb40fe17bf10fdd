"""Forks several calls in a row and executes the first steps of each call, in machine code where this is possible.

This is an optimisation. After a fork, both processes share all memory, and the first write to a page copies the page.
An interpreter writes to about fifty pages from one fork to the next, so a zygote that forked in Python would copy fifty
pages for every call. The machine code writes only to a stack, a page of results and the buffer of the child's input.
docs/architecture.md has the CPU time that it saves.

A job is a copy of the call's input and a list of system calls (steps), which `Confinement.syscall_steps` in
`confine.py` chooses. `fork_batch.S` is the source of the machine code and documents the layout of a job.

Python executes the same jobs, more slowly, where memory cannot be made executable (PR_SET_MDWE, systemd's
MemoryDenyWriteExecute, SELinux), and at the isolation levels `landlock` and `none`. The machine code is for x86-64,
which all levels but `none` require.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
from collections.abc import Callable

import system_calls

MAX_JOBS = 32
"""Maximum number of jobs in one run."""
STEP_WORDS = 7
"""Words of a step: the number of the system call and six arguments."""
DATA_OFFSET = 260
"""Number of words of a job before its data. The steps may point to the data."""
_JOB_WORDS = 320
"""Size of a job. Its data has at most 60 words."""
_HEADER_WORDS = 5
"""Number of words of a job before its steps: the result, and the four words of the input copy. If a step fails in a
child, the address of this step replaces the first word of the input copy, which has been done then."""
_END = -1
_MACHINE_CODE = bytes.fromhex(  # printed by `make machine-code`
    "5355415441554989fc4c8d2cf74d39ec744e498b1c24488b7308488b7b10488b"
    "4b18f3a4488b4b2031c0f3aa488d6bf0e835000000e8300000004885c0740948"
    "89034983c408ebc548837d38ff7411e8160000004885c079ef48890348896b08"
    "4c89e0415d415c5d5bc34883c538488b4500488b7d08488b7510488b55184c8b"
    "55204c8b45284c8b4d300f05c3"
)


class ForkBatch:
    """Memory for jobs: `add` writes a job, and `run` forks all of them."""

    def __init__(self, *, use_machine_code: bool = True) -> None:
        # The pages are private: what a call writes to them must not reach the zygote or another call.
        flags, rights = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
        self._jobs = mmap.mmap(-1, 8 * MAX_JOBS * (_JOB_WORDS + 1), flags, rights)
        self._base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._jobs))  # also that of the list of jobs
        self.words = memoryview(self._jobs).cast("q")  # the addresses of the jobs, then the jobs
        self.data_addresses = [self._base_address + 8 * (_job_word(number) + DATA_OFFSET) for number in range(MAX_JOBS)]
        """Address of the data of each job."""
        for number in range(MAX_JOBS):
            self.words[number] = self._base_address + 8 * _job_word(number)
        self._own_job = 0
        # These two functions are public attributes because the warm-up (`fork_warmup.py`) replaces them for a while.
        self.invoke: Callable[..., int] = system_calls.invoke
        """Function that makes a system call for `execute_in_python`."""
        self.execute: Callable[[int, int], int] = self.execute_in_python
        """Function that executes jobs. Its arguments are the address of the list of jobs and the number of jobs. It
        returns an address in this list: in a child the address of the entry of the child's job, in the parent the
        address behind the last entry."""
        self.has_machine_code = False
        if use_machine_code:
            self._code = mmap.mmap(-1, mmap.PAGESIZE, flags, rights)
            self._code[: len(_MACHINE_CODE)] = _MACHINE_CODE
            code = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
            if system_calls.mprotect(code, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0:
                self.has_machine_code = True
                # CFUNCTYPE would release the GIL around the forks, which writes to memory; PYFUNCTYPE keeps it.
                self.execute = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)(code)

    def add(self, number: int, input_copy: tuple[int, int, int, int], steps: list[int], data: list[int]) -> None:
        """Write a job. The first step must read the clock into the data, and the second step must fork. `input_copy` is
        the result of `CallInput.prepare_copy`."""
        start = _job_word(number)
        job = array.array("q", (0, *input_copy, *steps, _END))
        assert len(job) <= DATA_OFFSET and len(data) <= _JOB_WORDS - DATA_OFFSET
        self.words[start : start + len(job)] = job
        self.words[start + DATA_OFFSET : start + DATA_OFFSET + len(data)] = array.array("q", data)

    def run(self, count: int) -> int | None:
        """Fork the first `count` jobs. Return None in the parent and the job's number in a child."""
        number = (int(self.execute(self._base_address, count)) - self._base_address) // 8
        if number == count:
            return None
        self._own_job = _job_word(number)
        return number

    def execute_in_python(self, list_address: int, count: int) -> int:
        """Do the same as the machine code (`fork_batch.S`)."""
        words = self.words
        for number in range(count):
            job = (words[number] - list_address) // 8  # index of the job's first word
            source, target, size, zeros = words[job + 1 : job + _HEADER_WORDS]
            ctypes.memmove(target, source, size)
            ctypes.memset(target + size, 0, zeros)
            step = job + _HEADER_WORDS
            self.invoke(*words[step : step + STEP_WORDS])
            step += STEP_WORDS
            words[job] = result = self.invoke(*words[step : step + STEP_WORDS])
            if result != 0:
                continue
            step += STEP_WORDS
            while words[step] != _END:
                result = self.invoke(*words[step : step + STEP_WORDS])
                if result < 0:  # for `raise_if_step_failed`
                    words[job], words[job + 1] = result, list_address + 8 * step
                    break
                step += STEP_WORDS
            return list_address + 8 * number
        return list_address + 8 * count

    def raise_if_step_failed(self) -> None:
        """In a child: raise `OSError` if a step of its job failed."""
        error, step_address = self.words[self._own_job : self._own_job + 2]
        if error:
            number = self.words[(step_address - self._base_address) // 8]
            raise OSError(-error, f"system call {number}: {os.strerror(-error)}")

    def child_pid(self, number: int) -> int:
        """In the parent: return the process id of a job's child, or the negative error number of its fork."""
        return int(self.words[_job_word(number)])

    def forked_at(self, number: int) -> float:
        """In the parent: return the time of a job's fork on the clock of time.monotonic, in seconds."""
        start = _job_word(number) + DATA_OFFSET
        return self.words[start] + self.words[start + 1] / 1e9


def _job_word(number: int) -> int:
    """Return the first word of a job, counted from the start of the memory, which begins with the list of jobs."""
    return MAX_JOBS + number * _JOB_WORDS
