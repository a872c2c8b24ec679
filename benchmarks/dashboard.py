"""Speed of a run's page with ten thousand rollouts, in a real browser.

Prints medians in milliseconds: from opening the page to its tiles, of a served page and of an
exported file, and from a change of a filter or of the search to the screen.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.pictures import TIMEOUT_S, browser
from runspec.local.dashboard.page import PageData, exported_page
from runspec.local.dashboard.source import FolderSource
from tests.runspec.local.dashboard.made_run import MadeRun

STEPS, ROLLOUTS = 1250, 10_000
REPEATS = 7
_AFTER = "requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)))"
_TILES = """
const done = arguments[0];
const look = () => document.querySelector(".tile") ? done(performance.now()) : setTimeout(look, 1);
look();"""
"""Answers with the milliseconds from opening the page to its tiles."""
_FILTER = f"""
const [value, done] = arguments, began = performance.now();
const node = document.querySelector("[aria-label=Outcome]");
node.value = value;
node.dispatchEvent(new Event("change"));
{_AFTER};"""
_SEARCH = f"""
const [value, done] = arguments, began = performance.now(), before = $("count").textContent;
const look = () => $("count").textContent === before ? setTimeout(look, 1) : {_AFTER};
$("search").value = value;
$("search").dispatchEvent(new Event("input"));
look();"""


def opened(chrome: Chrome, url: str) -> float:
    chrome.get("about:blank")
    chrome.get(url)
    return float(chrome.execute_async_script(_TILES))


def measured(chrome: Chrome, url: str) -> dict[str, float]:
    """Return the medians of one page."""

    def timed(script: str, *values: str) -> float:
        return median(
            float(chrome.execute_async_script(script, values[i % len(values)]))
            for i in range(REPEATS)
        )

    found = {"open_ms": median(opened(chrome, url) for _ in range(REPEATS))}
    chrome.find_element("id", "tab-rollouts").click()
    listed: Callable[[Chrome], bool] = lambda c: c.execute_script(  # noqa: E731
        "return run.rows.size === arguments[0] && $('count').textContent.length > 0", ROLLOUTS
    )
    WebDriverWait(chrome, TIMEOUT_S).until(listed)
    found["filter_ms"] = timed(_FILTER, "rejected", "")
    found["search_ms"] = timed(_SEARCH, "out 100", "")
    return {name: round(value, 1) for name, value in found.items()}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, browser() as chrome:
        chrome.set_script_timeout(TIMEOUT_S)
        made = MadeRun(Path(folder))
        made.add_steps(STEPS)
        view = PageData(FolderSource(made.dir))
        view.refresh(read_s=float("inf"))
        page = Path(folder) / "page.html"
        page.write_text(exported_page([view]), encoding="utf-8")
        command = [sys.executable, "-m", "runspec", "dashboard", str(made.dir)]
        command += ["--listen", "127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                url = server.stdout.readline().partition(" at ")[2].split()[0]
                opened(chrome, url)
                ready = "return run.rows.size === arguments[0]"
                deadline = time.monotonic() + TIMEOUT_S
                while not chrome.execute_script(ready, ROLLOUTS) and time.monotonic() < deadline:
                    time.sleep(0.2)
                found = {"served": measured(chrome, url)}
            finally:
                server.send_signal(signal.SIGINT)
        found["exported"] = measured(chrome, page.as_uri())
    print(json.dumps({"rollouts": ROLLOUTS, **found}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
