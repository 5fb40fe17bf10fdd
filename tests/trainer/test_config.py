"""A run's settings: who wins, what is refused, and that every refusal says what was expected."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from trainer import config
from trainer.config import ConfigError, RunConfig, StageConfig, load, urls

RUN = """
seed = 3
[model]
path = "somewhere"
[model.shape]
layers = 40
hidden = 5120
intermediate = 17408
heads = 40
kv_heads = 8
head_dim = 128
vocab = 151936
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
    first, second = load(file, {}, ["rl.steps=9"]).stages
    assert (first.name, first.steps, first.prompts, first.lr) == ("first", 4, 8, 1.0)
    assert (second.name, second.steps, second.prompts, second.lr) == ("second", 9, 8, StageConfig().lr)


def test_stages_keep_the_file_s_order_whichever_say_something(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[stages.b]\n[stages.c]\nsteps = 2\n[stages.a]\n[rl]\nsteps = 3\n", encoding="utf-8")
    assert [(stage.name, stage.steps) for stage in load(file, {}).stages] == [("b", 3), ("c", 2), ("a", 3)]
    assert [(stage.name, stage.steps) for stage in load(file, {}, ["stages.a.steps=1"]).stages][2] == ("a", 1)


def test_what_a_run_writes_down_reads_back_as_the_same_run(file: Path, tmp_path: Path) -> None:
    said = load(file, {}, ['data.train=["a", "b"]', "track.has_logprobs=true", "model.chat=own"])
    assert (said.data.train, said.track.has_logprobs, said.model.chat) == (("a", "b"), True, "own")
    written = tmp_path / "config.json"
    written.write_text(json.dumps(said.to_dict()), encoding="utf-8")
    assert load(written, {}) == said
    written.write_text(json.dumps(RunConfig().to_dict()), encoding="utf-8")
    assert load(written, {}) == RunConfig()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("seed=x", "--set seed: expected a whole number from 0 to 2147483647, got 'x'"),
        ("seed=true", "--set seed: expected a whole number from 0 to 2147483647, got True"),
        ("seed=1.5", "--set seed: expected a whole number from 0 to 2147483647, got 1.5"),
        ("sft.lr=nan", "--set sft.lr: expected a number from 0 to 1, got nan"),
        ("engines.sync=ftp", "--set engines.sync: expected one of file, nccl, got 'ftp'"),
        ("track.has_logprobs=yes", "--set track.has_logprobs: expected true or false, got 'yes'"),
        ("data.train=a", "--set data.train: expected a list such as"),
        ("data.train=[1]", "--set data.train: expected a list such as"),
        ("model=3", "--set model: expected a table, got '3'"),
        ("seed.x=3", "--set seed.x: expected a value, as seed is no table"),
        ("stages=3", "--set stages: expected a table, got '3'"),
        ("stages.first=3", "--set stages.first: expected a table, got '3'"),
        ("rl=3", "--set rl: expected a table, got '3'"),
        ("sede=3", "--set sede: unknown setting; did you mean seed?"),
        ("stages.first.step=3", "--set stages.first.step: unknown setting; did you mean steps?"),
        ("rl.step=3", "--set rl.step: unknown setting; did you mean steps?"),
        ("stages.frist.steps=3", "--set stages.frist.steps: no such stage; did you mean first?"),
        ("model.shape.layer=1", "--set model.shape.layer: unknown setting; did you mean layers?"),
        ("seed", "--set seed: expected path.to.key=value"),
        ("stages.first.keep=99", "stages.first: keep=99 of samples=32: expected no more; lower keep"),
        ("stages.first.select=all", "stages.first: select=all with keep=16 and samples=32: expected them equal"),
    ],
)
def test_a_mistake_is_refused_with_what_was_expected(file: Path, said: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file, {}, [said])
    assert str(caught.value).startswith(message)


def test_a_mistake_says_in_which_source_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[sft]\nepoch = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml: sft\.epoch: unknown setting; did you mean epochs\?"):
        load(file, {})
    with pytest.raises(ConfigError, match=r"RSTAR_TRAIN_SFT__EPOCH: unknown setting; did you mean epochs\?"):
        load(None, {"RSTAR_TRAIN_SFT__EPOCH": "1"})
    file.write_text('seed = "1"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml: seed: expected a whole number from 0 to 2147483647, got '1'"):
        load(file, {})


def test_half_a_shape_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"model\.shape: expected hidden, intermediate, heads, kv_heads, head_dim"):
        load(None, {}, ["model.shape.layers=3"])


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
    for name, cls in vars(config).items():
        if name.endswith("Config") and cls is not RunConfig:
            for setting in dataclasses.fields(cls):
                if setting.default is not dataclasses.MISSING and "low" in setting.metadata:
                    assert setting.metadata["low"] <= setting.default <= setting.metadata["high"] < math.inf, setting
                choices = setting.metadata.get("choices")
                assert not choices or setting.default in choices, setting


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
    assert [stage.name for stage in said.stages] == ["rl1", "rl2", "rl3"]
    first, second, third = said.stages
    assert first.max_tokens < second.max_tokens == third.max_tokens
    assert first.max_turns == second.max_turns < third.max_turns
    assert (third.drop_solved, third.reset_optimizer) == (8, True)


def test_endpoints_count_their_brackets_out() -> None:
    assert urls(["http://n[08-10]:[1-2]", "http://[::1]:80"]) == (
        *("http://n08:1", "http://n08:2", "http://n09:1", "http://n09:2", "http://n10:1", "http://n10:2"),
        "http://[::1]:80",
    )


def test_an_engine_must_take_more_than_a_response() -> None:
    with pytest.raises(ConfigError, match=r"evaluate: max_tokens=100 with engines\.max_length=100: expected less"):
        load(None, {}, ["engines.max_length=100", "evaluate.max_tokens=100"])
