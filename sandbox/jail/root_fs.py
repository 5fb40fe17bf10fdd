"""The jail's file system: a read-only tmpfs that holds what Python needs, and nothing else of the host.

    /python     bin/python3, the standard library and the packages (mounted), read-only
    /lib...     the shared libraries, at the places where the loader looks by itself
    /guest      a copy of the guest's own source
    /dev        null, zero, full, random, urandom; shm -> /tmp, for POSIX semaphores
    /etc        passwd, group and hosts of a few lines
    /tmp        empty: each call mounts its own scratch folder here

There is no /proc, which would show other processes, the mounts and kernel addresses, and which many containers do not
let us mount; and no /sys. Small files are copied and only folders and large files mounted, because every call's own
mount namespace copies every mount: 1 to 2 us each.
"""

from __future__ import annotations

import os
import shutil
import stat

from sandbox.jail import kernel
from sandbox.jail.interpreter import PYTHON_DIR_IN_JAIL, Interpreter
from sandbox.jail.spec import GUEST_DIR_IN_JAIL, JailSpec

# Mounted on for a moment, until the root is entered or moved: every Linux host has it, and nothing that we mount comes
# from it.
ROOT_STAGING_DIR = "/proc"
LARGE_BYTES = 4 << 20
"""From here on one more mount is cheaper than a copy in every jail's memory."""
DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
"""Name -> minor number under major 1 (Documentation/admin-guide/devices.txt)."""
ETC = {
    "passwd": "root:x:0:0::/:/bin/false\nnobody:x:65534:65534::/:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
_READ_ONLY = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV


def build(spec: JailSpec) -> None:
    """Make the root in this (new, own) mount namespace, at `STAGE`."""
    # First of all: whatever is mounted from here on must not appear on the host.
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("jail", ROOT_STAGING_DIR, "tmpfs", kernel.MS_NOSUID, "mode=755")
    for folder in ("tmp", "dev", "etc", "python/bin", "guest"):
        os.makedirs(f"{ROOT_STAGING_DIR}/{folder}")
    _write_etc()
    _copy_guest(spec.guest_dir)
    _place_python(spec)
    _make_devices()
    # Last, when nothing is left to create: read-only as a file system, not only as a mount of it.
    kernel.mount(
        "jail", ROOT_STAGING_DIR, flags=kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID, options="mode=755"
    )


def move_to(folder: str) -> None:
    """Take what was laid out to `folder`, for another program to enter; what `STAGE` hid is there again."""
    kernel.mount(ROOT_STAGING_DIR, folder, flags=kernel.MS_MOVE)


def pivot() -> None:
    """Move into what was laid out, and let go of the host's root."""
    os.chdir(ROOT_STAGING_DIR)
    # Old and new root on one spot: the old one ends on top and is detached, and no folder for it stays behind.
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")


def _write_etc() -> None:
    for name, text in ETC.items():
        with open(f"{ROOT_STAGING_DIR}/etc/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _copy_guest(guest_dir: str) -> None:
    for name in sorted(os.listdir(guest_dir)):
        if name.endswith(".py"):
            shutil.copyfile(os.path.join(guest_dir, name), f"{ROOT_STAGING_DIR}{GUEST_DIR_IN_JAIL}/{name}")


def _place_python(spec: JailSpec) -> None:
    python = spec.python
    for source, target in python.libraries:
        _place_file(source, target)
    _place_file(python.binary, f"{PYTHON_DIR_IN_JAIL}/bin/python3")
    for name in ("python", "python{}.{}".format(*python.version)):
        os.symlink("python3", f"{ROOT_STAGING_DIR}{PYTHON_DIR_IN_JAIL}/bin/{name}")
    for source, target in python.mounts:
        _bind(source, target)
    for target in python.masked_paths:
        _bind(f"{ROOT_STAGING_DIR}/tmp", target)


def _place_file(source: str, target: str) -> None:
    path = ROOT_STAGING_DIR + target
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.getsize(source) >= LARGE_BYTES:
        _touch(path)
        _bind(source, target)
        return
    shutil.copyfile(source, path)
    os.chmod(path, 0o755)


def _make_devices() -> None:
    for name, minor in DEVICES.items():
        path = f"{ROOT_STAGING_DIR}/dev/{name}"
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            os.chmod(path, 0o666)
        except PermissionError:  # only the host's root may; others mount the host's nodes
            _touch(path)
            kernel.mount(f"/dev/{name}", path, flags=kernel.MS_BIND)
            _restrict(path, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NOEXEC)
    os.symlink("/tmp", f"{ROOT_STAGING_DIR}/dev/shm")


def _bind(source: str, target: str) -> None:
    path = ROOT_STAGING_DIR + target
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    kernel.mount(source, path, flags=kernel.MS_BIND)
    _restrict(path, _READ_ONLY)


def _restrict(path: str, flags: int) -> None:
    """A bind mount takes its own flags only on a remount, which must keep those that the host set."""
    kept = os.statvfs(path).f_flag & (kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount("none", path, flags=kernel.MS_REMOUNT | kernel.MS_BIND | flags | kept)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def first_unreadable(python: Interpreter) -> str | None:
    """The first path of the interpreter that only its owner may read, if there is one: calls run as other users."""
    for path in (python.binary, *(source for source, _ in (*python.mounts, *python.libraries))):
        needed = stat.S_IROTH | (stat.S_IXOTH if os.path.isdir(path) else 0)
        if os.stat(path).st_mode & needed != needed:
            return path
    return None
