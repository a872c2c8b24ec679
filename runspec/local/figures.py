"""What the report draws of metrics.jsonl, and what each figure means."""

from __future__ import annotations

from collections.abc import Sequence

from runspec.local.metrics import Row
from runspec.local.plots import Curve, Figure


def figures(rows: Sequence[Row]) -> dict[str, list[Figure]]:
    """Figures by section; those that no row has a number for are left out.

    Args:
        rows: metrics.jsonl, a row a step, in order.
    """
    sections = {
        "Learning": _learning(rows),
        "Policy and loss": _policy(rows),
        "Time": _time(rows),
    }
    drawn = {
        title: [figure for figure in section if any(curve.points for curve in figure.curves)]
        for title, section in sections.items()
    }
    return {title: section for title, section in drawn.items() if section}


def _learning(rows: Sequence[Row]) -> list[Figure]:
    return [
        Figure(
            "Task reward",
            "Mean over the graded rollouts.",
            [_curve(rows, "task_reward")],
            bottom=0.0,
            top=1.0,
        ),
        Figure(
            "Length error",
            "Mean |target - length|, tokens.",
            [_curve(rows, "length_error")],
            bottom=0.0,
        ),
        Figure(
            "Mean length by target",
            "Tokens; the dashed lines are the targets.",
            _length_curves(rows),
            bottom=0.0,
            levels=_targets(rows),
        ),
        Figure("Reward", "Task reward plus the length term.", [_curve(rows, "reward")]),
        Figure(
            "Rejected rollouts",
            "A step; failed one of the validator's checks.",
            [_curve(rows, "rejected_rollouts", averaged=False)],
            bottom=0.0,
            top=1.0,
        ),
    ]


def _policy(rows: Sequence[Row]) -> list[Figure]:
    return [
        Figure(
            "Lag",
            "Training step minus the version that sampled.",
            [_curve(rows, "lag_mean", "mean"), _curve(rows, "lag_max", "largest", averaged=False)],
            bottom=0.0,
            top=1.0,
        ),
        Figure(
            "Log-prob difference",
            "Mean |log-prob|: sampler against the validator's prefill of the same version; "
            "drift: the policy in training against the one that sampled.",
            [
                _curve(rows, "logprob_diff", "sampler - prefill"),
                _curve(rows, "policy_drift", "drift"),
            ],
            log=True,
        ),
        Figure(
            "KL",
            "Per token, by k3: the policy from the reference; the sampler from the policy in "
            "training, and from the one that the step began with.",
            [
                _curve(rows, "kl", "to the reference"),
                _curve(rows, "kl_sampler", "sampler, in training"),
                _curve(rows, "kl_sampler_old", "sampler, at the start"),
            ],
            log=True,
        ),
        Figure(
            "Ratio",
            "pi_theta / pi_old of the trained tokens: quantiles.",
            [
                _curve(rows, "ratio_p01", "1 %"),
                _curve(rows, "ratio_p50", "median"),
                _curve(rows, "ratio_p99", "99 %"),
            ],
        ),
        Figure(
            "Clipped tokens",
            "Share of tokens that each bound of the ratio acts on.",
            [
                _curve(rows, "clip_fraction_low", "1 - eps_low"),
                _curve(rows, "clip_fraction_high", "1 + eps_high"),
                _curve(rows, "clip_fraction_delta", "delta"),
            ],
            bottom=0.0,
        ),
        Figure("Entropy", "Nats a token.", [_curve(rows, "entropy")], bottom=0.0),
        Figure("Gradient norm", "Before clipping.", [_curve(rows, "grad_norm")], log=True),
    ]


def _time(rows: Sequence[Row]) -> list[Figure]:
    return [
        Figure(
            "Busy share",
            "Share of the time spent working, not waiting.",
            [
                _curve(rows, "learner_busy_fraction", "learner"),
                _curve(rows, "sampler_busy_fraction", "samplers"),
            ],
            bottom=0.0,
            top=1.0,
        ),
        Figure(
            "Wait for a verdict and for training",
            "Seconds from a submission to its verdict, and to the first batch that trains it.",
            [
                _curve(rows, "verdict_latency_p50", "verdict, p50"),
                _curve(rows, "verdict_latency_p99", "verdict, p99", averaged=False),
                _curve(rows, "manifest_latency_p50", "batch, p50"),
                _curve(rows, "manifest_latency_p99", "batch, p99", averaged=False),
            ],
            bottom=0.0,
        ),
        Figure(
            "The learner's seconds",
            "A step: log-probs before the first update, updates, and waits by whom they were for.",
            [
                _curve(rows, "score_s", "log-probs"),
                _curve(rows, "update_s", "updates"),
                *_wait_curves(rows),
            ],
            bottom=0.0,
        ),
        Figure(
            "Learner's speed",
            "Real tokens a second of its work, prompts included, padding not.",
            [_curve(rows, "tokens_per_s")],
            bottom=0.0,
        ),
        Figure(
            "MFU",
            "Useful FLOPs over what the devices could do in bfloat16: in all of the learner's "
            "work, and in the updates alone.",
            [_curve(rows, "mfu", "all work"), _curve(rows, "mfu_update", "updates")],
            bottom=0.0,
        ),
    ]


def _curve(rows: Sequence[Row], key: str, label: str = "", *, averaged: bool = True) -> Curve:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return Curve(label, points, averaged)


def _targets(rows: Sequence[Row]) -> list[int]:
    return sorted({int(target) for row in rows for target in row.get("by_target") or {}})


def _length_curves(rows: Sequence[Row]) -> list[Curve]:
    return [
        Curve(
            str(target),
            [
                (row["step"], seen["length_mean"])
                for row in rows
                if (seen := (row.get("by_target") or {}).get(str(target)))
                and seen.get("length_mean") is not None
            ],
        )
        for target in _targets(rows)
    ]


def _wait_curves(rows: Sequence[Row]) -> list[Curve]:
    timed = [(row["step"], row["waits"]) for row in rows if row.get("waits") is not None]
    return [
        Curve(f"for the {whom}", [(step, waits.get(whom) or 0.0) for step, waits in timed])
        for whom in sorted({whom for _, waits in timed for whom in waits})
    ]
