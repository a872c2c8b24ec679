"""Writes summary.json and report.html: the curves of a run and some of its rollouts.

The page fetches nothing.

Prompts and outputs are a model's words, and so hostile: every text is escaped, and the page's
content security policy allows no script and no request at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from runspec.core.files import write_atomic
from runspec.local.formatting import duration, number, per_second, seconds
from runspec.local.metrics import JsonLines, Row, read_rows, summarise, weights_bytes_sent
from runspec.local.plots import Figure, draw, figures

_STEPS_SHOWN = 3
_SAMPLES_A_STEP = 4
_MAX_TEXT = 4000

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #d7dce3;
  --page: #ffffff; --card: #f6f7f9; --good: #1a7f4b; --bad: #b3362b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #39414d;
  --page: #14181e; --card: #1c222a; --good: #5cc28c; --bad: #ee8377; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p { color: var(--soft); margin: .2rem 0; max-width: 60rem; }
table { border-collapse: collapse; margin-top: 1rem; }
td, th { text-align: right; padding: .25rem .9rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; font-weight: normal; }
td:first-child, th:first-child { text-align: left; padding-left: 0; } th { color: var(--soft); }
.curves { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(21rem, 1fr)); }
figure { margin: 0; padding: .8rem; background: var(--card); border-radius: .5rem; }
figcaption { color: var(--soft); font-size: .85rem; } figure b { color: var(--ink); }
svg { width: 100%; height: auto; color: var(--ink); display: block; }
article { padding: .7rem .9rem; background: var(--card); border-radius: .5rem; margin: .6rem 0; }
article header { color: var(--soft); font-size: .85rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .35rem 0 0;
  font: 13px/1.45 ui-monospace, monospace; } pre.prompt { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
"""
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
SAMPLES_FILE = "samples.jsonl"


def render_report(
    run: str, rows: Sequence[Row], samples: Sequence[Row], summary: dict[str, Any]
) -> str:
    """The page.

    Args:
        run: the run's name.
        rows: metrics.jsonl, a row a step, in order.
        samples: samples.jsonl, a row a rollout.
        summary: as `metrics.summarise` makes it.
    """
    body = [
        f"<h1>{escape(run)}</h1>",
        f"<p>{summary['steps']} steps in {duration(summary['wall_s'])}, "
        f"{summary['rollouts_accepted']:,} rollouts accepted, "
        f"{summary['rollouts_rejected']:,} rejected.</p>",
        _table(summary),
        "<p>Each point is one step. Rewards and lengths come from the validators' files, not from "
        "the workers' claims.</p>",
        *(_section(title, section) for title, section in figures(rows).items()),
        *_rollouts(samples),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta HTTP-EQUIV="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _section(title: str, section: Sequence[Figure]) -> str:
    drawn = "".join(_figure(figure) for figure in section)
    return f'<h2>{escape(title)}</h2><div class="curves">{drawn}</div>'


def _figure(figure: Figure) -> str:
    return (
        f"<figure><figcaption><b>{escape(figure.title)}</b><br>{escape(figure.caption)}"
        f"</figcaption>{draw(figure)}</figure>"
    )


def _table(summary: dict[str, Any]) -> str:
    rows = [
        ("Task reward", summary["task_reward_first"], summary["task_reward_last"]),
        ("Reward", summary["reward_first"], summary["reward_last"]),
        ("Length error, tokens", summary["length_error_first"], summary["length_error_last"]),
    ]
    cells = "".join(
        f"<tr><td>{name}</td><td>{number(a)}</td><td>{number(b)}</td></tr>" for name, a, b in rows
    )
    facts = [
        ("Mean lag", number(summary["mean_lag"])),
        ("Largest lag", number(summary["max_lag"])),
        ("Learner busy", _share(summary["learner_busy_fraction"])),
        ("Samplers busy", _share(summary["sampler_busy_fraction"])),
        ("Submission to verdict, p50 / p99 of a step", _latency(summary, "verdict")),
        ("Submission to batch, p50 / p99 of a step", _latency(summary, "manifest")),
        ("Learner, real tokens/s", per_second(summary["learner_tokens_per_s"])),
        ("Learner, MFU", _share(summary["mfu"])),
        ("Updates skipped", number(summary["skipped_updates"])),
        ("Weights sent", f"{summary['weights_bytes_sent'] / 1e6:,.1f} MB"),
    ]
    more = "".join(f"<tr><td>{name}</td><td></td><td>{text}</td></tr>" for name, text in facts)
    head = "<tr><th></th><th>first 10 steps</th><th>last 10 steps</th></tr>"
    return f"<table>{head}{cells}{more}</table>"


def _rollouts(samples: Sequence[Row]) -> list[str]:
    known = [sample for sample in samples if isinstance(sample.get("step"), int)]
    steps = sorted({sample["step"] for sample in known})
    if not steps:
        return []
    last = steps[_STEPS_SHOWN:][-_STEPS_SHOWN:]
    parts = []
    for title, chosen in (("First steps", steps[:_STEPS_SHOWN]), ("Last steps", last)):
        shown = [
            sample
            for step in chosen
            for sample in [s for s in known if s["step"] == step][:_SAMPLES_A_STEP]
        ]
        if shown:
            parts.append(f"<h2>{title}</h2>")
            parts += [_rollout(sample) for sample in shown]
    return parts


def _rollout(sample: Row) -> str:
    task = sample.get("task_reward")
    mood = "good" if isinstance(task, int | float) and task >= 0.5 else "bad"
    facts = [
        f"step {sample['step']}",
        f"problem {sample.get('problem_id')}",
        f"length {sample.get('length')}, asked for {sample.get('target')}",
        f"reward {number(sample.get('reward'))}",
    ]
    return (
        f"<article><header>{escape(' · '.join(facts))} · "
        f'<span class="{mood}">task reward {escape(number(task))}</span></header>'
        f'<pre class="prompt">{_text(sample.get("prompt"))}</pre>'
        f"<pre>{_text(sample.get('output'))}</pre></article>"
    )


def _text(value: object) -> str:
    text = str(value)
    cut = f"{text[:_MAX_TEXT]} [{len(text) - _MAX_TEXT} more characters]"
    return escape(text if len(text) <= _MAX_TEXT else cut)


def _latency(summary: dict[str, Any], name: str) -> str:
    p50, p99 = (summary[f"{name}_latency_{p}"] for p in ("p50", "p99"))
    return f"{seconds(p50)} / {seconds(p99)}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def write_summary(run_dir: Path, wall_s: float) -> dict[str, Any] | None:
    """Write summary.json and report.html of the steps trained so far.

    Args:
        run_dir: the run directory.
        wall_s: seconds that the run was up, over all its sessions.

    Returns:
        The summary; None, and nothing written, while no step has been trained.
    """
    rows = read_rows(run_dir)
    if not rows:
        return None
    summary = summarise(rows, wall_s=wall_s, weights_bytes_sent=weights_bytes_sent(run_dir))
    write_atomic(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2).encode() + b"\n")
    samples = JsonLines(run_dir / SAMPLES_FILE).new_rows()
    page = render_report(run_dir.name, rows, samples, summary)
    write_atomic(run_dir / REPORT_FILE, page.encode())
    return summary
