"""What a guest may touch at level `landlock`, as data: Landlock's rights by the kernel's ABI, and who gets which.

Two rulesets hold at once. The zygote's names what Python needs, to read, and the folder of all calls; each call's the
same and its own folder alone. A ruleset refuses what it handles and does not give, so everything the ABI knows is
handled: files, TCP, and reaching processes and abstract sockets outside.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

from sandbox.errors import IsolationError
from sandbox.jail import kernel
from sandbox.jail.interpreter import Interpreter
from sandbox.jail.private import private_folders, used_paths
from sandbox.jail.root_fs import first_unreadable
from sandbox.jail.spec import JailSpec

# linux/landlock.h
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_FIFO, MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 10, 1 << 12
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FIRST_FILES = REFER - 1
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract Unix sockets, signals
_NO_AUDIT = (
    0b101  # LOG_SAME_EXEC_OFF, LOG_SUBDOMAINS_OFF: what hostile code is refused must not fill the host's audit log
)

TRUNCATE_ABI = 3
"""The first ABI that keeps code from emptying files which it may read and its uid may write."""
_SCRATCH = (
    WRITE_FILE | READ_FILE | READ_DIR | REMOVE_DIR | REMOVE_FILE
    | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE
)  # fmt: skip
TEMPORARY = ("/tmp", "/var/tmp")
DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True, slots=True)
class LandlockRules:
    """Both rulesets but for the call's folder, which the guest makes."""

    handled: tuple[int, int, int]
    """Files, network, scopes (struct landlock_ruleset_attr)."""
    flags: int
    paths: tuple[tuple[str, int], ...]
    scratch: int
    """The rights in a folder of calls."""

    def encode(self) -> dict[str, Any]:
        """For the guest, as JSON."""
        return {"handled": self.handled, "flags": self.flags, "paths": self.paths, "scratch": self.scratch}


def rules_for(spec: JailSpec, abi: int) -> LandlockRules:
    files, network, scopes = handled(abi)
    mounts = [source for source, _ in spec.python.mounts]
    binaries = [spec.python.binary, *(source for source, _ in spec.python.libraries)]
    wanted = {
        **dict.fromkeys((*mounts, spec.guest_dir_in_jail), READ_FILE | READ_DIR),
        **dict.fromkeys(binaries, READ_FILE | EXECUTE),
        **dict.fromkeys(_config_files(spec.python), READ_FILE),
        **dict.fromkeys((f"/dev/{name}" for name in DEVICES), READ_FILE | WRITE_FILE),
    }
    given = tuple((os.path.realpath(path), access & files) for path, access in wanted.items())
    return LandlockRules((files, network, scopes), _NO_AUDIT if abi >= 7 else 0, given, _SCRATCH & files)


def check_requirements(spec: JailSpec, abi: int) -> None:
    """Raise `IsolationError` where calls would lack what they need, or the kernel what holds them."""
    if spec.uid_base is None:
        if abi < TRUNCATE_ABI:
            raise IsolationError(
                f"isolation=landlock: an ordinary user needs Landlock ABI {TRUNCATE_ABI} (Linux 6.2), got {abi}, at "
                "which calls could empty the files of this user; start as root with Docker's default capabilities"
            )
        return
    assert spec.scratch is not None
    closed = private_folders([spec.scratch])
    if kernel.CAP_SYS_ADMIN not in kernel.effective_capabilities():  # else the launcher mounts it (`private.share`)
        closed += private_folders(used_paths(spec.python))
    if hidden := first_unreadable(spec.python) or next(iter(closed), None):
        raise IsolationError(
            f"isolation=landlock: calls run as users of their own, who cannot reach {hidden}; name a Python (--python, "
            "or `rstar-sandbox runtime --path`) and a temporary folder (TMPDIR) that all may enter, or start as an "
            "ordinary user; with CAP_SYS_ADMIN, Python may be anywhere"
        )


def scratch_parent_dir(*, has_uids: bool) -> str:
    """Where to make the folder of calls: in the temporary folder, or if calls have uids of their own that cannot get
    there, as with pam_tmpdir's, in the first usual one where they can."""
    usual = tempfile.gettempdir()
    if has_uids:
        for parent in (usual, *TEMPORARY):
            if os.path.isdir(parent) and not private_folders([f"{parent}/any"]):
                return parent
    return usual


def handled(abi: int) -> tuple[int, int, int]:
    """All that an ABI can refuse."""
    files = _FIRST_FILES | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
    return files, _TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0


def _config_files(python: Interpreter) -> list[str]:
    """Small files that Python, its library or the loader reads where they exist, and fails if it may not."""
    around = os.path.dirname(os.path.dirname(python.executable))
    customs = [f"{source}/sitecustomize.py" for source, _ in python.mounts]  # Debian's leads to /etc
    return [
        path
        for path in (f"{around}/pyvenv.cfg", "/etc/ld.so.cache", "/etc/mime.types", *customs)
        if os.path.isfile(path)
    ]
