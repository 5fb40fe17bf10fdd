"""The page of error messages has the messages of the code, and the pages of settings have each name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.error_messages import messages
from bench.reference import error_messages
from sandbox import errors
from sandbox.settings import server
from sandbox.settings.tenants import load_tenants
from trainer.config import ConfigError, RunConfig
from trainer.config_loading import validate_tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "part/module.py").write_text(
        """
def check(value):
    if value > LIMIT:
        raise ConfigError(f"queue_mb={value}: expected less than the {LIMIT} MiB"
                          f" of this machine; lower it")
    if not value:
        raise HttpError(413, "the batch is too large")
    _require(value, f"{name}{value}: unknown setting")
    raise ConfigError(f"{name}: expected {rule}, got {value}")
    raise ValueError("no message of a setting")
"""
    )
    return tmp_path


def test_computed_parts_of_a_message_become_dots_and_generic_messages_are_left_out(root: Path) -> None:
    assert messages(root, "part") == [
        "queue_mb=...: expected less than the ... MiB of this machine; lower it",
        "the batch is too large",
        "...: unknown setting",
    ]


def assert_is_on_the_page(error: Exception) -> None:
    shown = [line.strip("-` ") for line in error_messages().splitlines() if line.startswith("- ")]
    patterns = [".*".join(map(re.escape, message.split("..."))) for message in shown]
    matching = [message for message, pattern in zip(shown, patterns, strict=True) if re.fullmatch(pattern, str(error))]
    assert matching, f"the page has no message like {error}"


@pytest.mark.parametrize(
    "flags",
    [
        {"host": "0.0.0.0"},
        {"cluster": "kubernetes"},
        {"workers": "2", "cluster": "ray"},
        {"slot": "3"},
        {"tenants": "missing.toml"},
    ],
    ids=lambda flags: "-".join(flags),
)
def test_a_message_about_a_wrong_setting_of_the_server_is_on_the_page(flags: dict[str, str]) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        load_tenants(Path(server.load(None, {}, flags).tenants or ""))
    assert_is_on_the_page(caught.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"stages": {"rl1": {"steps": 1, "kept_per_problem": 64, "samples_per_problem": 8}}},
        {"stages": {"rl1": {"step": 1}}},
        {"sandbox": {"answer_rounding": True, "answer_check": "math-verify"}},
        {"hardware": {"sharding": "full", "gpus_per_node": 1}},
    ],
    ids=["kept_per_problem", "step", "answer_rounding", "sharding"],
)
def test_a_message_about_a_wrong_setting_of_the_trainer_is_on_the_page(tree: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_tree(RunConfig, tree, "run.toml: ")
    assert_is_on_the_page(caught.value)
