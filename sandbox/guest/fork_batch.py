"""Forks several calls in a row and confines each, in machine code.

After a fork both sides share all memory, and whoever writes to a page first copies it. An interpreter writes to some
fifty pages before it comes to fork again, so a zygote that forked in Python would copy those for every call, and every
call some more while it makes itself ready. Here nothing is written in between but a stack, a page of results and the
input, which is copied to where the child will find it. The code knows nothing of calls: a job is a list of system
calls, and `confine` says which.

    for each job: copy its input; step 1 (what time is it); step 2 (fork)
        in the child: all other steps, as far as none fails; return
    return

x86-64, as the filter is that no level with namespaces goes without. It keeps registers as the C ABI has it.

Where memory cannot be made executable (PR_SET_MDWE, systemd's MemoryDenyWriteExecute, SELinux), Python goes through the
same list of system calls, which takes longer.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
from collections.abc import Callable

MOST = 32
"""Jobs at once."""
STEP = 7
"""Words of a step: the system call's number, and six arguments."""
_HEAD, _LAST = 5, -1
_WORDS, ROOM = 320, 260
"""Of a job: its result, four words of what to copy, its steps; and from the word ROOM on, what those point at."""
# rdi: where jobs are listed, rsi: how many. Returns the place in that list of the job that we are the child of, or the
# end. A child whose step fails leaves the error in its job's first word, and where the step is in the second.
_CODE = bytes.fromhex(
    "53 55 4154 4155"  # push rbx, rbp, r12, r13
    "4989fc 4c8d2cf7"  # r12 = rdi; r13 = rdi + 8 * rsi
    "4d39ec 744e"  # next: if r12 == r13, go to out
    "498b1c24"  # rbx = [r12], the job
    "488b7308 488b7b10 488b4b18 f3a4"  # rsi, rdi, rcx = the next three words; copy rcx bytes
    "488b4b20 31c0 f3aa"  # rcx = another one; so many zeros behind them
    "488d6bf0"  # rbp = a step before the first
    "e835000000 e830000000"  # call step, twice
    "4885c0 7409"  # if rax == 0, go to child
    "488903 4983c408 ebc5"  # [rbx] = rax; r12 += 8; go to next
    "48837d38ff 7411"  # child: if the step to come is the last, go to out
    "e816000000 4885c0 79ef"  # call step; if rax >= 0, go to child
    "488903 48896b08"  # [rbx], [rbx + 8] = rax, rbp
    "4c89e0 415d 415c 5d 5b c3"  # out: rax = r12; pop r13, r12, rbp, rbx; return
    "4883c538 488b4500"  # step: rbp += 7 words; rax = [rbp]
    "488b7d08 488b7510 488b5518 4c8b5520 4c8b4528 4c8b4d30"  # rdi, rsi, rdx, r10, r8, r9
    "0f05 c3"  # syscall; return
)


_libc = ctypes.PyDLL(None, use_errno=True)  # with the interpreter lock held: a zygote and a call have one thread
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.argtypes = (ctypes.c_long,) * STEP
_libc.syscall.restype = ctypes.c_long


class Burst:
    """Room for jobs. `put` each, then `run` them."""

    def __init__(self) -> None:
        # Private above all: what a call writes here is its own affair.
        flags, rights = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
        self._code, self._jobs = (
            mmap.mmap(-1, size, flags, rights) for size in (mmap.PAGESIZE, 8 * MOST * (_WORDS + 1))
        )
        self._code[: len(_CODE)] = _CODE
        code, self._list = (ctypes.addressof(ctypes.c_char.from_buffer(pages)) for pages in (self._code, self._jobs))
        self.has_code = _libc.mprotect(code, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0
        """Whether the machine code can be executed here."""
        self.words = memoryview(self._jobs).cast("q")
        self.rooms = [self._list + 8 * (MOST + number * _WORDS + ROOM) for number in range(MOST)]
        """The address of each job's room."""
        for number, room in enumerate(self.rooms):
            self.words[number] = room - 8 * ROOM
        self._own = 0
        self._run: Callable[[int, int], int] = self._run_in_python
        if self.has_code:
            self._run = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)(code)

    def put(self, number: int, copy: tuple[int, int, int, int], steps: list[int], room: list[int]) -> None:
        """A job: what to copy (from, to, how much, zeros behind), its steps, the first one and the fork included."""
        at = MOST + number * _WORDS
        job = array.array("q", (0, *copy, *steps, _LAST))
        assert len(job) <= ROOM and len(room) <= _WORDS - ROOM
        self.words[at : at + len(job)] = job
        self.words[at + ROOM : at + ROOM + len(room)] = array.array("q", room)

    def run(self, count: int) -> int | None:
        """Fork the first so many jobs. In a child, its number."""
        number = (int(self._run(self._list, count)) - self._list) // 8
        if number == count:
            return None
        self._own = MOST + number * _WORDS
        return number

    def _run_in_python(self, listed: int, count: int) -> int:
        """What the machine code does."""
        words = self.words
        for number in range(count):
            job = (words[number] - listed) // 8
            source, target, size, zeros = words[job + 1 : job + _HEAD]
            ctypes.memmove(target, source, size)
            ctypes.memset(target + size, 0, zeros)
            at = job + _HEAD
            self._step(at)
            words[job] = result = self._step(at + STEP)
            if result != 0:
                continue
            at += 2 * STEP
            while words[at] != _LAST:
                result = self._step(at)
                if result < 0:
                    words[job], words[job + 1] = result, listed + 8 * at
                    break
                at += STEP
            return listed + 8 * number
        return listed + 8 * count

    def _step(self, at: int) -> int:
        """What the system call of the step at that word returns; below 0, an error's number."""
        result = int(_libc.syscall(*self.words[at : at + STEP]))
        return result if result != -1 else -ctypes.get_errno()

    def check(self) -> None:
        """In a child. Raises `OSError` if one of its steps was refused."""
        error, place = self.words[self._own : self._own + 2]
        if error:
            number = self.words[(place - self._list) // 8]
            raise OSError(-error, f"system call {number}: {os.strerror(-error)}")

    def result(self, number: int) -> int:
        """In the parent: the child's process id, or an error's number below 0."""
        return int(self.words[MOST + number * _WORDS])

    def time(self, number: int) -> float:
        """In the parent: when it was forked, in the seconds of time.monotonic."""
        at = MOST + number * _WORDS + ROOM
        return self.words[at] + self.words[at + 1] / 1e9
