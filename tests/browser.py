"""Chromium without a screen, driven by Selenium: no download, and no way but to loopback.

With CELERY_REDLOCK_PICTURES=docs/pictures its tests make the pictures there.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

PACKAGES = ("chromium", "chromium-driver")  # Debian's names
WINDOW = (1200, 900)  # pixels


def missing() -> str:
    """Return why there is no browser to drive, with what to install, or "" where there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)}: apt-get install {' '.join(PACKAGES)}" if absent else ""


@contextmanager
def browser(folder: Path) -> Iterator[Chrome]:
    """Give a browser that keeps what it keeps in a folder; all of it ends with the `with`.

    Without one its test is skipped, which CI takes for a failure.
    """
    if without := missing():
        pytest.skip(without)
    # imported late: it comes with the lane of the pages
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for word in (
        "headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "no-first-run",
        "disable-background-networking", "disable-component-update", "no-proxy-server",
        "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "hide-scrollbars",
        f"user-data-dir={folder}", f"window-size={WINDOW[0]},{WINDOW[1]}",
    ):  # fmt: skip
        options.add_argument(f"--{word}")
    driver_path = str(shutil.which("chromedriver"))
    service = Service(driver_path, popen_kw={"start_new_session": True})
    try:
        try:
            made = Chrome(options=options, service=service)
        except WebDriverException as error:
            pytest.skip(f"chromium does not start here: {error.msg}")
        try:
            yield made
        finally:
            with suppress(WebDriverException):
                made.quit()
    finally:
        with suppress(ProcessLookupError, AttributeError):  # gone, or never there
            os.killpg(service.process.pid, signal.SIGKILL)


def take_picture(chrome: Chrome, name: str, first: str, last: str, width: int) -> None:
    """Make a picture from one element down to another, where pictures are wanted.

    first, last: XPaths; the wider one gives the width. width: of the window, in pixels.
    """
    from selenium.webdriver.common.by import By

    folder = os.environ.get("CELERY_REDLOCK_PICTURES")
    if folder is None:
        return
    size = chrome.get_window_size()
    chrome.set_window_size(width, size["height"])
    start, end = (chrome.find_element(By.XPATH, path).rect for path in (first, last))
    clip = {
        **start,
        "width": max(start["width"], end["width"]),
        "height": end["y"] + end["height"] - start["y"],
        "scale": 2,  # sharp on a fine screen
    }
    wanted = {"clip": clip, "captureBeyondViewport": True}
    taken = chrome.execute_cdp_cmd("Page.captureScreenshot", wanted)
    chrome.set_window_size(**size)
    (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))
