"""Level `nsjail`: from a spec to the text of nsjail's configuration. Pure; `sandbox.jail.launch_nsjail` starts
nsjail with it.

- Every field is one that config.proto has since nsjail 3.1, by the name that it has had since.
- What the zygote must not have is refused here: the host's namespaces, capabilities but the few that set up a call.
  What a call may use (time, memory, files, processes) stays with the call's own layers; nsjail limits none of it, since
  its limits would hold for all calls of a jail together.
- The root is ours, laid out before nsjail starts and handed over by one recursive bind mount: mounts of nsjail's own
  would belong to the zygote's user namespace, where its CAP_SYS_ADMIN may make them writable.
- No /proc inside. nsjail itself needs the host's, to write the id maps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Union

from sandbox.jail.launcher import HOSTNAME
from sandbox.jail.spec import GUEST_DIR_IN_JAIL, JailSpec

CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL")
"""`namespaces.KEPT`, as nsjail names them."""


@dataclass(frozen=True, slots=True)
class EnumValue:
    """The name of an enum's value, which is written without quotes."""

    name: str


Value = Union[bool, int, str, EnumValue, "Fields"]
Fields = Sequence[tuple[str, Value]]

POLICY: Fields = (
    ("name", "rstar-sandbox"),
    ("mode", EnumValue("ONCE")),
    ("hostname", HOSTNAME),
    ("cwd", "/"),
    ("log_level", EnumValue("WARNING")),
    ("keep_env", False),
    ("keep_caps", False),
    *(("cap", name) for name in CAPABILITIES),
    ("disable_no_new_privs", False),
    ("clone_newuser", True),
    ("clone_newpid", True),
    ("clone_newns", True),
    ("clone_newnet", True),
    ("clone_newipc", True),
    ("clone_newuts", True),
    ("clone_newcgroup", False),  # as at level namespaces: it changes only what /proc and /sys show
    ("iface_no_lo", True),
    ("mount_proc", False),
    ("time_limit", 0),
    ("disable_rl", True),
)
_ROOT_MOUNT: Fields = (("dst", "/"), ("is_bind", True), ("is_dir", True), ("rw", False), ("nosuid", True))


@dataclass(frozen=True, slots=True)
class StartParameters:
    """What one start of nsjail adds to the policy: descriptors that the guest gets, files, the id map, a priority."""

    fd: int
    """The guest's socket."""
    alive: int
    """A pipe's end for `guest/init.py`."""
    root: str
    """The folder that holds the laid-out root."""
    log: str
    """The file for what nsjail says of itself."""
    id_map: str
    """One line `inside outside count`, for users and groups alike."""
    nice: int
    """The priority to run at: nsjail would choose the lowest."""


def config(spec: JailSpec, start: StartParameters) -> str:
    """nsjail's configuration in protobuf's text format, one top field a line."""
    inside, outside, count = start.id_map.split()
    ids: Fields = (("inside_id", inside), ("outside_id", outside), ("count", int(count)))
    program, *arguments = (spec.guest_python, "-I", "-S", "-B", f"{GUEST_DIR_IN_JAIL}/init.py", str(start.alive))
    fields: Fields = (
        *POLICY,
        ("log_file", start.log),
        ("nice_level", start.nice),
        ("uidmap", ids),
        ("gidmap", ids),
        ("mount", (("src", start.root), *_ROOT_MOUNT)),
        ("pass_fd", start.fd),
        ("pass_fd", start.alive),
        *(("envar", f"{name}={value}") for name, value in spec.guest_env().items()),
        ("exec_bin", (("path", program), *(("arg", word) for word in (*arguments, *spec.guest_argv(start.fd))))),
    )
    return "".join(f"{line}\n" for line in _lines(fields))


def _lines(fields: Fields) -> Iterator[str]:
    for name, value in fields:
        if isinstance(value, (bool, int, str, EnumValue)):
            yield f"{name}: {_scalar(value)}"
        else:
            yield f"{name} {{ {' '.join(_lines(value))} }}"


def _scalar(value: bool | int | str | EnumValue) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case EnumValue():
            return value.name
        case str():
            return quoted(value)


def quoted(text: str) -> str:
    """A string literal: printable ASCII as it is, any other byte in octal, always three digits."""
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in os.fsencode(text))
    return f'"{"".join(plain)}"'
