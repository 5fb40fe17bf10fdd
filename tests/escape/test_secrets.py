"""Attacks that read secrets: files and processes of the host, the server's, and other calls'."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.types import Call
from tests.escape.targets import Host, Target, canary, succeeds_without_jail
from tests.executor.calling import DEADLINE_S, OWN_PYTHON, call

READING = {
    "a world-readable file": "scan(read(HOST['file']))",
    "a file by going up": "scan(read('../' * 40 + HOST['file'][1:]))",
    "a file through a link": "os.symlink(HOST['file'], 'link'); scan(read('link'))",
    "a file by a hard link": "attempt(os.link, HOST['file'], 'hard'); scan(read('hard')); scan(read(HOST['file']))",
    "a file by executing it": """
done = attempt(lambda: subprocess.run(["/bin/cat", HOST["file"]], capture_output=True))
if not isinstance(done, OSError): scan(done.stdout)
""",
    "the names in a directory": """
got = attempt(os.listdir, HOST["directory"])
if not isinstance(got, OSError) and "secret" in got: breach(got)
""",
    "shared memory": "scan(read(HOST['shm']))\nfor name in names('/dev/shm'): scan(read('/dev/shm/' + name))",
    "the environment of the server": "scan(read(f'/proc/{HOST[\"server\"]}/environ'))",
    "the command line of the server": "scan(read(f'/proc/{HOST[\"server\"]}/cmdline'))",
    "files through the root of another process": """
for pid in (HOST["server"], os.getppid(), 1, "self"):
    for entry in ("root", "cwd/../../../../../../.."): scan(read(f"/proc/{pid}/{entry}{HOST['file']}"))
""",
    "every environment and command line in /proc": """
for pid in names("/proc"):
    if pid.isdigit() and int(pid) != os.getpid(): scan(read(f"/proc/{pid}/environ") + read(f"/proc/{pid}/cmdline"))
""",
    "the memory of the server": """
for pid in (HOST["server"], os.getppid()):
    for line in read(f"/proc/{pid}/maps").decode().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if "rw" not in line or last - first > 64 << 20: continue
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as file: file.seek(first); scan(file.read(last - first))
        except OSError: pass
""",
    "a new mount of /proc": """
libc.unshare(0x10020000)
if libc.mount(b"proc", b"/tmp", b"proc", 0, None) == 0: scan(read(f"/tmp/{HOST['server']}/environ")); libc.umount(b"/tmp")
if names("/proc/1"): breach("/proc/1")
""",
    "an inherited descriptor": """
for fd in range(1024):
    if fd < 5 or not works(os.fstat, fd): continue
    breach(fd)
""",
    "a parent directory through an inherited descriptor": """
for fd in (*range(1024), -100):
    got = attempt(os.open, "../" * 20 + HOST["file"][1:], os.O_RDONLY, 0o600) if fd == -100 else \
        raw(257, fd, ("../" * 20 + HOST["file"][1:]).encode(), 0)
    if isinstance(got, int) and got >= 0: scan(os.read(got, 4096))
""",
    "files by handles, without a path": """
libc.name_to_handle_at.restype = ctypes.c_int
handle, mount = struct.pack("Ii128x", 128, 0), ctypes.c_int()
buffer = ctypes.create_string_buffer(handle, len(handle))
fd = raw(303, -100, HOST["file"].encode(), buffer, ctypes.byref(mount), 0)
if fd >= 0: breach("handle")
for inode in range(2, 12):
    got = raw(304, 0, struct.pack("IiQ", 8, 1, inode), 0)
    if got >= 0: breach(inode)
""",
    "a set-uid program": """
for path in ("/bin/su", "/usr/bin/su", "/usr/bin/sudo", "/usr/bin/passwd", "/usr/bin/mount"):
    done = attempt(lambda: subprocess.run([path, "--help"], capture_output=True))
    if not isinstance(done, OSError): breach(path)
