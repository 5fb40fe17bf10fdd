"""Settings of a run: one frozen tree, from defaults < TOML or JSON file < environment < `--set`.

Invariants:
- A setting has one name everywhere: `stages.rl1.steps` is a key of the file, `--set stages.rl1.steps=3`, and
  RSTAR_TRAIN_STAGES__RL1__STEPS. A key of `[rl]` holds for every stage that does not say its own.
- A setting is described once, on its field: kind, bounds and help come from there.
- An unknown name or a bad value is a `ConfigError` that says where it stood, what was expected and what came.
- `RunConfig.to_dict` is what `load` reads back as an equal tree: a run's config.json is a config file.

Nothing here is read from a model, a data set or a machine.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

ENV_PREFIX = "RSTAR_TRAIN_"
ENV_DOT = "__"
"""What a dot is in the name of a variable."""
MANY = 1_000_000_000


class ConfigError(ValueError):
    """Settings that cannot be used. The message says where, what was expected and what came."""


def _text(default: str, doc: str, *choices: str) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


def _number(default: float, low: float, doc: str, high: float = MANY) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high})


def _size(doc: str) -> Any:
    return field(metadata={"doc": doc, "low": 1, "high": MANY})


def _other(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Shape:
    """The model's sizes for `--dry-run`, as in its config.json. To be stated where that file is not at hand."""

    layers: int = _size("decoder layers")
    hidden: int = _size("width of the residual stream")
    intermediate: int = _size("width of the gated MLP")
    heads: int = _size("query heads")
    kv_heads: int = _size("key and value heads")
    head_dim: int = _size("width of a head")
    vocab: int = _size("rows of the embedding")
    is_tied: bool = _other(False, "whether the output layer is the embedding")


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    path: str = _text("tiny", "folder or hub name; 'tiny' is generated from the seed")
    dtype: str = _text("bfloat16", "of the weights that sample and train", "float32", "bfloat16")
    chat: str = _text("rstar2", "the prompt's form: rStar2's, or the tokenizer's own template", "rstar2", "own")
    preamble: str = _text("", "what the system message says instead of the chat's own; empty is the chat's own")
    shape: Shape | None = None
    """Sizes, where they cannot be read from the model's folder."""


@dataclass(frozen=True)
class SandboxConfig:
    """Where tool calls and reward checks go."""

    endpoints: tuple[str, ...] = _other(
        (), "URLs of services, [1-8] counting; none starts one for as long as a command runs"
    )
    timeout_s: float = _number(4.0, 0.01, "seconds of its own clock that a call gets", 300)
    memory_mb: int = _number(512, 16, "MiB that a call gets")


@dataclass(frozen=True)
class EnginesConfig:
    """What samples."""

    kind: str = _text("local", "in this process, or vLLM over HTTP", "local", "vllm")
    endpoints: tuple[str, ...] = _other((), "URLs of vLLM servers, [1-8] counting; none starts `count` of them")
    count: int = _number(1, 1, "vLLM servers to start on this machine", 1024)
    python: str = _text("", "Python that has vllm, to start servers with; empty is this one")
    slots: int = _number(64, 1, "sequences that one engine runs at once", 65536)
    max_length: int = _number(16384, 16, "tokens of prompt and response that an engine takes")
    sync: str = _text("file", "how new weights travel: a shared folder, or NCCL/RCCL", "file", "nccl")
    tensor_parallel: int = _number(1, 1, "GPUs of one engine", 64)
    gpu_memory: float = _number(0.9, 0.01, "part of a GPU's memory that an engine takes", 1)
    timeout_s: float = _number(600.0, 1, "seconds for one generation before its engine counts as hung")


@dataclass(frozen=True)
class HardwareConfig:
    """What trains. Engines share its GPUs, or have `engine_gpus` of their own."""

    nodes: int = _number(1, 1, "machines that train", 4096)
    gpus: int = _number(0, 0, "GPUs of each that train; 0 trains on the CPU", 64)
    gpu_gb: float = _number(0.0, 0, "GB (10^9 bytes) of memory of one GPU", 10_000)
    engine_gpus: int = _number(0, 0, "GPUs for engines alone, of all machines; 0 is the same ones")
    sharding: str = _text("none", "of weights, gradients and optimizer states", "none", "full")
    launch: tuple[str, ...] = _other((), "what runs a training command, such as torchrun and its arguments")


