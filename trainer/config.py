"""The settings of a run as one frozen tree of dataclasses, and the checks across them.

Invariants:
- A setting has one name everywhere: `stages.rl1.steps` in a TOML file, `--set stages.rl1.steps=3`, and the variable
  RSTAR_TRAIN_STAGES__RL1__STEPS.
- A setting's type states its range; pydantic checks values against it.
- Settings that contradict each other are a `ConfigError` when the tree is built, before a run starts.

`trainer.config_loading` reads the tree from its sources. Nothing here reads a model, a data set or the machine.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field
from itertools import pairwise, product
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def _parse_list(value: Any) -> Any:
    """Parse a list given as text by a variable or `--set`: `["a", "b"]`, or its single item."""
    is_list = isinstance(value, str) and value.startswith("[")
    return tomllib.loads(f"value = {value}")["value"] if is_list else [value] if isinstance(value, str) else value


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
StringList = Annotated[tuple[str, ...], BeforeValidator(_parse_list)]
Dtype = Literal["float32", "bfloat16"]
Tracker = Literal["trackio", "wandb", "tensorboard"]
"""A tracker's name is also the name of the package that it needs."""
Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"]
"""Variants of AdamW, named as in transformers. Those with `8bit` or `paged` need the package bitsandbytes."""


RESERVED_BODY_FIELDS = frozenset({
    "model", "prompt", "max_tokens", "temperature", "top_p", "stop", "seed", "logprobs", "n", "best_of", "echo",
    "stream",
})  # fmt: skip
"""Fields of a completion request that `engines.extra_body` must not have."""
RESERVED_STAGES = ("initial", "sft", "train", "eval")
"""Names of the run folder's own stages and problems, which no stage may have."""
ONLINE_SETTINGS = ("one_step_off_policy", "dynamic_sampling_rounds")
"""Settings of a stage that need `episodes = "online"`."""


class ConfigError(ValueError):
    """Settings that cannot be used. The message names the source of the setting, what was expected and what was
    given."""


@dataclass(frozen=True, config=STRICT)
class ModelShape:
    """A model's sizes, named as in its config.json."""

    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    vocab_size: PositiveInt
    head_dim: PositiveInt | None = None
    tie_word_embeddings: bool = False

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


