"""Writes summary.json and report.html: the curves of a run and some of its rollouts.

The page fetches nothing.

Prompts and outputs are a model's words, and so hostile: every text is escaped, and the page's
content security policy allows no script and no request at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from runspec.core.files import write_atomic
from runspec.core.run_files import evaluation_files
from runspec.core.spec.resolved import load_resolved
from runspec.local.diagnosis import Cause, cause_lines, diagnose
from runspec.local.evaluations import (
    SECTION,
    evaluation_plots,
    newest,
    result_line,
    summarise_evaluations,
)
from runspec.local.formatting import duration, latency, number, per_second, share
from runspec.local.islands import summary_pairs
from runspec.local.metrics import (
    JsonLines,
    Row,
    end_figures,
    read_rows,
    shares_bytes_sent,
    summarise,
    weights_bytes_sent,
)
from runspec.local.plots import Figure, draw, figures
from verify.formats.evaluation import Evaluated, read_evaluations

_STEPS_SHOWN = 3
_SAMPLES_A_STEP = 4
_MAX_TEXT = 4000

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
SAMPLES_FILE = "samples.jsonl"


def render_report(
    run: str,
    rows: Sequence[Row],
    samples: Sequence[Row],
    summary: dict[str, Any],
    evaluations: Sequence[Evaluated] = (),
    causes: Sequence[Cause] = (),
) -> str:
    """The page.

    Args:
        run: the run's name.
        rows: metrics.jsonl, a row a step, in order.
        samples: samples.jsonl, a row a rollout.
        summary: as `metrics.summarise` makes it.
        evaluations: in the order of versions.
        causes: why the newest steps did not learn; empty if they did.
    """
    if "tokens" in summary:
        work = f"{summary['tokens']:,} tokens, {number(summary['epoch'])} epochs"
        source = "Held-out documents are never trained on."
    else:
        work = f"{summary['rollouts_accepted']:,} rollouts accepted, "
        work += f"{summary['rollouts_rejected']:,} rejected"
        source = (
            "Rewards and lengths come from the validators' files, not from the workers' claims."
        )
    body = [
        f"<h1>{escape(run)}</h1>",
        f"<p>{summary['steps']} steps in {duration(summary['wall_s'])}, {work}.</p>",
        _table(summary),
        f"<p>Each point is one step. {source}</p>",
        *_diagnosis(causes),
        *_evaluations(evaluations),
        *(_section(title, section) for title, section in figures(rows).items()),
        *_rollouts(samples),
    ]
    page = (resources.files("runspec.local") / "report.html").read_text(encoding="utf-8")
    return Template(page).substitute(run=escape(run), body="".join(body))


def _section(title: str, section: Sequence[Figure]) -> str:
    drawn = "".join(
        f"<figure><figcaption><b>{escape(figure.title)}</b><br>{escape(figure.caption)}"
        f"</figcaption>{draw(figure)}</figure>"
        for figure in section
    )
    return f'<h2>{escape(title)}</h2><div class="curves">{drawn}</div>'


def _diagnosis(causes: Sequence[Cause]) -> list[str]:
    items = "".join(f"<li>{escape(line)}</li>" for line in cause_lines(causes))
    return [f"<h2>Why it does not learn</h2><ul>{items}</ul>"] if items else []


def _evaluations(results: Sequence[Evaluated]) -> list[str]:
    if not results:
        return []
    lines = (f"{name}, {result_line(result)}" for name, result in newest(results).items())
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return [_section(SECTION, evaluation_plots(results)), f"<ul>{items}</ul>"]


def _table(summary: dict[str, Any]) -> str:
    cells = "".join(
        f"<tr><td>{name}</td><td>{number(a)}</td><td>{number(b)}</td></tr>"
        for name, a, b in end_figures(summary)
    )
    facts = [
        *(_documents(summary) if "tokens" in summary else _swarm(summary)),
        ("Learner busy", share(summary["learner_busy_fraction"])),
        ("Learner, real tokens/s", per_second(summary["learner_tokens_per_s"])),
        ("Learner, MFU", share(summary["mfu"])),
        ("Updates skipped", number(summary["skipped_updates"])),
        ("Weights sent", f"{summary['weights_bytes_sent'] / 1e6:,.1f} MB"),
        *(summary_pairs(summary["islands"]) if summary["islands"] else ()),
    ]
    more = "".join(f"<tr><td>{name}</td><td></td><td>{text}</td></tr>" for name, text in facts)
    head = "<tr><th></th><th>first 10 steps</th><th>last 10 steps</th></tr>"
    return f"<table>{head}{cells}{more}</table>"


def _swarm(summary: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Mean lag", number(summary["mean_lag"])),
        ("Largest lag", number(summary["max_lag"])),
        ("Samplers busy", share(summary["sampler_busy_fraction"])),
        ("Submission to verdict, p50 / p99 of a step", " / ".join(latency(summary, "verdict"))),
        ("Submission to batch, p50 / p99 of a step", " / ".join(latency(summary, "manifest"))),
    ]


def _documents(summary: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Trained tokens", f"{summary['trained_tokens']:,}"),
        ("Padding", share(summary["padding_share"])),
        ("Learner waited for input", share(summary["input_wait_share"])),
    ]


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
    summary = summarise(
        rows,
        wall_s=wall_s,
        weights_bytes_sent=weights_bytes_sent(run_dir),
        shares_bytes_sent=shares_bytes_sent(run_dir),
    )
    evaluations = read_evaluations(evaluation_files(run_dir))
    summary["evaluations"] = summarise_evaluations(evaluations)
    write_atomic(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2).encode() + b"\n")
    samples = JsonLines(run_dir / SAMPLES_FILE).new_rows()
    causes = diagnose(load_resolved(run_dir), rows)
    page = render_report(run_dir.name, rows, samples, summary, evaluations, causes)
    write_atomic(run_dir / REPORT_FILE, page.encode())
    return summary
