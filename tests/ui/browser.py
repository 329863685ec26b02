"""Headless Chromium over its DevTools protocol, with nothing but aiohttp."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
WAIT_SECONDS = 90.0  # a busy machine starts a browser slowly
ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, where the sandbox does not; it opens pages of this repository alone
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)


def chromium() -> str:
    """The browser's path. Raises RuntimeError with how to get one."""
    named = os.environ.get("CHROMIUM")
    found = named or next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        raise RuntimeError("no Chromium here; install one (Debian: apt install chromium), or set CHROMIUM to its path")
    return found


class Page:
    """One tab. problems: errors of scripts, refusals by the page's policy and failed loads, as the browser reports
    them."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.requested: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.problems.append(str(event["params"]["entry"]))
            elif event["method"] == "Network.requestWillBeSent":
                self.requested.append(event["params"]["request"]["url"])

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(WAIT_SECONDS):
            event = await answer
        assert "error" not in event, (method, event["error"])
        result: dict[str, Any] = event["result"]
        return result

    async def run(self, script: str) -> Any:
        """Value of an expression in the page, evaluated outside the page's content security policy."""
        reply = await self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait for an expression to be truthy; its value."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    value = await self.run(script)
                    if value:
                        return value
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never true: {script}; problems: {self.problems}; the page:\n{text}") from None

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)

    async def width(self, pixels: int) -> None:
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=pixels, height=900, deviceScaleFactor=1, mobile=pixels < 600
        )

    async def colours(self, scheme: str) -> None:
        await self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def press(self, key: str, code: int, text: str = "") -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.ask("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        await self.ask("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        """PNG of the whole page."""
        shot = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """A fresh browser with one tab; both are removed at the end, with the profile."""
    with tempfile.TemporaryDirectory(prefix="spillway-ui-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            chromium(),
            *ARGUMENTS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                port = await _debugging_port(process)
            drain = asyncio.create_task(_drain(process))
            async with aiohttp.ClientSession() as client:
                address = f"http://127.0.0.1:{port}/json/list"
                async with client.get(address) as reply:
                    (tab,) = [each for each in await reply.json(content_type=None) if each["type"] == "page"]
                async with client.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
                        await page.ask(f"{domain}.enable")
                    yield page
                    await page.ask("Browser.close")
                    await listening
            await drain
        finally:
            if process.returncode is None:
                try:
                    async with asyncio.timeout(WAIT_SECONDS):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def _debugging_port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    output = b""
    async for line in process.stderr:
        output += line
        if b"DevTools listening on ws://" in line:
            return int(line.split(b"127.0.0.1:")[1].split(b"/")[0])
    raise AssertionError(f"Chromium ended: {output.decode(errors='replace')}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.read(65_536):
        pass
