"""Attacks that read secrets in files and processes of the host, of the server, and of other calls."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.types import Call
from tests.escape.targets import Host, Target, canary, check_resisted, succeeds_without_jail, with_controls_of_root
from tests.executor.calling import DEADLINE_S, OWN_PYTHON, call

READING = {
    "a world-readable file": "scan(read(HOST['file']))",
    "a file by going up": "scan(read('../' * 40 + HOST['file'][1:]))",
    "a file through a link": "os.symlink(HOST['file'], 'link'); scan(read('link'))",
    "a file by a hard link": "attempt(os.link, HOST['file'], 'hard'); scan(read('hard')); scan(read(HOST['file']))",
    "a file by executing it": """
run = attempt(lambda: subprocess.run(["/bin/cat", HOST["file"]], capture_output=True))
if not isinstance(run, OSError): scan(run.stdout)
""",
    "the names in a directory": """
if "secret" in names(HOST["directory"]): breach(names(HOST["directory"]))
""",
    "shared memory": "scan(read(HOST['shm']))\nfor name in names('/dev/shm'): scan(read('/dev/shm/' + name))",
    "the environment of the executor": "scan(read(f'/proc/{HOST[\"executor_pid\"]}/environ'))",
    "the command line of the executor": "scan(read(f'/proc/{HOST[\"executor_pid\"]}/cmdline'))",
    "files through the root of another process": """
for pid in (HOST["executor_pid"], os.getppid(), 1, "self"):
    for entry in ("root", "cwd/../../../../../../.."): scan(read(f"/proc/{pid}/{entry}{HOST['file']}"))
""",
    "every environment and command line in /proc": """
for pid in names("/proc"):
    if pid.isdigit() and int(pid) != os.getpid(): scan(read(f"/proc/{pid}/environ") + read(f"/proc/{pid}/cmdline"))
""",
    "the memory of the server": """
for pid in (HOST["executor_pid"], os.getppid()):
    for line in read(f"/proc/{pid}/maps").decode().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if "rw" not in line or last - first > 64 << 20: continue
        try:
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as file: file.seek(first); scan(file.read(last - first))
        except OSError: pass
""",
    "a new mount of /proc": """
libc.unshare(0x10020000)  # CLONE_NEWUSER | CLONE_NEWNS
if libc.mount(b"proc", b"/tmp", b"proc", 0, None) == 0: scan(read(f"/tmp/{HOST['executor_pid']}/environ")); libc.umount(b"/tmp")
if names("/proc/1"): breach("/proc/1")
""",
    "an inherited descriptor": """
for fd in range(5, 1024):  # a call has standard streams, the report and the output files: 0 to 4
    if works(os.fstat, fd): breach(fd)
""",
    "a parent directory through an inherited descriptor": """
path = "../" * 20 + HOST["file"][1:]
for fd in (*range(1024), -100):  # -100: AT_FDCWD, the working directory
    opened = raw('openat', fd, path.encode(), os.O_RDONLY)
    if opened >= 0: scan(os.read(opened, 4096))
""",
    "files by handles, without a path": """
handle, mount_id = ctypes.create_string_buffer(struct.pack("Ii128x", 128, 0)), ctypes.c_int()
if raw('name_to_handle_at', -100, HOST["file"].encode(), handle, ctypes.byref(mount_id), 0) >= 0: breach("name_to_handle_at(2)")
for inode in range(2, 12):
    if raw('open_by_handle_at', 0, struct.pack("IiQ", 8, 1, inode), 0) >= 0: breach(f"open_by_handle_at(2) of inode {inode}")
""",
    "a set-uid program": """
for path in ("/bin/su", "/usr/bin/su", "/usr/bin/sudo", "/usr/bin/passwd", "/usr/bin/mount"):
    if works(lambda: subprocess.run([path, "--help"], capture_output=True)): breach(path)
""",
    "a disk by its device": """
import stat
devices = {"sda": (8, 0), "vda": (254, 0), "vda2": (253, 0), "mem": (1, 1), "kmsg": (1, 11), "zero": (1, 5)}
for name, (major, minor) in devices.items():
    kind = stat.S_IFCHR if major == 1 else stat.S_IFBLK
    if works(os.mknod, name, 0o600 | kind, os.makedev(major, minor)):
        if works(os.open, name, os.O_RDONLY): breach(name)
        os.unlink(name)
""",
    "the sources of the server": """
for directory, subdirs, _ in os.walk("/"):
    if {"gateway", "executor", "jail"} <= {*subdirs}: breach(directory)
    if directory == "/proc" or directory.count("/") > 6: subdirs.clear()
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
def test_a_call_cannot_read(attack: str, target: Target) -> None:
    target.resists(READING[attack])


@pytest.mark.parametrize("attack", with_controls_of_root(READING, "a disk by its device"))
def test_reading_succeeds_without_a_jail(attack: str, host: Host, tmp_path: Path) -> None:
    succeeds_without_jail(host, READING[attack], tmp_path)


@dataclass(frozen=True)
class OtherCalls:
    """Two calls with secrets in their code, input, arguments, variables, files, names of files, output and value."""

    secrets: frozenset[str]
    endless: Call
    short: Call


