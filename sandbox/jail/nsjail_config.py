"""Level `nsjail`: turns a `JailSpec` into the text of nsjail's configuration, for `launch_nsjail`.

- nsjail's config.proto has all these fields, by these names, since version 3.1.
- `POLICY` gives the zygote its own namespaces, and only the capabilities that it needs to confine calls. (A zygote is
  the interpreter in the jail that forks once per call.)
- Limits of time, memory, files and processes are not in this configuration. nsjail would apply each limit to all calls
  of a jail together.
- The launcher builds the root of the jail, and nsjail binds this root by one recursive mount. If nsjail made the mounts
  itself, they would belong to the user namespace of the zygote. The zygote has CAP_SYS_ADMIN in this namespace, so it
  could make the mounts writable.
- The jail has no /proc. nsjail itself runs outside the jail, and needs the host's /proc to write the id maps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sandbox.jail.launcher import HOSTNAME, ZYGOTE_CAPABILITIES
from sandbox.jail.spec import GUEST_DIR_IN_JAIL, JailSpec

POLICY = (
    'name: "rstar-sandbox"',
    "mode: ONCE",
    f'hostname: "{HOSTNAME}"',
    'cwd: "/"',
    "log_level: WARNING",
    "keep_env: false",
    "keep_caps: false",
    *(f'cap: "{name}"' for name in ZYGOTE_CAPABILITIES),
    "disable_no_new_privs: false",
    "clone_newuser: true",
    "clone_newpid: true",
    "clone_newns: true",
    "clone_newnet: true",
    "clone_newipc: true",
    "clone_newuts: true",
    "clone_newcgroup: false",  # it changes only /proc and /sys, which a jail does not have
    "iface_no_lo: true",
    "mount_proc: false",
    "time_limit: 0",
    "disable_rl: true",
)


@dataclass(frozen=True, slots=True)
class StartParameters:
    """The values of a configuration that differ from one start of nsjail to the next."""

    socket_fd: int
    """Descriptor of the guest's socket, which the guest inherits."""
    nsjail_alive_fd: int
    """Read end of a pipe, which `guest/init.py` inherits. Only nsjail holds the write end. So init reads end of file if
    nsjail died before init's parent-death signal was set."""
    root_dir: str
    """Directory on the host with the jail's root."""
    log_file: str
    """Path of the file to which nsjail writes its own messages."""
    id_map: str
    """A line `inside outside count` (user_namespaces(7)), which is the map of uids and also the map of gids."""
    nice: int
    """Nice value of the jail. It is always set, because nsjail's default is the lowest priority."""


def config(spec: JailSpec, start: StartParameters) -> str:
    """Return nsjail's configuration in protobuf's text format, one field of the message per line."""
    inside, outside, count = start.id_map.split()
    ids = f"{{ inside_id: {quoted(inside)} outside_id: {quoted(outside)} count: {int(count)} }}"
    # init uses no environment variables (-I) and no packages (-S), and cannot write bytecode to a read-only root (-B).
    init = ("-I", "-S", "-B", f"{GUEST_DIR_IN_JAIL}/init.py", str(start.nsjail_alive_fd))
    arguments = " ".join(f"arg: {quoted(argument)}" for argument in (*init, *spec.guest_argv(start.socket_fd)))
    lines = (
        *POLICY,
        f"log_file: {quoted(start.log_file)}",
        f"nice_level: {start.nice}",
        f"uidmap {ids}",
        f"gidmap {ids}",
        f'mount {{ src: {quoted(start.root_dir)} dst: "/" is_bind: true is_dir: true rw: false nosuid: true }}',
        f"pass_fd: {start.socket_fd}",
        f"pass_fd: {start.nsjail_alive_fd}",
        *(f"envar: {quoted(f'{name}={value}')}" for name, value in spec.guest_env().items()),
        f"exec_bin {{ path: {quoted(spec.guest_python)} {arguments} }}",
    )
    return "".join(f"{line}\n" for line in lines)


def quoted(text: str) -> str:
    """Return a string literal. A quote, a backslash and each byte that is not printable ASCII become a backslash and
    three octal digits. All other bytes are unchanged."""
    data = os.fsencode(text)
    characters = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in data)
    return f'"{"".join(characters)}"'
