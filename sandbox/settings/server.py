"""Settings of the server: one frozen object, from defaults < TOML file < environment < flags.

- A setting has the same name in every source: `queue_mb` in TOML, `RSTAR_SANDBOX_QUEUE_MB` in the environment,
  `--queue-mb`.
- A setting is declared once, at its field. Flags, checks, help and error messages use that declaration.
- An unknown name or a wrong value is a `ConfigError` with the name as its source spells it, the expected value and the
  received one.
- The token has no flag, because command lines are visible in `ps`, and `repr` omits it.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sandbox.errors import ConfigError
from sandbox.fields import NumberRule
from sandbox.settings.mounts import read_mounts
from sandbox.settings.profiles import PARENTS, OwnProfile, read_profiles
from sandbox.types import LIMIT_FIELDS, Limits

ENV_PREFIX = "RSTAR_SANDBOX_"
CLIENT_VARIABLES = ("URL",)
"""Variables with the prefix that only clients read. A server ignores them: it may be started from a client's shell."""
LOG_FORMATS = ("text", "json")

SLOTS_PER_CORE = 16
"""Calls per core that run at once. With 16, a core is busy even if some of its calls sleep or do I/O. With 8, each call
costs 10 % more CPU time, because fewer slots become free together and the gateway sends fewer calls in one message."""
CORES_PER_ZYGOTE_POOL = 2
"""Cores for which one zygote pool is started. A pool has one zygote, the process from which calls are forked, per
profile. A zygote forks one call at a time, and a fork takes a third of the CPU time of a small call. So a zygote can
keep about three cores busy. Each pool costs memory."""
LONG_SLOTS_PER_CORE = 32
"""Long calls per core that run in addition to short calls. A call is long once it has used `demote_after_ms`. Long
calls use only the CPU time that short calls leave, so their number is bounded only by memory and by descriptors
(`jail.max_slots_for_fds`)."""
MIN_LONG_SLOTS = 512
"""Minimum number of long slots. It suffices for the largest burst in docs/benchmarks.md: 50,000 calls, of which 1 %
(500) are endless loops."""
RESERVED_PART = 1 / 8
"""Number of reserved slots, as a fraction of the short slots. Only first calls may use a reserved slot: calls of a
small request of which no call runs (`gateway/calls/request_queue.py`). So they get a slot at once, even if another
request uses all short slots."""
CORES_PER_EXECUTOR = 8
"""Cores for which one executor is started. An executor has one thread, which spends a fraction of a millisecond on a
call; the call itself takes several milliseconds of a core."""

MAX_TOKEN_CHARS = 1 << 16
"""Maximum length of a token file, so that a wrong path (a device, a log) does not fill the memory."""
ISOLATION_LEVELS = ("nsjail", "namespaces", "landlock", "none")
"""All levels, the strongest first. `nsjail` and `namespaces` are equally strong."""
ZYGOTE_PROFILES = tuple(profile.value for profile in PARENTS)
"""Profiles that `--profiles` may name. `auto` is no profile of a zygote: it is resolved to one of these. The zygote of
`verify` is spawned on first use and needs no setting."""


@dataclass(frozen=True, slots=True)
class TextRule:
    """A setting that is text: one of `choices`, or any text if there are no choices."""

    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.choices)}" if self.choices else "text"

    @property
    def metavar(self) -> str:
        return "|".join(self.choices) or "TEXT"

    def parse(self, text: str) -> str:
        return text

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and bool(value) and (not self.choices or value in self.choices)

    def convert(self, value: Any) -> Any:
        return value


@dataclass(frozen=True, slots=True)
class NameListRule:
    """A setting that is a list of distinct names out of `choices`. In text, commas separate the names."""

    choices: tuple[str, ...]
    metavar = "NAMES"

    @property
    def expected(self) -> str:
        return f"a list of {', '.join(self.choices)}"

    def parse(self, text: str) -> list[str]:
        return [name.strip() for name in text.split(",")]

    def accepts(self, value: Any) -> bool:
        is_list = isinstance(value, (list, tuple)) and all(name in self.choices for name in value)
        return is_list and 0 < len(value) == len(set(value))

    def convert(self, value: Any) -> tuple[str, ...]:
        return tuple(value)


SETTING_GROUPS = {
    "listen": "the HTTP side",
    "queue": "waiting calls and results",
    "limits": "the maximum that a call may request; a higher limit is lowered to it",
    "isolation": "the jail around the calls",
    "cluster": "calls on other machines",
    "logs": "log lines on stderr",
    "tuning": "the defaults suit the machine",
}
"""Groups of settings in the order of `serve --help`, with their descriptions."""

