"""A headless Chromium that is asked over its own protocol: what a page draws, what it holds, how it looks."""

import asyncio
import base64
import json
import shutil
import tempfile
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path

import psutil
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

from helpers import harness

LISTEN = """
window.drawn = new Set();
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function(text, ...where) {
    window.drawn.add(text);
    return fill.call(this, text, ...where);
};
"""
"""Bokeh draws words on canvases, where no document has them."""


class Page:
    """A page that is open."""

    def __init__(self, socket):
        self._socket, self._numbers = socket, count(1)

    async def ask(self, method, **parameters):
        """Call a method of Chromium's protocol; what the page tells of its own meanwhile is passed over."""
        number = next(self._numbers)
        await self._socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := await asyncio.wait_for(self._socket.read_message(), 60)) is not None:
            answer = json.loads(message)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
        raise AssertionError("Chromium closed the page")

    async def open(self, url):
        """Go to another page."""
        await self.ask("Page.navigate", url=url)

    async def value(self, expression):
        """Return the value of an expression of JavaScript."""
        found = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait_for(self, expression, seconds=60):
        """Wait until an expression is true; return its value."""
        for _ in range(10 * seconds):
            if found := await self.value(expression):
                return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"{expression} did not come in {seconds} seconds; drawn: {await self.drawn()}")

    async def drawn(self):
        """Return the words that the page has drawn so far."""
        return set(await self.value("[...(window.drawn || [])]"))

    async def picture(self):
        """Return how it looks, as a PNG."""
        return base64.b64decode((await self.ask("Page.captureScreenshot", format="png"))["data"])


@contextmanager
def chromium_in(folder):
    """Start Chromium with all that it writes in a folder; at the end none of its processes writes there any more."""
    command = [shutil.which("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder}/profile", "about:blank"]
    with harness.process(command, folder / "log", env=harness.environment(TMPDIR=str(folder))) as started:
        try:
            yield
        finally:
            family = psutil.Process(started.pid).children(recursive=True)
            started.terminate()
            started.wait(30)
            _, left = psutil.wait_procs(family, 10)
            for process in left:
                process.kill()
            psutil.wait_procs(left, 10)


@asynccontextmanager
async def opened(url, width=1280, height=720):
    """Open a page of this machine; no name of another is resolved."""
    # Its folder has a name that is short enough for its socket.
    with tempfile.TemporaryDirectory(prefix="dkfm-") as name, chromium_in(folder := Path(name)):
        told = folder / "profile" / "DevToolsActivePort"
        await asyncio.to_thread(harness.wait_for, lambda: told.exists() and told.read_text().count("\n"), "Chromium")
        port = told.read_text().split()[0]
        listed = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
        entry = next(entry for entry in json.loads(listed.body) if entry["type"] == "page")
        socket = await websocket_connect(entry["webSocketDebuggerUrl"], max_message_size=2**26)
        try:
            page = Page(socket)
            await page.ask("Page.enable")
            await page.ask("Page.addScriptToEvaluateOnNewDocument", source=LISTEN)
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            await page.ask("Emulation.setDeviceMetricsOverride", **size)
            await page.open(url)
            yield page
        finally:
            socket.close()
