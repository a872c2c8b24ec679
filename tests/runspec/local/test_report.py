"""The report: self-contained, whole, and deaf to what a model says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from runspec.local.metrics import summarise
from runspec.local.plots import figures
from runspec.local.report import render_report

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=y>&amp;"


def row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "task_reward": 0.3 + 0.005 * step,
        "reward": -0.2,
        "length_error": 12 - 0.1 * step,
        "by_target": {t: {"length_mean": float(t) + 3} for t in ("8", "16")},
        "lag_mean": 1.2,
        "lag_max": 2,
        "logprob_diff": 1e-6,
        "policy_drift": 0.04,
        "kl": 1e-3,
        "kl_sampler": 2e-3,
        "kl_sampler_old": 1e-3,
        "ratio_p01": 0.8,
        "ratio_p50": 1.0,
        "ratio_p99": 1.3,
        "clip_fraction_low": 0.01,
        "clip_fraction_high": 0.02,
        "clip_fraction_delta": 0.0,
        "entropy": 1.5,
        "grad_norm": 0.3,
        "score_s": 0.5,
        "update_s": 1.5,
        "waits": {"coordinator": 0.2, "checkpoint": 0.1} if step % 2 else {},
        "tokens_per_s": 9000.0,
        "mfu": 0.41,
        "mfu_update": 0.5,
        "rejected_rollouts": 0,
        "learner_busy_fraction": 0.8,
        "sampler_busy_fraction": 0.7,
        "verdict_latency_p50": 1.5,
        "verdict_latency_p99": 4.25 if step < 29 else 75.0,
        "manifest_latency_p50": 20.0,
        "manifest_latency_p99": None,
    }


def sample(step: int, output: str) -> dict[str, Any]:
    return {"step": step, "problem_id": "p", "prompt": "Spell ab", "output": output} | {
        "target": 8, "length": 9, "task_reward": 1.0, "reward": 0.95,
    }  # fmt: skip


class Page(HTMLParser):
    """Counts tags, and collects what they would fetch and the text of rollouts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "srcset") and value and value[0] != "#"
        ]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def page() -> str:
    rows = [row(step) for step in range(30)]
    samples = [sample(step, f"out {step}") for step in range(0, 30, 2)] + [sample(29, HOSTILE)]
    return render_report("a<b", rows, samples, summarise(rows, wall_s=95, weights_bytes_sent=2e6))


def test_every_curve_is_there_in_the_ink_of_the_page(page: str) -> None:
    assert Page(page).tags.count("svg") == 17
    assert "currentColor" in page
    assert "prefers-color-scheme: dark" in page


def test_nothing_is_fetched_and_no_script_may_run(page: str) -> None:
    parsed = Page(page)
    assert parsed.fetched == []
    assert {"script", "link", "img", "iframe"}.isdisjoint(parsed.tags)
    assert "default-src 'none'" in page
    assert not re.search(r"url\((?!#)", page)
    assert not re.search(r"@import", page)


def test_what_a_model_says_is_text(page: str) -> None:
    assert HOSTILE in "".join(Page(page).texts)
    assert HOSTILE not in page
    assert "<title>a&lt;b</title>" in page


def test_figures_without_numbers_are_left_out() -> None:
    # given a run on a CPU, whose peak nobody knows
    rows = [{**row(step), "mfu": None, "mfu_update": None} for step in range(3)]
    drawn = figures(rows)
    # then there is no figure of MFU, and waits are drawn by whom they were for, a 0 where none was
    assert [figure.title for figure in drawn["Time"]] == [
        "Busy share",
        "Wait for a verdict and for training",
        "The learner's seconds",
        "Learner's speed",
    ]
    curves = {curve.label: list(curve.points) for curve in drawn["Time"][2].curves}
    assert curves["for the coordinator"] == [(0, 0.0), (1, 0.2), (2, 0.0)]
    assert curves["for the checkpoint"] == [(0, 0.0), (1, 0.1), (2, 0.0)]
    assert figures([{"step": 0}]) == {}