SettingRule = TextRule | NameListRule | NumberRule


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting. `group` is its heading in `serve --help`; a secret setting has no flag."""

    group: str
    default: Any
    rule: SettingRule
    doc: str
    is_secret: bool = False

    def checked(self, value: Any, where: str) -> Any:
        """Return the value in its final type. Raises `ConfigError`; `where` names the setting as its source does."""
        if self.rule.accepts(value):
            return self.rule.convert(value)
        received = "something else" if self.is_secret else f"{value!r:.80}"  # a secret must not reach the log
        raise ConfigError(f"{where}: expected {self.rule.expected}, got {received}")


def _setting(group: str, default: Any, rule: SettingRule, doc: str, *, secret: bool = False) -> Any:
    setting = Setting(group, default, rule, doc, is_secret=secret)
    return field(default=default, metadata={"setting": setting}, repr=not secret)


def _text(group: str, default: str | None, doc: str, *choices: str, secret: bool = False) -> Any:
    """Declare a text: one of `choices`, or any text if there are none."""
    return _setting(group, default, TextRule(choices), doc, secret=secret)


def _count(group: str, default: int, low: int, high: int, doc: str) -> Any:
    """Declare a whole number from `low` to `high`. The arguments have the order of all declarations below: group,
    default, minimum, maximum, description."""
    return _setting(group, default, NumberRule(low, high), doc)


def _number(group: str, default: float, low: float, high: float, doc: str) -> Any:
    """Declare a number from `low` to `high`."""
    return _setting(group, default, NumberRule(low, high, whole=False), doc)


@dataclass(frozen=True)
class ExecutorConfig:
    """The settings that executors receive. In a `ServeConfig`, the numbers of `SPLIT_BY_EXECUTOR` are for all executors
    together, and `ServeConfig.per_executor` divides them."""

    python: str | None = _text("isolation", None, "Python that runs the calls (default: the guest runtime)")
    isolation: str = _text(
        "isolation",
        "auto",
        "isolation level; auto: the strongest level that this machine supports",
        "auto",
        *ISOLATION_LEVELS,
    )
    cores: int = _count("tuning", 0, 0, 4096, "cores to plan for; 0: all cores that the machine and its cgroups grant")
    zygote_pools: int = _count(
        "tuning",
        0,
        0,
        4096,
        "zygote pools (one zygote per profile each), for all executors together; "
        f"0: one per {CORES_PER_ZYGOTE_POOL} cores",
    )
    slots: int = _count(
        "tuning",
        0,
        0,
        100_000,
        f"calls running at once, for all executors together; 0: {SLOTS_PER_CORE} per core",
    )
    long_slots: int = _count(
        "tuning",
        0,
        0,
        100_000,
        "long calls running in addition to --slots, for all executors together; "
        f"0: {LONG_SLOTS_PER_CORE} per core, at least {MIN_LONG_SLOTS}",
    )
    sessions: int = _count(
        "tuning", 256, 0, 100_000, "sessions open at once, for all executors together; each has its own slot"
    )
    demote_after_ms: float = _number(
        "tuning",
        100.0,
        1,
        1e9,
        "milliseconds of virtual time (waiting for a core does not count) after which a call is long: it then runs at "
        "a lower CPU priority",
    )
    profiles: tuple[str, ...] = _setting(
        "tuning",
        ZYGOTE_PROFILES,
        NameListRule(ZYGOTE_PROFILES),
        "built-in profiles that each zygote pool keeps a zygote for",
    )
    attempts: int = _count("tuning", 3, 1, 100, "times that a call is started in all, if its zygote or executor dies")
    log_format: str = _text("logs", "text", "format of log lines; json: one JSON object per line", *LOG_FORMATS)
    own_profiles: tuple[OwnProfile, ...] = ()
    """Profiles of the TOML file, each after the one that it extends. Each pool keeps a zygote for each."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Directories that calls can read: path that calls see, path on the host."""

    def encode(self) -> dict[str, Any]:
        """Return the executor's settings as a mapping for msgpack or JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(ExecutorConfig)}
        return {**values, "own_profiles": [profile.encode() for profile in self.own_profiles]}

    @staticmethod
    def decode(raw: Mapping[str, Any]) -> ExecutorConfig:
        """Invert `encode`. Raises `ConfigError`."""
        values, settings = dict(raw), _settings_of(ExecutorConfig)
        if values.get("python") is None:  # the only setting here whose default is None, which its rule does not accept
            values.pop("python", None)
        own_profiles = tuple(OwnProfile.decode(profile) for profile in values.pop("own_profiles", ()))
        mounts = tuple((path, source) for path, source in values.pop("mounts", ()))
        checked = {name: _find(name, settings, where=name).checked(value, where=name) for name, value in values.items()}
        return ExecutorConfig(**checked, own_profiles=own_profiles, mounts=mounts)


DEFAULT_MAX_LIMITS = Limits(timeout_s=300.0, memory_mb=16384, output_kb=16384, processes=1024, disk_mb=4096)


@dataclass(frozen=True, slots=True)
class Worker:
    """What a server with several workers tells each of them."""

    number: int
    """0 to `workers` - 1."""
    directory: str
    """Private directory with the workers' own sockets."""


