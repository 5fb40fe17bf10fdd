"""Level `nsjail`: turns a `JailSpec` into the text of nsjail's configuration, for `launch_nsjail`.

- nsjail's config.proto has all these fields, by these names, since version 3.1.
- `POLICY` gives the zygote its own namespaces, and only the capabilities that it needs to confine calls.
- Limits (time, memory, files, processes) are not here: nsjail would apply them to all calls of a jail together.
- The launcher builds the root, and nsjail adds it by one recursive bind mount. Mounts made by nsjail would belong to
  the zygote's user namespace, where the zygote's CAP_SYS_ADMIN could make them writable.
- The jail has no /proc. Outside, nsjail itself needs the host's /proc to write the id maps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Union

from sandbox.jail.launcher import HOSTNAME, ZYGOTE_CAPABILITIES
from sandbox.jail.spec import GUEST_DIR_IN_JAIL, JailSpec


@dataclass(frozen=True, slots=True)
class EnumValue:
    """A value of an enum, written without quotes."""

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
    *(("cap", name) for name in ZYGOTE_CAPABILITIES),
    ("disable_no_new_privs", False),
    ("clone_newuser", True),
    ("clone_newpid", True),
    ("clone_newns", True),
    ("clone_newnet", True),
    ("clone_newipc", True),
    ("clone_newuts", True),
    ("clone_newcgroup", False),  # it changes only /proc and /sys, which a jail does not have
    ("iface_no_lo", True),
    ("mount_proc", False),
    ("time_limit", 0),
    ("disable_rl", True),
)
_ROOT_MOUNT: Fields = (("dst", "/"), ("is_bind", True), ("is_dir", True), ("rw", False), ("nosuid", True))


@dataclass(frozen=True, slots=True)
class StartParameters:
    """The parts of a configuration that differ between starts of nsjail."""

    socket_fd: int
    """Descriptor of the guest's socket, which the guest inherits."""
    nsjail_alive_fd: int
    """Read end of a pipe whose write end only nsjail holds. `guest/init.py` inherits it."""
    root_dir: str
    """Directory on the host with the jail's root."""
    log_file: str
    """Path of the file to which nsjail writes its own messages."""
    id_map: str
    """Map of uids and of gids: one line `inside outside count` (user_namespaces(7))."""
    nice: int
    """Nice value of the jail. nsjail's default is the lowest priority."""


def config(spec: JailSpec, start: StartParameters) -> str:
    """Return nsjail's configuration in protobuf's text format, one field of the message per line."""
    inside, outside, count = start.id_map.split()
    ids: Fields = (("inside_id", inside), ("outside_id", outside), ("count", int(count)))
    init = ("-I", "-S", "-B", f"{GUEST_DIR_IN_JAIL}/init.py", str(start.nsjail_alive_fd))
    arguments = (*init, *spec.guest_argv(start.socket_fd))
    fields: Fields = (
        *POLICY,
        ("log_file", start.log_file),
        ("nice_level", start.nice),
        ("uidmap", ids),
        ("gidmap", ids),
        ("mount", (("src", start.root_dir), *_ROOT_MOUNT)),
        ("pass_fd", start.socket_fd),
        ("pass_fd", start.nsjail_alive_fd),
        *(("envar", f"{name}={value}") for name, value in spec.guest_env().items()),
        ("exec_bin", (("path", spec.guest_python), *(("arg", argument) for argument in arguments))),
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
    """Return a string literal: printable ASCII unchanged, all other bytes as three octal digits."""
    data = os.fsencode(text)
    characters = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in data)
    return f'"{"".join(characters)}"'
