"""The reference pages are those that the code generates, and describe each setting, route and metric."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import reference
from sandbox.settings.server import SETTINGS
from trainer.config import StageConfig


@pytest.mark.parametrize(("name", "text"), reference.pages().items(), ids=list(reference.pages()))
def test_a_page_is_the_one_that_the_code_generates(name: str, text: str) -> None:
    assert (reference.PAGES / name).read_text(encoding="utf-8") == text, "run python -m bench.reference"


def test_each_row_has_a_description() -> None:
    rows = re.findall(r"^\| (?!---).*\|$", "\n".join(reference.pages().values()), re.MULTILINE)
    assert len(rows) > len(SETTINGS)
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_setting_of_server_and_stages_has_a_row() -> None:
    server, trainer = reference.server_settings(), reference.trainer_settings()
    assert [name for name in SETTINGS if f"| `{name}` |" not in server] == []
    # The field `name` is no setting: it is the key of the stage's table.
    stage_settings = [name for name in StageConfig.__dataclass_fields__ if name != "name"]
    assert [name for name in stage_settings if f"| `{name}` |" not in trainer] == []


def test_every_command_has_its_own_options_and_a_list_of_its_settings() -> None:
    text = reference.commands()
    for command in ("rstar-sandbox serve", "rstar-sandbox doctor", "rstar-train recipe", "rstar-train collect"):
        assert f"### `{command}`\n" in text
    serve = text.partition("### `rstar-sandbox serve`")[2].partition("###")[0]
    assert "| `--config FILE` | TOML file with settings |" in serve
    assert "`--queue-mb`" in serve.partition("Options that are [settings of the server](server-settings.md)")[2]


def test_a_page_that_differs_is_named_and_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "PAGES", tmp_path)
    assert reference.main(["--check"]) == 1
    assert "metrics.md: differs from the code; run python -m bench.reference" in capsys.readouterr().out
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
