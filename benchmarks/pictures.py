"""Pictures of a run's page for the docs: `python -m benchmarks.pictures RUN FOLDER`.

Writes PNG files of the tabs, and of the overview on a phone, as the installed Chromium draws them.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.local.dashboard.page import PageData, exported_page
from runspec.local.dashboard.source import FolderSource

DESKTOP, PHONE = (1440, 900), (390, 844)
PICTURES = {
    "dashboard": ("overview", DESKTOP, 1.0),
    "dashboard-curves": ("curves", DESKTOP, 1.0),
    "dashboard-timeline": ("timeline", DESKTOP, 1.0),
    "dashboard-rollouts": ("rollouts", DESKTOP, 1.0),
    "dashboard-phone": ("overview", PHONE, 2.0),
}
"""Tab, size in CSS pixels and pixels a CSS pixel, by file name."""
COLOURS = 256
"""Colours of a picture, which keep it small."""
MOST_BYTES = 200_000
TIMEOUT_S = 60.0
# No sandbox: it cannot be had as root. Nothing is fetched but the page, from this machine.
OPTIONS = (
    *("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "disable-sync"),
    *("disable-background-networking", "disable-component-update", "disable-dev-shm-usage"),
    *("no-first-run", "hide-scrollbars", "window-size=1440,900"),
)


@contextmanager
def browser() -> Iterator[Chrome]:
    """Start Debian's Chromium with an empty profile.

    Raises:
        UserError: it is not installed.
    """
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        missing = "chromium" if binary is None else "chromedriver"
        raise UserError(
            f"{missing} is not installed",
            place="PATH",
            remedy="apt-get install chromium chromium-driver",
        )
    options = Options()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="runspec-browser-") as profile:
        for option in (*OPTIONS, f"user-data-dir={profile}"):
            options.add_argument(f"--{option}")
        with Chrome(options=options, service=Service(driver)) as started:
            yield started


def show_as(chrome: Chrome, size: tuple[int, int], dark: bool = False, scale: float = 1.0) -> None:
    """Take on a screen's size, a phone's touch and a colour scheme."""
    phone, scheme = size == PHONE, "dark" if dark else "light"
    screen = {"width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": phone}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    chrome.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def picture(chrome: Chrome) -> bytes:
    """Return a screenshot as a small PNG."""
    drawn = Image.open(io.BytesIO(chrome.get_screenshot_as_png())).convert("RGB")
    out = io.BytesIO()
    drawn.quantize(COLOURS).save(out, "PNG", optimize=True)
    return out.getvalue()


def _is_drawn(chrome: Chrome) -> bool:
    return bool(chrome.find_elements("css selector", "section:not([hidden]) :is(canvas, .card)"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    given = parser.parse_args()
    try:
        view = PageData(FolderSource(given.run))
        view.refresh(read_s=float("inf"))
        with tempfile.TemporaryDirectory() as folder, browser() as chrome:
            page = Path(folder) / "page.html"
            page.write_text(exported_page([view]), encoding="utf-8")
            for name, (tab, size, scale) in PICTURES.items():
                show_as(chrome, size, scale=scale)
                chrome.get(page.as_uri())
                chrome.find_element("id", f"tab-{tab}").click()
                WebDriverWait(chrome, TIMEOUT_S).until(_is_drawn)
                data = picture(chrome)
                if len(data) > MOST_BYTES:
                    remedy = "lower benchmarks.pictures.COLOURS"
                    raise UserError(f"{len(data)} bytes is too large", place=name, remedy=remedy)
                write_atomic(given.folder / f"{name}.png", data)
                print(f"{given.folder / name}.png: {len(data)} bytes")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
