"""A browser for the tests of the pages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.gateway.browser import Browser, chromium


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running_browser:
        yield running_browser