TINY_MODEL = "tiny"
"""The `model.path` of a model that the run generates from its seed."""
TINY_SHAPE = ModelShape(2, 128, 384, 4, 2, vocab_size=640, head_dim=32, tie_word_embeddings=True)
"""The sizes of this model. Its tokenizer has at most this vocabulary."""


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The model to train."""

    path: str = TINY_MODEL  # folder or hub name; 'tiny' is a model that the run generates from its seed
    dtype: Dtype = "bfloat16"  # dtype of engines, passes, and weights that peft freezes; trained weights are float32
    attn_implementation: str = ""  # attention of the trained model, such as flash_attention_2; if empty, transformers'
    peft: dict[str, Any] = field(default_factory=dict)  # train an adapter: options of a peft config, of LoRA by default
    chat_format: Literal["rstar2", "tokenizer"] = "rstar2"  # rStar2's prompt, or the tokenizer's own chat template
    chat_template: str = ""  # with chat_format = "tokenizer": a template in place of the tokenizer's, as a file, or
    # as "chatml-tools", which describes the tools to models whose own template cannot
    system_prompt: str = ""  # replaces the system message of the chat format, unless it is empty
    shape: ModelShape | None = None  # sizes for --dry-run, if the model's config.json is not on this machine


@dataclass(frozen=True, config=STRICT)
class SandboxConfig:
    """The sandbox for tool calls and answer checks."""

    endpoints: StringList = ()  # URLs of servers; [1-8] expands to 8 URLs; if empty, each command starts a server
    timeout_s: PositiveFloat = 4.0  # seconds of virtual time per call
    memory_mb: Annotated[int, Field(ge=16)] = 512  # MiB per call
    answer_check: Literal["strict", "math-verify"] = "strict"  # rules by which an answer is right (docs/verify.md)
    answer_rounding: bool = False  # with strict: a decimal is also right if the problem's answer rounds to it


@dataclass(frozen=True, config=STRICT)
class EnginesConfig:
    """The engines that sample."""

    kind: Literal["local", "vllm", "openai"] = "local"  # in this process, vLLM over HTTP, or OpenAI's completions API
    endpoints: StringList = ()  # URLs of servers; [1-8] expands to 8 URLs; if empty, `count` vLLM servers are started
    count: PositiveInt = 1  # vLLM servers to start on this machine
    vllm_python: str = ""  # a Python that has vLLM, to start servers; if empty, the trainer's Python
    max_num_seqs: PositiveInt = 64  # sequences that one engine runs at once
    max_model_len: Annotated[int, Field(ge=16)] = 16384  # tokens of prompt and response per sequence
    # Only for kind=local: cpu, cuda, or cuda:N for the GPU with this number; ROCm's are also named cuda. If empty, the
    # first GPU of hardware.engine_gpus or, without them, of training, and the CPU if training has no GPU.
    device: str = ""
    weight_sync: Literal["file", "gloo", "nccl"] = "file"  # new weights: a shared folder, TCP, or NCCL/RCCL
    # How new weights are checked: by checksums of tensors (and once by log-probabilities of the sync probe), by the
    # probe at each sync, or not at all. A broadcast (gloo, nccl) compares checksums in any case.
    sync_check: Literal["checksum", "probe", "off"] = "checksum"
    probe_tolerance: PositiveFloat = 1.0  # factor on the difference of log-probabilities above which the probe warns
    tensor_parallel_size: PositiveInt = 1  # GPUs per engine
    gpu_memory_utilization: Fraction = 0.9  # share of a GPU's memory that an engine takes
    sleep_mode: bool = False  # engines on the training GPUs free their memory while the trainer optimizes
    turn_timeout_s: PositiveFloat = 600.0  # timeout of a turn in seconds; it is longer for an engine that is slow
    max_down_s: NonNegativeFloat = 1200.0  # seconds that episodes wait while all vLLM servers are down
    args: dict[str, Any] = field(
        default_factory=dict
    )  # more of vLLM's AsyncEngineArgs, for servers that the run starts
    # Only for kind=openai, whose servers keep their own weights; model.path then names a tokenizer:
    model_name: str = ""  # the model's name at the endpoints
    api_key_env: str = ""  # name of the environment variable that has the API key; the key itself is stored nowhere
    prompt_format: Literal["text", "ids"] = "text"  # `ids` only if the servers have the same tokenizer
    request_logprobs: bool = False  # only if the servers return those of the distribution that they sample from
    send_seed: bool = True  # false for servers that reject `seed`
    stop_strings: StringList = ()  # end a turn, besides the end tokens of the chat format
    extra_body: dict[str, Any] = field(default_factory=dict)  # more fields of each request, such as top_k


@dataclass(frozen=True, config=STRICT)
class HardwareConfig:
    """The machines that train. Engines share their GPUs, or have `engine_gpus` of their own."""

    nodes: PositiveInt = 1  # machines that train
    gpus_per_node: NonNegativeInt = 0  # GPUs that train, one process each; 0 trains on the CPU, one process per node
    gpu_memory_gb: NonNegativeFloat = 0.0  # memory of one GPU in GB (10^9 bytes)
    engine_gpus: NonNegativeInt = 0  # GPUs for engines only, on all nodes together; 0 shares the training GPUs
    sharding: Literal["none", "full"] = "none"  # sharding of weights, gradients and optimizer states
    launcher: StringList = ()  # command that starts training processes, such as torchrun and its arguments


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The training problems."""

    train: StringList = ("generated:2048",)  # files, hub names, 'generated:N', or 'generated-programs:N'
    decontaminate_against: StringList = ()  # sources whose 8-grams must not occur in training problems
    integer_answers_only: bool = True  # keep only problems whose answer is an integer


