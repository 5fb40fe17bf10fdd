"""Settings: one frozen tree per process, from defaults < TOML file < environment < flags.

Invariants:
- A setting has one name everywhere: `queue_mb` in TOML, `RSTAR_SANDBOX_QUEUE_MB` in the environment, `--queue-mb`.
- A setting is described once, on its field; flags, checks and messages all come from that description.
- An unknown name or a bad value is a `ConfigError` that says where it stood, what was expected and what came.
- The token is never a flag (command lines show in `ps`) and never in a `repr`.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sandbox.errors import ConfigError
from sandbox.types import LIMIT_FIELDS, Limits, NumberRule, Profile

ENV_PREFIX = "RSTAR_SANDBOX_"
CLIENT_ENV = {"URL"}
"""For clients, not for us; seeing them is no mistake."""

SLOTS_PER_CORE = 16
"""Calls running at once, per core: enough that sleepers and I/O do not idle it, and that orders and answers of small
calls travel together (8 take a tenth more CPU for each); few enough to keep memory small."""
CORES_PER_ZYGOTE_POOL = 2
"""A zygote forks one call at a time, in a third of what a small call costs; more of them share less memory."""
LONG_SLOTS_PER_CORE, MIN_LONG_SLOTS = 32, 512
"""Long calls beside those, per core, and at the least: one in a hundred of a burst of 50,000. They take what short ones
leave of the cores, so memory is what bounds them, and descriptors: see `jail.max_slots_for_fds`."""
CORES_PER_EXECUTOR = 8
"""An executor is one thread, which spends a fraction of a millisecond on a call that costs a core several."""

ISOLATION_LEVELS = ("nsjail", "namespaces", "landlock", "none")
ZYGOTE_PROFILES = tuple(p.value for p in Profile if p not in (Profile.AUTO, Profile.VERIFY))


@dataclass(frozen=True, slots=True)
class TextRule:
    """The rule for a text setting: any text, or one of `choices`."""

    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.choices)}" if self.choices else "text"

    def parse(self, text: str) -> Any:
        return text

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and bool(value) and (not self.choices or value in self.choices)


@dataclass(frozen=True, slots=True)
class NameListRule:
    """The rule for a list of distinct names out of `choices`; text separates them by commas."""

    choices: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"a list of {', '.join(self.choices)}"

    def parse(self, text: str) -> Any:
        return [name.strip() for name in text.split(",")]

    def accepts(self, value: Any) -> bool:
        named = isinstance(value, (list, tuple)) and all(name in self.choices for name in value)
        return named and 0 < len(value) == len(set(value))


@dataclass(frozen=True, slots=True)
class Range:
    """The rule for a number: its range, both ends allowed, and whether it must be whole."""

    low: float
    high: float
    whole: bool = True

    @property
    def expected(self) -> str:
        return f"a{' whole' if self.whole else ''} number from {self.low:.12g} to {self.high:.12g}"

    def parse(self, text: str) -> Any:
        try:
            return int(text) if self.whole else float(text)
        except ValueError:
            return text

    def accepts(self, value: Any) -> bool:
        kind = int if self.whole else (int, float)
        return isinstance(value, kind) and not isinstance(value, bool) and self.low <= value <= self.high


SettingRule = TextRule | NameListRule | Range


@dataclass(frozen=True, slots=True)
class Setting:
    """What a setting is for, and which values it takes."""

    doc: str
    rule: SettingRule
    is_flag: bool = True


def _setting(default: Any, rule: SettingRule, doc: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"setting": Setting(doc, rule, is_flag=not secret)}, repr=not secret)


_PYTHON = _setting(None, TextRule(), "Python that runs the calls (default: the runtime, made on first use)")
_ISOLATION = _setting(
    "auto",
    TextRule(("auto", *ISOLATION_LEVELS)),
    "isolation level; auto: the strongest level that this machine supports",
)
_CORES = _setting(0, Range(0, 4096), "cores to plan for; 0 is all that the machine and its control groups grant")
_ZYGOTES = _setting(
    0,
    Range(0, 4096),
    f"zygote pools (one zygote per profile each), for all executors together; 0: one per {CORES_PER_ZYGOTE_POOL} cores",
)
_SLOTS = _setting(0, Range(0, 100_000), f"calls running at once, of all executors; 0 is {SLOTS_PER_CORE} per core")
_LONG_SLOTS = _setting(
    0,
    Range(0, 100_000),
    f"long calls running in addition to --slots, for all executors together; 0: {LONG_SLOTS_PER_CORE} per core, "
    f"at least {MIN_LONG_SLOTS}",
)
_DEMOTE_AFTER_MS = _setting(
    100.0,
    Range(1, 1e9, whole=False),
    "milliseconds of virtual time after which a call counts as long and runs at idle priority",
)
_PROFILES = _setting(
    ZYGOTE_PROFILES, NameListRule(ZYGOTE_PROFILES), "profiles that each zygote pool keeps a zygote for"
)
_ATTEMPTS = _setting(3, Range(1, 100), "attempts per call if its zygote or executor dies")


@dataclass(frozen=True)
class ExecutorConfig:
    """What one executor needs to know. `settings` is its form on the wire."""

    python: str | None = _PYTHON
    isolation: str = _ISOLATION
    cores: int = _CORES
    zygote_pools: int = _ZYGOTES
    slots: int = _SLOTS
    long_slots: int = _LONG_SLOTS
    demote_after_ms: float = _DEMOTE_AFTER_MS
    profiles: tuple[str, ...] = _PROFILES
    attempts: int = _ATTEMPTS

    def encode(self) -> dict[str, Any]:
        """A mapping fit for msgpack or JSON."""
        return {**asdict(self), "profiles": list(self.profiles)}

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> ExecutorConfig:
        """The inverse of `settings`. Raises `ConfigError`."""
        known = _settings_of(cls)
        values = {name: value for name, value in raw.items() if value is not None or name != "python"}
        return cls(**{name: _checked(value, _known(name, known, name), name) for name, value in values.items()})


DEFAULT_MAX_LIMITS = Limits(timeout_s=300.0, memory_mb=16384, output_kb=16384, processes=1024, disk_mb=4096)


@dataclass(frozen=True)
class ServeConfig:
    """Everything `rstar-sandbox serve` can be told. Raises `ConfigError` where settings contradict each other."""

    host: str = _setting("127.0.0.1", TextRule(), "address to listen on; beyond loopback a token is required")
    port: int = _setting(8642, Range(0, 65535), "port to listen on; 0 takes a free one")
    token: str | None = _setting(
        None, TextRule(), "what clients must send as 'Authorization: Bearer TOKEN'", secret=True
    )
    token_file: str | None = _setting(None, TextRule(), "file holding the token")
    executors: int = _setting(0, Range(0, 1024), f"executor processes; 0 is one per {CORES_PER_EXECUTOR} cores")
    queue_calls: int = _setting(100_000, Range(1, 100_000_000), "calls waiting or running before new ones get 429")
    queue_mb: int = _setting(1024, Range(1, 10_000_000), "MiB of calls held before new ones get 429")
    tenant_share: float = _setting(
        0.9, Range(0.01, 1, whole=False), "part of queue_calls and of queue_mb that one tenant may hold"
    )
    queue_timeout_s: float = _setting(
        7200.0, Range(0.01, 1e6, whole=False), "seconds a call may wait for a slot before it gets no verdict"
    )
    batch_calls: int = _setting(65_536, Range(1, 10_000_000), "calls in one batch")
    results_mb: int = _setting(1024, Range(1, 10_000_000), "MiB of results held for clients that are slow to read")
    body_mb: int = _setting(256, Range(1, 100_000), "MiB of one request body")
    connections: int = _setting(16_384, Range(1, 1_000_000), "connections before new ones get 503")
    stall_s: float = _setting(30.0, Range(0.01, 1e6, whole=False), "seconds a client may take to send or read 256 KiB")
    drain_s: float = _setting(30.0, Range(0, 1e6, whole=False), "seconds that running calls get when the server stops")
    max_limits: Limits = DEFAULT_MAX_LIMITS
    python: str | None = _PYTHON
    isolation: str = _ISOLATION
    isolation_reason: str = ""
    """Why `auto`, which `isolation` was before the server chose, took no stronger level."""
    cores: int = _CORES
    zygote_pools: int = _ZYGOTES
    slots: int = _SLOTS
    long_slots: int = _LONG_SLOTS
    demote_after_ms: float = _DEMOTE_AFTER_MS
    profiles: tuple[str, ...] = _PROFILES
    attempts: int = _ATTEMPTS

    def __post_init__(self) -> None:
        if self.token is None and not _is_loopback(self.host):
            raise ConfigError(
                f"host={self.host} can be reached from other machines and needs a token; "
                f"set {ENV_PREFIX}TOKEN or --token-file, or stay on 127.0.0.1"
            )

    def executor_config(self) -> ExecutorConfig:
        """The part that an executor needs, if there is only one."""
        return ExecutorConfig(**{f.name: getattr(self, f.name) for f in fields(ExecutorConfig)})

    def resolved(self, cores: int, memory_mb: int | None = None) -> ServeConfig:
        """With numbers in place of zeros, and no call granted more memory than there is, on a machine that grants
        `cores` and `memory_mb`. Raises `ConfigError`."""
        shared: dict[str, Any] = resolve_capacity(self, cores)
        cores, slots = shared["cores"], shared["slots"]
        executors = self.executors or min(slots, -(-cores // CORES_PER_EXECUTOR))
        if slots < executors:
            raise ConfigError(f"slots={slots} for executors={executors}: expected a slot each; lower executors")
        max_limits = self.max_limits if memory_mb is None else within_memory(self.max_limits, memory_mb)
        return replace(self, **shared, executors=executors, max_limits=max_limits)

    def per_executor(self) -> list[ExecutorConfig]:
        """What each executor gets of cores, slots and warm interpreters, once these are resolved."""
        shares = zip(*(split_evenly(getattr(self, name), self.executors) for name in SPLIT_BY_EXECUTOR), strict=True)
        return [replace(self.executor_config(), **dict(zip(SPLIT_BY_EXECUTOR, share, strict=True))) for share in shares]


SPLIT_BY_EXECUTOR = ("cores", "slots", "long_slots", "zygote_pools")
"""Settings that are for all executors together."""
REMOVED_SETTINGS = {
    "gateways": "was removed: one server has one gateway; run several servers behind a TCP load balancer",
    "zygotes": "was renamed to zygote_pools",
}
"""Settings of earlier versions, with what the error message says about each."""


def resolve_capacity(config: ExecutorConfig | ServeConfig, cores: int) -> dict[str, int]:
    """The settings in `SPLIT_BY_EXECUTOR`, with numbers in place of zeros, on a machine that grants `cores`."""
    cores = config.cores or cores
    return {
        "cores": cores,
        "slots": config.slots or SLOTS_PER_CORE * cores,
        "long_slots": config.long_slots or max(LONG_SLOTS_PER_CORE * cores, MIN_LONG_SLOTS),
        "zygote_pools": config.zygote_pools or -(-cores // CORES_PER_ZYGOTE_POOL),
    }


def within_memory(limits: Limits, memory_mb: int) -> Limits:
    """No more than a machine of so much memory has; a call's least limit at the least."""
    return replace(limits, memory_mb=min(limits.memory_mb, max(memory_mb, int(LIMIT_FIELDS["memory_mb"].low))))


