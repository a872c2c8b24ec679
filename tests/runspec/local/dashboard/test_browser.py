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
from selenium.webdriver.remote.webelement import WebElement

from benchmarks.pictures import DESKTOP, PHONE, browser, show_as
from runspec.local.dashboard.page import PageData, exported_page
from runspec.local.dashboard.source import FolderSource
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.dashboard.made_run import BEGAN, REASON, MadeRun
from tests.runspec.local.fake_run import store
from tests.waiting import eventually, one_ended
from verify.formats.documents import Evaluated, Figure

pytestmark = pytest.mark.slow

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    "\u202egnp.exe\u2066\x1b[31m"
)
STEPS = 1250
"""Ten thousand rollouts."""
SCREENS = [(size, dark) for size in (DESKTOP, PHONE) for dark in (False, True)]
PALE = """
const parsed = (text) => text.match(/[\\d.]+/g).map(Number);
const over = ([r, g, b, a = 1], under) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
const linear = (c) => c <= 10 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const ground = (node) => node === null ? [255, 255, 255]
  : over(parsed(getComputedStyle(node).backgroundColor), ground(node.parentElement));
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
for (let text = walk.nextNode(); text; text = walk.nextNode()) {
  const node = text.parentElement;
  if (!text.data.trim() || !node.checkVisibility() || node.tagName === "OPTION") continue;
  const under = ground(node), ink = over(parsed(getComputedStyle(node).color), under);
  const [low, high] = [light(under), light(ink)].sort((a, b) => a - b);
  if ((high + 0.05) / (low + 0.05) < 4.5) found.push(text.data.slice(0, 40));
}
return found;"""
"""Texts in sight whose contrast to what is behind them is below 4.5, which WCAG's AA asks for."""


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
def chrome() -> Iterator[Chrome]:
    with browser() as started:
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

    def run(self, script: str, *values: Any) -> Any:
        return self.chrome.execute_script(script, *values)

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
    page.until(lambda: len(page.found("#curves .plot canvas")) == 16, "plots")

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
    # when one is left, then it is open: its group is shown with the check, its number and its limit
    search.send_keys("-3")
    page.counts(1)
    search.send_keys(Keys.ESCAPE)
    page.until(lambda: "1 checks failed" in page.text("detail"), "the failed check")
    assert len(page.found(".card")) == 4
    assert f"rejected: {REASON}" in page.text("detail")
    assert "toploc\tfailed\t9\t8\t9 errors" in page.text("detail").splitlines()
    page.require_no_error()


def test_hostile_text_is_shown_as_text(run: MadeRun, chrome: Chrome, url: str) -> None:
    page = Tab(chrome, url, "rollouts")
    page.choose("Steps", str(STEPS - 2), "input")
    page.counts(8)
    page.until(lambda: "<script>" in page.text("detail"), "its group")
    page.press("k")
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
    page.require_no_error()


@pytest.fixture(scope="module")
def exported(run: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of 20 steps with evaluations, whose older rollouts have no text, as a file."""
    path, other = tmp_path_factory.mktemp("page") / "page.html", run.dir.parent / "other"
    values = {"mean": Figure(0.25, 0.2, 0.3), "pass-2": Figure(0.4, 0.3, 0.5)}
    shared = ("other", "held-out")
    results = [
        Evaluated(*shared, v, "a" * 64, values, 0, [], BEGAN + 5.0 + 8.0 * v, 2.0, 1.5)
        for v in (0, 20)
    ]
    store(other, *results)
    view = PageData(FolderSource(other))
    view.refresh(60.0)
    room = len(exported_page([view], 0).encode()) + 60_000
    path.write_text(exported_page([view], room))
    return path.as_uri()


@pytest.mark.parametrize(("size", "dark"), SCREENS)
def test_every_tab_is_sound_on_each_screen(
    chrome: Chrome, exported: str, size: tuple[int, int], dark: bool
) -> None:
    show_as(chrome, size, dark)
    page = Tab(chrome, exported, "overview")
    tiles = {each.find_element("css selector", ".soft").text: each for each in page.found(".tile")}
    assert {"Held-out, task reward", "Task reward", "Lag, steps", "Time"} <= {*tiles}
    assert all(tile.find_element("tag name", "b").text for tile in tiles.values())
    assert page.found("#overview .plot canvas") and "pass@2" in page.text("overview")
    for tab in ("overview", "curves", "timeline", "rollouts", "workers"):
        chrome.find_element("id", f"tab-{tab}").click()
        # then each text can be read, nothing is wider than the screen, and the tab is in sight
        assert page.run(PALE) == [], tab
        assert page.run("return document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.run(
            "const box = $('tab-' + tab).getBoundingClientRect();"
            "return box.left >= 0 && box.right <= innerWidth + 1"
        )
    # and keys are spoken of where there are some
    assert chrome.find_element("tag name", "footer").is_displayed() == (size == DESKTOP)
    page.require_no_error()


def test_the_page_works_by_keyboard_alone(chrome: Chrome, exported: str) -> None:
    show_as(chrome, DESKTOP)
    page = Tab(chrome, exported, "overview")
    # when arrows go through the tabs, then the next one is open, and it is seen to have the focus
    chrome.find_element("id", "tab-overview").send_keys(Keys.ARROW_RIGHT)
    focus = chrome.switch_to.active_element
    assert focus.get_attribute("id") == "tab-curves" and page.text("curves")
    assert [each.text for each in page.found("[aria-selected=true][tabindex='0']")] == ["Curves"]
    assert focus.value_of_css_property("outline-style") != "none"
    # and what changed, and what never was other than zero, takes one line
    zero = "Zero at every step, not drawn: rejected rollouts."
    assert page.text("silent") == f"Changed at step 7: lr 0.0001. {zero}"
    # and a chart's values can be saved, and it can be enlarged
    page.run("window.save = (...saved) => (window.saved = saved)")
    [figure] = [each for each in page.found("#curves figure") if "Mean over" in each.text]
    enlarge, csv = figure.find_elements("tag name", "button")
    csv.send_keys(Keys.ENTER)
    name, text = page.run("return window.saved")
    assert (name, *text.splitlines()[:3]) == (
        *("task-reward.csv", 'step,"Task reward"', "0,0.3", "1,0.305"),
    )
    before = figure.rect["height"]
    enlarge.send_keys(Keys.ENTER)
    assert figure.rect["height"] > 1.5 * before
    # and the timeline begins with the whole run
    page.press("3")
    whole = page.text("span")
    assert "3 min 20 s of 3 min 20 s" in whole and "filling: the coordinator" in page.text(
        "timeline"
    )
    page.press("+")
    assert page.text("span") != whole
    page.press("0")
    assert page.text("span") == whole
    # and the first rollout with its text is open, and arrows open others
    page.press("4")
    page.until(lambda: page.found(".card.chosen"), "the first rollout")
    assert page.found(".row.heads")[0].text.split() == [
        *("step", "outcome", "prompt", "length/target", "reward"),
    ]
    assert "… 19 1" in page.text("list") and "have no text" in page.text("count")
    page.choose("Order", "oldest step", "change")
    page.run("views.rollouts.list.scrollTop = 1800")
    page.until(lambda: page.found(".row.bare"), "marks at rollouts without text")
    chosen = "return views.rollouts.chosen"
    first = page.run(chosen)
    page.found("#list")[0].send_keys(Keys.ARROW_DOWN)
    assert page.run(chosen) != first
    page.require_no_error()
