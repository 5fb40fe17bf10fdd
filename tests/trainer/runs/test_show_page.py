"""Tests of the page of `rstar-train show` in a browser: its numbers, charts, filters, episodes, safety and layout."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.browser import TIMEOUT_S, Browser, Page, chromium, in_a_browser
from tests.trainer.run_folders import KEPT_PER_PROBLEM, SAMPLES_PER_PROBLEM, STAGE_STEPS, write_step
from tests.trainer.runs.show_cases import (
    FIRST_RL_STEP,
    HOSTILE_TEXTS,
    LAST_STEP,
    all_episodes,
    hostile_episode,
    show_arguments,
)
from trainer.episodes.metrics import METRICS
from trainer.json_files import write_json
from trainer.runs import show
from trainer.runs.run_folder import LAYOUT_VERSION, RunFolder

pytestmark = [in_a_browser, pytest.mark.asyncio(loop_scope="module")]

TILES = {
    "Reward": "reward", "Tool errors": "tool_error_ratio_correct", "One answer": "one_answer",
    "Response length": "response_length", "In the loss": "episodes_in_loss", "Loss": "loss", "Step": "step_s",
}  # fmt: skip
"""The metric of each tile, by the tile's title."""
MASK_SPANS = (
    "JSON.stringify([...document.querySelectorAll('.mask rect')]"
    ".map(r => [r.x.baseVal.value, r.width.baseVal.value, +(r.height.baseVal.value > 5)]))"
)
"""JavaScript that returns (start, length, loss mask) of each part of an episode's bar. The rectangles of sampled tokens
are higher than those of other tokens."""
NBSP = "\u00a0"
SHOWN_DIGITS = 6e-3
"""Relative error of a number that is shown with three digits."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running_browser:
        yield running_browser


def write_page(folder: RunFolder, tmp_path: Path, *args: str) -> str:
    """Write the page of a run folder and return its URL."""
    path = tmp_path / "run.html"
    show.show_run(show_arguments(str(folder.path), "--html", str(path), *args))
    return path.as_uri()


def parse_number(text: str) -> float:
    """Return the number that the page wrote as `text`."""
    if text == "–":
        return float("nan")
    number = float(text.replace(",", "").replace("−", "-").removesuffix("%").removesuffix(" s").strip())
    return number / 100 if text.endswith("%") else number


def nan_if_none(number: float | None) -> float:
    return float("nan") if number is None else number


async def read_definitions(page: Page, selector: str) -> dict[str, str]:
    """Return a list of definitions: each term with its first definition."""
    items = f"[...document.querySelectorAll('{selector} > div')]"
    script = f"JSON.stringify({items}.map(item => [...item.children].map(part => part.textContent)))"
    return {term: definition for term, definition, *_ in json.loads(await page.run(script))}


async def move_slider(page: Page, index: int) -> None:
    await page.run(
        f"(s => {{ s.value = {index}; s.dispatchEvent(new Event('input')) }})(document.getElementById('step'))"
    )


async def filter_episodes(page: Page, **choices: str) -> None:
    """Set fields of the filter form."""
    for name, value in choices.items():
        await page.run(f"document.getElementById('filter').elements[{json.dumps(name)}].value = {json.dumps(value)}")
    await page.run("document.getElementById('filter').dispatchEvent(new Event('input'))")


async def listed_episodes(page: Page) -> list[str]:
    """Return the episodes in the list as "step/group/sample"."""
    script = "JSON.stringify([...document.querySelectorAll('#list button')].map(b => b.dataset.place))"
    return list(json.loads(await page.run(script)))


async def test_an_episode_is_marked_as_correct_if_its_reward_is_above_the_bound_of_the_run(
    browser: Browser, tiny_run: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(tiny_run.path, folder.path)
    config = tiny_run.read_config() or {}
    for correct_above in (0, 0.5, 1):
        reward = {"reward": {"correct_above": correct_above}}
        for changed in (config | reward, config | {"reward.correct_above": correct_above}):
            write_json(folder.path / "config.json", {"layout_version": LAYOUT_VERSION, "config": changed})
            async with browser.page(write_page(folder, tmp_path)) as page:
                await filter_episodes(page, reward="correct")
                assert bool(await listed_episodes(page)) == (correct_above < 1)


async def test_the_page_shows_the_numbers_of_the_run_folder(
    browser: Browser, tiny_run: RunFolder, tmp_path: Path
) -> None:
    metrics = [row for row in tiny_run.read_metrics() if row["stage"] != "sft"]
    async with browser.page(write_page(tiny_run, tmp_path)) as page:
        assert await page.text("h1") == "tiny"
        assert f"{LAST_STEP} steps · {len(all_episodes(tiny_run))} episodes · 3 stages" in await page.text("#about")
        for index in (0, 3, len(metrics) - 1):  # the first step, one in the middle, and the last
            row = metrics[index]
            await move_slider(page, index)
            steps = [other["step"] for other in metrics if other["stage"] == row["stage"]]
            step_of_stage = f"step {1 + steps.index(row['step'])} of {len(steps)}"
            assert await page.text("#at") == f"{row['stage']}, {step_of_stage} ({row['step']} of the run)"
            numbers = {name: parse_number(text) for name, text in (await read_definitions(page, "#numbers")).items()}
            expected = {name: nan_if_none(row[name]) for name in METRICS}
            assert numbers == pytest.approx(expected, rel=SHOWN_DIGITS, nan_ok=True)
            tiles = {title: parse_number(text) for title, text in (await read_definitions(page, "#tiles")).items()}
            expected = {title: nan_if_none(row[name]) for title, name in TILES.items()}
            assert tiles == pytest.approx(expected, rel=SHOWN_DIGITS)
            legend = await page.text("#charts")
            assert f"in the loss {row['episodes_in_loss']}\n" in legend
            assert f"not in the loss {row['episodes_not_in_loss']}\n" in legend
        interval = f"(40{NBSP}% to 90{NBSP}%)"
        assert await page.text("#result") == f"Accuracy after rl2: 70{NBSP}% {interval}"
        lines = (await page.text("#results")).splitlines()
        for name, stage in zip(STAGE_STEPS, (tiny_run.read_summary() or {})["stages"], strict=True):
            (line,) = [line for line in lines if line.startswith(name)]
            assert line.split("\t")[3:] == [
                f"{100 * stage['accuracy']:.0f}{NBSP}% {interval}",
                f"{100 * stage['tool_error_ratio']:.0f}{NBSP}%",
                f"80{NBSP}%",  # one_answer
                "60",  # seconds
            ]
        assert page.faults == []


async def test_a_curve_has_a_point_per_step_and_a_chart_has_a_line_between_stages(
    browser: Browser, tiny_run: RunFolder, tmp_path: Path
) -> None:
    rewards = [row["reward"] for row in tiny_run.read_metrics() if "reward" in row]
    async with browser.page(write_page(tiny_run, tmp_path)) as page:
        chart = "document.querySelector('svg.plot')"  # the first chart, of rewards
        curve = await page.run(f"{chart}.querySelector('path[stroke=\"var(--one)\"]').getAttribute('d')")
        heights = [float(y) for y in re.findall(r"[ML]\S+ (\d+\.\d+)", curve)]
        assert len(heights) == len(rewards)
        # Relative to the first and the last point, the curve and the rewards have the same shape.
        drawn = [(heights[0] - y) / (heights[0] - heights[-1]) for y in heights]
        assert drawn == pytest.approx([(r - rewards[0]) / (rewards[-1] - rewards[0]) for r in rewards], abs=0.01)
        assert await page.run(f"{chart}.querySelectorAll('.boundary').length") == 1, "between rl1 and rl2"
        buttons = "[...document.querySelectorAll('#stages button')]"
        await page.run(f"{buttons}.find(b => b.textContent === 'sft').click()")
        assert await page.run(f"{chart}.querySelectorAll('.boundary').length") == 2
        await page.run(f"{buttons}.slice(1).forEach(b => b.click())")  # only the stage sft stays selected
        steps = STAGE_STEPS["sft"]
        assert await page.text("#at") == f"sft, step {steps} of {steps} ({steps} of the run)"
        assert "Reward" not in await page.text("#charts") and "Loss" in await page.text("#charts")


async def test_pointing_at_a_chart_chooses_its_step(browser: Browser, tiny_run: RunFolder, tmp_path: Path) -> None:
    async with browser.page(write_page(tiny_run, tmp_path)) as page:
        box = json.loads(await page.run("JSON.stringify(document.querySelector('svg.plot').getBoundingClientRect())"))
        # 8 px from the right is the end of the curves, 30 px from the left is before their beginning.
        for x, step in ((box["right"] - 8, LAST_STEP), (box["x"] + 30, FIRST_RL_STEP)):
            await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=box["y"] + 60)
            await page.until(f"document.getElementById('at').textContent.includes('({step} of the run)')")
        await page.run("document.getElementById('jump').click()")
        assert await listed_episodes(page) == [
            f"{FIRST_RL_STEP}/{group}/{sample}" for group in range(3) for sample in range(SAMPLES_PER_PROBLEM)
        ]


async def test_the_filters_of_the_page_select_the_episodes_of_the_files(
    browser: Browser, tiny_run: RunFolder, tmp_path: Path
) -> None:
    rows = all_episodes(tiny_run)

    def matching(is_match: Callable[[dict[str, Any]], Any]) -> list[str]:
        return [f"{row['step']}/{row['group']}/{row['sample']}" for row in rows if is_match(row)]

    async with browser.page(write_page(tiny_run, tmp_path)) as page:
        for choices, is_match in (
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
            await filter_episodes(page, **choices)
            assert await listed_episodes(page) == matching(is_match), choices
            assert await page.text("#count") == f"{len(matching(is_match))} of {len(rows)} found"
        assert await page.text("#episode") == "No episode is like that."
        assert page.faults == []


async def test_all_parts_of_an_episode_are_shown(browser: Browser, tiny_run: RunFolder, tmp_path: Path) -> None:
    row = next(
        row
        for row in all_episodes(tiny_run)
        if row["num_failed_tool_calls"] and row["turns"][0]["tool_calls"][0]["arguments"] and row["is_selected"]
    )
    url = f"{write_page(tiny_run, tmp_path)}#{row['step']}/{row['group']}/{row['sample']}"
    async with browser.page(url) as page:
        shown = await page.text("#episode")
        call = row["turns"][0]["tool_calls"][0]
        reason = row["selection_reason"].removeprefix("selected: ")
        for text in (row["problem"]["text"], reason, call["arguments"]["code"], call["response"]):
            assert text.strip() in shown
        assert f"{'correct' if row['reward'] else 'wrong'}, selected" in shown
        facts = await read_definitions(page, "#episode .facts")
        assert facts["Answer blocks"] == str(row["answer_blocks"])
        assert facts["Penalty"].split()[2::3] == [f"{row['p_err']:.3g}", f"{row['p_format']:.3g}"]
        spans = json.loads(await page.run(MASK_SPANS))
        assert spans == [[start, end - start, mask] for start, end, mask in row["loss_mask"]]
        await page.run("document.querySelector('#episode details').open = true")
        assert (await page.text("#episode table")).count("● selected") == KEPT_PER_PROBLEM
        num_coloured = await page.run("document.querySelectorAll('#episode pre .k, #episode pre .s').length")
        assert num_coloured > 0, "keywords and strings of the code"


async def test_arrow_keys_move_through_the_list_of_episodes(
    browser: Browser, tiny_run: RunFolder, tmp_path: Path
) -> None:
    async with browser.page(write_page(tiny_run, tmp_path)) as page:
        episodes = await listed_episodes(page)
        await page.run("document.querySelector('#list button').focus()")
        page_scroll = await page.run("scrollY")
        for _ in range(20):  # more than are visible, so that the list scrolls
            await page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown")
        await page.until(f"document.activeElement.dataset.place === '{episodes[20]}'")
        await page.until(f"location.hash === '#{episodes[20]}'")
        assert await page.run("scrollY") == page_scroll
        assert await page.run("document.getElementById('list').scrollTop") > 0
        assert await page.text("#episode h3") == "p7-2 #4", "episode 20 of step 7 in groups of eight"
        tab_stops = "[...document.querySelectorAll('#list button')].filter(b => b.tabIndex === 0).length"
        assert await page.run(tab_stops) == 1, "the tab key leaves the list at once"


async def test_text_of_a_model_is_inserted_as_text_only(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / HOSTILE_TEXTS[0].replace("/", ""))
    folder.bind_config({text: text for text in HOSTILE_TEXTS})
    for step, text in enumerate(HOSTILE_TEXTS, 1):
        write_step(folder, step, text, [[hostile_episode(text)] * 2])
    async with browser.page(write_page(folder, tmp_path), 320) as page:
        for step, text in enumerate(HOSTILE_TEXTS, 1):
            await filter_episodes(page, step=str(step))
            shown = "\ufffd lone" if text == "\ud800 lone" else text  # a browser may replace a lone surrogate
            assert (await page.run("document.querySelector('#episode pre').textContent")) in (shown, text)
            assert await page.run("document.documentElement.scrollWidth") == 320, text[:40]
        assert await page.run("typeof hacked") == "undefined"
        # The page itself has no image and no frame, and two scripts: its data and its code.
        assert await page.run("document.querySelectorAll('img, iframe, body script ~ script ~ script').length") == 0
        assert await page.run("performance.getEntriesByType('resource').length") == 0
        assert page.faults == []


async def test_the_content_policy_blocks_inserted_scripts_and_images(
    browser: Browser, tiny_run: RunFolder, tmp_path: Path
) -> None:
    async with browser.page(write_page(tiny_run, tmp_path)) as page:
        script = "(s => { s.textContent = 'hacked=1'; document.body.append(s) })(document.createElement('script'))"
        await page.run(script)
        await page.run("document.body.append(Object.assign(new Image(), {src: 'https://example.invalid/x.png'}))")
        async with asyncio.timeout(TIMEOUT_S):
            while sum("Content Security Policy" in fault for fault in page.faults) < 2:
                await page.run("0")  # reads the events that arrive before its answer
        assert await page.run("typeof hacked") == "undefined"


async def test_the_page_reports_how_many_episodes_it_leaves_out(
    browser: Browser, tiny_run: RunFolder, tmp_path: Path
) -> None:
    total = len(all_episodes(tiny_run))
    async with browser.page(write_page(tiny_run, tmp_path, "--max-episodes", "16")) as page:
        expected = f"16 of {total} episodes, of 2 steps; {total - 16} are left out"
        assert expected in await page.text("#left-out")
    async with browser.page(write_page(tiny_run, tmp_path)) as page:
        assert await page.text("#left-out") == ""


async def test_a_run_without_episodes_or_without_steps_is_shown(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.bind_config({"model": "tiny"})
    async with browser.page(write_page(folder, tmp_path)) as page:
        assert await page.text("#episode") == "There are no episodes in this page." and page.faults == []
    folder.append_metrics({"step": 1, "stage": "sft", "loss": 3.5, "learning_rate": 0.0})
    async with browser.page(write_page(folder, tmp_path)) as page:
        assert await read_definitions(page, "#tiles") == {"Loss": "3.5"} and page.faults == []


@pytest.mark.parametrize("dark", [False, True])
async def test_the_page_fits_every_width_and_its_text_has_enough_contrast(
    browser: Browser, tiny_run: RunFolder, tmp_path: Path, dark: bool
) -> None:
    async with browser.page(write_page(tiny_run, tmp_path), dark=dark) as page:
        for width in (320, 420, 700, 800, 1280, 1920):
            await page.resize(width, 900)
            await page.until(f"innerWidth === {width}")
            assert await page.run("document.documentElement.scrollWidth") == width
        await page.run("document.querySelectorAll('details').forEach(details => details.open = true)")
        for choices in ({}, {"reward": "no reward"}, {"tools": "some failed"}):
            await filter_episodes(page, **choices)
            assert await page.lowest_contrast() >= 4.5, "the minimum of WCAG 2.2, 1.4.3"