def split_evenly(total: int, parts: int) -> list[int]:
    """`total` in whole parts that differ by one at most; 0 stays 0, and nobody gets none of anything else."""
    return [max((total + n) // parts, min(total, 1)) for n in reversed(range(parts))]


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> ServeConfig:
    """Settings from all four sources. `flags` maps names of settings to text. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    if file is not None:
        values |= _with_token({name: (value, f"{file}: {name}") for name, value in _read_toml(file).items()})
    values |= _with_token(_from_environment(environ))
    values |= _with_token({name: (_read(name, text), f"--{flag_name(name)}") for name, text in flags.items()})
    ceilings = {name: values.pop(f"max_{name}") for name in LIMIT_FIELDS if f"max_{name}" in values}
    return ServeConfig(**values, max_limits=replace(DEFAULT_MAX_LIMITS, **ceilings))


def flag_name(name: str) -> str:
    """`queue_mb` as it is written on a command line."""
    return name.replace("_", "-")


def _settings_of(cls: type) -> dict[str, Setting]:
    return {f.name: f.metadata["setting"] for f in fields(cls) if "setting" in f.metadata}


def _ceiling(name: str, number: NumberRule) -> Setting:
    doc = f"ceiling for calls: {number.doc}"
    return Setting(doc, Range(number.low, number.high, number.whole))


SETTINGS: dict[str, Setting] = _settings_of(ServeConfig) | {
    f"max_{name}": _ceiling(name, number) for name, number in LIMIT_FIELDS.items()
}
"""Every setting of `serve` by name."""


def _with_token(layer: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """One source's values, checked; a token file becomes the token, so that a higher source wins whichever it used."""
    values = {name: _checked(value, _known(name, SETTINGS, where), where) for name, (value, where) in layer.items()}
    if "token_file" in values:
        values["token"] = _read_token(Path(values["token_file"]), layer["token_file"][1])
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found = {}
    for key, text in environ.items():
        bare = key.removeprefix(ENV_PREFIX)
        if bare == key or bare in CLIENT_ENV or _is_service_link(bare, text):
            continue
        name = bare.lower()
        found[name] = (_read(name, text), key)
    return found


def _is_service_link(bare: str, text: str) -> bool:
    """Kubernetes sets such variables in every pod beside a service that is named rstar-sandbox."""
    return bare.startswith(("SERVICE_", "PORT_")) or (bare == "PORT" and "://" in text)


def _read(name: str, text: str) -> Any:
    setting = SETTINGS.get(name)
    return setting.rule.parse(text) if setting else text


def _read_toml(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as why:
        raise ConfigError(f"--config {file}: cannot be read ({why.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as why:
        raise ConfigError(f"--config {file}: is not TOML ({why})") from None


def _read_token(file: Path, where: str) -> str:
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"{where}: expected a file with a token, but {file} cannot be read ({why})") from None
    if not token:
        raise ConfigError(f"{where}: expected a file with a token, but {file} is empty")
    return token


def _known(name: str, settings: Mapping[str, Setting], where: str) -> Setting:
    if name in settings:
        return settings[name]
    if name in REMOVED_SETTINGS:
        raise ConfigError(f"{where}: {REMOVED_SETTINGS[name]}")
    near = difflib.get_close_matches(name, settings, n=1)
    advice = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(settings)}"
    raise ConfigError(f"{where}: unknown setting; {advice}")


def _checked(value: Any, setting: Setting, where: str) -> Any:
    if not setting.rule.accepts(value):
        came = f"{value!r:.80}" if setting.is_flag else "something else"
        raise ConfigError(f"{where}: expected {setting.rule.expected}, got {came}")
    if isinstance(setting.rule, Range) and not setting.rule.whole:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
