"""Makes the pictures of docs/dashboard.md.

`python -m tests.runspec.local.dashboard.screenshots RUN docs`, once for each version of the page.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from selenium.webdriver import Chrome

from runspec.local.dashboard.page import exported_page
from runspec.local.dashboard.source import FolderSource
from runspec.local.dashboard.view import RunView
from tests.runspec.local.dashboard.test_browser import browser

SETTLE_S = 1.0


def main(run_dir: Path, out: Path) -> None:
    view = RunView(FolderSource(run_dir))
    view.refresh(60.0)
    assert not view.trouble, view.trouble
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(exported_page([view]), encoding="utf-8")
        with browser(Path(folder) / "profile", 1200, 760) as chrome:
            chrome.get(page.as_uri())
            _shot(chrome, "curves", out)
            _shot(chrome, "timeline", out)
            _shot(chrome, "rollouts", out, "views.rollouts.shade = 3; views.rollouts.move(1)")


def _shot(chrome: Chrome, tab: str, out: Path, first: str = "") -> None:
    chrome.find_element("id", f"tab-{tab}").click()
    chrome.execute_script(first)
    time.sleep(SETTLE_S)
    chrome.save_screenshot(str(out / f"dashboard-{tab}.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