@dataclass(frozen=True, config=STRICT)
class SftConfig:
    """Supervised fine-tuning on tool format and instruction following, without reasoning (the paper's section 4)."""

    data: StringList = ()  # files, hub names, or generated ones, of conversations; if empty, there is no SFT
    epochs: PositiveFloat = 3.0  # passes over the conversations
    learning_rate: Fraction = 5e-6  # peak; cosine decay to 0
    warmup_ratio: Fraction = 0.04  # share of the steps in which the learning rate rises
    batch_size: PositiveInt = 128  # conversations per step
    micro_batch_size: PositiveInt = 8  # conversations per device and pass
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    max_conversation_tokens: Annotated[int, Field(ge=16)] = 8192  # longer conversations are dropped
    save_steps: PositiveInt = 100  # steps between checkpoints
    optim: Optimizer = "adamw_torch"  # transformers' name of the optimizer: fused, with moments in 8 bits, or paged


@dataclass(frozen=True, config=STRICT)
class SamplingConfig:
    """The limits and sampling parameters of episodes."""

    max_response_tokens: PositiveInt = 8192  # tokens after the prompt, observations included
    max_turns: PositiveInt = 10  # responses of the model in an episode
    max_tool_response_chars: Annotated[int, Field(ge=16)] = 4096  # longer tool responses are truncated
    temperature: PositiveFloat = 1.0  # divides the logits before a token is sampled
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # a token is sampled from the most likely ones with this sum


@dataclass(frozen=True, config=STRICT)
class StageConfig(SamplingConfig):
    """A stage of reinforcement learning. Except for sizes, defaults are the paper's (sections 2.2, 5.1)."""

    name: str = ""  # the stage's key in [stages]
    steps: PositiveInt = 100  # training steps
    data: StringList = ()  # sources of problems; if empty, those of [data] train
    difficulty_filter_samples: NonNegativeInt = 0  # samples per problem before the stage; the stage drops problems
    # of which all samples are correct; 0 keeps all problems
    reset_optimizer: bool = False  # start with new optimizer states
    problems_per_step: PositiveInt = 512  # groups of episodes in a training step
    samples_per_problem: Annotated[int, Field(ge=2)] = 32  # the paper's 2G
    kept_per_problem: Annotated[int, Field(ge=2)] = 16  # episodes that RoC selects, the paper's G
    # Which samples are kept: by the paper's rule, by the released code's, at random for comparisons, or all.
    roc_mode: Literal["paper", "released", "uniform", "off"] = "paper"
    # Where episodes come from: `online` samples them in each step in this process, `cluster` in each step on Ray nodes,
    # `collected` all before the stage. [collect] has the settings of the last two.
    episodes: Literal["online", "cluster", "collected"] = "online"
    max_unavailable_share: Fraction = 0.2  # a step in which the infrastructure costs more episodes ends the run
    dynamic_sampling_rounds: NonNegativeInt = 0  # rounds in which a step samples further problems in place of groups
    # without a signal, until it has problems_per_step groups with one; 0 is off
    one_step_off_policy: bool = False  # sample the next step while this one is optimized, with the weights before it
    learning_rate: Fraction = 1e-6  # constant after the warm-up
    warmup_steps: NonNegativeInt = 20  # training steps in which the learning rate rises
    max_grad_norm: PositiveFloat = 1.0  # gradients are scaled down to this norm
    micro_batch_tokens: PositiveInt = 65536  # tokens per device and pass, prompts included; bounds activations
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    save_steps: PositiveInt = 10  # training steps between checkpoints
    optim: Optimizer = "adamw_torch"  # transformers' name of the optimizer: fused, with moments in 8 bits, or paged
    grpo: dict[str, Any] = field(default_factory=dict)  # more arguments of TRL's GRPOConfig

    def require_problems(self, count: int, found: str) -> None:
        """Raise `ConfigError` if `count` problems are too few for a training step. `found` says where they are from."""
        _require(
            count >= self.problems_per_step,
            f"stages.{self.name}: expected at least problems_per_step={self.problems_per_step} problems, got {count}: "
            f"{found}; give other problems, or lower problems_per_step",
        )


