"""Settings of a run: one frozen tree, from defaults < TOML or JSON file < environment < `--set`.

Invariants:
- A setting has one name everywhere: `stages.rl1.steps` is a key of the file, `--set stages.rl1.steps=3`, and
  RSTAR_TRAIN_STAGES__RL1__STEPS. A key of `[rl]` holds for every stage that does not say its own.
- A setting is described once: its kind and bounds are its type, which pydantic holds values against.
- An unknown name or a bad value is a `ConfigError` that says where it stood, what was expected and what came. So are
  settings that do not fit together: all that can be known before a run starts is checked here.
- `asdict` of a `RunConfig` is what `load` reads back as an equal tree: a run's config.json is a config file.

Nothing here is read from a model, a data set or a machine.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

ENV_PREFIX = "RSTAR_TRAIN_"
ENV_DOT = "__"
"""What a dot is in the name of a variable."""
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

T = TypeVar("T")


def _listed(value: Any) -> Any:
    """A list as a variable or `--set` says it: `["a", "b"]`, or its one item."""
    is_list = isinstance(value, str) and value.startswith("[")
    return tomllib.loads(f"value = {value}")["value"] if is_list else [value] if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Dtype = Literal["float32", "bfloat16"]
Tracker = Literal["trackio", "wandb", "tensorboard"]
"""Each is also the name of the package that it needs."""
Policy = Literal["reserve_worst_case", "kv"]


class ConfigError(ValueError):
    """Settings that cannot be used. The message says where, what was expected and what came."""


@dataclass(frozen=True, config=STRICT)
class Shape:
    """A model's sizes, by their names in its config.json."""

    num_hidden_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    vocab_size: Count
    head_dim: Count | None = None
    tie_word_embeddings: bool = False

    @property
    def head(self) -> int:
        """The width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """What is trained."""

    path: str = "tiny"  # folder or hub name; 'tiny' is generated from the seed
    dtype: Dtype = "bfloat16"  # that engines and passes compute in; the weights that train are float32
    chat: Literal["rstar2", "own"] = "rstar2"  # the prompt's form: rStar2's, or the tokenizer's own template
    preamble: str = ""  # what the system message says instead of the chat's own; empty is the chat's own
    shape: Shape | None = None  # for --dry-run, where the model's config.json is not at hand


@dataclass(frozen=True, config=STRICT)
class SandboxConfig:
    """Where tool calls and reward checks go."""

    endpoints: Texts = ()  # URLs of services, [1-8] counting; none starts one for as long as a command runs
    timeout_s: Positive = 4.0  # seconds of its own clock that a call gets
    memory_mb: Annotated[int, Field(ge=16)] = 512  # MiB that a call gets


@dataclass(frozen=True, config=STRICT)
class EnginesConfig:
    """What samples."""

    kind: Literal["local", "vllm"] = "local"  # in this process, or vLLM over HTTP
    endpoints: Texts = ()  # URLs of vLLM servers, [1-8] counting; none starts `count` of them
    count: Count = 1  # vLLM servers to start on this machine
    python: str = ""  # Python that has vllm, to start servers with; empty is this one
    slots: Count = 64  # sequences that one engine runs at once
    max_length: Annotated[int, Field(ge=16)] = 16384  # tokens of prompt and response that an engine takes
    sync: Literal["file", "nccl"] = "file"  # how new weights travel: a shared folder, or NCCL/RCCL
    tensor_parallel: Count = 1  # GPUs of one engine
    gpu_memory: Share = 0.9  # part of a GPU's memory that an engine takes
    timeout_s: Positive = 600.0  # seconds for one generation; more where the engine's usual speed asks for it
    max_down_s: Annotated[float, Field(ge=0)] = 1200.0  # seconds that episodes wait when all vLLM servers are down
    policy: Policy = "kv"  # which engine runs a turn


@dataclass(frozen=True, config=STRICT)
class HardwareConfig:
    """What trains. Engines share its GPUs, or have `engine_gpus` of their own."""

    nodes: Count = 1  # machines that train
    gpus: Whole = 0  # GPUs of each that train, a process each; 0 trains on the CPU, one process a machine
    gpu_gb: Annotated[float, Field(ge=0)] = 0.0  # GB (10^9 bytes) of memory of one GPU
    engine_gpus: Whole = 0  # GPUs for engines alone, of all machines; 0 is the same ones
    sharding: Literal["none", "full"] = "none"  # of weights, gradients and optimizer states
    launch: Texts = ()  # what runs a training command, such as torchrun and its arguments


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Problems to train on: files, hub names, or 'generated:N'."""

    train: Texts = ("generated:2048",)
    against: Texts = ()  # sources whose 8-grams must not occur in the training problems
    is_integer_only: bool = True  # whether only problems with an integer as their answer are kept


