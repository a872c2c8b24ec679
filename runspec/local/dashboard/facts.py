"""The figures of a whole run as lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runspec.local.formatting import duration, latency, number, per_second, share
from runspec.local.islands import summary_pairs


def work_line(summary: Mapping[str, Any]) -> str:
    """Return what the run has done, as one sentence.

    Args:
        summary: as `metrics.summarise` makes it.
    """
    if "tokens" in summary:
        work = f"{summary['tokens']:,} tokens, {number(summary['epoch'])} epochs"
    else:
        work = f"{summary['rollouts_accepted']:,} rollouts accepted, "
        work += f"{summary['rollouts_rejected']:,} rejected"
    return f"{summary['steps']} steps in {duration(summary['wall_s'])}, {work}."


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and value of the figures that are no curve's ends."""
    return [
        *(_documents(summary) if "tokens" in summary else _swarm(summary)),
        ("Learner busy", share(summary["learner_busy_fraction"])),
        ("Learner, real tokens/s", per_second(summary["learner_tokens_per_s"])),
        ("Learner, MFU", share(summary["mfu"])),
        ("Updates skipped", number(summary["skipped_updates"])),
        ("Weights sent", f"{summary['weights_bytes_sent'] / 1e6:,.1f} MB"),
        *(summary_pairs(summary["islands"]) if summary["islands"] else ()),
    ]


def _swarm(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Mean lag", number(summary["mean_lag"])),
        ("Largest lag", number(summary["max_lag"])),
        ("Samplers busy", share(summary["sampler_busy_fraction"])),
        ("Submission to verdict, p50 / p99 of a step", " / ".join(latency(summary, "verdict"))),
        ("Submission to batch, p50 / p99 of a step", " / ".join(latency(summary, "manifest"))),
    ]


def _documents(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Trained tokens", f"{summary['trained_tokens']:,}"),
        ("Padding", share(summary["padding_share"])),
        ("Learner waited for input", share(summary["input_wait_share"])),
    ]