@dataclass(frozen=True, config=STRICT)
class EvalConfig(SamplingConfig):
    """The evaluation after SFT and after each stage, always on the same held-out problems."""

    data: StringList = ("generated:256",)  # sources; generated problems never occur in training
    samples_per_problem: PositiveInt = 1  # the k of avg@k
    every_steps: NonNegativeInt = 0  # also evaluate after every so many training steps of a stage; 0 is off


@dataclass(frozen=True, config=STRICT)
class CollectConfig(SamplingConfig):
    """The collection of episodes into a store (`rstar-train collect`)."""

    data: StringList = ()  # sources of problems; none is [data] train
    samples_per_problem: PositiveInt = 8  # episodes per problem
    store: str = ""  # directory of the store; empty is collection/ in the run folder
    executor: Literal["sequential", "local", "ray"] = "local"  # one at a time, many in this process, or on Ray nodes
    ray_address: str = ""  # HOST:PORT of a Ray cluster; empty is RAY_ADDRESS, a local cluster, or a new one
    episodes_per_worker: PositiveInt = 64  # episodes at once in one process; online, those in stateful environments
    deadline_s: PositiveFloat = 1200.0  # seconds per episode, its earlier tries included
    max_infrastructure_failures: NonNegativeInt = 8  # failed tries of an episode because of engine, sandbox or node
    max_environment_failures: NonNegativeInt = 1  # failed tries of an episode because of its environment
    max_refills: NonNegativeInt = 2  # further samples of a problem that replace failed ones
    # A collection ends if the infrastructure costs more episodes, or if the environments of more problems fail.
    max_unavailable_share: Fraction = 0.2


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    """The rewards of training, collection and evaluation (docs/environments.md)."""

    function: str = ""  # package.module:function, for problems without a reward of their own; if empty, the environment
    timeout_s: PositiveFloat = 60.0  # seconds for one call of a function
    max_concurrent: PositiveInt = 32  # calls of functions at once in one process
    correct_above: float = 0.0  # an episode with a larger reward is correct: for RoC, metrics, filter and evaluation

    def recorded(self) -> dict[str, Any]:
        """Return the settings that decide which episodes are correct, as an evaluation and a store record them. A
        default is left out."""
        values = {name: getattr(self, name) for name in ("function", "correct_above")}
        return {f"reward.{name}": value for name, value in values.items() if value}


@dataclass(frozen=True, config=STRICT)
class TrackingConfig:
    """Trackers that receive the metrics besides the run folder."""

    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(_parse_list)] = ()  # packages that receive the metrics
    project: str = "rstar-train"  # name under which a tracker lists the run


