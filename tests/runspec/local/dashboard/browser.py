"""A real browser on a page: Debian's Chromium, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

# No sandbox: it cannot be had as root. Nothing is fetched but the page, from this machine.
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
)


@contextmanager
def browser(profile: Path, width: int = 1400, height: int = 1000) -> Iterator[Chrome]:
    """Starts Chromium with an empty profile; logs of the page are kept."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert binary and driver, "install it: apt-get install chromium chromium-driver"
    options = Options()
    options.binary_location = binary
    for option in (*_OPTIONS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = Chrome(options=options, service=Service(driver))
    try:
        yield started
    finally:
        started.quit()