@dataclass(frozen=True, config=STRICT)
class SftConfig:
    """The start: tool format and instruction following, no reasoning (the paper's section 4)."""

    data: Texts = ()  # conversations, or 'generated:N'; none leaves the stage out
    epochs: Positive = 3.0  # times through the data
    lr: Share = 5e-6  # peak learning rate, cosine to 0
    warmup: Share = 0.04  # part of the steps in which the rate rises
    batch: Count = 128  # conversations per step
    micro_batch: Count = 8  # conversations per device in one pass
    is_checkpointing: bool = False  # recompute activations in the backward pass
    max_length: Annotated[int, Field(ge=16)] = 8192  # tokens of a conversation; longer ones are left out
    save_steps: Count = 100  # steps between checkpoints


@dataclass(frozen=True, config=STRICT)
class SamplingConfig:
    """How episodes are sampled."""

    max_tokens: Count = 8192  # response tokens, tool responses included
    max_turns: Count = 10  # turns of an episode
    tool_chars: Annotated[int, Field(ge=16)] = 4096  # characters of a tool response before it is cut
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


@dataclass(frozen=True, config=STRICT)
class StageConfig(SamplingConfig):
    """A stage of reinforcement learning. Defaults are the paper's (sections 2.2, 5.1), but for the sizes."""

    name: str = ""  # its key
    steps: Count = 100  # optimizer steps
    data: Texts = ()  # sources; none is [data] train
    drop_solved: Whole = 0  # samples per problem before the stage; all right drops it. 0 filters nothing
    reset_optimizer: bool = False  # start with fresh optimizer states
    prompts: Count = 512  # problems per step
    samples: Annotated[int, Field(ge=2)] = 32  # rollouts per problem, the paper's 2G
    keep: Annotated[int, Field(ge=2)] = 16  # rollouts kept of those, G
    select: Literal["paper", "released", "all"] = "paper"  # resample on correct: the paper's, its code's; or keep all
    early_stop: bool = False  # end a problem's last rollouts once the others suffice; it favours short ones
    partial: Share = 0.0  # problems begun beyond `prompts`, as a share of it; what a step leaves goes on in the next
    max_stale: Count = 2  # steps that a rollout may go on for after its first
    lr: Share = 1e-6  # learning rate, constant after the warm-up
    warmup_steps: Whole = 20  # steps in which the rate rises
    epsilon_low: Share = 0.2  # how far down a ratio may go
    epsilon_high: Positive = 0.28  # how far up
    max_grad_norm: Positive = 1.0  # gradients are scaled down to it
    micro_batch: Count = 8  # rollouts per device in one pass
    is_checkpointing: bool = False  # recompute activations in the backward pass
    save_steps: Count = 10  # steps between checkpoints


@dataclass(frozen=True, config=STRICT)
class EvaluateConfig(SamplingConfig):
    """How accuracy is measured after SFT and after each stage, always on the same problems."""

    data: Texts = ("generated:256",)  # sources; generated ones never occur in training
    samples: Count = 1  # episodes per problem, the k of avg@k


