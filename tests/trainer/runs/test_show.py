"""Tests of `rstar-train show`: its output in the terminal, its choice of episodes for the page, and the safety of the
text in the page."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from tests.trainer.run_folders import SAMPLES_PER_PROBLEM, group, write_step
from tests.trainer.runs.show_cases import (
    FIRST_RL_STEP,
    HOSTILE_TEXTS,
    LAST_STEP,
    all_episodes,
    hostile_episode,
    show_arguments,
)
from trainer.episodes.metrics import METRICS
from trainer.json_files import RecordError, write_json
from trainer.runs import show, text_tables
from trainer.runs.run_folder import RunFolder
from trainer.runs.text_tables import ShowError

TEMPLATE = files("trainer.runs").joinpath("show.html").read_text(encoding="utf-8")

Show = Callable[..., str]


@pytest.fixture
def show_in_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    """A function that runs `rstar-train show` for a run folder and returns what the command prints."""
    monkeypatch.setenv("COLUMNS", "160")

    def run_show(folder: RunFolder, *args: str) -> str:
        show.show_run(show_arguments(str(folder.path), *args))
        return capsys.readouterr().out

    return run_show


# The terminal


def test_the_terminal_shows_the_first_and_the_last_value_of_each_metric(
    tiny_run: RunFolder, show_in_terminal: Show
) -> None:
    shown = show_in_terminal(tiny_run)
    rows = list(tiny_run.read_metrics())
    for name, metric in METRICS.items():
        values = [row[name] for row in rows if row.get(name) is not None]
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{name} ")]
        assert line.split()[1:3] == [as_shown(values[0]), as_shown(values[-1])]
        assert line.rstrip().endswith(metric.description)
    assert f"step {LAST_STEP}, rl2" in shown


def test_the_terminal_shows_where_the_time_of_a_step_goes(tmp_path: Path, show_in_terminal: Show) -> None:
    folder = RunFolder(tmp_path)
    step = {"stage": "rl1", "step_s": 4.0, "rollout_wait_s": 2.0, "weight_sync_s": 0.4, "optimize_s": 1.0}
    folder.append_metrics({"step": 1, **step, "wait_s_sum": 10.0, "generate_s_sum": 20.0, "tool_s_sum": 70.0})
    folder.append_metrics({"step": 2, **step, "step_s": 6.0, "rollout_wait_s": 4.0})
    (line,) = [line for line in show_in_terminal(folder).splitlines() if re.match(r"rl1 +5 ", line)]
    assert line.split()[1:] == ["5", "60.0%", "8.0%", "20.0%", "12.0%", "10.0%", "20.0%", "70.0%"]


def test_no_word_of_a_table_is_cut_in_a_terminal_of_80_columns(
    tmp_path: Path, show_in_terminal: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = RunFolder(tmp_path)
    times = {"step_s": 1.25, "rollout_wait_s": 1.0, "weight_sync_s": 0.1, "optimize_s": 0.1}
    folder.append_metrics({"step": 1, "stage": "rl1", **times, "wait_s_sum": 1.0, "generate_s_sum": 2.0})
    words = set(show_in_terminal(folder).split())
    assert {"episodes", "weight", "training", "engine", "sampling", "tools", "80.0%"} <= words


def as_shown(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def test_a_run_can_be_shown_while_it_is_written(tmp_path: Path, show_in_terminal: Show) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ShowError, match="expected a run folder"):
        show_in_terminal(folder)
    write_json(folder.path / "config.json", {"layout_version": 99, "config": {}})
    with pytest.raises(RecordError, match="expected layout_version 2, got 99"):
        show_in_terminal(folder)
    write_json(folder.path / "config.json", {"layout_version": 2, "config": {}})
    assert "no training step is finished yet" in show_in_terminal(folder)
    write_step(folder, 1, "rl1", [group(random.Random(1), "p", skill=0.5)])
    for path in ("metrics.jsonl", "episodes/step_000001.jsonl", "episodes/step_000002.jsonl"):
        with (folder.path / path).open("ab") as file:
            file.write(b'{"stage":"rl1","step"')  # the writer has not finished this line yet
    shown = show_in_terminal(folder)
    assert "step 1, rl1" in shown and "episodes of 2 steps" in shown
    assert len(show.sample_episodes(folder, folder.episode_steps(), 100)) == SAMPLES_PER_PROBLEM


def test_the_terminal_warns_of_the_last_step_only(tmp_path: Path, show_in_terminal: Show) -> None:
    folder = RunFolder(tmp_path)
    for step, share in ((1, 1.0), (2, 0.91), (3, 0.9)):
        folder.append_metrics({"step": step, "stage": "rl1", "truncated_share": share, "repeated_call_share": None})
        shown = show_in_terminal(folder)
        assert ("warning: truncated_share is" in shown) == (share > 0.9)
        assert "truncated_share " in shown


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_untrusted_text_cannot_control_the_terminal(tmp_path: Path, show_in_terminal: Show, text: str) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "stage": text, "reward": 0.5})
    shown = show_in_terminal(folder)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    shown.encode()  # fails for a lone surrogate
    assert text_tables.escape_controls("\x1b[31mred\x07") == "⟨1b⟩[31mred⟨07⟩"


# The choice of episodes for the page


def test_the_page_of_a_big_run_has_whole_groups_spread_over_its_steps(tiny_run: RunFolder) -> None:
    steps = tiny_run.episode_steps()
    chosen = show.sample_episodes(tiny_run, steps, 40)
    groups = {(row["step"], row["group"]) for row in chosen}
    assert len(chosen) == 40 == len(groups) * SAMPLES_PER_PROBLEM
    chosen_steps = sorted({step for step, _ in groups})
    assert chosen_steps[0] == FIRST_RL_STEP and chosen_steps[-1] == LAST_STEP and len(chosen_steps) == 5
    assert all(row.keys().isdisjoint({"response_ids", "prompt_ids", "logprobs"}) for row in chosen)
    assert len(show.sample_episodes(tiny_run, steps, 10_000)) == len(all_episodes(tiny_run))
    assert {row["step"] for row in show.sample_episodes(tiny_run, [LAST_STEP], 400)} == {LAST_STEP}
    assert len(show.sample_episodes(tiny_run, steps, SAMPLES_PER_PROBLEM + 1)) == SAMPLES_PER_PROBLEM
    assert len(show.sample_episodes(tiny_run, steps, 3)) == 3, "a part of a group, since no whole one fits"


def test_a_page_that_cannot_be_written_is_named_in_the_error(tiny_run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ShowError, match="expected a writable file, got: Is a directory"):
        show.show_run(show_arguments(str(tiny_run.path), "--html", str(tmp_path)))


def test_the_episodes_of_a_page_have_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "MAX_EPISODE_BYTES", 200_000)
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.write_episodes(step, "rl1", [[hostile_episode("x" * 1_000)] * 4] * 4, [[0]] * 4)
    chosen = show.sample_episodes(folder, folder.episode_steps(), 1000)
    # The number of episodes is halved until they fit, so they use at least a part of the limit.
    assert 80_000 < len(json.dumps(chosen)) < 200_000
    assert len({row["step"] for row in chosen}) > 1


def test_spread_includes_the_first_and_the_last_item() -> None:
    assert text_tables.spread([*"abc"], 9) == [*"abc"]
    assert text_tables.spread([*"abc"], 1) == ["c"]
    assert text_tables.spread([], 5) == []
    for num_items in range(2, 60):
        for max_items in range(2, num_items):
            chosen = text_tables.spread(list(range(num_items)), max_items)
            assert len(set(chosen)) == max_items and (chosen[0], chosen[-1]) == (0, num_items - 1)


# The safety of the page


def test_the_page_inserts_no_markup_and_loads_nothing() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\bon\w+=\"", TEMPLATE)
    # The namespace of SVG is the only URL.
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", TEMPLATE)


def test_data_cannot_end_the_script_element_of_the_page() -> None:
    page = show.page({"name": "</script><!--<script>"})
    assert page.count("</script>") == TEMPLATE.count("</script>")
    assert "<!--" not in page.removeprefix("<!doctype html>")