@dataclass(frozen=True, config=STRICT)
class StorageConfig:
    """What the run folder stores."""

    save_logprobs: bool = False  # write each token's log-probability into the episodes
    save_entropies: bool = False  # write the entropy of each token of the episodes in the loss
    keep_checkpoints: NonNegativeInt = 0  # newest checkpoints of SFT and of each stage that stay on disk; 0 keeps two
    # during a training, and then the one that the next stage needs


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """All settings of `rstar-train`."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # seed of all random choices
    run_dir: str = "runs/run"  # the run folder
    model: ModelConfig = field(default_factory=ModelConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    engines: EnginesConfig = field(default_factory=EnginesConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rl: StageConfig = field(default_factory=StageConfig)  # defaults of all stages
    stages: dict[str, StageConfig] = field(default_factory=dict)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)

    def __post_init__(self) -> None:
        model, engines = self.model, self.engines
        _require(
            self.sandbox.answer_check == "strict" or not self.sandbox.answer_rounding,
            f"sandbox: answer_rounding=true: expected answer_check=strict, got {self.sandbox.answer_check}, which has "
            "rules of its own",
        )
        _require(
            not model.chat_template or model.chat_format == "tokenizer",
            f"model.chat_template={model.chat_template}: expected chat_format=tokenizer, since {model.chat_format} has "
            "its own",
        )
        _require(
            not engines.args or (engines.kind == "vllm" and not engines.endpoints),
            f"engines.args: {', '.join(engines.args)}: expected kind=vllm without endpoints, since these are arguments "
            "of servers that the run starts",
        )
        _require(
            re.fullmatch(r"(cpu|cuda(:\d+)?)?", engines.device),
            f"engines.device={engines.device}: expected cpu, cuda or cuda:N with the number of a GPU",
        )
        _require(
            not engines.device or engines.kind == "local",
            f"engines.device={engines.device}: expected kind=local, got {engines.kind}, whose servers have their own "
            "devices",
        )
        _require(
            not engines.endpoints or engines.kind != "local",
            "engines.endpoints: expected engines.kind=vllm or openai, got local, which runs in this process",
        )
        _require(
            not model.attn_implementation.startswith("flash")
            or (model.dtype == "bfloat16" and self.hardware.gpus_per_node > 0),
            f"model.attn_implementation={model.attn_implementation}: expected bfloat16 and GPUs, got {model.dtype}, "
            f"gpus_per_node={self.hardware.gpus_per_node}",
        )
        for name in self.stages:
            _require(
                re.fullmatch("[a-z0-9_-]+", name) and name not in RESERVED_STAGES,
                f"stages.{name}: expected a name of a-z, 0-9, _ and -, other than {', '.join(RESERVED_STAGES)}",
            )
        ranks, sft = self.hardware.nodes * max(1, self.hardware.gpus_per_node), self.sft
        _require(
            not sft.data or sft.batch_size % (sft.micro_batch_size * ranks) == 0,
            f"sft: batch_size={sft.batch_size}: expected a multiple of micro_batch_size={sft.micro_batch_size} x "
            f"{ranks} ranks",
        )
        if engines.kind == "openai":
            self._check_openai()
        self._check_gpus_and_processes()
        if engines.sleep_mode:
            self._check_sleep_mode()
        _require(
            self.eval.data or not (sft.data or self.stages),
            "eval.data: expected sources of problems, got none, since the model is evaluated after sft and each stage",
        )
        _require(
            self.collect.executor != "ray" or engines.kind != "vllm" or engines.endpoints,
            "collect.executor=ray: expected engines.endpoints, URLs of vLLM servers that all nodes can reach, got none",
        )
        stages = {f"stages.{name}": stage for name, stage in self.stages.items()}
        sharded = self.hardware.sharding == "full"
        for table, settings in self.trainings().items():
            _require(
                not (sharded and needs_bitsandbytes(settings.optim)),
                f"{table}: optim={settings.optim}: expected adamw_torch or adamw_torch_fused with "
                "hardware.sharding=full, since bitsandbytes cannot update sharded weights",
            )
        for (_, before), (table, stage) in pairwise(stages.items()):
            _require(
                stage.optim == before.optim or stage.reset_optimizer or bool(model.peft),
                f"{table}: optim={stage.optim}: expected {before.optim}, whose states it continues; or set "
                "reset_optimizer",
            )
        for table, stage in stages.items():
            _check_stage(table, stage, ranks)
            _require(
                stage.episodes == "online" or not self.eval.every_steps,
                f"eval: every_steps={self.eval.every_steps}: expected 0, since {table} has episodes={stage.episodes}",
            )
            _require(
                stage.data or self.data.train,
                f"{table}.data: expected sources of problems, got none there and in data.train; set one of them",
            )
            _require(
                stage.episodes != "cluster" or (engines.kind == "vllm" and engines.endpoints),
                f"{table}: episodes=cluster: expected engines.kind=vllm with endpoints that all nodes can reach, whose "
                "servers get new weights in each step",
            )
        for table, limits in {**stages, "eval": self.eval}.items():
            self.check_model_len(table, limits)

    def _check_openai(self) -> None:
        engines = self.engines
        trainings = [*(["sft.data"] if self.sft.data else []), *(f"stages.{name}" for name in self.stages)]
        _require(
            not trainings,
            f"{', '.join(trainings)}: engines.kind=openai: expected a configuration without training, since servers "
            "cannot load trained weights; use it for collect, eval --model and rollout, and one with another kind for "
            "training",
        )
        _require(engines.endpoints, "engines.endpoints: kind=openai: expected URLs of servers, got none")
        _require(engines.model_name, "engines.model_name: kind=openai: expected the model's name, got none")
        _require(
            not any(re.search(r"[@?#]", url) for url in engines.endpoints),
            "engines.endpoints: expected URLs without user, password or query, since URLs are stored; put the API key "
            "into a variable, and its name into engines.api_key_env",
        )
        check_options("engines.extra_body", engines.extra_body, RESERVED_BODY_FIELDS, engines.extra_body, "field")

    def _check_gpus_and_processes(self) -> None:
        """Raise `ConfigError` unless training, engines and the launcher can share the GPUs as the settings say."""
        engines, hardware = self.engines, self.hardware
        gpus, per_node = hardware.nodes * hardware.gpus_per_node, hardware.gpus_per_node
        _require(
            hardware.sharding == "none" or gpus > 1,
            f"hardware: sharding=full: expected several GPUs, got nodes={hardware.nodes} x gpus_per_node={per_node}; "
            "set sharding to none",
        )
        if engines.kind == "vllm":
            _require(
                engines.weight_sync != "nccl" or (gpus and hardware.engine_gpus),
                f"engines.weight_sync=nccl: expected engines on GPUs of their own, got gpus_per_node={per_node} and "
                f"engine_gpus={hardware.engine_gpus}, since NCCL allows one rank per GPU; set weight_sync to file or "
                "gloo, or raise hardware.engine_gpus",
            )
        if engines.kind == "vllm" and not engines.endpoints:
            size, available = engines.tensor_parallel_size, hardware.engine_gpus or per_node
            _require(
                per_node > 0 or (size == 1 and not hardware.engine_gpus),
                f"engines: tensor_parallel_size={size}, hardware.engine_gpus={hardware.engine_gpus}: expected 1 and 0 "
                "with gpus_per_node=0, since the run then starts its servers on the CPU; set engines.endpoints",
            )
            _require(
                not per_node or engines.count * size <= available,
                f"engines: count={engines.count} x tensor_parallel_size={size} GPUs: expected at most {available}; "
                "lower one of them, or raise hardware.engine_gpus",
            )
        numbers = {"nnodes": hardware.nodes, "nproc[-_]per[-_]node": max(1, per_node)}
        for option, expected in numbers.items():
            for given in re.finditer(rf"--{option}[= ](\d+)(?!\S)", " ".join(hardware.launcher)):
                _require(
                    int(given[1]) == expected,
                    f"hardware.launcher: {given[0]}: expected {expected}, got {given[1]}, since the run has "
                    f"nodes={hardware.nodes} and gpus_per_node={per_node} (0 is one process per node)",
                )

    def _check_sleep_mode(self) -> None:
        engines, hardware, stages = self.engines, self.hardware, self.stages.items()
        unfit = [name for name, stage in stages if stage.episodes != "online" or stage.one_step_off_policy]
        online = "episodes=online and one_step_off_policy=false, since engines sleep while the trainer optimizes"
        for holds, got, expected in (
            (engines.kind == "vllm", f"engines.kind={engines.kind}", "vllm, since no other engine has a sleep mode"),
            (hardware.gpus_per_node > 0, "hardware.gpus_per_node=0", "GPUs, since only their memory is freed"),
            (not hardware.engine_gpus, f"hardware.engine_gpus={hardware.engine_gpus}", "0, since GPUs are shared"),
            (not unfit, f"stages {', '.join(unfit)}", online),
        ):
            _require(holds, f"engines.sleep_mode=true, {got}: expected {expected}; or set sleep_mode to false")

    @property
    def local_device(self) -> str:
        """torch's name of the local engine's device."""
        hardware = self.hardware
        gpu = f"cuda:{hardware.gpus_per_node if hardware.engine_gpus else 0}"
        return self.engines.device or (gpu if hardware.gpus_per_node else "cpu")

    def trainings(self) -> dict[str, SftConfig | StageConfig]:
        """Return the settings of SFT, if there is one, and of the stages, by the names of their tables."""
        stages = {f"stages.{name}": stage for name, stage in self.stages.items()}
        return {**({"sft": self.sft} if self.sft.data else {}), **stages}

    def check_model_len(self, table: str, limits: SamplingConfig) -> None:
        """Raise `ConfigError` if the longest response leaves no token of an engine's context for a prompt."""
        _require(
            limits.max_response_tokens < self.engines.max_model_len,
            f"{table}: max_response_tokens={limits.max_response_tokens}: expected less than "
            f"engines.max_model_len={self.engines.max_model_len}, which includes the prompt; raise that",
        )

    def stage_config(self, name: str) -> StageConfig:
        """Return the stage of that name. Raises `ConfigError`."""
        if name not in self.stages:
            raise ConfigError(f"stage {name!r}: {suggestion(name, self.stages)}")
        return self.stages[name]


