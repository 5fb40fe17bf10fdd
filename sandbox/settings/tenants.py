"""The tenants that may send calls, and the bounds of each. `load_tenants` reads them from the file of `--tenants`.

    [tenants.rl-training]
    token_file = "rl-training.token"    # or token = "..."; a relative path starts at the directory of this file
    queue_share = 0.5                   # fraction of queue_calls and queue_mb; default: the server's --tenant-share
    max_running = 64                    # calls at executors at once; default: no bound of its own
    max_timeout_s = 60                  # one key per limit; the lower one of this and the server's maximum counts
    priority = 0                        # lowest priority number that its calls may have

- A token is kept as its SHA-256 digest. No `repr`, log line or error message contains a token.
- Tokens are found by their digest in a dict. So the time of a search does not depend on how many characters of a token
  are right, and cannot be used to guess a token.
"""

from __future__ import annotations

import hashlib
import stat
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sandbox.errors import ConfigError, InvalidCall
from sandbox.fields import NumberRule, check_label, check_names
from sandbox.settings.server import read_token
from sandbox.types import LIMIT_FIELDS, PRIORITY_RULE, Limits

MAX_FILE_BYTES = 1 << 20
"""Maximum bytes of a tenants file. While the server reads the file again, it answers no request. For 10,000 tenants
this takes half a second."""
_UNLIMITED = Limits(**{name: rule.high for name, rule in LIMIT_FIELDS.items()})  # type: ignore[arg-type]
_NUMBER_RULES: Mapping[str, NumberRule] = {
    "queue_share": NumberRule(0.01, 1, whole=False),
    "max_running": NumberRule(1, 1_000_000),
    "priority": PRIORITY_RULE,
    **{f"max_{name}": rule for name, rule in LIMIT_FIELDS.items()},
}
_KEYS = dict.fromkeys(("token", "token_file", *_NUMBER_RULES))


@dataclass(frozen=True, slots=True)
class Tenant:
    """One owner of calls, and its bounds."""

    name: str
    queue_share: float | None = None
    """Part of the queue's calls and bytes that it may hold; None: `tenant_share` of the server."""
    max_running: int | None = None
    """Calls that executors may have at once. Calls that wait in an executor count. None: no bound of its own."""
    max_limits: Limits = field(default=_UNLIMITED)
    """Maximum limits of its calls, in addition to the server's."""
    priority: int = 0
    """Lowest priority number that its calls may have. A call with a lower number would run before calls of other
    tenants, so its number is raised to this one."""

    def check_owner(self, named: str, where: str) -> None:
        """Check the tenant that a call of this tenant names. Raises `InvalidCall` if it names another tenant."""
        if named not in ("", self.name):
            raise InvalidCall(
                f"{where}.tenant: the token is that of tenant {self.name!r}, got {named!r:.80}; omit the field"
            )


class Tenants:
    """All tenants of one file."""

    def __init__(self, by_digest: Mapping[bytes, Tenant]) -> None:
        self._by_digest = by_digest
        shares = [tenant.queue_share for tenant in by_digest.values() if tenant.queue_share is not None]
        self._set_shares, self._unset_shares = sum(shares), len(by_digest) - len(shares)

    def find(self, token: str) -> Tenant | None:
        """Return the tenant with this token; None for an unknown token."""
        return self._by_digest.get(_digest(token))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tenant.name for tenant in self._by_digest.values())

    def total_share(self, default: float) -> float:
        """Return the sum of the `queue_share` of all tenants. For a tenant that sets none, it is `default`."""
        return self._set_shares + default * self._unset_shares

    def __len__(self) -> int:
        return len(self._by_digest)

    def __repr__(self) -> str:
        return f"Tenants({', '.join(tenant.name for tenant in self._by_digest.values())})"


def load_tenants(file: Path, server_token: str | None = None) -> Tenants:
    """Read a tenants file. Raises `ConfigError` with the file, the tenant and what to do. `server_token` is the token
    of the server itself, which no tenant may have."""
    by_digest: dict[bytes, Tenant] = {}
    for name, raw in _read_tables(file).items():
        where = f"{file}: tenant {name!r:.80}"
        _check_names(name, raw, where)
        digest = _digest(_token(raw, where, file.parent))
        if digest in by_digest:
            raise ConfigError(
                f"{where}: has the token of tenant {by_digest[digest].name!r:.80}; give each tenant a token of its own"
            )
        if server_token is not None and digest == _digest(server_token):
            raise ConfigError(f"{where}: has the token of the server; give the tenant a token of its own")
        by_digest[digest] = _tenant(name, raw, where)
    return Tenants(by_digest)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _read_tables(file: Path) -> dict[str, dict[str, Any]]:
    """Return the keys of each tenant, by name."""
    _check_is_no_device(file, str(file))
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: expected a tenants file of at most {MAX_FILE_BYTES} bytes; check the path")
        document = tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(f"{file}: the tenants file cannot be read ({error.strerror}); check --tenants") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 at byte {error.start}; correct the tenants file there") from None
    except (ValueError, RecursionError) as error:  # tomllib raises these two for long numbers and deep nesting
        raise ConfigError(f"{file}: is not TOML ({error}); correct the tenants file there") from None
    tables = document.get("tenants")
    if set(document) - {"tenants"}:
        unknown = min(set(document) - {"tenants"})
        raise ConfigError(f"{file}: unknown key {unknown!r:.80}; a tenant is a table [tenants.NAME]")
    if not isinstance(tables, dict) or not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{file}: expected a table [tenants.NAME] for each tenant, got none; add at least one")
    return tables


def _check_is_no_device(file: Path, where: str) -> None:
    """Raise `ConfigError` for a pipe or a device, because reading it may block the server for ever."""
    with suppress(OSError, ValueError):  # the reader of the file says why it cannot be read
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ConfigError(f"{where}: expected a regular file, but {file} is a pipe or a device; check the path")


def _check_names(name: str, raw: Mapping[str, Any], where: str) -> None:
    try:
        check_label(name, f"{where}: the name")
        check_names(raw, _KEYS, where)
    except InvalidCall as error:
        raise ConfigError(str(error)) from None
    if not name:
        raise ConfigError(f"{where}: the name is empty; name the tenant")


def _token(raw: Mapping[str, Any], where: str, directory: Path) -> str:
    sources = [key for key in ("token", "token_file") if key in raw]
    if len(sources) != 1:
        received = "both" if sources else "neither"
        raise ConfigError(f"{where}: expected token or token_file, got {received}; set one of them")
    value = raw[sources[0]]
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: {sources[0]}: expected text that is not empty; set it")
    if sources == ["token_file"]:
        _check_is_no_device(directory / value, f"{where}: token_file")
        return read_token(str(directory / value), f"{where}: token_file")
    return value.strip()  # a client cannot send white space at the ends of a header


def _tenant(name: str, raw: Mapping[str, Any], where: str) -> Tenant:
    values: dict[str, Any] = {}
    for key, rule in _NUMBER_RULES.items():
        if key in raw:
            if not rule.accepts(raw[key]):
                raise ConfigError(f"{where}: {key}: expected {rule.expected}, got {raw[key]!r:.80}; correct it")
            values[key] = rule.convert(raw[key])
    limits = {limit: values.pop(f"max_{limit}") for limit in LIMIT_FIELDS if f"max_{limit}" in values}
    return Tenant(name, **values, max_limits=replace(_UNLIMITED, **limits))
