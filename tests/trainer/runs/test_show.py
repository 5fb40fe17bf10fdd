"""`rstar-train show`: what it shows is what the folder says, and whatever a model wrote is only text."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.browser import CHROMIUM, TIMEOUT_S, Browser, Page, chromium
from tests.trainer.run_folders import KEEP, STAGES, episode, group, write_run, write_step
from trainer import cli
from trainer.episodes.episode import Episode, Problem, ToolCall, ToolCallStatus
from trainer.episodes.metrics import METRICS
from trainer.json_files import RecordError, write_json
from trainer.runs import show, text_tables
from trainer.runs.run_folder import RunFolder

PAGE = files("trainer.runs").joinpath("show.html").read_text(encoding="utf-8")
FIRST_RL, LAST = STAGES["sft"] + 1, sum(STAGES.values())
HOSTILE = [
    "<img src=x onerror=hacked=1>", "</script><script>hacked=1</script>", "<svg onload=hacked=1>", "__proto__",
    "'\"`${hacked=1}", "constructor", "\u202eright to left", "javascript:hacked=1", "\ud800 lone", "\x1b[31mred\x07",
    "<!--<script>", "{{policy}}{{data}}", "\u2028 line", "x" * 3000,
]  # fmt: skip
TILES = {
    "Reward": "reward", "Tool errors": "tool_error_ratio_correct", "One answer": "one_answer",
    "Response length": "response_length", "In the loss": "episodes_in_loss", "Loss": "loss", "Step": "step_s",
}  # fmt: skip
SPANS = (
    "JSON.stringify([...document.querySelectorAll('.mask rect')]"
    ".map(r => [r.x.baseVal.value, r.width.baseVal.value, +(r.height.baseVal.value > 5)]))"
)
"""JavaScript: start, length and mask of what the bar of an episode shows."""

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")

Shown = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", problems=3)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    monkeypatch.setenv("COLUMNS", "160")

    def command(folder: RunFolder, *args: str) -> str:
        """What the command prints."""
        show.show_run(arguments(str(folder.path), *args))
        return capsys.readouterr().out

    return command


def arguments(*args: str) -> argparse.Namespace:
    return cli._parser().parse_args(["show", *args])


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    """All episodes."""
    return [row for step in folder.episode_steps() for row in folder.read_episodes(step)]


def hostile(text: str) -> Episode:
    """An episode that has `text` wherever a model or a data set may write."""
    call = ToolCall(text, {"code": text, "input": text}, ToolCallStatus.ERROR, text, is_truncated=True)
    one = episode(random.Random(1), "p", 0, skill=1.0)
    turn = replace(
        one.turns[0], text=f"<reason>{text}<tool_call>{text}</tool_call>{text}", tool_calls=(call,), engine=text
    )
    return replace(one, problem=Problem(text, text, text, text), turns=(turn,), answer=text, error=text)


# The terminal


def test_the_terminal_shows_each_number_first_and_last(folder: RunFolder, shown: Shown) -> None:
    shown_text = shown(folder)
    metrics = list(folder.read_metrics())
    for name, metric in METRICS.items():
        have = [row[name] for row in metrics if row.get(name) is not None]
        (line,) = [line for line in shown_text.splitlines() if line.startswith(f"{name} ")]
        assert line.split()[1:3] == [number(have[0]), number(have[-1])] and line.rstrip().endswith(metric.description)
    assert f"step {LAST}, rl2" in shown_text


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def test_a_run_can_be_shown_while_it_is_written(tmp_path: Path, shown: Shown) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(show.ShowError, match="expected a run folder"):
        shown(folder)
    write_json(folder.path / "config.json", {"layout_version": 99, "config": {}})
    with pytest.raises(RecordError, match="expected layout_version 2, got 99"):
        shown(folder)
    write_json(folder.path / "config.json", {"layout_version": 2, "config": {}})
    assert "no training step is finished yet" in shown(folder)
    write_step(folder, 1, "rl1", [group(random.Random(1), "p", skill=0.5)])
    for path in ("metrics.jsonl", "episodes/step_000001.jsonl", "episodes/step_000002.jsonl"):
        with (folder.path / path).open("ab") as file:
            file.write(b'{"stage":"rl1","step"')
    assert "step 1, rl1" in shown(folder) and "episodes of 2 steps" in shown(folder)
    assert len(show.sample_episodes(folder, folder.episode_steps(), 100)) == 2 * KEEP


@pytest.mark.parametrize("text", HOSTILE)
def test_untrusted_text_cannot_control_the_terminal(tmp_path: Path, shown: Shown, text: str) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "stage": text, "reward": 0.5})
    shown_text = shown(folder)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown_text)
    shown_text.encode()
    assert text_tables.escape_controls("\x1b[31mred\x07") == "⟨1b⟩[31mred⟨07⟩"


# What goes into the page


def test_a_big_run_gives_whole_groups_spread_over_its_steps(folder: RunFolder) -> None:
    chosen = show.sample_episodes(folder, folder.episode_steps(), 40)
    groups = {(row["step"], row["group"]) for row in chosen}
    assert len(chosen) == 40 == len(groups) * 2 * KEEP
    steps = sorted({step for step, _ in groups})
    assert steps[0] == FIRST_RL and steps[-1] == LAST and len(steps) == 5
    assert all(row.keys().isdisjoint({"response_ids", "prompt_ids", "logprobs"}) for row in chosen)
    everything = show.sample_episodes(folder, folder.episode_steps(), 10_000)
    assert len(everything) == len(rows(folder))
    assert {row["step"] for row in show.sample_episodes(folder, [LAST], 400)} == {LAST}
    few = show.sample_episodes(folder, folder.episode_steps(), 2 * KEEP + 1)
    assert len(few) == 2 * KEEP and len(show.sample_episodes(folder, folder.episode_steps(), 3)) == 3


def test_a_page_that_cannot_be_written_is_named(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(show.ShowError, match="expected a writable file, got: Is a directory"):
        show.show_run(arguments(str(folder.path), "--html", str(tmp_path)))


def test_a_page_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "MAX_EPISODE_BYTES", 200_000)
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.write_episodes(step, "rl1", [[hostile("x" * 1_000)] * 4] * 4, [[0]] * 4)
    chosen = show.sample_episodes(folder, folder.episode_steps(), 1000)
    assert 80_000 < len(json.dumps(chosen)) < 200_000 and len({row["step"] for row in chosen}) > 1


def test_spread_takes_both_ends() -> None:
    assert (
        text_tables.spread([*"abc"], 9) == [*"abc"]
        and text_tables.spread([*"abc"], 1) == ["c"]
        and text_tables.spread([], 5) == []
    )
    for count in range(2, 60):
        for most in range(2, count):
            chosen = text_tables.spread(list(range(count)), most)
            assert len(set(chosen)) == most and (chosen[0], chosen[-1]) == (0, count - 1)


def test_the_page_makes_no_markup_of_data_and_loads_nothing() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\bon\w+=\"", PAGE)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", PAGE)


def test_data_cannot_end_the_script_element_of_the_page() -> None:
    text = show.page({"name": "</script><!--<script>"})
    assert text.count("</script>") == PAGE.count("</script>") and "<!--" not in text[50:]


# The page in a browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as one:
        yield one


def made(folder: RunFolder, tmp_path: Path, *args: str) -> str:
    """The URL of the folder's page."""
    path = tmp_path / "run.html"
    show.show_run(arguments(str(folder.path), "--html", str(path), *args))
    return path.as_uri()


