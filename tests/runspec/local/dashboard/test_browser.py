"""The page in a real browser: it follows the run, filters, and shows hostile text as text."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from tests.runspec.local.dashboard.browser import browser
from tests.runspec.local.dashboard.made_run import REASON, MadeRun
from tests.waiting import eventually, one_ended

pytestmark = pytest.mark.slow

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    "\u202egnp.exe\u2066\x1b[31m"
)
STEPS = 1250
"""Ten thousand rollouts."""


def say(step: int, group: int, sample: int) -> str:
    if step == STEPS - 2:
        return HOSTILE * 8_000 if sample == 0 else HOSTILE
    return f"out {step}-{group}-{sample}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    made = MadeRun(tmp_path_factory.mktemp("runs"), "big", say)
    made.add_steps(STEPS)
    other = MadeRun(made.dir.parent, "other")
    other.add_steps(20)
    return made


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
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
        eventually(
            lambda: "http://" in log.read_text(),
            "its address",
            hopeless=lambda: one_ended([process]),
            context=log.read_text,
        )
        yield log.read_text().partition(" at ")[2].split()[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, log.read_text()


def until(condition: Callable[[], Any], what: str, chrome: Chrome) -> None:
    eventually(
        condition, what, deadline_s=60, poll_s=0.1, context=lambda: str(chrome.get_log("browser"))
    )


def text(chrome: Chrome, element: str) -> str:
    return chrome.execute_script("return document.getElementById(arguments[0]).innerText", element)


def opened(chrome: Chrome, url: str, tab: str) -> None:
    chrome.get(url)
    until(lambda: "of 5000" in text(chrome, "progress"), "the run's head", chrome)
    chrome.find_element("id", f"tab-{tab}").click()


def test_the_page_follows_the_run(run: MadeRun, chrome: Chrome, url: str) -> None:
    opened(chrome, url, "curves")
    until(lambda: len(chrome.find_elements("css selector", ".plot canvas")) == 17, "plots", chrome)

    def both() -> bool:
        legends = (each.text for each in chrome.find_elements("css selector", ".legend"))
        return any("big" in legend and "other" in legend for legend in legends)

    until(both, "curves of both runs, over each other", chrome)
    # when a step is trained, then the page shows it
    before = run.steps
    run.add_steps(1)
    now = f"step {before + 1} of"
    until(lambda: now in text(chrome, "progress"), "a new step", chrome)
    # and every tab is drawn without an error
    for tab in ("overview", "timeline", "workers", "rollouts"):
        chrome.find_element("id", f"tab-{tab}").click()
        assert chrome.find_element("id", tab).is_displayed()
    assert chrome.get_log("browser") == []


def test_filters_and_search_find_rollouts(run: MadeRun, chrome: Chrome, url: str) -> None:
    opened(chrome, url, "rollouts")
    every = f"{8 * run.steps:,} of {8 * run.steps:,}"
    until(lambda: text(chrome, "count").startswith(every), "all rollouts", chrome)
    # when rejected ones are wanted, then they are shown, and how long the filter took
    chrome.execute_script(
        "const s = document.querySelector('[aria-label=Outcome]'); s.value = 'rejected';"
        "s.dispatchEvent(new Event('change'))"
    )
    rejected = f"{8 * (run.steps // 5):,} of"
    assert text(chrome, "count").startswith(rejected) and " ms" in text(chrome, "count")
    # and words are looked for on top
    search = chrome.find_element("id", "search")
    chrome.find_element("tag name", "body").send_keys("/")
    assert chrome.switch_to.active_element == search
    search.send_keys("OUT 1004-1")
    until(lambda: text(chrome, "count").startswith("4 of"), "what has the words", chrome)
    # when one is chosen by a key, then its group is shown with the check, its number and its limit
    search.send_keys(Keys.ESCAPE)
    chrome.find_element("tag name", "body").send_keys("j")
    until(lambda: len(chrome.find_elements("css selector", ".card")) == 4, "its group", chrome)
    assert f"rejected: {REASON}" in text(chrome, "detail")
    chrome.execute_script("document.querySelector('[aria-label=Outcome]').value = ''")
    search.clear()
    search.send_keys("out 1004-0-3")
    until(lambda: text(chrome, "count").startswith("1 of"), "the one that failed", chrome)
    chrome.execute_script("document.activeElement.blur()")
    chrome.find_element("tag name", "body").send_keys("j")
    until(lambda: "1 checks failed" in text(chrome, "detail"), "the failed check", chrome)
    lines = text(chrome, "detail").splitlines()
    row = next(line for line in lines if line.startswith("toploc\tfailed"))
    assert row.split("\t") == ["toploc", "failed", "9", "8", "9 errors"]
    # and tokens have the colours of their difference
    for _ in range(2):
        chrome.find_element("tag name", "body").send_keys("c")
    spans = chrome.find_elements("css selector", ".card.chosen .tokens span")
    assert spans and "claimed -0.5, recomputed -0.25" in (spans[0].get_attribute("title") or "")
    assert chrome.get_log("browser") == []


def test_hostile_text_is_shown_as_text(run: MadeRun, chrome: Chrome, url: str) -> None:
    opened(chrome, url, "rollouts")
    chrome.execute_script(
        "const s = document.querySelector('[aria-label=Steps]'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        str(STEPS - 2),
    )
    until(lambda: text(chrome, "count").startswith("8 of"), "its step", chrome)
    chrome.find_element("tag name", "body").send_keys("j")
    until(lambda: len(chrome.find_elements("css selector", ".card")) == 4, "its group", chrome)
    shown = text(chrome, "detail")
    assert "<script>document.title='owned'</script>" in shown
    # with marks that turn the writing round, and terminals' codes, shown by their number
    assert "⟨U+202E⟩gnp.exe⟨U+2066⟩⟨U+001B⟩[31m" in shown
    assert not {"\u202e", "\u2066", "\x1b"} & set(shown)
    # and megabytes are cut
    assert "more characters" in shown and len(shown) < 200_000
    # in every colour
    for _ in range(4):
        chrome.find_element("tag name", "body").send_keys("c")
        assert chrome.title == "big and other"
        assert chrome.find_elements("css selector", "#detail img, #detail script") == []
    assert chrome.get_log("browser") == []


def test_an_export_is_the_page(run: MadeRun, chrome: Chrome, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    other = str(run.dir.parent / "other")
    command = [sys.executable, "-m", "runspec", "dashboard", other, "--export", str(page)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    opened(chrome, page.as_uri(), "rollouts")
    # then it finds rollouts without a server
    search = chrome.find_element("id", "search")
    search.send_keys("out 19-1")
    until(lambda: text(chrome, "count").startswith("4 of"), "what has the words", chrome)
    # on a phone nothing is wider than the screen, and by night it is dark
    chrome.execute_script("document.activeElement.blur()")
    chrome.set_window_size(400, 800)
    chrome.find_element("tag name", "body").send_keys("t")
    width = chrome.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    ground = chrome.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert width <= 0 and ground == "rgb(20, 24, 30)"
    assert chrome.get_log("browser") == []
