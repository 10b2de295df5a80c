"""Debian's Chromium, driven by Playwright: what a page draws, what it holds, how it looks, what it complains of."""

import shutil
from contextlib import contextmanager

import pytest

LISTEN = """
window.drawn = new Set();
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function(text, ...where) {
    window.drawn.add(text);
    return fill.call(this, text, ...where);
};
"""
"""Bokeh draws words on canvases, where no document has them."""


@contextmanager
def open_page(url, width=1280, height=720):
    """Open a page of this machine, and give it with the list of its complaints; no name of another is resolved."""
    playwright = pytest.importorskip("playwright.sync_api", reason="it drives the browser")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("There is no Chromium to open the page in.")  # reason: nothing else renders as browsers do
    options = ["--no-sandbox", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with (
        playwright.sync_playwright() as started,
        started.chromium.launch(executable_path=path, args=options) as browser,
    ):
        page, complaints = browser.new_page(viewport={"width": width, "height": height}), []
        page.set_default_timeout(60_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.add_init_script(LISTEN)
        page.goto(url)
        yield page, complaints
