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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast, get_type_hints

from trainer.scheduler import POLICIES

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


def _other(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Shape:
    """The model's sizes for `--dry-run`, as in its config.json. To be stated, all, where that file is not at hand."""

    layers: int = _number(0, 0, "decoder layers")
    hidden: int = _number(0, 0, "width of the residual stream")
    intermediate: int = _number(0, 0, "width of the gated MLP")
    heads: int = _number(0, 0, "query heads")
    kv_heads: int = _number(0, 0, "key and value heads")
    head_dim: int = _number(0, 0, "width of a head")
    vocab: int = _number(0, 0, "rows of the embedding")
    is_tied: bool = _other(False, "whether the output layer is the embedding")

    def __post_init__(self) -> None:
        missing = [name for name, size in asdict(self).items() if name != "is_tied" and not size]
        if 0 < len(missing) < len(fields(self)) - 1:
            raise ConfigError(f"model.shape: expected {', '.join(missing)} beside the others")


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    path: str = _text("tiny", "folder or hub name; 'tiny' is generated from the seed")
    dtype: str = _text("bfloat16", "of the weights that sample and train", "float32", "bfloat16")
    chat: str = _text("rstar2", "the prompt's form: rStar2's, or the tokenizer's own template", "rstar2", "own")
    preamble: str = _text("", "what the system message says instead of the chat's own; empty is the chat's own")
    shape: Shape = field(default_factory=Shape)


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
    timeout_s: float = _number(600.0, 1, "seconds for one generation; more where the engine's usual speed asks for it")
    policy: str = _text("kv", "where a turn runs; others are to compare with", *POLICIES)


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
        here = f"stages.{self.name}" if self.name else "rl"
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
        return {**asdict(self), "stages": {stage.name: asdict(stage) for stage in self.stages}}


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


class _Said(NamedTuple):
    """A value as a source gave it, and where it stood."""

    value: Any
    where: str
    is_text: bool = False


_Table = dict[str, Any]
"""Of tables and `_Said`."""


def load(file: Path | None, environ: Mapping[str, str], sets: Sequence[str] = ()) -> RunConfig:
    """Settings from all sources; `file` may be a run's folder, `sets` are `path.to.key=value`. Raises `ConfigError`."""
    if file is not None and file.is_dir():
        file /= "config.json"
    tree = _marked(_read(file), f"{file}: ") if file is not None else {}
    stages = tree.get("stages")
    names = list(stages) if isinstance(stages, dict) else []
    for path, one in [*_from_environment(environ), *_from_sets(sets)]:
        if path[0] == "stages" and len(path) > 1 and path[1] not in names:
            raise ConfigError(f"{one.where}: no such stage; {_advice(path[1], names)}")
        _put(tree, path, one)
    common = tree.pop("rl", {})
    _build(StageConfig, common)  # so that a mistake in [rl] is seen where no stage inherits it
    if isinstance(stages := tree.get("stages"), dict):
        for name, own in stages.items():
            if isinstance(own, dict):
                stages[name] = {**common, **own, "name": _Said(name, f"{file}: stages")}
    config: RunConfig = _build(RunConfig, tree)
    return config


def _build(cls: type[Any], table: Any) -> Any:
    """A `cls` of what was said of it."""
    if isinstance(table, _Said):
        raise ConfigError(f"{table.where}: expected a table, got {table.value!r:.80}")
    known, kinds = {f.name: f.metadata for f in fields(cls)}, get_type_hints(cls)
    for name, said in table.items():
        if name not in known:
            advice = _advice(name, [*known, "rl"] if cls is RunConfig else known)
            raise ConfigError(f"{_where(said) or name}: unknown setting; {advice}")
    return cls(**{name: _value(kinds[name], known[name], said) for name, said in table.items()})


def _value(kind: Any, rule: Mapping[str, Any], said: Any) -> Any:
    if kind == tuple[StageConfig, ...]:
        tables = said.values() if isinstance(said, dict) else [said]
        return tuple(_build(StageConfig, table) for table in tables)
    if is_dataclass(kind):
        return _build(cast(type[Any], kind), said)
    if isinstance(said, dict):
        raise ConfigError(f"{_where(said)}: expected a value, got a table")
    value = _literal(said.value) if said.is_text and kind is not str else said.value
    if kind is float and type(value) is int:
        value = float(value)
    if kind == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    expected, holds = _rule(kind, rule)
    if type(value) is not kind or not holds(value):
        raise ConfigError(f"{said.where}: expected {expected}, got {value!r:.80}")
    return value


def _rule(kind: Any, rule: Mapping[str, Any]) -> tuple[str, Callable[[Any], bool]]:
    """What values are expected, in words and as a test of those that have the kind."""
    if "low" in rule:
        low, high = rule["low"], rule["high"]
        return f"a{' whole' * (kind is int)} number from {low:.12g} to {high:.12g}", lambda value: low <= value <= high
    if choices := rule.get("choices"):
        return f"one of {', '.join(choices)}", lambda value: value in choices
    words = {bool: "true or false", str: "text"}
    return words.get(kind, 'a list such as ["a", "b"]'), lambda value: kind in words


def _literal(text: str) -> Any:
    """What a file would have said by `text`; text itself where that is nothing."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read(file: Path) -> Mapping[str, Any]:
    kind, parse = ("JSON", json.loads) if file.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        tree = parse(file.read_text(encoding="utf-8"))
        return dict(tree.get("config", tree) if kind == "JSON" else tree)  # as `trainer.record` writes it
    except OSError as why:
        raise ConfigError(f"{file}: cannot be read ({why.strerror})") from None
    except (ValueError, AttributeError) as why:
        raise ConfigError(f"{file}: expected a table of settings in {kind} ({why})") from None


def _marked(tree: Mapping[str, Any], where: str) -> _Table:
    return {
        name: _marked(value, f"{where}{name}.") if isinstance(value, dict) else _Said(value, f"{where}{name}")
        for name, value in tree.items()
    }


def _put(tree: _Table, path: Sequence[str], one: _Said) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
        if isinstance(tree, _Said):
            raise ConfigError(f"{one.where}: expected a value, as {name} is no table")
    tree[path[-1]] = one


def _where(said: Any) -> str:
    """Where the first value of a table stands."""
    while isinstance(said, dict):
        said = next(iter(said.values()), "")
    return said.where if said else ""


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[list[str], _Said]]:
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX):
            yield name.removeprefix(ENV_PREFIX).lower().split(ENV_DOT), _Said(text, name, is_text=True)


def _from_sets(sets: Iterable[str]) -> Iterator[tuple[list[str], _Said]]:
    for text in sets:
        path, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"--set {text}: expected path.to.key=value")
        yield path.split("."), _Said(value, f"--set {path}", is_text=True)


def _advice(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names) or 'none'}"