@dataclass(frozen=True)
class ServeConfig(ExecutorConfig):
    """The settings of `rstar-sandbox serve`. Raises `ConfigError` if settings contradict each other."""

    host: str = _text("listen", "127.0.0.1", "address to listen on; other than loopback requires a token")
    port: int = _count("listen", 8642, 0, 65535, "port to listen on; 0: a free port")
    token: str | None = _text(
        "listen", None, "token that clients must send as 'Authorization: Bearer TOKEN'", secret=True
    )
    token_file: str | None = _text("listen", None, "file that contains the token")
    tenants: str | None = _text(
        "listen", None, "TOML file with a token and bounds for each tenant; SIGHUP makes the server read it again"
    )
    connections: int = _count("listen", 16_384, 1, 1_000_000, "open connections; more get 503")
    body_mb: int = _count("listen", 256, 1, 100_000, "MiB of one request body")
    stall_s: float = _number("listen", 30.0, 0.01, 1e6, "seconds a client may take to send or read 256 KiB")
    drain_s: float = _number("listen", 30.0, 0, 1e6, "seconds that running calls get when the server stops")
    queue_calls: int = _count("queue", 100_000, 1, 100_000_000, "calls waiting or running; more get 429")
    queue_mb: int = _count("queue", 1024, 1, 10_000_000, "MiB of waiting and running calls; more get 429")
    tenant_share: float = _number("queue", 0.9, 0.01, 1, "fraction of queue_calls and queue_mb that one tenant may use")
    queue_timeout_s: float = _number(
        "queue", 7200.0, 0.01, 1e6, "seconds a call may wait for a slot before it gets status unavailable"
    )
    batch_calls: int = _count("queue", 65_536, 1, 10_000_000, "calls in one batch")
    results_mb: int = _count("queue", 1024, 1, 10_000_000, "MiB of results kept for clients that read slowly")
    access_log: str = _text("logs", "off", "log a line for each request", "on", "off")
    executors: int = _count("tuning", 0, 0, 1024, f"executor processes; 0: one per {CORES_PER_EXECUTOR} cores")
    workers: int = _count("tuning", 1, 1, 1024, "complete servers behind the port, each with its share of everything")
    cluster: str | None = _text(
        "cluster",
        None,
        "run the calls on the nodes of a Ray cluster. ray or ray=auto: this machine's cluster, which is started if "
        "there is none; ray=HOST:PORT: the cluster with this head. The settings of executors, such as slots, then "
        "apply to each node separately",
    )
    cluster_min_isolation: str = _text(
        "cluster",
        "landlock",
        "weakest isolation level that a node may have, if --isolation is auto",
        *ISOLATION_LEVELS,
    )
    max_limits: Limits = DEFAULT_MAX_LIMITS
    isolation_reason: str = ""
    """With `isolation` auto: the reason why no stronger level was chosen. Empty if the strongest level was chosen."""
    worker: Worker | None = None
    """None if the server has one worker."""

    def __post_init__(self) -> None:
        if self.workers > 1 and (self.tenants is not None or self.cluster is not None):
            raise ConfigError(
                f"workers={self.workers}: cannot be combined with --tenants and --cluster, whose bounds and nodes "
                "belong to one server; omit --workers"
            )
        if not self.needs_token and not _is_loopback(self.host):  # `load` has read the token of `token_file`
            raise ConfigError(
                f"host={self.host} can be reached from other machines and needs a token; "
                f"set {ENV_PREFIX}TOKEN, --token-file or --tenants, or stay on 127.0.0.1"
            )
        if self.cluster is not None and not re.fullmatch(r"ray(=(auto|\S+:\d+))?", self.cluster):
            raise ConfigError(f"cluster={self.cluster}: expected ray, ray=auto or ray=HOST:PORT")

    @property
    def needs_token(self) -> bool:
        """Whether requests must carry a token: the server's token or the token of a tenant."""
        return self.token is not None or self.tenants is not None

    @property
    def ray_address(self) -> str:
        """Address of the Ray cluster: HOST:PORT, or "auto" for the cluster of this machine."""
        return (self.cluster or "").partition("=")[2] or "auto"

    def executor_config(self) -> ExecutorConfig:
        """Return the settings of a server's only executor."""
        return ExecutorConfig(**{f.name: getattr(self, f.name) for f in fields(ExecutorConfig)})

    def resolved(self, cores: int, memory_mb: int | None = None) -> ServeConfig:
        """Return settings with zeros replaced by the numbers for a machine that grants `cores`, and with the memory
        limit of a call lowered to `memory_mb`. Raises `ConfigError`."""
        capacity: dict[str, Any] = resolve_capacity(self, cores)
        slots = capacity["slots"]
        executors = self.executors or min(slots, math.ceil(capacity["cores"] / CORES_PER_EXECUTOR))
        if slots < executors:
            raise ConfigError(f"slots={slots} for executors={executors}: expected a slot each; lower executors")
        max_limits = self.max_limits if memory_mb is None else within_memory(self.max_limits, memory_mb)
        return replace(self, **capacity, executors=executors, max_limits=max_limits)

    def per_worker(self, cores: int) -> list[ServeConfig]:
        """Divide the settings, for a machine that grants `cores`, among the workers. Raises `ConfigError`."""
        resolved, names = self.resolved(cores), SPLIT_BY_WORKER
        if resolved.cores < self.workers:
            raise ConfigError(f"workers={self.workers} for cores={resolved.cores}: expected a core each; lower workers")
        shares = zip(*(split_evenly(getattr(resolved, name), self.workers) for name in names), strict=True)
        workers = [replace(resolved, **dict(zip(names, share, strict=True))) for share in shares]
        # No larger batch would ever be admitted.
        return [replace(w, batch_calls=min(w.batch_calls, int(w.queue_calls * w.tenant_share) or 1)) for w in workers]

    def per_executor(self) -> list[ExecutorConfig]:
        """Divide resolved settings among the executors."""
        shares = zip(*(split_evenly(getattr(self, name), self.executors) for name in SPLIT_BY_EXECUTOR), strict=True)
        return [replace(self.executor_config(), **dict(zip(SPLIT_BY_EXECUTOR, share, strict=True))) for share in shares]