""",
    "a disk by its device": """
for name, node in (("sda", (8, 0)), ("vda", (254, 0)), ("vda", (253, 0)), ("mem", (1, 1)), ("kmsg", (1, 11)), ("x", (1, 5))):
    got = attempt(os.mknod, name, 0o600 | 0o020000 * (node[0] == 1) | 0o060000 * (node[0] != 1), os.makedev(*node))
    if not isinstance(got, OSError) and works(os.open, name, os.O_RDONLY): breach(name)
    if not isinstance(got, OSError): os.unlink(name)
""",
    "the sources of the server": """
for directory, _, names in os.walk("/"):
    if directory == "/proc": continue
    if {"gateway", "executor", "jail"} <= set(os.listdir(directory)): breach(directory)
    if directory.count("/") > 6: _.clear()
for name in ("sandbox", "sandbox.jail", "sandbox.executor"):
    try: __import__(name)
    except ImportError: continue
    breach(name)
""",
    "the user's home": """
for home in ("/root", "/home", "/var", "/usr/share"):
    if works(os.listdir, home): breach(home)
""",
    "the accounts": "if read('/etc/shadow'): breach('shadow')\nif read('/etc/machine-id'): breach('machine-id')",
}


@pytest.mark.parametrize("attack", READING)
def test_reading(attack: str, target: Target) -> None:
    target.resists(READING[attack])


@pytest.mark.parametrize("attack", READING)
def test_reading_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, READING[attack], tmp_path)


@dataclass(frozen=True)
class OtherCalls:
    """Two other calls of the same zygote, and all secrets in them."""

    secrets: frozenset[str]
    running: Call
    ended: Call


def other_calls() -> OtherCalls:
    tokens = [canary() for _ in range(9)]
    hang = "\nimport time\ntime.sleep(1000)"
    running = call(f"x = {tokens[0]!r}{hang}", stdin=tokens[1], files={"in": tokens[2].encode()}, timeout_s=300.0)
    ended = call(
        f"import sys\nprint({tokens[3]!r}, file=sys.stderr)\nopen('out', 'w').write({tokens[4]!r})\nprint({tokens[5]!r})\n"
        f"{tokens[6]!r}",
        stdin=tokens[7],
        files={"in": tokens[8].encode()},
        return_files=("out",),
    )
    return OtherCalls(frozenset(tokens), running, ended)


SEARCH = {
    "frames of the caller": """
def values(frame):
    while frame:
        yield frame.f_locals; yield frame.f_globals
        frame = frame.f_back
found, seen = list(values(sys._getframe().f_back)), set()
while found and len(seen) < 500_000:
    value = found.pop()
    if id(value) in seen: continue
    seen.add(id(value))
    if isinstance(value, (bytes, bytearray, memoryview)): scan(bytes(value))
    elif isinstance(value, str): scan(value.encode(errors="replace"))
    elif isinstance(value, dict): found += [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)): found += value
    elif hasattr(type(value), "__slots__"): found += [getattr(value, s, None) for s in type(value).__slots__]
    elif hasattr(value, "__dict__") and not isinstance(value, type(sys)): found.append(vars(value))
""",
    "objects known to the collector": """
import gc
gc.unfreeze()
for value in gc.get_objects():
    for part in gc.get_referents(value):
        if isinstance(part, (bytes, bytearray)): scan(bytes(part))
        elif type(part) is str: scan(part.encode(errors="replace"))
""",
    "memory": """
