"""The jail's root file system: a read-only tmpfs with what Python needs, and nothing else of the host.

    /python     bin/python3, the standard library and the packages (mounted), read-only
    /lib...     the shared libraries, at the paths where the loader searches by default
    /guest      a copy of the guest's own source
    /dev        null, zero, full, random, urandom; shm -> /tmp, for POSIX semaphores
    /etc        passwd and group with the uids of calls; hosts
    /usr/lib/locale/C.utf8    the locale that calls use, if the host has it
    /tmp        empty: the mount point of each call's scratch directory
    ...         directories of the operator (`JailSpec.data`), read-only and without programs

- There is no /sys and no /proc. /proc would show other processes, the mounts and kernel addresses, and many containers
  refuse to mount it.
- Only directories and large files are mounted. Small files are copied, because each call gets a mount namespace with a
  copy of all mounts, and to copy a mount takes 1 to 2 us.
"""

from __future__ import annotations

import os
import shutil
import stat

from sandbox.jail import kernel
from sandbox.jail.interpreter import PYTHON_DIR_IN_JAIL, Interpreter
from sandbox.jail.spec import FIRST_SLOT_UID, GUEST_DIR_IN_JAIL, JailSpec

ROOT_STAGING_DIR = "/proc"
"""Directory over which the new root is mounted until the process pivots to the root or moves it. Every Linux host has
this directory, and the root needs no file in it."""
MIN_MOUNTED_BYTES = 4 << 20
"""Files of at least this many bytes are mounted. For such a file, one more mount costs less than a copy in the memory
of each jail."""
DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
"""Minor numbers, under major number 1 (Documentation/admin-guide/devices.txt)."""
ETC = {
    "passwd": "root:x:0:0::/:/bin/false\nnobody:x:65534:65534::/:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}
USER = "sandbox"
"""User name of all calls, for every uid. The environment variables USER and LOGNAME have the same value."""
LOCALE_DIRS = ("/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8")
"""Directories in which the C library looks for the locale C.UTF-8. A host that has only an archive of locales has
neither directory."""
_BIND_FLAGS = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV


def build(spec: JailSpec) -> None:
    """Build the root at `ROOT_STAGING_DIR`, in this process's own new mount namespace. Raises `OSError`."""
    # This must be first, so that no later mount appears on the host.
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("jail", ROOT_STAGING_DIR, "tmpfs", kernel.MS_NOSUID, "mode=755")
    for name in ("tmp", "dev", "etc", "python/bin", "guest"):
        os.makedirs(f"{ROOT_STAGING_DIR}/{name}")
    _write_etc(spec)
    _copy_locale()
    copy_guest(spec.guest_dir, f"{ROOT_STAGING_DIR}{GUEST_DIR_IN_JAIL}")
    _add_python(spec.python)
    _make_devices()
    for target, source in spec.data:
        _bind(source, target, _BIND_FLAGS | kernel.MS_NOEXEC)
    # This must be last, when all files exist. It makes the file system itself read-only, and not only one mount of it.
    flags = kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID
    kernel.mount("jail", ROOT_STAGING_DIR, flags=flags, options="mode=755")


def move_to(target: str) -> None:
    """Move the root to `target`, so that another program can enter it and /proc is visible again."""
    kernel.mount(ROOT_STAGING_DIR, target, flags=kernel.MS_MOVE)


def pivot() -> None:
    """Enter the new root and unmount the host's root."""
    os.chdir(ROOT_STAGING_DIR)
    # With two equal paths the old root is mounted over the new one, from where it is unmounted (pivot_root(2)).
    kernel.pivot_root(".", ".")
    kernel.unmount_lazily(".")
    os.chdir("/")


def first_unreadable(python: Interpreter) -> str | None:
    """Return the first path of the interpreter that other users may not read, or None."""
    for path in (python.binary, *(source for source, _ in (*python.mounts, *python.libraries))):
        needed = stat.S_IROTH | (stat.S_IXOTH if os.path.isdir(path) else 0)
        if os.stat(path).st_mode & needed != needed:
            return path
    return None


def _write_etc(spec: JailSpec) -> None:
    uids = range(FIRST_SLOT_UID, spec.uid_count)
    users = {
        "passwd": "".join(f"{USER}:x:{uid}:{uid}::/tmp:/bin/false\n" for uid in uids),
        "group": "".join(f"{USER}:x:{uid}:\n" for uid in uids),
    }
    for name, text in ETC.items():
        with open(f"{ROOT_STAGING_DIR}/etc/{name}", "w", encoding="ascii") as file:
            file.write(text + users.get(name, ""))


def _copy_locale() -> None:
    for path in LOCALE_DIRS:
        if os.path.isdir(path):
            shutil.copytree(path, ROOT_STAGING_DIR + path)


def copy_guest(guest_dir: str, target: str) -> None:
    """Copy the guest's source, with modes that let the uids of calls read it. Raises `OSError`."""
    shutil.copytree(guest_dir, target, ignore=_all_but_sources, copy_function=shutil.copyfile, dirs_exist_ok=True)
    for directory, _, _ in os.walk(target):
        os.chmod(directory, 0o755)


def _all_but_sources(_directory: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".py") and name != "site"]


def _add_python(python: Interpreter) -> None:
    for source, target in python.libraries:
        _add_file(source, target)
    _add_file(python.binary, f"{PYTHON_DIR_IN_JAIL}/bin/python3")
    for name in ("python", "python{}.{}".format(*python.version)):
        os.symlink("python3", f"{ROOT_STAGING_DIR}{PYTHON_DIR_IN_JAIL}/bin/{name}")
    for source, target in python.mounts:
        _bind(source, target)
    for target in python.masked_paths:
        _bind(f"{ROOT_STAGING_DIR}/tmp", target)


def _add_file(source: str, target: str) -> None:
    path = ROOT_STAGING_DIR + target
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.getsize(source) >= MIN_MOUNTED_BYTES:
        _create_empty(path)
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
        except PermissionError:  # only root of the initial user namespace may create devices
            _create_empty(path)
            kernel.mount(f"/dev/{name}", path, flags=kernel.MS_BIND)
            _add_mount_flags(path, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NOEXEC)
    os.symlink("/tmp", f"{ROOT_STAGING_DIR}/dev/shm")


def _bind(source: str, target: str, flags: int = _BIND_FLAGS) -> None:
    path = ROOT_STAGING_DIR + target
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    kernel.mount(source, path, flags=kernel.MS_BIND)
    _add_mount_flags(path, flags)


def _add_mount_flags(path: str, flags: int) -> None:
    """Remount a bind mount with `flags`, which mount(2) ignores when it creates the mount. Keeps the host's flags."""
    kept = os.statvfs(path).f_flag & (kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount("none", path, flags=kernel.MS_REMOUNT | kernel.MS_BIND | flags | kept)


def _create_empty(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
