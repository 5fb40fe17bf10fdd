"""Tests of the dashboard in a real browser: it shows the numbers of `/v1/stats`, and shows hostile names as text."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from sandbox.gateway.calls.dispatcher import Dispatcher, NodeRow
from sandbox.gateway.calls.executor_handle import ExecutorHandle
from sandbox.gateway.calls.executor_report import ReadyReport
from sandbox.gateway.observe.history import History
from sandbox.gateway.routes import STATS
from sandbox.types import Status
from tests.fakes import FakeFleet
from tests.gateway.browser import Browser, Page, in_a_browser
from tests.gateway.serving import Served, serving, until

PAGE = files("sandbox.gateway.pages").joinpath("dashboard.html").read_text(encoding="utf-8")
PAGE_IS_SHOWN = "!document.getElementById('all').hidden"


def test_the_page_never_inserts_data_as_markup() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\bon\w+=\"", PAGE)


def test_the_page_has_a_colour_and_a_pattern_for_every_status() -> None:
    table = re.findall(r'\["(\w+)", "(#\w{6})", "([^"]*)"\]', PAGE)
    assert {name for name, _, _ in table} == set(Status)
    assert len({pattern for _, _, pattern in table}) == len(table)


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_shows_the_numbers_of_the_server(browser: Browser) -> None:
    async with (
        serving(queue_calls=5000, isolation_reason="namespaces: refused") as served,
        browser.page(served.url) as page,
    ):
        hanging = await _send_traffic(served)
        await page.until(f"{_rows_of('statuses')}.ok?.[1] === '1,234'")
        await page.until(f"{_rows_of('executors')}['● 0 up']?.[0] === '4'")
        statuses, executors, events = [await _table(page, name) for name in ("statuses", "executors", "events")]
        tiles = await page.text("#tiles")
        # The columns after "per second" are "total" and "share".
        assert statuses["ok"][1:] == ["1,234", "99.9 %"] and statuses["unavailable"][1:] == ["0", "0.0 %"]
        # The columns are running, long, slots, restarts and zygotes.
        assert executors == {"● 0 up": ["4", "3", "4", "0", "3"]}
        assert await _table(page, "zygotes") == {"bare": ["2"], "symbolic": ["1"]}
        assert statuses["invalid"][1] == "1" and events["requests rejected with 400"][1] == "1"
        assert re.search(r"Waiting\s+12\s+max 5,000", tiles) and re.search(r"Running\s+4\s+3 long", tiles)
        assert await page.text("h1") == "● Ready" and "isolation none (namespaces: refused)" in await page.text(
            "#about"
        )
        for chart in ("rates", "latency", "load", "machine"):
            label = await page.run(f"document.getElementById('{chart}').getAttribute('aria-label')")
            assert re.search(r", the last \d+ (s|min)\. Now: \w", label)
        assert "waiting 12, running 4, slots 4" in await page.text("#load-now")
        assert page.faults == []
        hanging.cancel()
        await asyncio.wait([hanging])


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("width", [320, 1280])
async def test_a_tenant_sees_its_own_calls_and_the_operator_those_of_all_tenants(
    browser: Browser, width: int, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants."<b>a"]\ntoken = "token-a"\n[tenants.b]\ntoken = "token-b"\n', encoding="utf-8")
    async with serving(token="server", tenants=str(file)) as served:
        for token, calls in (("token-a", 1), ("token-b", 2)):
            batch = {"calls": [{"code": "1"}] * calls + [{"code": 1}]}
            await served.post("/v1/batch", batch, Authorization=f"Bearer {token}")
        async with browser.page(served.url, width) as page:
            await page.until("!document.getElementById('ask').hidden")
            await _enter(page, "server")
            await page.until(PAGE_IS_SHOWN)
            # The columns are calls, ok, waiting, running and CPU time.
            assert await _table(page, "tenants") == {
                "<b>a": ["2", "1", "0", "0", "0 s"],
                "b": ["3", "2", "0", "0", "0 s"],
            }
        async with browser.page(served.url, width) as page:
            await page.until("!document.getElementById('ask').hidden")
            await _enter(page, "token-a")
            await page.until("!document.getElementById('own').hidden")
            shown = await _table(page, "own-statuses")
            assert (shown["ok"], shown["invalid"]) == (["1", "50.0 %"], ["1", "50.0 %"])
            assert "tenant <b>a" in await page.text("#about") and not await page.run(PAGE_IS_SHOWN)
            assert await page.run("document.documentElement.scrollWidth") == width
            assert await page.lowest_contrast() >= 4.5
            await served.post("/v1/execute", {"code": "1"}, Authorization="Bearer token-a")
            await page.until(f"{_rows_of('own-statuses')}.ok[0] === '2'")
            assert [
                fault for fault in page.faults if "401" not in fault
            ] == []  # the 401 of the request without a token is expected


class _TwoNodes:
    """A membership with a node that is ready and one that is refused."""

    def __init__(self, executors: list[ExecutorHandle]) -> None:
        self._executors = executors

    async def run(self, dispatcher: Dispatcher) -> None: ...

    async def started(self) -> None: ...

    def rows(self) -> list[NodeRow]:
        return [
            NodeRow("a", "10.0.0.1", "ready", "", "namespaces", tuple(self._executors), 2),
            NodeRow("<b>", "10.0.0.2", "refused", "has no guest runtime", "landlock", (), 0),
        ]


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_shows_nodes_if_there_are_any(browser: Browser) -> None:
    async with serving() as served, browser.page(served.url) as page:
        await page.until(PAGE_IS_SHOWN)
        assert await page.run("document.getElementById('nodes-part').hidden")
        served.dispatcher.membership = _TwoNodes(served.dispatcher.executors)
        await page.until("!document.getElementById('nodes-part').hidden")
        assert await _table(page, "nodes") == {
            "● a ready": ["namespaces", "0", "4", "0", "2"],
            "⊘ <b> refused: has no guest runtime": ["landlock", "0", "0", "–", "0"],
        }
        assert page.faults == []


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_names_from_hostile_code_are_shown_as_text(browser: Browser) -> None:
    names = [
        "<img src=x onerror=hacked=1>", "</script><script>hacked=1</script>", "<svg onload=hacked=1>", "__proto__",
        "'\"`${hacked=1}", "constructor", "\u202eright to left", "javascript:hacked=1",
    ]  # fmt: skip
    async with serving() as served, browser.page(served.url) as page:
        stats = {"missed_imports": dict.fromkeys(names, 7), "zygotes": {names[0]: 1}, f"{names[1]}_total": 5}
        served.fleet.last_executor.send("stats", stats)
        executor = served.dispatcher.executors[0]
        executor.ready_report = ReadyReport(slots=4, isolation=names[0], python=names[1])
        await page.until(f"document.getElementById('missed').rows.length > {len(names)}")  # the names and the head
        shown = await _table(page, "missed")
        assert set(shown) == set(names)
        assert names[0] in await page.text("#about") and names[0] in await page.text("#zygotes")
        assert names[1] in await page.text("#events")
        assert await page.run("typeof hacked") == "undefined"
        assert await page.run("document.querySelectorAll('img, body script ~ script, iframe, svg svg').length") == 0
        assert page.faults == []


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_token_is_requested_once(browser: Browser) -> None:
    async with serving(token="s3cret") as served, browser.page(served.url) as page:
        await page.until("!document.getElementById('ask').hidden")
        assert await page.text("h1") == "◌ Token required" and not await page.run(PAGE_IS_SHOWN)
        await _enter(page, "guess")
        await page.until("document.getElementById('why').textContent === 'The server rejected this token.'")
        await _enter(page, "s3cret")
        await page.until(PAGE_IS_SHOWN)
        refused = served.dispatcher.counters.refused[401]
        assert refused == 2  # the first request of the page, and the one with the wrong token
        await page.call("Page.reload")
        await page.until(f"document.readyState === 'complete' && {PAGE_IS_SHOWN}")
        assert served.dispatcher.counters.refused[401] == refused


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_shows_an_unreachable_server_and_continues_when_it_is_back(browser: Browser) -> None:
    async with serving() as served, browser.page(served.url) as page:
        await page.until(PAGE_IS_SHOWN)
        await page.call("Network.enable")
        await _set_network(page, offline=True)
        await page.until("document.querySelector('h1').textContent.startsWith('✖ No answer since ')")
        assert await page.run("document.body.className") == "away"
        await served.post("/v1/execute", {"code": "1"})
        _pretend_restart(served)
        await _set_network(page, offline=False)
        await page.until(f"{_rows_of('statuses')}.ok?.[1] === '1'")
        assert await page.text("h1") == "● Ready"
        await page.until("steps.length > 0 && steps[0].number === 1")


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_shows_the_reason_why_no_call_runs(browser: Browser) -> None:
    async with serving(FakeFleet(start_reactions=("ready", "silent"))) as served, browser.page(served.url) as page:
        await page.until("document.querySelector('h1').textContent === '● Ready'")
        served.fleet.last_executor.exit(1)
        await page.until("document.querySelector('h1').textContent === '✖ No executor'")
        await served.dispatcher.drain(0)
        await page.until("document.querySelector('h1').textContent === '◐ Draining: no new calls'")
        assert (await _table(page, "executors")).keys() == {"✖ 0 down"}


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_shows_how_many_executors_are_down(browser: Browser) -> None:
    fleet = FakeFleet(start_reactions=("ready", "ready", "silent"))
    async with serving(fleet, executors=2) as served, browser.page(served.url) as page:
        await page.until("document.querySelector('h1').textContent === '● Ready'")
        fleet.last_executor.exit(1)
        await page.until("document.querySelector('h1').textContent === '● Ready, 1 of 2 executors'")
        assert await page.run("document.querySelector('h1').dataset.mood") == "warn"


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_shows_that_all_long_slots_are_in_use(browser: Browser) -> None:
    async with serving() as served, browser.page(served.url) as page:
        served.fleet.last_executor.send("stats", {"running": 9, "running_long": 7, "long_slots": 8})
        await page.until("document.querySelector('#tiles').textContent.includes('7 long (max 8), ')")
        assert await page.text("h1") == "● Ready"
        served.fleet.last_executor.send("stats", {"running": 10, "running_long": 8, "long_slots": 8})
        await page.until("document.querySelector('h1').textContent === '● Ready, all long slots in use'")
        assert await page.run("document.querySelector('h1').dataset.mood") == "warn"
        _, metrics_text = await served.get("/metrics")
        for name in ("running_long", "long_slots"):
            assert f'rstar_sandbox_executor_{name}{{executor="0"}} 8' in metrics_text


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_charts_show_one_or_ten_minutes(browser: Browser) -> None:
    async with serving() as served, browser.page(served.url) as page:
        await page.until(PAGE_IS_SHOWN)
        for button, period in ((1, "the last 10 min"), (0, "the last 60 s")):
            await page.run(f"document.getElementById('spans').elements[{button}].click()")
            await page.until(f"document.getElementById('load').getAttribute('aria-label').includes('{period}')")


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_every_percentile_has_its_label_even_without_calls(browser: Browser) -> None:
    async with serving() as served, browser.page(served.url) as page:
        has_label = "document.getElementById('latency').textContent.includes(name)"
        await page.until(f"['p50', 'p90', 'p99'].every(name => {has_label})")


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("width", [320, 420, 800, 1280, 1920])
async def test_nothing_overflows_at_any_width(browser: Browser, width: int) -> None:
    async with serving() as served, browser.page(served.url, width) as page:
        hanging = await _send_traffic(served)
        await page.until(f"{_rows_of('executors')}['● 0 up']?.[0] === '4'")
        assert await page.run("document.documentElement.scrollWidth") == width
        hanging.cancel()
        await asyncio.wait([hanging])


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("dark", [False, True])
async def test_every_text_has_enough_contrast(browser: Browser, dark: bool) -> None:
    async with serving() as served, browser.page(served.url, dark=dark) as page:
        hanging = await _send_traffic(served)
        for chart, line in (("load", "waiting"), ("latency", "p99"), ("machine", "memory")):
            await page.until(f"document.getElementById('{chart}').textContent.includes('{line}')")
        assert await page.lowest_contrast() >= 4.5  # success criterion 1.4.3 of WCAG 2.2
        hanging.cancel()
        await asyncio.wait([hanging])


def _rows_of(table: str) -> str:
    """Return a JavaScript expression for an object that describes a table. For each row, the key is the text of the
    first cell, and the value is the list of the texts of the other cells."""
    return (
        f"Object.fromEntries([...document.getElementById('{table}').tBodies[0]?.rows ?? []]"
        ".map(row => [...row.cells].map(cell => cell.textContent.trim())).map(([name, ...rest]) => [name, rest]))"
    )


async def _table(page: Page, name: str) -> dict[str, list[str]]:
    """Return the rows of a table as `_rows_of` describes them, with plain spaces in place of no-break spaces."""
    text = await page.run(f"JSON.stringify(Object.entries({_rows_of(name)}))")
    return dict(json.loads(text.replace("\u00a0", " ")))


async def _send_traffic(served: Served) -> asyncio.Task[Any]:
    """Finish 1,234 calls, and send a malformed call and a malformed batch. Then send 20 calls without an end: 8 calls
    are dispatched (twice the 4 slots), and 12 wait. They end when the returned task is cancelled."""
    await served.post("/v1/batch", {"calls": [{"code": "1"}] * 1234 + [{"code": 1}]})
    await served.post("/v1/batch", {})
    hanging = asyncio.create_task(served.post("/v1/batch", {"calls": [{"code": "hang"}] * 20}))
    await until(lambda: served.dispatcher.call_table.waiting == 12)
    stats = {"running": 4, "running_long": 3, "queued": 4, "zygotes": {"bare": 2, "symbolic": 1}}
    served.fleet.last_executor.send("stats", stats)
    return hanging


async def _enter(page: Page, token: str) -> None:
    await page.run(f"document.getElementById('token').value = {json.dumps(token)}")
    await page.run("document.getElementById('ask').requestSubmit()")


async def _set_network(page: Page, *, offline: bool) -> None:
    await page.call(
        "Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1
    )


def _pretend_restart(served: Served) -> None:
    """Replace the history, as if the server had been restarted: step numbers start at 1 again."""
    stats = served.app[STATS]
    stats._started_at += 1
    stats._history = History(stats._snapshot())