def other_calls() -> OtherCalls:
    tokens = [canary() for _ in range(14)]
    endless = call(
        f"import time\nx = {tokens[0]!r}\ntime.sleep(1000)",
        stdin=tokens[1],
        files={"in": tokens[2].encode()},
        argv=(tokens[9],),
        env={"SECRET": tokens[10]},
        timeout_s=300.0,
    )
    short = call(
        f"import sys\nprint({tokens[3]!r}, file=sys.stderr)\nopen('out', 'w').write({tokens[4]!r})\nprint({tokens[5]!r})\n"
        f"open({tokens[13]!r}, 'w')\n{tokens[6]!r}",
        stdin=tokens[7],
        files={"in": tokens[8].encode()},
        argv=(tokens[11],),
        env={"SECRET": tokens[12]},
        return_files=("out", "CANARY*"),
    )
    return OtherCalls(frozenset(tokens), endless, short)


SEARCHES = {
    "frames of the caller": """
def variables(frame):
    while frame:
        yield frame.f_locals; yield frame.f_globals
        frame = frame.f_back
def content(view):
    # The kernel copies: memory that only the zygote has is EFAULT, where reading it would crash.
    copy = os.open("copy", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try: return os.pread(copy, os.pwrite(copy, view, 0), 0)
    except OSError: return b""
    finally: os.close(copy)
stack, visited = list(variables(sys._getframe().f_back)), set()
while stack and len(visited) < 500_000:
    value = stack.pop()
    if id(value) in visited: continue
    visited.add(id(value))
    if isinstance(value, (bytes, bytearray)): scan(bytes(value))
    elif isinstance(value, memoryview): scan(content(value))
    elif isinstance(value, str): scan(value.encode(errors="replace"))
    elif isinstance(value, dict): stack += [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)): stack += value
    elif hasattr(type(value), "__slots__"): stack += [getattr(value, s, None) for s in type(value).__slots__]
    elif hasattr(value, "__dict__") and not isinstance(value, type(sys)): stack.append(vars(value))
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
def mapped_pages():
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
runs = []  # [first page, page after the last]
for page in mapped_pages():
    if runs and runs[-1][1] == page: runs[-1][1] += 1
    else: runs.append([page, page + 1])
copy = os.open("copy", os.O_RDWR | os.O_CREAT, 0o600)
libc.pwrite.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
for first, last in runs:
    while first < last:
        # Writing an unreadable page to a file fails with EFAULT, where reading the page would crash.
        copied_bytes = libc.pwrite(copy, first << 12, min(last - first, 256) << 12, 0)
        if copied_bytes > 0: scan(os.pread(copy, copied_bytes + 64, 0))
        first += max(1, copied_bytes >> 12)
""",
}


@pytest.mark.parametrize("search", SEARCHES)
def test_a_call_finds_no_secrets_of_other_calls_in(search: str, target: Target) -> None:
    """The attack is the second of four calls that the zygote forks as one batch. An earlier call runs at the same
    time."""
    earlier, first, following = other_calls(), other_calls(), other_calls()
    attack = target.build_call(SEARCHES[search], timeout_s=120.0, memory_mb=1024)
    caller = target.caller
    earlier_endless = caller.submit(earlier.endless)
    caller.run_all([earlier.short] * 3)
    # Wait until no call of the last test runs, and until the endless call has become a long call. Then all four short
    # slots are free.
    caller.stats.clear()
    caller.until(lambda: (caller.stats.get("running"), caller.stats.get("running_long")) == (1, 1))
    with target.zygotes_stopped():
        first_short = caller.submit(first.short)
        attacker = caller.submit(attack)
        following_endless, following_short = caller.submit(following.endless), caller.submit(following.short)
        caller.stats.clear()
        caller.until(lambda: caller.stats.get("running") == 5)  # the batch and the earlier endless call
    caller.result_of(first_short)
    output = caller.result_of(attacker).stdout
    caller.result_of(following_short)
    caller.send("cancel", [earlier_endless, following_endless])
    assert output.endswith("END\n")
    stolen = [token for token in earlier.secrets | first.secrets | following.secrets if token in output]
    assert not stolen, output


def test_calls_of_a_batch_do_not_inherit_each_others_descriptors(target: Target) -> None:
    """The zygote forks the calls of a batch one after another. At each fork, it has the files of all these calls
    open."""
    attack = target.build_call(READING["an inherited descriptor"], stdin="of this call alone")
    caller = target.caller
    caller.stats.clear()
    caller.until(lambda: caller.stats.get("running") == 0)  # the calls that the last test cancelled have ended
    with target.zygotes_stopped():
        attacks = [caller.submit(attack) for _ in range(3)]
        caller.stats.clear()
        caller.until(lambda: caller.stats.get("running") == len(attacks))
    for seq in attacks:
        check_resisted(caller.result_of(seq))


FAKE_ZYGOTE = """
import gc, os, sys
secret = sys.argv[1].encode() * 2
code = sys.argv[2]
def serve(requests):
    if os.fork() == 0: exec(code, {"__name__": "__main__"}); os._exit(0)
    os.wait()
serve([secret, {"kept": [secret.decode()]}])
"""


@pytest.mark.parametrize("search", SEARCHES)
def test_search_finds_secrets_of_the_parent_without_a_jail(search: str, host: Host, tmp_path: Path) -> None:
    argv = [OWN_PYTHON, "-c", FAKE_ZYGOTE, canary(), host.attack_program(SEARCHES[search])]
    run = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=DEADLINE_S)
    assert "BREACH CANARY" in run.stdout, run