@dataclass(frozen=True, config=STRICT)
class TrackConfig:
    """Where metrics go besides the run's folder."""

    to: Annotated[tuple[Tracker, ...], BeforeValidator(_listed)] = ()
    project: str = "rstar-train"  # their project
    has_logprobs: bool = False  # whether episodes are written with their log-probabilities


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """Everything that `rstar-train` can be told."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # all that is random follows from it
    run_dir: str = "runs/run"  # the run's folder
    model: ModelConfig = field(default_factory=ModelConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    engines: EnginesConfig = field(default_factory=EnginesConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rl: StageConfig = field(default_factory=StageConfig)  # what stages have that do not say their own
    stages: dict[str, StageConfig] = field(default_factory=dict)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        ranks, longest = self.hardware.nodes * max(1, self.hardware.gpus), self.engines.max_length
        _expect(
            not self.sft.data or self.sft.batch % (self.sft.micro_batch * ranks) == 0,
            f"sft: batch={self.sft.batch}: expected a multiple of micro_batch={self.sft.micro_batch} x {ranks} ranks",
        )
        _expect(
            self.hardware.sharding == "none" or self.hardware.gpus > 0,
            f"hardware: sharding={self.hardware.sharding}: expected GPUs, got gpus=0; set sharding to none",
        )
        stages = {f"stages.{name}": stage for name, stage in self.stages.items()}
        for here, stage in stages.items():
            of = f"keep={stage.keep} of samples={stage.samples}"
            _expect(stage.keep <= stage.samples, f"{here}: {of}: expected no more; lower keep")
            _expect(
                stage.select != "all" or stage.keep == stage.samples,
                f"{here}: select=all, {of}: expected one number, as nothing is dropped; or set select to paper",
            )
            _expect(
                stage.prompts * stage.keep % (stage.micro_batch * ranks) == 0,
                f"{here}: prompts={stage.prompts} x keep={stage.keep} rows: expected a multiple of "
                f"micro_batch={stage.micro_batch} x {ranks} ranks; change one of them",
            )
            _expect(
                stage.top_p == 1,
                f"{here}: top_p={stage.top_p}: expected 1, as what is trained are probabilities without it; it is for "
                "[evaluate]",
            )
        for here, sampled in {**stages, "evaluate": self.evaluate}.items():
            _expect(
                sampled.max_tokens < longest,
                f"{here}: max_tokens={sampled.max_tokens}: expected less than engines.max_length={longest}, as the "
                "prompt takes some; raise that",
            )

    def stage(self, name: str) -> StageConfig:
        """The stage of that name. Raises `ConfigError`."""
        if name not in self.stages:
            raise ConfigError(f"stage {name!r}: {_advice(name, self.stages)}")
        return self.stages[name]


def urls(endpoints: Sequence[str]) -> tuple[str, ...]:
    """`endpoints` with every [1-8] in them counted out, as lists of hosts are often written."""
    parts = (re.split(r"(\[\d+-\d+\])", text) for text in endpoints)
    return tuple("".join(chosen) for some in parts for chosen in product(*map(_counted, some)))


def _counted(part: str) -> list[str]:
    if not (found := re.fullmatch(r"\[(\d+)-(\d+)\]", part)):
        return [part]
    low, high = found.groups()
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]


def load(file: Path | None, environ: Mapping[str, str], sets: Sequence[str] = ()) -> RunConfig:
    """Settings from all sources; `file` may be a run's folder, `sets` are `path.to.key=value`. Raises `ConfigError`."""
    if file is not None and file.is_dir():
        file /= "config.json"
    tree, origins = _read(file) if file is not None else {}, {}
    for where, path, text in _said(environ, sets):
        *above, last = path.split(".")
        if above[:1] == ["stages"] and above[1:] and above[1] not in (known := tree.get("stages", {})):
            raise ConfigError(f"{where}: no such stage; {_advice(above[1], known)}")
        table = tree
        for name in above:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{where}: expected a value, as {name} is no table")
        table[last], origins[path] = text, where
    common, stages = tree.get("rl", {}), tree.get("stages")
    if isinstance(common, dict) and isinstance(stages, dict):
        inherited = {name: {**common, **own, "name": name} for name, own in stages.items() if isinstance(own, dict)}
        tree["stages"] = {**stages, **inherited}
    return checked(RunConfig, tree, f"{file}: " if file else "", origins)


def checked(kind: type[T], tree: Mapping[str, Any], where: str, origins: Mapping[str, str] | None = None) -> T:
    """A `kind` of what `tree` says; `origins` say where what is not of `where` stood, by path. Raises `ConfigError`."""
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as why:
        error = why.errors()[0]  # [rl] comes before the stages that have its mistakes, too
    path = [str(part) for part in error["loc"]]
    stood = (".".join(path[:length]) for length in range(len(path), 0, -1))
    said = next((origins[at] for at in stood if origins and at in origins), where + ".".join(path))
    match error["type"]:
        case "value_error" if isinstance(error["ctx"]["error"], ConfigError):
            raise error["ctx"]["error"]
        case "unexpected_keyword_argument":
            raise ConfigError(f"{said}: unknown setting; {_advice(path[-1], _settings(kind, path[:-1]))}")
        case "missing":
            raise ConfigError(f"{said}: expected a value, got none")
    raise ConfigError(f"{said}: {error['msg'].replace('Input should be', 'expected')}, got {error['input']!r:.80}")


def _settings(kind: Any, path: Iterable[str]) -> list[str]:
    """The names in a table."""
    table = kind()
    for name in path:
        table = getattr(table, name) if is_dataclass(table) else StageConfig()
    return [setting.name for setting in fields(table or Shape)]


def _read(file: Path) -> dict[str, Any]:
    kind, parse = ("JSON", json.loads) if file.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        tree = parse(file.read_text(encoding="utf-8"))
        return dict(tree.get("config", tree) if kind == "JSON" else tree)  # as `trainer.runs.run_folder` writes it
    except OSError as why:
        raise ConfigError(f"{file}: cannot be read ({why.strerror})") from None
    except (ValueError, AttributeError) as why:
        raise ConfigError(f"{file}: expected a table of settings in {kind} ({why})") from None


def _said(environ: Mapping[str, str], sets: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Where, the path of the setting, and what; the later counts."""
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX):
            yield name, name.removeprefix(ENV_PREFIX).lower().replace(ENV_DOT, "."), text
    for one in sets:
        path, equals, value = (part.strip() for part in one.partition("="))
        if not equals:
            raise ConfigError(f"--set {one}: expected path.to.key=value")
        yield f"--set {path}", path, value


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigError(text)


def _advice(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names) or 'none'}"