def needs_bitsandbytes(optim: Optimizer) -> bool:
    return "8bit" in optim or "paged" in optim


def _check_stage(table: str, stage: StageConfig, ranks: int) -> None:
    kept, problems = stage.kept_per_problem, stage.problems_per_step
    selection = f"kept_per_problem={kept} of samples_per_problem={stage.samples_per_problem}"
    _require(
        kept <= stage.samples_per_problem,
        f"{table}: {selection}: expected no more than the samples; lower kept_per_problem",
    )
    _require(
        stage.roc_mode != "off" or kept == stage.samples_per_problem,
        f"{table}: roc_mode=off, {selection}: expected equal numbers, since nothing is dropped; or set roc_mode",
    )
    _require(
        problems * kept % ranks == 0,
        f"{table}: problems_per_step={problems} x kept_per_problem={kept} rows: expected a multiple of {ranks} ranks; "
        "change one of them",
    )
    _require(
        stage.micro_batch_tokens > stage.max_response_tokens,
        f"{table}: micro_batch_tokens={stage.micro_batch_tokens}: expected more than "
        f"max_response_tokens={stage.max_response_tokens}, since a pass has at least one row with its prompt; raise "
        "micro_batch_tokens, or lower max_response_tokens",
    )
    online_only = [name for name in ONLINE_SETTINGS if getattr(stage, name)]
    _require(
        stage.episodes == "online" or not online_only,
        f"{table}: {', '.join(online_only)}: expected episodes=online, got {stage.episodes}",
    )
    _require(
        not (stage.one_step_off_policy and stage.dynamic_sampling_rounds),
        f"{table}: one_step_off_policy=true: expected dynamic_sampling_rounds=0, since its rounds follow from the "
        "rewards of the step; set one of them",
    )
    _require(
        stage.top_p == 1,
        f"{table}: top_p={stage.top_p}: expected 1, since the loss uses the untruncated probabilities; set top_p in "
        "[eval] only",
    )