@dataclass(frozen=True)
class DataConfig:
    """Problems to train on: files, hub names, or 'generated:N'."""

    train: tuple[str, ...] = _other(("generated:2048",), "sources")
    against: tuple[str, ...] = _other((), "sources whose 8-grams must not occur in the training problems")
    is_integer_only: bool = _other(True, "whether only problems with an integer as their answer are kept")


@dataclass(frozen=True)
class SftConfig:
    """The start: tool format and instruction following, no reasoning (the paper's section 4)."""

    data: tuple[str, ...] = _other((), "conversations, or 'generated:N'; none leaves the stage out")
    epochs: float = _number(3.0, 0.001, "times through the data", 1000)
    lr: float = _number(5e-6, 0, "peak learning rate, cosine to 0", 1)
    warmup: float = _number(0.04, 0, "part of the steps in which the rate rises", 1)
    batch: int = _number(128, 1, "conversations per step")
    micro_batch: int = _number(8, 1, "conversations per device in one pass", 65536)
    max_length: int = _number(8192, 16, "tokens of a conversation; longer ones are left out")
    save_steps: int = _number(100, 1, "steps between checkpoints")


@dataclass(frozen=True)
class StageConfig:
    """A stage of reinforcement learning. Defaults are the paper's (sections 2.2, 5.1), but for the sizes."""

    name: str = _text("", "its key")
    steps: int = _number(100, 1, "optimizer steps")
    max_tokens: int = _number(8192, 1, "response tokens, tool responses included")
    max_turns: int = _number(10, 1, "turns of an episode", 10_000)
    tool_chars: int = _number(4096, 16, "characters of a tool response before it is cut")
    data: tuple[str, ...] = _other((), "sources; none is [data] train")
    drop_solved: int = _number(
        0, 0, "samples per problem, taken before the stage; all right drops it. 0 filters nothing", 1024
    )
    reset_optimizer: bool = _other(False, "start with fresh optimizer states")
    prompts: int = _number(512, 1, "problems per step", 1_000_000)
    samples: int = _number(32, 2, "rollouts per problem, the paper's 2G", 4096)
    keep: int = _number(16, 2, "rollouts kept of those, G", 4096)
    select: str = _text(
        "paper", "resample on correct: the paper's, the public code's, or keep all", "paper", "released", "all"
    )
    temperature: float = _number(1.0, 0.01, "of sampling", 10)
    top_p: float = _number(1.0, 0.01, "of sampling", 1)
    lr: float = _number(1e-6, 0, "learning rate, constant after the warm-up", 1)
    warmup_steps: int = _number(20, 0, "steps in which the rate rises")
    epsilon_low: float = _number(0.2, 0, "how far down a ratio may go", 1)
    epsilon_high: float = _number(0.28, 0, "how far up", 10)
    max_grad_norm: float = _number(1.0, 0, "gradients are scaled down to it")
    micro_batch: int = _number(8, 1, "rollouts per device in one pass", 65536)
    is_checkpointing: bool = _other(False, "recompute activations in the backward pass")
    save_steps: int = _number(10, 1, "steps between checkpoints")

    def __post_init__(self) -> None:
        here = f"stages.{self.name}"
        if self.keep > self.samples:
            raise ConfigError(f"{here}: keep={self.keep} of samples={self.samples}: expected no more; lower keep")
        if self.select == "all" and self.keep != self.samples:
            raise ConfigError(
                f"{here}: select=all with keep={self.keep} and samples={self.samples}: expected them equal, as "
                "nothing is dropped; set both to one number, or select to paper"
            )


@dataclass(frozen=True)
class EvaluateConfig:
    """How accuracy is measured after SFT and after each stage, always on the same problems."""

    data: tuple[str, ...] = _other(("generated:256",), "sources; generated ones never occur in training")
    samples: int = _number(1, 1, "episodes per problem, the k of avg@k", 1024)
    temperature: float = _number(1.0, 0.01, "of sampling", 10)
    top_p: float = _number(1.0, 0.01, "of sampling", 1)
    max_tokens: int = _number(0, 0, "response tokens; 0 is the most that a stage has")
    max_turns: int = _number(0, 0, "turns; 0 is the most that a stage has", 10_000)


