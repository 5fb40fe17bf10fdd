"""A headless Chromium, controlled over the DevTools protocol: isolated pages, their DOM and their screenshots."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
TIMEOUT_S = 60.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
)  # fmt: skip

LOWEST_CONTRAST_JS = """() => {
  const luminance = colour => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map(n => n / 255).map(n => n <= .04045 ? n / 12.92 : ((n + .055) / 1.055) ** 2.4);
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
  };
  const backgroundLuminance = node => {
    const colour = getComputedStyle(node).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? backgroundLuminance(node.parentElement) : luminance(colour);
  };
  const hasText = node => [...node.childNodes].some(child => child.nodeType === Node.TEXT_NODE && child.data.trim());
  const isVisible = node => node.getClientRects().length;
  const nodes = [...document.querySelectorAll("body *:not(:disabled, option, script, style)")].filter(node => hasText(node) && isVisible(node));
  return Math.min(...nodes.map(node => {
    const style = getComputedStyle(node);
    const pair = [luminance(node.tagName === "text" ? style.fill : style.color), backgroundLuminance(node)];
    return (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
  }));
}"""  # noqa: E501
"""JavaScript function that returns the lowest contrast ratio in the page, by the formulas of WCAG 2.2."""


class Browser:
    """One Chromium; `page` opens pages in it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._command_ids = itertools.count(1)
        self.faults: list[str] = []
        """Problems that the pages reported: uncaught errors, violations of the content policy, failed loads."""

    async def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Send a command, and return its result."""
        command_id = next(self._command_ids)
        command = {"id": command_id, "method": method, "params": params} | ({"sessionId": session} if session else {})
        await self._socket.send_json(command)
        while True:
            message = json.loads(await self._socket.receive_str(timeout=TIMEOUT_S))
            if message.get("id") == command_id:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            if message.get("method") == "Runtime.exceptionThrown":
                self.faults.append(str(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded":
                self.faults.append(f"{message['params']['entry']['text']} {message['params']['entry'].get('url', '')}")

    @asynccontextmanager
    async def page(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False) -> AsyncIterator[Page]:
        """Open `url` in a new browser context, without cookies and storage."""
        self.faults.clear()
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = (await self.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        await page.resize(width, height)
        await page.call("Emulation.setScrollbarsHidden", hidden=True)
        await page.call("Emulation.setEmulatedMedia", features=[_colour_scheme(dark)])
        await page.call("Page.navigate", url=url)
        await page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
        yield page
        await self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """A page of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    @property
    def faults(self) -> list[str]:
        return self._browser.faults

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, self._session, **params)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page, and return its value."""
        message = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in message, message["exceptionDetails"]
        return message["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until the JavaScript expression `condition` is true."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not await self.run(condition):  # noqa: ASYNC110  the page sends no event
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never true: {condition}; {self.faults}\n{await self.text()}") from None

    async def text(self, selector: str = "body") -> str:
        """Return the visible text of an element."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def lowest_contrast(self) -> float:
        """Return the lowest contrast between a visible text and its background (WCAG ratio)."""
        return float(await self.run(f"({LOWEST_CONTRAST_JS})()"))

    async def screenshot(self) -> bytes:
        """Return a PNG of the whole page, the part outside of the window included."""
        return base64.b64decode((await self.call("Page.captureScreenshot", captureBeyondViewport=True))["data"])


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start a Chromium with a temporary profile; kill it and remove the profile at the end."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile_dir:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, f"--user-data-dir={profile_dir}", stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                url = await _devtools_url(process)
            async with aiohttp.ClientSession() as http, http.ws_connect(url, max_msg_size=0) as socket:
                browser = Browser(socket)
                yield browser
                await browser.call("Browser.close")
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(5):  # seconds to exit after Browser.close
                    await process.communicate()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()


async def _devtools_url(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    output = b""
    while line := await process.stderr.readline():
        output += line
        if line.startswith(b"DevTools listening on "):
            return line.split()[-1].decode()
    raise AssertionError(f"chromium did not start: {output.decode(errors='replace')}")


def _colour_scheme(dark: bool) -> dict[str, str]:
    return {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
