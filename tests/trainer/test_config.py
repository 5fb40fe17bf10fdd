"""Tests of the settings of a run: which source of a setting wins, and the errors for wrong settings."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest
from pydantic import TypeAdapter

from trainer.config import ConfigError, Optimizer, RunConfig, StageConfig, expand_urls
from trainer.config_loading import load_config
from trainer.json_files import write_json
from trainer.recipe.resource_plan import MOMENT_BYTES

RUN = """
seed = 3
[model]
path = "somewhere"
[model.shape]
num_hidden_layers = 40
hidden_size = 5120
intermediate_size = 17408
num_attention_heads = 40
num_key_value_heads = 8
vocab_size = 151936
[rl]
problems_per_step = 8
steps = 7
[stages.first]
steps = 4
learning_rate = 1
[stages.second]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with two stages, one of which has settings of its own."""
    path = tmp_path / "run.toml"
    path.write_text(RUN, encoding="utf-8")
    return path


def test_without_sources_all_settings_have_their_defaults() -> None:
    assert load_config(None, {}) == RunConfig()


def test_set_beats_variable_beats_file(file: Path) -> None:
    environ = {"RSTAR_TRAIN_SEED": "4", "RSTAR_TRAIN_STAGES__FIRST__STEPS": "5", "PATH": "/bin"}
    config = load_config(file, environ, ["stages.first.steps = 6"])
    assert (config.seed, config.stage_config("first").steps, config.model.path) == (4, 6, "somewhere")


def test_answers_are_checked_strictly_and_only_then_rounded() -> None:
    sandbox = load_config(None, {}).sandbox
    assert (sandbox.answer_check, sandbox.answer_rounding) == ("strict", False)
    assert load_config(None, {}, ["sandbox.answer_rounding=true"]).sandbox.answer_rounding
    with pytest.raises(ConfigError, match=r"answer_rounding=true: expected answer_check=strict, got math-verify"):
        load_config(None, {}, ["sandbox.answer_rounding=true", "sandbox.answer_check=math-verify"])


def test_a_stage_takes_the_values_of_rl_unless_it_has_its_own(file: Path) -> None:
    first, second = load_config(file, {}, ["rl.steps=9"]).stages.values()
    assert (first.name, first.steps, first.problems_per_step, first.learning_rate) == ("first", 4, 8, 1.0)
    assert (second.name, second.steps, second.problems_per_step) == ("second", 9, 8)
    assert second.learning_rate == StageConfig().learning_rate


def test_a_stage_merges_its_arguments_of_trl_with_those_of_all_stages(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[rl.grpo]\nweight_decay = 0.1\nadam_beta2 = 0.9\n[stages.a]\n[stages.b.grpo]\nadam_beta2 = 0.95\n")
    stages = load_config(file, {}, ["stages.a.grpo.adam_beta1=0.8"]).stages
    assert stages["a"].grpo == {"weight_decay": 0.1, "adam_beta2": 0.9, "adam_beta1": 0.8}
    assert stages["b"].grpo == {"weight_decay": 0.1, "adam_beta2": 0.95}


def test_a_default_that_no_stage_takes_is_refused_if_it_is_set_for_this_command(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[stages.a]\nsteps = 1\n[stages.b]\nsteps = 2\n")
    with pytest.raises(
        ConfigError, match=r"^--set rl.steps: each stage has a steps of its own; use stages\.NAME\.steps$"
    ):
        load_config(file, {}, ["rl.steps=7"])
    assert load_config(file, {"RSTAR_TRAIN_RL__STEPS": "7"}).stages["a"].steps == 1, "a variable is for many runs"
    assert load_config(file, {}, ["rl.grpo.weight_decay=0.1"]).stages["a"].grpo == {"weight_decay": 0.1}
    assert load_config(file, {}, ["rl.max_turns=3"]).stages["a"].max_turns == 3


@pytest.mark.parametrize("name", ["sft", "initial", "train", "eval", "RL1", '"a/b"', '".."'])
def test_a_stage_has_no_name_that_the_run_folder_or_a_variable_cannot_have(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[stages.{name}]\n")
    with pytest.raises(ConfigError, match="expected a name of a-z, 0-9, _ and -, other than initial, sft, train, eval"):
        load_config(file, {})


def test_a_moved_run_folder_is_its_own_run_dir(tmp_path: Path) -> None:
    config = load_config(None, {}, [f"run_dir={tmp_path / 'before'}"])
    write_json(tmp_path / "after/config.json", {"layout_version": 2, "config": asdict(config)})
    assert load_config(tmp_path / "after", {}).run_dir == str(tmp_path / "after")
    (tmp_path / "before").symlink_to("after")
    assert load_config(tmp_path / "after", {}).run_dir == str(tmp_path / "before"), "the same folder keeps its name"
    assert load_config(tmp_path / "after", {}, ["run_dir=elsewhere"]).run_dir == "elsewhere"


def test_a_setting_of_a_stage_needs_a_table_of_stages(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("stages = 5\n")
    with pytest.raises(ConfigError, match=r"^--set stages\.rl1\.steps: expected a value, since stages is not a table$"):
        load_config(file, {}, ["stages.rl1.steps=2"])


def test_stages_keep_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[stages.b]\n[stages.c]\nsteps = 2\n[stages.a]\n[rl]\nsteps = 3\n", encoding="utf-8")
    stages = load_config(file, {}).stages.values()
    assert [(stage.name, stage.steps) for stage in stages] == [("b", 3), ("c", 2), ("a", 3)]
    assert list(load_config(file, {}, ["stages.a.steps=1"]).stages.items())[2] == ("a", StageConfig(name="a", steps=1))


def test_a_written_configuration_reads_back_equal(file: Path, tmp_path: Path) -> None:
    overrides = ['data.train=["a", "b"]', "storage.save_logprobs=true", "model.chat_format=tokenizer"]
    config = load_config(file, {}, overrides)
    assert (config.data.train, config.storage.save_logprobs) == (("a", "b"), True)
    assert config.model.chat_format == "tokenizer"
    assert load_config(file, {}, ["data.train=a"]).data.train == ("a",)
    written = tmp_path / "config.json"
    written.write_text(json.dumps(asdict(config)), encoding="utf-8")
    assert load_config(written, {}) == config
    written.write_text(json.dumps(asdict(RunConfig())), encoding="utf-8")
    assert load_config(written, {}) == RunConfig()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=x", "--set seed: expected a valid integer, unable to parse string as an integer, got 'x'"),
        ("seed=true", "--set seed: expected a valid integer"),
        ("seed=1.5", "--set seed: expected a valid integer"),
        ("seed=-1", "--set seed: expected greater than or equal to 0, got '-1'"),
        ("sft.learning_rate=nan", "--set sft.learning_rate: expected a finite number, got 'nan'"),
        ("engines.weight_sync=ftp", "--set engines.weight_sync: expected 'file', 'gloo' or 'nccl', got 'ftp'"),
        ("storage.save_logprobs=so", "--set storage.save_logprobs: expected a valid boolean"),
        ("tracking.trackers=mlflow", "--set tracking.trackers: expected 'trackio', 'wandb' or 'tensorboard'"),
        ("data.train=[1]", "--set data.train: expected a valid string, got 1"),
        ("data.train=[", "--set data.train: Value error, Invalid value"),
        ("model=3", "--set model: expected a dictionary or an instance of ModelConfig, got '3'"),
        ("seed.x=3", "--set seed.x: expected a value, since seed is not a table"),
        ("stages=3", "--set stages: expected a valid dictionary, got '3'"),
        ("stages.first=3", "--set stages.first: expected a dictionary or an instance of StageConfig, got '3'"),
        ("rl=3", "--set rl: expected a dictionary or an instance of StageConfig, got '3'"),
        ("sede=3", "--set sede: unknown setting; did you mean seed?"),
        ("stages.first.step=3", "--set stages.first.step: unknown setting; did you mean steps?"),
        ("rl.step=3", "--set rl.step: unknown setting; did you mean steps?"),
        ("stages.frist.steps=3", "--set stages.frist.steps: no such stage; did you mean first?"),
        (
            "model.shape.layer=1",
            "--set model.shape.layer: unknown setting; expected one of num_hidden_layers, hidden_size",
        ),
        ("seed", "--set seed: expected path.to.key=value"),
        ("rl.top_p=0.9", "stages.first: top_p=0.9: expected 1, since the loss uses the untruncated probabilities"),
        (
            "stages.first.kept_per_problem=99",
            "stages.first: kept_per_problem=99 of samples_per_problem=32: expected no more than the samples",
        ),
        ("rl.kept_per_problem=1", "--set rl.kept_per_problem: expected greater than or equal to 2, got '1'"),
        (
            "rl.micro_batch_tokens=8192",
            "stages.first: micro_batch_tokens=8192: expected more than max_response_tokens=8192, since a pass has",
        ),
        ("rl.micro_batch_size=7", "--set rl.micro_batch_size: unknown setting; did you mean micro_batch_tokens"),
        (
            "hardware.gpus_per_node=3",
            "stages.first: problems_per_step=8 x kept_per_problem=16 rows: expected a multiple of 3 ranks",
        ),
        (
            "hardware.sharding=full",
            "hardware: sharding=full: expected several GPUs, got nodes=1 x gpus_per_node=0; set sharding to none",
        ),
        ("rl.optim=sgd", "--set rl.optim: expected 'adamw_torch', 'adamw_torch_fused', 'adamw_8bit'"),
        (
            "stages.second.optim=adamw_8bit",
            "stages.second: optim=adamw_8bit: expected adamw_torch, whose states it continues; or set reset_optimizer",
        ),
        (
            "engines.sleep_mode=true",
            "engines.sleep_mode=true, engines.kind=local: expected vllm, since no other engine has a sleep mode; or",
        ),
        (
            "stages.second.max_response_tokens=16384",
            "stages.second: max_response_tokens=16384: expected less than engines.max_model_len=16384",
        ),
        (
            "stages.first.roc_mode=off",
            "stages.first: roc_mode=off, kept_per_problem=16 of samples_per_problem=32: expected equal numbers",
        ),
        (
            "model.chat_template=a.jinja",
            "model.chat_template=a.jinja: expected chat_format=tokenizer, since rstar2 has",
        ),
        ("engines.args.dtype=half", "engines.args: dtype: expected kind=vllm without endpoints, since these are"),
        ("stages=1", "--set stages: expected a valid dictionary, got '1'"),
        ("engines.endpoints=http://a", "engines.endpoints: expected engines.kind=vllm or openai, got local, which"),
        ("engines.device=gpu", "engines.device=gpu: expected cpu, cuda or cuda:N with the number of a GPU"),
        (
            "model.attn_implementation=flash_attention_2",
            "model.attn_implementation=flash_attention_2: expected bfloat16 and GPUs, got bfloat16, gpus_per_node=0",
        ),
        ("eval.data=[]", "eval.data: expected sources of problems, got none, since the model is evaluated after sft"),
        ("data.train=[]", "stages.first.data: expected sources of problems, got none there and in data.train; set one"),
        ("rl.episodes=cluster", "stages.first: episodes=cluster: expected engines.kind=vllm with endpoints that all"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_expected_value(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, {}, [override])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware.sharding=full"], "hardware: sharding=full: expected several GPUs, got nodes=1 x gpus_per_node=1; "),
        (
            ["engines.weight_sync=nccl"],
            "engines.weight_sync=nccl: expected engines on GPUs of their own, got gpus_per_node=1 and engine_gpus=0, ",
        ),
        (
            ["engines.weight_sync=nccl", "hardware.gpus_per_node=0", "engines.endpoints=http://a"],
            "engines.weight_sync=nccl: expected engines on GPUs of their own, got gpus_per_node=0 and engine_gpus=0, ",
        ),
        (["engines.count=2"], "engines: count=2 x tensor_parallel_size=1 GPUs: expected at most 1; lower one of them"),
        (
            ["engines.tensor_parallel_size=4", "hardware.engine_gpus=2"],
            "engines: count=1 x tensor_parallel_size=4 GPUs: expected at most 2; lower one of them, or raise",
        ),
        (
            ["engines.tensor_parallel_size=2", "hardware.gpus_per_node=0"],
            "engines: tensor_parallel_size=2, hardware.engine_gpus=0: expected 1 and 0 with gpus_per_node=0, since the",
        ),
        (["collect.executor=ray"], "collect.executor=ray: expected engines.endpoints, URLs of vLLM servers that all"),
        (
            ['hardware.launcher=["torchrun", "--nproc-per-node=8"]'],
            "hardware.launcher: --nproc-per-node=8: expected 1, got 8, since the run has nodes=1 and gpus_per_node=1",
        ),
        (
            ['hardware.launcher=["torchrun", "--nnodes", "2", "--nproc_per_node", "1"]'],
            "hardware.launcher: --nnodes 2: expected 1, got 2, since",
        ),
    ],
)
def test_gpus_that_training_engines_and_launcher_cannot_share_are_refused(
    file: Path, overrides: list[str], message: str
) -> None:
    sets = ["engines.kind=vllm", "hardware.gpus_per_node=1"]
    with pytest.raises(ConfigError) as error:
        load_config(file, {}, [*sets, *overrides])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "overrides",
    [
        ["engines.weight_sync=nccl", "hardware.engine_gpus=1"],
        ["engines.tensor_parallel_size=4", "engines.count=2", "hardware.engine_gpus=8"],
        ["engines.tensor_parallel_size=8", "engines.endpoints=http://a"],
        ["hardware.nodes=2", "hardware.sharding=full", 'hardware.launcher=["torchrun", "--nnodes=2"]'],
        ["hardware.gpus_per_node=0", 'hardware.launcher=["torchrun", "--nproc-per-node=1", "--nnodes=1:4"]'],
    ],
)
def test_gpus_that_training_engines_and_launcher_can_share_are_accepted(file: Path, overrides: list[str]) -> None:
    assert load_config(file, {}, ["engines.kind=vllm", "hardware.gpus_per_node=1", *overrides]).stages


@pytest.mark.parametrize(
    ("hardware", "device", "expected"),
    [
        ([], "", "cpu"),
        (["gpus_per_node=2"], "", "cuda:0"),
        (["gpus_per_node=2", "engine_gpus=1"], "", "cuda:2"),
        (["gpus_per_node=2"], "cpu", "cpu"),
        ([], "cuda:1", "cuda:1"),
    ],
)
def test_the_local_engine_runs_where_the_run_has_gpus_for_engines_unless_a_device_is_set(
    hardware: list[str], device: str, expected: str
) -> None:
    config = load_config(None, {}, [*(f"hardware.{setting}" for setting in hardware), f"engines.device={device}"])
    assert config.local_device == expected


def test_a_device_is_refused_for_engines_that_are_servers() -> None:
    with pytest.raises(ConfigError, match=r"engines\.device=cpu: expected kind=local, got vllm, whose servers have"):
        load_config(None, {}, ["engines.kind=vllm", "engines.device=cpu"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hardware.gpus_per_node=0", "hardware.gpus_per_node=0: expected GPUs, since only their memory is freed"),
        ("hardware.engine_gpus=1", "hardware.engine_gpus=1: expected 0, since GPUs are shared"),
        ("stages.first.episodes=cluster", "stages first: expected episodes=online and one_step_off_policy=false"),
        ("rl.episodes=collected", "stages first, second: expected episodes=online and one_step_off_policy=false"),
        ("rl.one_step_off_policy=true", "stages first, second: expected episodes=online and one_step_off_policy=false"),
    ],
)
def test_sleep_mode_is_refused_where_engines_could_not_sleep(file: Path, override: str, message: str) -> None:
    sets = ["engines.sleep_mode=true", "engines.kind=vllm", "hardware.gpus_per_node=1", "engines.weight_sync=gloo"]
    assert load_config(file, {}, sets).engines.sleep_mode
    with pytest.raises(ConfigError, match="engines.sleep_mode=true, " + re.escape(message)) as error:
        load_config(file, {}, [*sets, override])
    assert str(error.value).endswith("; or set sleep_mode to false")


def test_an_sft_batch_must_be_a_multiple_of_the_micro_batches(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sft: batch_size=12: expected a multiple of micro_batch_size=8 x 1 ranks"):
        load_config(file, {}, ["sft.data=talks.jsonl", "sft.batch_size=12"])


def test_an_error_names_the_source_of_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[sft]\nepoch = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml: sft\.epoch: unknown setting; did you mean epochs\?"):
        load_config(file, {})
    with pytest.raises(ConfigError, match=r"RSTAR_TRAIN_SFT__EPOCH: unknown setting; did you mean epochs\?"):
        load_config(None, {"RSTAR_TRAIN_SFT__EPOCH": "1"})
    file.write_text('seed = "one"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml: seed: expected a valid integer, .*, got 'one'"):
        load_config(file, {})


def test_an_incomplete_model_shape_names_the_missing_size() -> None:
    with pytest.raises(ConfigError, match=r"^model\.shape\.hidden_size: expected a value, got none"):
        load_config(None, {}, ["model.shape.num_hidden_layers=3"])


@pytest.mark.parametrize(
    ("name", "text", "syntax"),
    [("run.toml", "seed =", "TOML"), ("run.json", "{", "JSON"), ("run.json", "[]", "JSON")],
)
def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path, name: str, text: str, syntax: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{name}: expected a table of settings in {syntax}"):
        load_config(tmp_path / name, {})
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load_config(tmp_path / "none.toml", {})


def test_an_unknown_stage_gets_a_suggestion(file: Path) -> None:
    with pytest.raises(ConfigError, match="stage 'secnd': did you mean second"):
        load_config(file, {}).stage_config("secnd")


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        ("stages.first.grpo.weight_decay", "0.1", 0.1),
        ("stages.first.grpo.use_liger_kernel", "true", True),
        ("stages.first.grpo.adam_beta2", "1e-3", 0.001),
        ("model.peft.r", "8", 8),
        ("model.peft.use_dora", "False", False),
        ("model.peft.target_modules", '["q_proj", "v_proj"]', ["q_proj", "v_proj"]),
        ("model.peft.target_modules", "all-linear", "all-linear"),
        ("engines.args.kv_cache_dtype", "fp8", "fp8"),
        ("engines.args.compilation_config", '{"level": 3}', {"level": 3}),
    ],
)
def test_the_text_of_a_library_setting_becomes_a_value_of_the_type_that_the_text_shows(
    file: Path, setting: str, text: str, value: object
) -> None:
    *parents, name = setting.split(".")
    variable = "RSTAR_TRAIN_" + setting.upper().replace(".", "__")
    kind = "engines.kind=vllm"  # a run that starts servers, to which engines.args belong
    for environ, overrides in (({}, [f"{setting}={text}", kind]), ({variable: text}, [kind])):
        table = asdict(load_config(file, environ, overrides))
        for parent in parents:
            table = table[parent]
        assert table[name] == value and type(table[name]) is type(value)


@pytest.mark.parametrize("episodes", ["cluster", "collected"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["eval.every_steps=2"], r"eval: every_steps=2: expected 0, since stages\.first has episodes=EPISODES"),
        (
            ["stages.first.dynamic_sampling_rounds=2"],
            r"dynamic_sampling_rounds: expected episodes=online, got EPISODES",
        ),
        (["stages.first.one_step_off_policy=true"], r"one_step_off_policy: expected episodes=online, got EPISODES"),
    ],
)
def test_settings_that_need_engines_in_this_process_are_refused_without_them(
    file: Path, episodes: str, changes: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("EPISODES", episodes)):
        load_config(file, {}, [f"stages.first.episodes={episodes}", *changes])


def test_replacements_and_the_sampling_of_the_next_step_exclude_each_other(file: Path) -> None:
    sets = ["stages.first.one_step_off_policy=true", "stages.first.dynamic_sampling_rounds=1"]
    with pytest.raises(ConfigError, match=r"one_step_off_policy=true: expected .*dynamic_sampling_rounds=0"):
        load_config(file, {}, sets)


def test_every_default_is_an_allowed_value() -> None:
    assert TypeAdapter(RunConfig).validate_python(asdict(RunConfig())) == RunConfig()


def test_sharded_weights_are_not_trained_by_bitsandbytes(file: Path) -> None:
    sets = ["hardware.gpus_per_node=2", "hardware.sharding=full", "rl.optim=paged_adamw_8bit"]
    with pytest.raises(ConfigError, match=r"^stages\.first: optim=paged_adamw_8bit: expected adamw_torch or "):
        load_config(file, {}, sets)
    assert load_config(file, {}, [*sets[:2], "rl.optim=adamw_torch_fused"]).stages["first"].optim == "adamw_torch_fused"


def test_the_optimizers_are_those_of_transformers_whose_memory_is_known() -> None:
    training_args = pytest.importorskip("transformers.training_args")
    assert {str(name.value) for name in training_args.OptimizerNames} >= {*get_args(Optimizer)}
    assert MOMENT_BYTES.keys() == {*get_args(Optimizer)}


def test_the_defaults_of_a_stage_are_those_of_the_paper() -> None:
    stage = StageConfig()
    assert (stage.problems_per_step, stage.samples_per_problem, stage.kept_per_problem) == (512, 32, 16)
    assert (stage.learning_rate, stage.warmup_steps) == (1e-6, 20)
    assert (stage.temperature, stage.roc_mode) == (1.0, "paper")


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_configurations_in_configs_load(file: Path) -> None:
    config = load_config(file, {})
    assert config.sft.data
    if file.stem in ("qwen3-32b-gaia", "smollm2", "tiny-code"):  # not the paper's recipe of three stages
        return
    assert list(config.stages) == ["rl1", "rl2", "rl3"]
    first, second, third = config.stages.values()
    assert first.max_response_tokens < second.max_response_tokens == third.max_response_tokens
    assert first.max_turns == second.max_turns < third.max_turns
    # The paper filters problems with 8 samples before its third stage.
    assert (third.difficulty_filter_samples, third.reset_optimizer) == (8, True)


def test_ranges_in_endpoints_are_expanded() -> None:
    assert expand_urls(["http://n[08-10]:[1-2]", "http://[::1]:80"]) == (
        *("http://n08:1", "http://n08:2", "http://n09:1", "http://n09:2", "http://n10:1", "http://n10:2"),
        "http://[::1]:80",
    )


def test_a_response_must_be_shorter_than_the_context_of_the_engine() -> None:
    with pytest.raises(
        ConfigError, match=r"eval: max_response_tokens=100: expected less than engines\.max_model_len=100"
    ):
        load_config(None, {}, ["engines.max_model_len=100", "eval.max_response_tokens=100"])
