"""The page in a real browser: it follows the run, filters, and shows hostile text as text."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.runspec.cli.in_process import runspec
from tests.runspec.local.dashboard.made_run import REASON, MadeRun
from tests.waiting import eventually, one_ended

pytestmark = pytest.mark.slow

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    "\u202egnp.exe\u2066\x1b[31m"
)
STEPS = 1250
"""Ten thousand rollouts."""
# No sandbox: it cannot be had as root. Nothing is fetched but the page, from this machine.
OPTIONS = ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "disable-sync")
OPTIONS += ("disable-background-networking", "disable-component-update", "disable-dev-shm-usage")
OPTIONS += ("no-first-run", "window-size=1400,1000")


def say(step: int, group: int, sample: int) -> str:
    if step == STEPS - 2:
        return HOSTILE * 8_000 if sample == 0 else HOSTILE
    return f"out {step}-{group}-{sample}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    made = MadeRun(tmp_path_factory.mktemp("runs"), "big", say)
    made.add_steps(STEPS)
    MadeRun(made.dir.parent, "other").add_steps(20)
    return made


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Debian's Chromium with an empty profile, driven by selenium."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert binary and driver, "install it: apt-get install chromium chromium-driver"
    options = Options()
    options.binary_location = binary
    for option in (*OPTIONS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options=options, service=Service(driver)) as started:
        yield started


@pytest.fixture(scope="module")
def url(run: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`runspec dashboard` of both runs."""
    log = tmp_path_factory.mktemp("log") / "dashboard.log"
    command = [sys.executable, "-m", "runspec", "dashboard", str(run.dir)]
    command += [str(run.dir.parent / "other"), "--listen", "127.0.0.1:0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        ended: Callable[[], str] = lambda: one_ended([process])  # noqa: E731
        eventually(lambda: "http://" in log.read_text(), "its address", hopeless=ended)
        yield log.read_text().partition(" at ")[2].split()[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0, log.read_text()


class Tab:
    """A tab of the page, once the page has the run."""

    def __init__(self, chrome: Chrome, url: str, name: str) -> None:
        self.chrome = chrome
        chrome.get(url)
        self.until(lambda: "of 5000" in self.text("progress"), "the run's head")
        chrome.find_element("id", f"tab-{name}").click()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        log: Callable[[], str] = lambda: str(self.chrome.get_log("browser"))  # noqa: E731
        eventually(condition, what, poll_s=0.1, context=log)

    def text(self, element: str) -> str:
        found = "return document.getElementById(arguments[0]).innerText"
        return self.chrome.execute_script(found, element)

    def found(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements("css selector", selector)

    def press(self, key: str) -> None:
        self.chrome.execute_script("document.activeElement.blur()")
        self.chrome.find_element("tag name", "body").send_keys(key)

    def choose(self, label: str, value: str, event: str) -> None:
        chosen = "const s = document.querySelector(`[aria-label=${arguments[0]}]`);"
        chosen += "s.value = arguments[1]; s.dispatchEvent(new Event(arguments[2]))"
        self.chrome.execute_script(chosen, label, value, event)

    def counts(self, count: int) -> None:
        self.until(lambda: self.text("count").startswith(f"{count:,} of"), f"{count} rollouts")

    def require_no_error(self) -> None:
        assert self.chrome.get_log("browser") == []


def test_the_page_follows_the_run(run: MadeRun, chrome: Chrome, url: str) -> None:
    page = Tab(chrome, url, "curves")
    page.until(lambda: len(page.found(".plot canvas")) == 17, "plots")

    def both() -> bool:
        return any("big" in each.text and "other" in each.text for each in page.found(".legend"))

    page.until(both, "curves of both runs, over each other")
    # when a step is trained, then the page shows it
    run.add_steps(1)
    page.until(lambda: f"step {run.steps} of" in page.text("progress"), "a new step")
    # and every tab is drawn without an error
    for tab in ("overview", "timeline", "workers", "rollouts"):
        chrome.find_element("id", f"tab-{tab}").click()
        assert chrome.find_element("id", tab).is_displayed()
    page.require_no_error()


def test_filters_and_search_find_rollouts(run: MadeRun, chrome: Chrome, url: str) -> None:
    page = Tab(chrome, url, "rollouts")
    page.counts(8 * run.steps)
    # when rejected ones are wanted, then they are shown, and words are looked for on top
    page.choose("Outcome", "rejected", "change")
    page.counts(8 * (run.steps // 5))
    search = chrome.find_element("id", "search")
    page.press("/")
    assert chrome.switch_to.active_element == search
    search.send_keys("OUT 1004-0")
    page.counts(4)
    # when one is chosen by a key, then its group is shown with the check, its number and its limit
    search.send_keys("-3")
    page.counts(1)
    search.send_keys(Keys.ESCAPE)
    page.press("j")
    page.until(lambda: "1 checks failed" in page.text("detail"), "the failed check")
    assert len(page.found(".card")) == 4
    assert f"rejected: {REASON}" in page.text("detail")
    assert "toploc\tfailed\t9\t8\t9 errors" in page.text("detail").splitlines()
    page.require_no_error()


def test_hostile_text_is_shown_as_text(run: MadeRun, chrome: Chrome, url: str) -> None:
    page = Tab(chrome, url, "rollouts")
    page.choose("Steps", str(STEPS - 2), "input")
    page.counts(8)
    page.press("j")
    page.until(lambda: len(page.found(".card")) == 4, "its group")
    shown = page.text("detail")
    assert "<script>document.title='owned'</script>" in shown
    # with marks that turn the writing round, and terminals' codes, shown by their number
    assert "⟨U+202E⟩gnp.exe⟨U+2066⟩⟨U+001B⟩[31m" in shown
    assert not {"\u202e", "\u2066", "\x1b"} & set(shown)
    # and megabytes are cut
    assert "more characters" in shown and len(shown) < 200_000
    # in every colour
    for _ in range(4):
        page.press("c")
        assert chrome.title == "big and other"
        assert page.found("#detail img, #detail script") == []
    page.require_no_error()


def test_an_export_is_the_page(
    run: MadeRun, chrome: Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runspec.local.dashboard.page.MAX_DECODING_S", 600.0)
    path, other = tmp_path / "page.html", str(run.dir.parent / "other")
    assert runspec("dashboard", other, "--export", path).returncode == 0
    page = Tab(chrome, path.as_uri(), "rollouts")
    # then it finds rollouts without a server
    chrome.find_element("id", "search").send_keys("out 19-1")
    page.counts(4)
    # and on a phone nothing is wider than the screen
    chrome.set_window_size(400, 800)
    width = chrome.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert width <= 0
    page.require_no_error()