def expand_urls(endpoints: Sequence[str]) -> tuple[str, ...]:
    """Expand ranges in URLs: http://node[08-10] becomes three URLs, with the same number of digits in each."""
    split = (re.split(r"(\[\d+-\d+\])", url) for url in endpoints)
    return tuple("".join(parts) for url in split for parts in product(*map(_expand_range, url)))


def _expand_range(part: str) -> list[str]:
    if not (match := re.fullmatch(r"\[(\d+)-(\d+)\]", part)):
        return [part]
    low, high = match.groups()
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the last part of an error message about an unknown name. It is the closest of the `known` names. If none
    is close, it is a list of all known names, unless they are too many to read."""
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {near[0]}?"
    shown = ", ".join(names) if len(names) <= 50 else f"its {len(names)} documented names, none of which is similar"
    return f"expected one of {shown or 'none'}"


def check_options(
    table: str, options: Collection[str], own: Collection[str], known: Collection[str], kind: str
) -> None:
    """Check `options`, a table that is passed on to a library. Raise `ConfigError` for an option that the trainer sets
    itself or does not support (it is in `own`), and for one that the library does not have (it is not in `known`)."""
    for name in options:
        _require(
            name not in own,
            f"{table}: {name}: expected another {kind}, since the trainer sets this one itself or does not support it",
        )
        _require(name in known, f"{table}: {name}: unknown {kind}; {suggestion(name, sorted({*known} - {*own}))}")


def _require(holds: object, message: str) -> None:
    if not holds:
        raise ConfigError(message)
