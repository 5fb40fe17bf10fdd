"""Tests of the API page in a real browser. It works with and without a token, and stores the token only for its tab."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest

from tests.gateway.browser import Browser, Page, in_a_browser
from tests.gateway.serving import serving

PAGE = files("sandbox.gateway.pages").joinpath("docs.html").read_text(encoding="utf-8")
PAGE_IS_SHOWN = "!document.getElementById('all').hidden"
OPERATIONS_ARE_SHOWN = f"{PAGE_IS_SHOWN} && document.querySelectorAll('.opblock').length > 0"
TOKEN_IS_REQUESTED = "!document.getElementById('ask').hidden"
TOKEN = "s3cret"


def test_the_page_never_inserts_data_as_markup() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\bon\w+=\"", PAGE)


def test_the_page_loads_nothing_from_other_hosts() -> None:
    assert not re.search(r"https?://", PAGE)


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_requests_no_token_if_the_server_has_none(browser: Browser) -> None:
    async with serving() as served, browser.page(f"{served.url}/docs") as page:
        await page.until(OPERATIONS_ARE_SHOWN)
        assert not await page.run(TOKEN_IS_REQUESTED)
        text = await page.text("#all")
        assert "/v1/execute" in text.replace("\u200b", "") and "memory_limit" in text and "Schemas" in text
        await _try_execute(page, 200)
        assert page.faults == []


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_requests_the_token_and_sends_it(browser: Browser) -> None:
    async with serving(token=TOKEN) as served, browser.page(f"{served.url}/docs") as page:
        await page.until(TOKEN_IS_REQUESTED)
        assert not await page.run(OPERATIONS_ARE_SHOWN) and "Result" not in await page.text()
        await _enter(page, "guess")
        await page.until("document.getElementById('why').textContent === 'The server rejected this token.'")
        assert not await page.run(OPERATIONS_ARE_SHOWN)
        await _enter(page, TOKEN)
        await page.until(OPERATIONS_ARE_SHOWN)
        assert not await page.run(TOKEN_IS_REQUESTED)
        await _try_execute(page, 200)
        await page.run("sessionStorage.setItem('rstar-sandbox token', 'of another server')")
        await _try_execute(page, 401)
        await page.until(TOKEN_IS_REQUESTED)
        await _enter(page, TOKEN)
        await page.until(f"!({TOKEN_IS_REQUESTED}) && {OPERATIONS_ARE_SHOWN}")
        await _try_execute(page, 200)


@in_a_browser
@pytest.mark.asyncio(loop_scope="module")
async def test_the_token_is_stored_only_for_the_tab(browser: Browser) -> None:
    """A tab requests the token once for both pages. The token is in no URL, no cookie and no permanent storage."""
    async with serving(token=TOKEN) as served:
        async with browser.page(f"{served.url}/docs") as page:
            await page.until(TOKEN_IS_REQUESTED)
            await _enter(page, TOKEN)
            await page.until(OPERATIONS_ARE_SHOWN)
            urls = await page.run(
                "JSON.stringify([location.href, ...performance.getEntriesByType('resource').map(entry => entry.name)])"
            )
            assert "openapi.json" in urls and TOKEN not in urls
            stored = await page.run("JSON.stringify([{...localStorage}, document.cookie, history.state])")
            assert TOKEN not in stored
            assert await page.run("document.getElementById('token').value") == ""
            assert TOKEN not in await page.run("document.documentElement.outerHTML")
            for path in ("/docs", "/"):
                await page.call("Page.navigate", url=served.url + path)
                await page.until(
                    f"location.pathname === '{path}' && document.readyState === 'complete' && {PAGE_IS_SHOWN}"
                )
        async with browser.page(f"{served.url}/docs") as page:
            await page.until(TOKEN_IS_REQUESTED)


async def _enter(page: Page, token: str) -> None:
    await page.run(f"document.getElementById('token').value = {json.dumps(token)}")
    await page.run("document.getElementById('ask').requestSubmit()")


async def _try_execute(page: Page, status: int) -> None:
    """Send the example of /v1/execute until the response has `status`. The page loses clicks while it renders, so each
    poll clicks again."""
    await page.until(f"""(() => {{
        const operation = document.querySelector('.opblock-post');
        const shown = operation.querySelector('.live-responses-table .response .response-col_status');
        if (shown && shown.innerText.startsWith('{status}')) return true;
        (operation.querySelector('.btn.execute') || operation.querySelector('.opblock-summary-control')).click();
        return false;
    }})()""")
