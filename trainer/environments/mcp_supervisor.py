"""The parent process of an MCP server: limits what the server writes, and kills all processes that it leaves.

    trainer --stdin--------------------------> server
    trainer <--stdout-- this program <--stdout-- server
            <--stderr-- (the end of it)

It runs as `python -I -S mcp_supervisor.py PARENT_PID COMMAND...` and imports only the standard library.

Invariants:
- When this program ends, no process that the server has started remains, in whatever session the process is. Orphans
  become children of this program (PR_SET_CHILD_SUBREAPER), so it finds and kills them.
- This program ends in three cases: the server ends, it gets SIGTERM, or its parent dies.
- If a line or the whole output of the server exceeds its limit, the server is killed.
- This program writes to stderr only once, at its end: the last `MAX_STDERR_BYTES` of the server's stderr. If the server
  has written nothing there, it writes the server's exit code.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO

MAX_LINE_BYTES = 16 << 20
MAX_OUTPUT_BYTES = 256 << 20
"""Bytes that a server may write to stdout in one episode."""
MAX_STDERR_BYTES = 2000
KILL_TIMEOUT_S = 1.5
"""Seconds that the killing of all descendants may take. The SDK kills this program after 2 s."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, _exit)
    if os.getppid() != int(sys.argv[1]):  # the parent died before PR_SET_PDEATHSIG
        return 1
    command = sys.argv[2:]
    stderr, reason, exit_codes = bytearray(), "", [0]
    threads = []
    try:
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        assert server.stdout and server.stderr
        for target, args in ((_keep_tail, (server.stderr.fileno(), stderr)), (_reap, (server.pid, exit_codes))):
            threads.append(threading.Thread(target=target, args=args, daemon=True))
            threads[-1].start()
        reason = _relay(server.stdout)
    except (OSError, ValueError) as error:
        reason, exit_codes = f"{command[0]}: cannot be started ({error})", [127]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_descendants()
        for thread in threads:
            thread.join(timeout=0.2)
        os.write(2, reason.encode() or bytes(stderr) or b"exit code %d" % exit_codes[-1])
    return exit_codes[-1]


def kill_descendants() -> None:
    """Kill all descendants of this process, until none is left."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (pids := _descendants()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _descendants() -> list[int]:
    """Return the pids of the descendants of this process, without zombies."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:  # it ended
                continue
            children.setdefault(int(parent), []).append(int(name))
            if state in b"ZX":
                zombies.add(int(name))
    found = children.get(os.getpid(), [])
    for pid in found:  # the list grows during the loop
        found += children.get(pid, [])
    return [pid for pid in found if pid not in zombies]


def _relay(stdout: IO[bytes]) -> str:
    """Copy lines to stdout until the end. Return the reason if the server must end earlier."""
    total = 0
    while line := stdout.readline(MAX_LINE_BYTES + 1):
        total += len(line)
        if len(line) > MAX_LINE_BYTES:
            return f"the server wrote a line of more than {MAX_LINE_BYTES >> 20} MiB"
        if total > MAX_OUTPUT_BYTES:
            return f"the server wrote more than {MAX_OUTPUT_BYTES >> 20} MiB"
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            return "the trainer closed the connection"
    return ""


def _keep_tail(fd: int, tail: bytearray) -> None:
    while chunk := os.read(fd, 1 << 16):
        tail += chunk
        del tail[:-MAX_STDERR_BYTES]


def _reap(server_pid: int, exit_codes: list[int]) -> None:
    """Reap the server, and the orphans that it leaves. When the server ends, kill the orphans: one of them could hold
    the server's stdout open, and `_relay` would wait for it."""
    try:
        while True:
            pid, status = os.wait()
            if pid == server_pid:
                exit_codes.append(os.waitstatus_to_exitcode(status))
                kill_descendants()
    except ChildProcessError:  # there are no more
        pass


def _exit(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