def value(text: str) -> float:
    """A number as the page writes it."""
    if text == "–":
        return float("nan")
    number = float(text.replace(",", "").replace("−", "-").removesuffix("%").removesuffix(" s").strip())
    return number / 100 if text.endswith("%") else number


def known(number: float | None) -> float:
    return float("nan") if number is None else number


async def pairs(page: Page, selector: str) -> dict[str, str]:
    """What a list of definitions says: each term's first definition."""
    of = f"[...document.querySelectorAll('{selector} > div')]"
    script = f"JSON.stringify({of}.map(one => [...one.children].map(part => part.textContent)))"
    return {name: shown_text for name, shown_text, *_ in json.loads(await page.run(script))}


async def move(page: Page, index: int) -> None:
    await page.run(
        f"(s => {{ s.value = {index}; s.dispatchEvent(new Event('input')) }})(document.getElementById('step'))"
    )


async def find(page: Page, **choices: str) -> None:
    for name, wanted in choices.items():
        await page.run(f"document.getElementById('filter').elements[{json.dumps(name)}].value = {json.dumps(wanted)}")
    await page.run("document.getElementById('filter').dispatchEvent(new Event('input'))")


async def listed(page: Page) -> list[str]:
    return list(
        json.loads(
            await page.run("JSON.stringify([...document.querySelectorAll('#list button')].map(b => b.dataset.place))")
        )
    )


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_numbers_are_those_of_the_file(browser: Browser, folder: RunFolder, tmp_path: Path) -> None:
    metrics = [row for row in folder.read_metrics() if row["stage"] != "sft"]
    async with browser.page(made(folder, tmp_path)) as page:
        assert await page.text("h1") == "tiny"
        assert f"{LAST} steps · {len(rows(folder))} episodes · 3 stages" in await page.text("#about")
        for index in (0, 3, len(metrics) - 1):
            row = metrics[index]
            await move(page, index)
            steps = [other["step"] for other in metrics if other["stage"] == row["stage"]]
            number = f"step {1 + steps.index(row['step'])} of {len(steps)}"
            assert await page.text("#at") == f"{row['stage']}, {number} ({row['step']} of the run)"
            numbers = {name: value(shown_text) for name, shown_text in (await pairs(page, "#numbers")).items()}
            assert numbers == pytest.approx({name: known(row[name]) for name in METRICS}, rel=6e-3, nan_ok=True)
            tiles = {name: value(shown_text) for name, shown_text in (await pairs(page, "#tiles")).items()}
            assert tiles == pytest.approx({title: known(row[name]) for title, name in TILES.items()}, rel=6e-3)
            legend = await page.text("#charts")
            assert f"in the loss {row['episodes_in_loss']}\n" in legend
            assert f"not in the loss {row['episodes_not_in_loss']}\n" in legend
        assert await page.text("#result") == "Accuracy after rl2: 70\u00a0% (40\u00a0% to 90\u00a0%)"
        stages = (await page.text("#results")).splitlines()
        for name, stage in zip(STAGES, (folder.read_summary() or {})["stages"], strict=True):
            (line,) = [line for line in stages if line.startswith(name)]
            assert line.split("\t")[3:] == [
                f"{100 * stage['accuracy']:.0f}\u00a0% (40\u00a0% to 90\u00a0%)",
                f"{100 * stage['tool_error_ratio']:.0f}\u00a0%",
                "80\u00a0%",
                "60",
            ]
        assert page.faults == []


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_curves_have_a_point_a_step_and_a_line_between_stages(
    browser: Browser, folder: RunFolder, tmp_path: Path
) -> None:
    rewards = [row["reward"] for row in folder.read_metrics() if "reward" in row]
    async with browser.page(made(folder, tmp_path)) as page:
        plot = "document.querySelector('svg.plot')"
        curve = await page.run(f"{plot}.querySelector('path[stroke=\"var(--one)\"]').getAttribute('d')")
        heights = [float(y) for y in re.findall(r"[ML]\S+ (\d+\.\d+)", curve)]
        assert len(heights) == len(rewards)
        drawn = [(heights[0] - y) / (heights[0] - heights[-1]) for y in heights]
        assert drawn == pytest.approx([(r - rewards[0]) / (rewards[-1] - rewards[0]) for r in rewards], abs=0.01)
        assert await page.run(f"{plot}.querySelectorAll('.boundary').length") == 1
        await page.run("[...document.querySelectorAll('#stages button')].find(b => b.textContent === 'sft').click()")
        assert await page.run(f"{plot}.querySelectorAll('.boundary').length") == 2
        await page.run("[...document.querySelectorAll('#stages button')].slice(1).forEach(b => b.click())")
        assert await page.text("#at") == f"sft, step {STAGES['sft']} of {STAGES['sft']} ({STAGES['sft']} of the run)"
        assert "Reward" not in await page.text("#charts") and "Loss" in await page.text("#charts")


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_pointing_at_a_chart_chooses_its_step(browser: Browser, folder: RunFolder, tmp_path: Path) -> None:
    async with browser.page(made(folder, tmp_path)) as page:
        box = json.loads(await page.run("JSON.stringify(document.querySelector('svg.plot').getBoundingClientRect())"))
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box["right"] - 8, y=box["y"] + 60)
        await page.until(f"at('at').textContent.includes('({LAST} of the run)')")
        await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + 30, y=box["y"] + 60)
        await page.until(f"at('at').textContent.includes('({FIRST_RL} of the run)')")
        await page.run("document.getElementById('jump').click()")
        assert await listed(page) == [f"{FIRST_RL}/{g}/{sample}" for g in range(3) for sample in range(2 * KEEP)]


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_filters_of_the_page_select_the_episodes_of_the_files(
    browser: Browser, folder: RunFolder, tmp_path: Path
) -> None:
    everything = rows(folder)

    def matching(claim: Callable[[dict[str, Any]], Any]) -> list[str]:
        return [f"{row['step']}/{row['group']}/{row['sample']}" for row in everything if claim(row)]

    async with browser.page(made(folder, tmp_path)) as page:
        for choices, claim in (
            ({}, lambda row: True),
            (
                {"stage": "rl2", "selected": "not selected"},
                lambda row: row["stage"] == "rl2" and not row["is_selected"],
            ),
            ({"reward": "no reward"}, lambda row: row["reward"] is None),
            ({"reward": "correct", "tools": "some failed"}, lambda row: row["reward"] and row["num_failed_tool_calls"]),
            ({"stop": "turn_limit"}, lambda row: row["stop_reason"] == "turn_limit"),
            ({"text": "NAMEERROR"}, lambda row: "NameError" in json.dumps(row["turns"])),
            ({"text": "nowhere to be found"}, lambda row: False),
        ):
            await page.run("document.getElementById('filter').reset()")
            await find(page, **choices)
            assert await listed(page) == matching(claim), choices
            assert await page.text("#count") == f"{len(matching(claim))} of {len(everything)} found"
        assert await page.text("#episode") == "No episode is like that."
        assert page.faults == []


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_all_parts_of_an_episode_are_shown(browser: Browser, folder: RunFolder, tmp_path: Path) -> None:
    row = next(
        row
        for row in rows(folder)
        if row["num_failed_tool_calls"] and row["turns"][0]["tool_calls"][0]["arguments"] and row["is_selected"]
    )
    url = f"{made(folder, tmp_path)}#{row['step']}/{row['group']}/{row['sample']}"
    async with browser.page(url) as page:
        shown_text = await page.text("#episode")
        facts = await pairs(page, "#episode .facts")
        call = row["turns"][0]["tool_calls"][0]
        for text in (
            row["problem"]["text"],
            row["selection_reason"].removeprefix("selected: "),
            call["arguments"]["code"],
            call["response"],
        ):
            assert text.strip() in shown_text
        assert f"{'correct' if row['reward'] else 'wrong'}, selected" in shown_text and facts["Answer blocks"] == str(
            row["answer_blocks"]
        )
        assert facts["Penalty"].split()[2::3] == [f"{row['p_err']:.3g}", f"{row['p_format']:.3g}"]
        spans = json.loads(await page.run(SPANS))
        assert spans == [[start, end - start, mask] for start, end, mask in row["loss_mask"]]
        await page.run("document.querySelector('#episode details').open = true")
        assert (await page.text("#episode table")).count("● selected") == KEEP
        assert await page.run("document.querySelectorAll('#episode pre .k, #episode pre .s').length") > 0


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_list_is_walked_by_keys(browser: Browser, folder: RunFolder, tmp_path: Path) -> None:
    async with browser.page(made(folder, tmp_path)) as page:
        places = await listed(page)
        await page.run("document.querySelector('#list button').focus()")
        before = await page.run("scrollY")
        for _ in range(20):
            await page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown")
        await page.until(f"document.activeElement.dataset.place === '{places[20]}'")
        await page.until(f"location.hash === '#{places[20]}'")
        assert await page.run("scrollY") == before and await page.run("document.getElementById('list').scrollTop") > 0
        assert await page.text("#episode h3") == "p7-2 #4"
        assert (
            await page.run("[...document.querySelectorAll('#list button')].filter(b => b.tabIndex === 0).length") == 1
        )


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_model_wrote_is_only_text(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / HOSTILE[0].replace("/", ""))
    folder.bind_config({text: text for text in HOSTILE})
    for step, text in enumerate(HOSTILE, 1):
        write_step(folder, step, text, [[hostile(text)] * 2])
    async with browser.page(made(folder, tmp_path), 320) as page:
        for step, text in enumerate(HOSTILE, 1):
            await find(page, step=str(step))
            shown = "\ufffd lone" if text == "\ud800 lone" else text
            assert (await page.run("document.querySelector('#episode pre').textContent")) in (shown, text)
            assert await page.run("document.documentElement.scrollWidth") == 320, text[:40]
        assert await page.run("typeof hacked") == "undefined"
        assert await page.run("document.querySelectorAll('img, iframe, body script ~ script ~ script').length") == 0
        assert await page.run("performance.getEntriesByType('resource').length") == 0
        assert page.faults == []


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_only_the_pages_own_script_would_run(browser: Browser, folder: RunFolder, tmp_path: Path) -> None:
    async with browser.page(made(folder, tmp_path)) as page:
        script = "(s => { s.textContent = 'hacked=1'; document.body.append(s) })(document.createElement('script'))"
        await page.run(script)
        await page.run("document.body.append(Object.assign(new Image(), {src: 'https://example.invalid/x.png'}))")
        async with asyncio.timeout(TIMEOUT_S):
            while sum("Content Security Policy" in fault for fault in page.faults) < 2:
                await page.run("0")  # what has been said meanwhile is read with its answer
        assert await page.run("typeof hacked") == "undefined"


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_reports_how_many_episodes_it_leaves_out(
    browser: Browser, folder: RunFolder, tmp_path: Path
) -> None:
    everything = len(rows(folder))
    async with browser.page(made(folder, tmp_path, "--max-episodes", "16")) as page:
        assert f"16 of {everything} episodes, of 2 steps; {everything - 16} are left out" in await page.text(
            "#left-out"
        )
    async with browser.page(made(folder, tmp_path)) as page:
        assert await page.text("#left-out") == ""


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_a_run_without_episodes_or_without_steps_is_shown(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.bind_config({"model": "tiny"})
    async with browser.page(made(folder, tmp_path)) as page:
        assert await page.text("#episode") == "There are no episodes in this page." and page.faults == []
    folder.append_metrics({"step": 1, "stage": "sft", "loss": 3.5, "learning_rate": 0.0})
    async with browser.page(made(folder, tmp_path)) as page:
        assert await pairs(page, "#tiles") == {"Loss": "3.5"} and page.faults == []


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_and_stands_out(browser: Browser, folder: RunFolder, tmp_path: Path, dark: bool) -> None:
    async with browser.page(made(folder, tmp_path), dark=dark) as page:
        for width in (320, 420, 700, 800, 1280, 1920):
            await page.resize(width, 900)
            await page.until(f"innerWidth === {width}")
            assert await page.run("document.documentElement.scrollWidth") == width
        await page.run("document.querySelectorAll('details').forEach(one => one.open = true)")
        for choices in ({}, {"reward": "no reward"}, {"tools": "some failed"}):
            await find(page, **choices)
            assert await page.lowest_contrast() >= 4.5, "WCAG 2.2, 1.4.3"