SPLIT_BY_EXECUTOR = ("cores", "slots", "long_slots", "sessions", "zygote_pools")
"""Settings that are given for all executors together and are divided among them."""
SPLIT_BY_WORKER = (*SPLIT_BY_EXECUTOR, "executors", "connections", "queue_calls", "queue_mb", "results_mb")
"""Settings that are given for all workers together and are divided among them."""
TABLES = {"mounts": "[mounts]", "profiles": "[profiles.NAME]"}
"""Tables of the TOML file by name. `profiles` is also a setting."""


def resolve_capacity(config: ExecutorConfig, cores: int) -> dict[str, int]:
    """Return the settings of `SPLIT_BY_EXECUTOR` with numbers in place of zeros, for a machine that grants `cores`."""
    cores = config.cores or cores
    return {
        "cores": cores,
        "slots": config.slots or SLOTS_PER_CORE * cores,
        "long_slots": config.long_slots or max(LONG_SLOTS_PER_CORE * cores, MIN_LONG_SLOTS),
        "sessions": config.sessions,
        "zygote_pools": config.zygote_pools or math.ceil(cores / CORES_PER_ZYGOTE_POOL),
    }


def reserved_slots(slots: int) -> int:
    """Return the number of reserved slots, which exist in addition to `slots` short ones."""
    return int(slots * RESERVED_PART)


def within_memory(limits: Limits, memory_mb: int) -> Limits:
    """Lower `memory_mb` of the limits to the machine's memory, but not below the minimum of a call."""
    return replace(limits, memory_mb=min(limits.memory_mb, max(memory_mb, int(LIMIT_FIELDS["memory_mb"].low))))


