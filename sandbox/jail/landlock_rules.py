"""The rules of level `landlock`, as data: the access rights that each ABI version of Landlock knows, and the paths with
their rights.

A zygote (an interpreter that forks once per call) loads a ruleset, and each call inherits it and loads another. Both
rulesets apply to a call:

    of the zygote   grants to read what Python needs, and to read and write the scratch directories of all slots
    of the call     grants to read what Python needs, and to read and write the scratch directory of its own slot

A ruleset "handles" some rights: it denies each of them that it does not grant. Our rulesets handle all rights that the
ABI version knows. They are rights on files, on TCP, on signals to processes outside, and on abstract sockets of such
processes.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

from sandbox.errors import IsolationError
from sandbox.jail import kernel
from sandbox.jail.interpreter import Interpreter
from sandbox.jail.python_access import closed_dirs, paths_used_by
from sandbox.jail.root_fs import DEVICES, LOCALE_DIRS, first_unreadable
from sandbox.jail.spec import JailSpec

# linux/landlock.h
EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_FIFO = 1 << 10
MAKE_SYM = 1 << 12
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
_FILE_RIGHTS_OF_ABI_1 = REFER - 1
_TCP_RIGHTS = 0b11  # bind, connect
_SCOPES = 0b11  # abstract Unix sockets, signals
_NO_AUDIT = 0b101
"""LANDLOCK_RESTRICT_SELF_LOG_SAME_EXEC_OFF and LOG_SUBDOMAINS_OFF, which ABI 7 has added. Without them hostile code
could fill the host's audit log with denials."""

TRUNCATE_ABI = 3
"""First ABI version that can deny truncate(2). With an older one, code can empty each file that its uid may write."""
_SCRATCH_RIGHTS = (
    WRITE_FILE | READ_FILE | READ_DIR | REMOVE_DIR | REMOVE_FILE
    | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE
)  # fmt: skip
TEMPORARY_DIRS = ("/tmp", "/var/tmp")


@dataclass(frozen=True, slots=True)
class LandlockRules:
    """The rules of both rulesets, except for the rule of the scratch directories."""

    handled: tuple[int, int, int]
    """Handled rights on files, network and scopes (struct landlock_ruleset_attr)."""
    flags: int
    """Flags of landlock_restrict_self(2)."""
    paths: tuple[tuple[str, int], ...]
    """Paths, with the rights beneath each of them."""
    scratch_rights: int
    """Rights beneath a scratch directory."""


def rules_for(spec: JailSpec, abi: int) -> LandlockRules:
    files, network, scopes = handled_rights(abi)
    mounts = [source for source, _ in spec.python.mounts]
    binaries = [spec.python.binary, *(source for source, _ in spec.python.libraries)]
    rights = {
        **dict.fromkeys((*mounts, spec.guest_dir_in_jail), READ_FILE | READ_DIR),
        **dict.fromkeys((source for _, source in spec.data), READ_FILE | READ_DIR),
        **dict.fromkeys(filter(os.path.isdir, LOCALE_DIRS), READ_FILE | READ_DIR),
        **dict.fromkeys(binaries, READ_FILE | EXECUTE),
        **dict.fromkeys(_config_files(spec.python), READ_FILE),
        **dict.fromkeys((f"/dev/{name}" for name in DEVICES), READ_FILE | WRITE_FILE),
    }
    paths = tuple((os.path.realpath(path), access & files) for path, access in rights.items())
    return LandlockRules((files, network, scopes), _NO_AUDIT if abi >= 7 else 0, paths, _SCRATCH_RIGHTS & files)


def check_requirements(spec: JailSpec, abi: int) -> None:
    """Raise `IsolationError` if calls cannot reach the files that they need, or the ABI cannot confine them."""
    if spec.uid_base is None:
        if abi < TRUNCATE_ABI:
            raise IsolationError(
                f"isolation=landlock: an ordinary user needs Landlock ABI {TRUNCATE_ABI} (Linux 6.2), got {abi}, with "
                "which calls could empty the files of this user; start as root with Docker's default capabilities"
            )
        return
    assert spec.scratch_root is not None
    closed = closed_dirs([spec.scratch_root])
    if kernel.CAP_SYS_ADMIN not in kernel.effective_capabilities():  # else the launcher makes Python reachable
        closed += closed_dirs(paths_used_by(spec.python))
    if hidden := first_unreadable(spec.python) or next(iter(closed), None):
        raise IsolationError(
            f"isolation=landlock: calls have uids of their own, which cannot reach {hidden}; name a Python (--python, "
            "or `rstar-sandbox runtime --path`) and a temporary directory (TMPDIR) that all users may enter, or start "
            "as an ordinary user; with CAP_SYS_ADMIN, Python may be anywhere"
        )


def scratch_parent_dir(*, has_uids: bool) -> str:
    """Return the directory in which to create `JailSpec.scratch_root`: the usual one for temporary files.

    Calls that have their own uids may be unable to enter the usual directory (as with pam_tmpdir). Then return the
    first of `TEMPORARY_DIRS` that they can enter. Raises `IsolationError`.
    """
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError:
        raise IsolationError(
            "found no writable directory for temporary files; set TMPDIR, or mount a tmpfs on /tmp"
        ) from None
    if has_uids:
        for parent in (usual, *TEMPORARY_DIRS):
            if os.path.isdir(parent) and not closed_dirs([f"{parent}/file"]):  # checks the directories above the file
                return parent
    return usual


def handled_rights(abi: int) -> tuple[int, int, int]:
    """Return all rights on files, network and scopes that an ABI version can deny."""
    files = _FILE_RIGHTS_OF_ABI_1
    for right, since_abi in ((REFER, 2), (TRUNCATE, TRUNCATE_ABI), (IOCTL_DEV, 5)):
        files |= right if abi >= since_abi else 0
    return files, _TCP_RIGHTS if abi >= 4 else 0, _SCOPES if abi >= 6 else 0


def _config_files(python: Interpreter) -> list[str]:
    """Return the existing files that Python or the loader reads at start. The start fails if one is not readable."""
    environment = os.path.dirname(os.path.dirname(python.executable))
    site_files = [f"{source}/sitecustomize.py" for source, _ in python.mounts]  # Debian's is a link into /etc
    paths = (f"{environment}/pyvenv.cfg", "/etc/ld.so.cache", "/etc/mime.types", *site_files)
    return [path for path in paths if os.path.isfile(path)]