import mmap
def maps():
    # Without /proc, mincore(2) distinguishes mapped pages from holes. Start at known addresses and stop at wide holes.
    libc.sbrk.restype = ctypes.c_void_p
    anchors = [id(sys), id(int), libc.sbrk(0) - 4096, ctypes.addressof(ctypes.c_char_p.in_dll(libc, "environ")),
               ctypes.cast(libc.malloc, ctypes.c_void_p).value, ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value,
               ctypes.addressof(ctypes.create_string_buffer(1 << 20))]
    vector, seen, mincore = ctypes.create_string_buffer(512), set(), libc.mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    for anchor in anchors:
        for step in (1, -1):
            page, hole = anchor >> 12, 0
            while hole < 4096 and page > 16:
                if page in seen: page += step; hole = 0; continue
                if mincore(page << 12, 4096, vector) == 0: seen.add(page); hole = 0
                else: hole += 1
                page += step
    return sorted(seen)
pages, runs = maps(), []
for page in pages:
    if runs and runs[-1][1] == page: runs[-1][1] += 1
    else: runs.append([page, page + 1])
window = os.open("window", os.O_RDWR | os.O_CREAT, 0o600)
libc.pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
for first, last in runs:
    while first < last:
        # Writing the page to a file fails with EFAULT if it is unreadable, where reading it would crash.
        got = libc.pwrite(window, first << 12, min(last - first, 256) << 12, 0)
        if got > 0: scan(os.pread(window, got + 64, 0))
        first += max(1, got >> 12) if got > 0 else 1
""",
}


@pytest.mark.parametrize("search", SEARCH)
def test_secrets_of_other_calls_in(search: str, target: Target) -> None:
    earlier, batch_before, batch_after = other_calls(), other_calls(), other_calls()
    attack = target.call(SEARCH[search], timeout_s=120.0, memory_mb=1024)
    caller = target.caller
    hanging = caller.submit(earlier.running)
    caller.run_all([earlier.ended] * 3)
    caller.stats.clear()
    # Wait until the calls of the test before are gone and the hanging call is long, so that all four short slots are free.
    caller.until(lambda: (caller.stats.get("running"), caller.stats.get("running_long")) == (1, 1))
    with target.stopped():  # so that the zygote receives all four calls before it forks the first
        before = caller.submit(batch_before.ended)
        attacker = caller.submit(attack)
        after = [caller.submit(batch_after.running), caller.submit(batch_after.ended)]
        caller.stats.clear()
        caller.until(lambda: caller.stats.get("running") == 5)
    caller.result_of(before)
    output = caller.result_of(attacker).stdout
    caller.result_of(after[1])
    caller.send("cancel", [hanging, after[0]])
    assert output.endswith("END\n")
    stolen = [token for token in earlier.secrets | batch_before.secrets | batch_after.secrets if token in output]
    assert not stolen, output


def test_calls_of_a_batch_do_not_inherit_each_others_descriptors(target: Target) -> None:
    """The zygote forks them one after another, while it has the files of all of them open."""
    attack = target.call(READING["an inherited descriptor"], stdin="of this call alone")
    caller = target.caller
    caller.stats.clear()
    caller.until(lambda: caller.stats.get("running") == 0)  # those that the test before has cancelled have ended
    with target.stopped():
        attacks = [caller.submit(attack) for _ in range(3)]
        caller.stats.clear()
        caller.until(lambda: caller.stats.get("running") == len(attacks))
    output = [caller.result_of(seq).stdout for seq in attacks]
    assert all(text.endswith("END\n") for text in output), output
    assert not any("BREACH" in text for text in output), output


ZYGOTE = """
import gc, os, sys
secret = sys.argv[1].encode() * 2
code = sys.argv[2]
def serve(requests):
    if os.fork() == 0: exec(code, {"__name__": "__main__"}); os._exit(0)
    os.wait()
serve([secret, {"kept": [secret.decode()]}])
"""


@pytest.mark.parametrize("search", SEARCH)
def test_search_finds_secrets_of_the_parent_without_a_jail(search: str, host: Host, tmp_path: Path) -> None:
    argv = [OWN_PYTHON, "-c", ZYGOTE, canary(), host.with_facts(SEARCH[search])]
    run = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=DEADLINE_S)
    assert "BREACH CANARY" in run.stdout, run
