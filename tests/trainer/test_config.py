"""A run's settings: who wins, what is refused, and that every refusal says what was expected."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest
from pydantic import TypeAdapter

from trainer.config import ConfigError, Policy, RunConfig, StageConfig, load, urls
from trainer.scheduling.scheduler import POLICIES

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
prompts = 8
steps = 7
[stages.first]
steps = 4
lr = 1
[stages.second]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN, encoding="utf-8")
    return path


def test_defaults_hold_when_nothing_is_said() -> None:
    assert load(None, {}) == RunConfig()


def test_flags_beat_environment_beats_file(file: Path) -> None:
    environ = {"RSTAR_TRAIN_SEED": "4", "RSTAR_TRAIN_STAGES__FIRST__STEPS": "5", "PATH": "/bin"}
    said = load(file, environ, ["stages.first.steps = 6"])
    assert (said.seed, said.stage("first").steps, said.model.path) == (4, 6, "somewhere")


def test_a_stage_has_what_rl_says_unless_it_says_its_own(file: Path) -> None:
    first, second = load(file, {}, ["rl.steps=9"]).stages.values()
    assert (first.name, first.steps, first.prompts, first.lr) == ("first", 4, 8, 1.0)
    assert (second.name, second.steps, second.prompts, second.lr) == ("second", 9, 8, StageConfig().lr)


def test_stages_keep_the_file_s_order_whichever_say_something(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[stages.b]\n[stages.c]\nsteps = 2\n[stages.a]\n[rl]\nsteps = 3\n", encoding="utf-8")
    assert [(stage.name, stage.steps) for stage in load(file, {}).stages.values()] == [("b", 3), ("c", 2), ("a", 3)]
    assert list(load(file, {}, ["stages.a.steps=1"]).stages.items())[2] == ("a", StageConfig(name="a", steps=1))


def test_what_a_run_writes_down_reads_back_as_the_same_run(file: Path, tmp_path: Path) -> None:
    said = load(file, {}, ['data.train=["a", "b"]', "track.has_logprobs=true", "model.chat=own"])
    assert (said.data.train, said.track.has_logprobs, said.model.chat) == (("a", "b"), True, "own")
    assert load(file, {}, ["data.train=a"]).data.train == ("a",)
    written = tmp_path / "config.json"
    written.write_text(json.dumps(asdict(said)), encoding="utf-8")
    assert load(written, {}) == said
    written.write_text(json.dumps(asdict(RunConfig())), encoding="utf-8")
    assert load(written, {}) == RunConfig()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("seed=x", "--set seed: expected a valid integer, unable to parse string as an integer, got 'x'"),
        ("seed=true", "--set seed: expected a valid integer"),
        ("seed=1.5", "--set seed: expected a valid integer"),
        ("seed=-1", "--set seed: expected greater than or equal to 0, got '-1'"),
        ("sft.lr=nan", "--set sft.lr: expected a finite number, got 'nan'"),
        ("engines.sync=ftp", "--set engines.sync: expected 'file' or 'nccl', got 'ftp'"),
        ("track.has_logprobs=so", "--set track.has_logprobs: expected a valid boolean"),
        ("track.to=mlflow", "--set track.to: expected 'trackio', 'wandb' or 'tensorboard'"),
        ("data.train=[1]", "--set data.train: expected a valid string, got 1"),
        ("data.train=[", "--set data.train: Value error, Invalid value"),
        ("model=3", "--set model: expected a dictionary or an instance of ModelConfig, got '3'"),
        ("seed.x=3", "--set seed.x: expected a value, as seed is no table"),
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
        ("rl.top_p=0.9", "stages.first: top_p=0.9: expected 1, as what is trained are probabilities without it"),
        ("stages.first.keep=99", "stages.first: keep=99 of samples=32: expected no more; lower keep"),
        ("rl.keep=1", "--set rl.keep: expected greater than or equal to 2, got '1'"),
        ("rl.micro_batch=7", "stages.first: prompts=8 x keep=16 rows: expected a multiple of micro_batch=7 x 1 ranks"),
        ("hardware.gpus=3", "stages.first: prompts=8 x keep=16 rows: expected a multiple of micro_batch=8 x 3 ranks"),
        ("hardware.sharding=full", "hardware: sharding=full: expected GPUs, got gpus=0; set sharding to none"),
        (
            "stages.second.max_tokens=16384",
            "stages.second: max_tokens=16384: expected less than engines.max_length=16384",
        ),
        ("stages.first.select=all", "stages.first: select=all, keep=16 of samples=32: expected one number"),
    ],
)
def test_a_mistake_is_refused_with_what_was_expected(file: Path, said: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file, {}, [said])
    assert str(caught.value).startswith(message)


def test_a_batch_of_fine_tuning_is_of_whole_passes(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sft: batch=12: expected a multiple of micro_batch=8 x 1 ranks"):
        load(file, {}, ["sft.data=talks.jsonl", "sft.batch=12"])


def test_a_mistake_says_in_which_source_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[sft]\nepoch = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml: sft\.epoch: unknown setting; did you mean epochs\?"):
        load(file, {})
    with pytest.raises(ConfigError, match=r"RSTAR_TRAIN_SFT__EPOCH: unknown setting; did you mean epochs\?"):
        load(None, {"RSTAR_TRAIN_SFT__EPOCH": "1"})
    file.write_text('seed = "one"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml: seed: expected a valid integer, .*, got 'one'"):
        load(file, {})


def test_half_a_shape_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"^model\.shape\.hidden_size: expected a value, got none"):
        load(None, {}, ["model.shape.num_hidden_layers=3"])


@pytest.mark.parametrize(
    ("name", "text", "kind"), [("run.toml", "seed =", "TOML"), ("run.json", "{", "JSON"), ("run.json", "[]", "JSON")]
)
def test_a_file_that_is_none_is_named(tmp_path: Path, name: str, text: str, kind: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{name}: expected a table of settings in {kind}"):
        load(tmp_path / name, {})
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(tmp_path / "none.toml", {})


def test_a_stage_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match="stage 'secnd': did you mean second"):
        load(file, {}).stage("secnd")


def test_every_default_is_a_value_that_is_allowed() -> None:
    assert TypeAdapter(RunConfig).validate_python(asdict(RunConfig())) == RunConfig()


def test_the_policies_are_the_scheduler_s() -> None:
    assert get_args(Policy) == tuple(POLICIES)


def test_the_paper_s_recipe_is_the_default_of_a_stage() -> None:
    stage = StageConfig()
    assert (stage.prompts, stage.samples, stage.keep, stage.lr, stage.warmup_steps) == (512, 32, 16, 1e-6, 20)
    assert (stage.epsilon_low, stage.epsilon_high, stage.temperature, stage.select) == (0.2, 0.28, 1.0, "paper")


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_configurations_that_ship_are_read(file: Path) -> None:
    said = load(file, {})
    assert said.sft.data
    assert list(said.stages) == ["rl1", "rl2", "rl3"]
    first, second, third = said.stages.values()
    assert first.max_tokens < second.max_tokens == third.max_tokens
    assert first.max_turns == second.max_turns < third.max_turns
    assert (third.drop_solved, third.reset_optimizer) == (8, True)


def test_endpoints_count_their_brackets_out() -> None:
    assert urls(["http://n[08-10]:[1-2]", "http://[::1]:80"]) == (
        *("http://n08:1", "http://n08:2", "http://n09:1", "http://n09:2", "http://n10:1", "http://n10:2"),
        "http://[::1]:80",
    )


def test_an_engine_must_take_more_than_a_response() -> None:
    with pytest.raises(ConfigError, match=r"evaluate: max_tokens=100: expected less than engines\.max_length=100"):
        load(None, {}, ["engines.max_length=100", "evaluate.max_tokens=100"])