def split_evenly(total: int, parts: int) -> list[int]:
    """Split `total` into whole parts that differ by at most 1. Each part is at least 1 unless `total` is 0."""
    return [max((total + n) // parts, min(total, 1)) for n in reversed(range(parts))]


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> ServeConfig:
    """Read the settings from all sources. `flags` maps names of settings to text. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    toml = _read_toml(file) if file else {}
    if file and isinstance(toml.get("profiles"), dict):  # else it is the setting `profiles`, a list
        values["own_profiles"] = read_profiles(toml.pop("profiles"), file)
    if file and "mounts" in toml:
        values["mounts"] = read_mounts(toml.pop("mounts"), file)
    from_toml = ((name, value, f"{file}: {name}") for name, value in toml.items())
    for source in (from_toml, _from_environment(environ), _from_flags(flags)):
        checked = {name: (_find(name, SETTINGS, where).checked(value, where), where) for name, value, where in source}
        values |= {name: value for name, (value, _) in checked.items()}
        if "token_file" in checked:  # read here, so that a token from a later source replaces the file's
            values["token"] = read_token(*checked["token_file"])
    max_limits = {name: values.pop(f"max_{name}") for name in LIMIT_FIELDS if f"max_{name}" in values}
    return ServeConfig(**values, max_limits=replace(DEFAULT_MAX_LIMITS, **max_limits))


def weakness(isolation: str) -> int:
    """Return the rank of an isolation level: 0 is the strongest. An unknown level is the weakest."""
    return ISOLATION_LEVELS.index(isolation) if isolation in ISOLATION_LEVELS else len(ISOLATION_LEVELS)


def flag_name(name: str) -> str:
    """Return the name of a setting as its flag spells it: `queue-mb` for `queue_mb`."""
    return name.replace("_", "-")


def _settings_of(cls: type) -> dict[str, Setting]:
    return {f.name: f.metadata["setting"] for f in fields(cls) if "setting" in f.metadata}


SETTINGS: dict[str, Setting] = _settings_of(ServeConfig) | {
    f"max_{name}": Setting("limits", getattr(DEFAULT_MAX_LIMITS, name), rule, f"maximum per call: {rule.doc}")
    for name, rule in LIMIT_FIELDS.items()
}
"""All settings of `serve` by name."""

_Values = Iterator[tuple[str, Any, str]]
"""Name of a setting, its value, and the source's spelling of the name, for error messages."""


def _read_toml(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # tomllib raises these two for long numbers and deep nesting
        raise ConfigError(f"--config {file}: is not TOML ({error})") from None


def _from_environment(environ: Mapping[str, str]) -> _Values:
    for key, text in environ.items():
        name = key.removeprefix(ENV_PREFIX)
        if name != key and name not in CLIENT_VARIABLES and not _is_service_link(name, text):
            yield name.lower(), _parse(name.lower(), text), key


def _from_flags(flags: Mapping[str, str]) -> _Values:
    return ((name, _parse(name, text), f"--{flag_name(name)}") for name, text in flags.items())


def _is_service_link(name: str, text: str) -> bool:
    """Return whether this is one of the variables that Kubernetes sets in every pod for a service named
    rstar-sandbox."""
    return name.startswith(("SERVICE_", "PORT_")) or (name == "PORT" and "://" in text)


def _parse(name: str, text: str) -> Any:
    return SETTINGS[name].rule.parse(text) if name in SETTINGS else text


def read_token(file: str, where: str) -> str:
    """Return the token in a file. Raises `ConfigError`; `where` names the setting as its source does."""
    try:
        with Path(file).open(encoding="utf-8") as opened:
            token = opened.read(MAX_TOKEN_CHARS + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: expected a file with a token, but {file} cannot be read ({error})") from None
    if len(token) > MAX_TOKEN_CHARS:
        raise ConfigError(f"{where}: expected a token of at most {MAX_TOKEN_CHARS} characters, but {file} is longer")
    token = token.strip()
    if not token:
        raise ConfigError(f"{where}: expected a file with a token, but {file} is empty")
    return token


def _find(name: str, settings: Mapping[str, Setting], where: str) -> Setting:
    """Return the setting `name`. Raises `ConfigError`; `where` names the setting as its source does."""
    if name in settings:
        return settings[name]
    if name in TABLES:
        raise ConfigError(f"{where}: is the table {TABLES[name]} of the TOML file; use --config FILE")
    shown = {setting: setting for setting in settings} | TABLES
    near = difflib.get_close_matches(name, shown, n=1)
    tables = f"; the tables of the TOML file are {', '.join(TABLES.values())}"
    advice = f"did you mean {shown[near[0]]}?" if near else f"the settings are {', '.join(settings)}{tables}"
    raise ConfigError(f"{where}: unknown setting; {advice}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
