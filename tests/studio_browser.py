"""Open the studio's pages in Chromium, and keep pictures of them.

With `STUDIO_SCREENSHOTS=FOLDER` a picture of each page is left there.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from dit_lora.studio.server import StudioServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
"""Width in pixels and color scheme."""
_SCREENSHOTS = os.environ.get("STUDIO_SCREENSHOTS")
_LOAD_PICTURES = """
for (const picture of document.images) picture.loading = 'eager';
const frames = [...document.querySelectorAll('video')].map((video) => {
  video.preload = 'auto';
  return video.readyState >= 2 || new Promise((resolve) => video.addEventListener('loadeddata', resolve));
});
Promise.all([...frames, ...[...document.images].map((picture) => picture.decode())]).then(() => null)
"""


@contextmanager
def start_browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def open_page(browser: Any, server: StudioServer, **options: Any) -> tuple[Any, list[str]]:
    """A page of a browser that has opened the link, and a list to which its errors are added."""
    keys = server.keys
    context = browser.new_context(base_url=f"http://{keys.host_names[0]}", **options)
    context.add_cookies([{"name": keys.cookie_name, "value": keys.session, "domain": "127.0.0.1", "path": "/"}])
    context.set_default_timeout(60_000)  # on a busy machine
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return page, errors


def check_page(page: Any, name: str, schemes: Sequence[str] = ("",)) -> None:
    """Load all pictures of a page, keep a picture of it if asked, and check that it is no wider than the screen.

    `schemes` are color schemes in which the page is shown; "" is the present one.
    """
    # Also for its style sheet: an element can be found before that is loaded.
    page.wait_for_load_state()
    # Thumbnails load when they come into sight.
    page.evaluate(_LOAD_PICTURES)
    width = page.viewport_size["width"]
    for scheme in schemes:
        if scheme:
            page.emulate_media(color_scheme=scheme)
        if _SCREENSHOTS:
            shown = "dark" if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") else "light"
            page.screenshot(path=f"{_SCREENSHOTS}/{name}_{width}_{shown}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
