"""A state of a session: a process that waits, forks itself for each cell, and after a cell is a state again.

`session.py` explains states. This module runs in processes in which code of the client has run, so nothing trusts what
they send.

    received from the keeper, with descriptors          sent to the keeper
    cell   + channel, record, stdin, stdout,            hello               a fork, on its own channel
             stderr, report [, returned files]          {exit_code, ...}    the code of a cell has ended
    state  + channel                                    error NUMBER        the fork failed
"""

from __future__ import annotations

import _thread
import array
import ctypes
import fcntl
import json
import marshal
import mmap
import os
import resource
import signal
import socket
import threading

import descriptors
import frames
import originals
import runner
import system_calls
from confine import CLONE_CHILD_SETTID, CLONE_PARENT
from fork_batch import STEP_WORDS, step

originals.use_builtins(globals())
os, signal, threading, _thread = map(originals.own, (os, signal, threading, _thread))
_SIGNALS = signal.valid_signals()
_FIRST_FREE_FD = 10
_MAX_FDS = 8
_recvmsg = socket.socket.recvmsg  # kept here because `runner` replaces the method
_python = ctypes.pythonapi


def fork(tid_address: int, flags: int = 0) -> int:
    """Fork this process without the interpreter's handlers. Return the pid, 0 in the child, or the negative error
    number."""
    flags |= CLONE_CHILD_SETTID | signal.SIGCHLD
    return system_calls.invoke(*step(system_calls.CLONE, flags, 0, 0, tid_address, tid_address))


def start(channel_fd: int, own_fd: int, steps: list, tid_address: int, options_json: bytes) -> None:
    """Become the first state: take the steps of the confinement, and wait for cells on the channel, which is moved to
    `own_fd`. Does not return."""
    try:
        os.dup2(channel_fd, own_fd, inheritable=False)
        os.closerange(3, own_fd)
        descriptors.close_from(own_fd + 1)
        for first in range(0, len(steps), STEP_WORDS):
            result = system_calls.invoke(*steps[first : first + STEP_WORDS])
            if result < 0:
                raise OSError(-result, f"system call {steps[first]}: {os.strerror(-result)}")
        runner.prepare_session(options_json)
        os.write(own_fd, b"hello")
        _serve(socket.socket(fileno=own_fd), tid_address)
    except BaseException as error:
        os.write(own_fd, f"error {error}".encode())
    os._exit(1)


def _serve(channel: socket.socket, tid_address: int) -> None:
    """Wait for messages, and fork for each of them. The fork returns to this function after its cell."""
    fd = channel.fileno()
    while True:
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, _SIGNALS)  # a timer of an earlier cell must not end the state
        kind, fds = _wait_for_fork(channel, tid_address)
        os.dup2(fds[0], fd, inheritable=False)
        os.write(fd, b"hello")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if kind == b"cell":
            before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            exit_code = _run(fds)
            os.write(fd, json.dumps(_report(exit_code, before_kb)).encode())
        else:
            os.close(fds[0])


def _wait_for_fork(channel: socket.socket, tid_address: int) -> tuple[bytes, list[int]]:
    """Fork for each message. Return in the forks only, the message and its descriptors."""
    while True:
        kind, fds = _receive(channel)
        if not kind:
            os._exit(0)
        has_threads = _thread._count() > 0
        if has_threads:
            _python.PyOS_BeforeFork()
        pid = fork(tid_address, CLONE_PARENT)
        if pid == 0:
            if has_threads:
                _python.PyOS_AfterFork_Child()
            return kind, fds
        if has_threads:
            _python.PyOS_AfterFork_Parent()
        for received in fds:
            os.close(received)
        if pid < 0:
            os.write(channel.fileno(), b"error %d" % -pid)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a message and its descriptors, which are moved to high numbers."""
    kind, ancillary, _flags, _address = _recvmsg(channel, 64, socket.CMSG_SPACE(4 * _MAX_FDS))
    fds = array.array("i")
    for _level, _type, data in ancillary:
        fds.frombytes(data)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    return kind, moved


def _run(fds: list[int]) -> int:
    """Run a cell with these descriptors. Return its exit code."""
    _channel, record_fd, *streams = fds
    record = memoryview(mmap.mmap(record_fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ))
    call = marshal.loads(record)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    body = record[len(record) - sum(call["blobs"]) :]
    return runner.run_cell(call, frames.split_blobs(body, call["blobs"]))


def _report(exit_code: int, before_kb: int) -> dict:
    signal.setitimer(signal.ITIMER_REAL, 0)
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    threads = [f"thread {thread.name}" for thread in threading.enumerate() if thread is not threading.main_thread()]
    return {
        "exit_code": exit_code,
        "children_cpu_ms": (children.ru_utime + children.ru_stime) * 1e3,
        "peak_kb": max(0, own.ru_maxrss - before_kb),
        "lost": threads,
        "is_alone": not _thread._count() and not _has_children(),
    }


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