@dataclass(frozen=True)
class TrackConfig:
    """Where metrics go besides the run's folder."""

    to: tuple[str, ...] = _other((), "any of trackio, wandb, tensorboard")
    project: str = _text("rstar-train", "their project")
    has_logprobs: bool = _other(False, "whether episodes are written with their log-probabilities")


@dataclass(frozen=True)
class RunConfig:
    """Everything that `rstar-train` can be told."""

    seed: int = _number(0, 0, "all that is random follows from it", 2**31 - 1)
    run_dir: str = _text("runs/run", "the run's folder")
    model: ModelConfig = field(default_factory=ModelConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    engines: EnginesConfig = field(default_factory=EnginesConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    stages: tuple[StageConfig, ...] = ()
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        wanted = {f"stages.{stage.name}": stage.max_tokens for stage in self.stages}
        for where, tokens in {**wanted, "evaluate": self.evaluate.max_tokens}.items():
            if tokens >= self.engines.max_length:
                raise ConfigError(
                    f"{where}: max_tokens={tokens} with engines.max_length={self.engines.max_length}: expected less, "
                    "as the prompt takes some; raise engines.max_length"
                )

    def stage(self, name: str) -> StageConfig:
        """The stage of that name. Raises `ConfigError`."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(f"stage {name!r}: {_advice(name, [stage.name for stage in self.stages])}")

    def to_dict(self) -> dict[str, Any]:
        """As nested mappings fit for JSON, which `load` reads back."""
        tree = {name: value for name, value in asdict(self).items() if value is not None}
        tree["model"] = {name: value for name, value in tree["model"].items() if value is not None}
        tree["stages"] = {stage.pop("name"): stage for stage in tree["stages"]}
        return tree


class _Said(NamedTuple):
    """A value as a source gave it, and where it stood."""

    value: Any
    where: str
    is_text: bool


def urls(endpoints: Sequence[str]) -> tuple[str, ...]:
    """`endpoints` with every [1-8] in them counted out, as lists of hosts are often written."""
    counted: list[str] = []
    for text in endpoints:
        if found := re.search(r"\[(\d+)-(\d+)\]", text):
            low, high = found.groups()
            numbers = [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
            counted += urls([text[: found.start()] + number + text[found.end() :] for number in numbers])
        else:
            counted.append(text)
    return tuple(counted)


def load(file: Path | None, environ: Mapping[str, str], sets: Sequence[str] = ()) -> RunConfig:
    """Settings from all sources; `file` may be a run's folder, `sets` are `path.to.key=value`. Raises `ConfigError`."""
    if file is not None and file.is_dir():
        file /= "config.json"
    tree = _read(file) if file is not None else {}
    said = _flat(tree, str(file))
    stages = tree["stages"] if isinstance(tree.get("stages"), dict) else {}
    for path, one in [*_from_environment(environ), *_from_sets(sets)]:
        if path[0] == "stages" and len(path) > 1 and path[1] not in stages:
            raise ConfigError(f"{one.where}: no such stage; {_advice(path[1], list(stages))}")
        said[path] = one
    common = {path[1:]: said.pop(path) for path in list(said) if path[0] == "rl"}
    _build(StageConfig, common)  # so that a mistake in [rl] is seen where no stage inherits it
    for name in stages:  # in the file's order, whichever of them say something of their own
        own = {path: said.pop(path) for path in list(said) if path[:2] == ("stages", name)}
        inherited = {("stages", name, *path): one for path, one in common.items()}
        said |= {**inherited, **own, ("stages", name, "name"): _Said(name, f"{file}: stages", is_text=True)}
    config: RunConfig = _build(RunConfig, said)
    return config


def _build(cls: type[Any], said: Mapping[tuple[str, ...], _Said]) -> Any:
    """A `cls` from what was said of it, by path below it."""
    known, kinds, below = {f.name: f for f in fields(cls)}, _kinds(cls), _by_name(said)
    for name, part in below.items():
        where = next(iter(part.values())).where
        if not name:
            raise ConfigError(f"{where}: expected a table, got {part[()].value!r:.80}")
        if name not in known:
            raise ConfigError(
                f"{where}: unknown setting; {_advice(name, [*known, 'rl'] if cls is RunConfig else known)}"
            )
    missing = [
        f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING and f.name not in below
    ]
    if missing:
        raise ConfigError(f"{next(iter(said.values())).where}: expected {', '.join(missing)} beside it")
    return cls(**{name: _value(kinds[name], known[name].metadata, part) for name, part in below.items()})


def _value(kind: Any, rule: Mapping[str, Any], said: Mapping[tuple[str, ...], _Said]) -> Any:
    is_table = kind == tuple[StageConfig, ...] or is_dataclass(kind)
    for path, one in said.items():
        if is_table != bool(path):
            raise ConfigError(f"{one.where}: expected a {'table' if is_table else 'value'}, got {one.value!r:.80}")
    if kind == tuple[StageConfig, ...]:
        return tuple(_build(StageConfig, stage) for stage in _by_name(said).values())
    return _build(kind, said) if is_table else _checked(kind, rule, said[()])


def _by_name(said: Mapping[tuple[str, ...], _Said]) -> dict[str, dict[tuple[str, ...], _Said]]:
    below: dict[str, dict[tuple[str, ...], _Said]] = {}
    for path, one in said.items():
        below.setdefault(path[0] if path else "", {})[path[1:]] = one
    return below


def _checked(kind: Any, rule: Mapping[str, Any], one: _Said) -> Any:
    value = _literal(one.value) if one.is_text and kind is not str else one.value
    if kind is float and type(value) is int:
        value = float(value)
    if kind == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    low, high, choices = rule.get("low", -MANY), rule.get("high", MANY), rule.get("choices", ())
    is_number = kind in (int, float)
    if type(value) is not kind or (is_number and not low <= value <= high) or (choices and value not in choices):
        expected = {bool: "true or false", str: "text", tuple[str, ...]: 'a list such as ["a", "b"]'}.get(kind, "")
        if is_number:
            expected = f"a{' whole' if kind is int else ''} number from {low:.12g} to {high:.12g}"
        if choices:
            expected = f"one of {', '.join(choices)}"
        raise ConfigError(f"{one.where}: expected {expected}, got {value!r:.80}")
    return value


def _literal(text: str) -> Any:
    """What a file would have said by `text`; text itself where that is nothing."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        tree = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as why:
        raise ConfigError(f"{file}: cannot be read ({why.strerror})") from None
    except ValueError as why:
        raise ConfigError(f"{file}: expected {'JSON' if file.suffix == '.json' else 'TOML'} ({why})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a table of settings, got {type(tree).__name__}")
    written = tree.get("config") if file.suffix == ".json" else None  # as `trainer.record` writes it
    return written if isinstance(written, dict) else tree


def _flat(tree: Mapping[str, Any], file: str, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], _Said]:
    said: dict[tuple[str, ...], _Said] = {}
    for name, value in tree.items():
        path = (*above, name)
        if isinstance(value, dict):
            said |= _flat(value, file, path)
        else:
            said[path] = _Said(value, f"{file}: {'.'.join(path)}", is_text=False)
    return said


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], _Said]]:
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX):
            path = tuple(name.removeprefix(ENV_PREFIX).lower().split(ENV_DOT))
            yield path, _Said(text, name, is_text=True)


def _from_sets(sets: Iterable[str]) -> Iterator[tuple[tuple[str, ...], _Said]]:
    for text in sets:
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: expected path.to.key=value")
        yield tuple(path.strip().split(".")), _Said(value.strip(), f"--set {path.strip()}", is_text=True)


def _kinds(cls: type[Any]) -> dict[str, Any]:
    """The type of each field, `X` for `X | None`."""
    hints = get_type_hints(cls)
    return {
        name: next(part for part in get_args(hint) if part is not type(None)) if type(None) in get_args(hint) else hint
        for name, hint in hints.items()
    }


def _advice(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, (names := list(known)), n=1)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names) or 'none'}"
