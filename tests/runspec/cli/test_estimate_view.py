from __future__ import annotations

from io import StringIO

from rich.console import Console

from runspec.cli.estimate_view import show_estimate
from runspec.estimate.run import estimate_run
from tests.runspec.estimate.shipped import shipped

FLEET = (
    "samplers.volunteers.replicas=16",
    "samplers.volunteers.download=590Mbit/s",
    "broadcast.origin.upload=1Gbit/s",
    "samplers.volunteers.hardware.price_per_hour=2.0",
)


def shown(*overrides: str, width: int = 80, profile: str | None = None) -> str:
    out = StringIO()
    console = Console(file=out, width=width, highlight=False)
    show_estimate(estimate_run(*shipped(*overrides, profile=profile)), console)
    return out.getvalue()


def test_it_says_what_the_issue_asks_for() -> None:
    text = shown(*FLEET, width=120)

    for part in (
        "32.8 G parameters, a version is 65.5 GB",
        "of 95 GB",
        "866 k",  # tokens of KV in a replica
        "26.4",  # sequences of full length at once
        "relay-eu > volunteers (16)",
        "14 min 49 s",  # 65.5 GB at 590 Mbit/s
        "limited by",
        "batch full after",
        "128.00 an hour",
        "0.25 of data.max_prompt_tokens",
    ):
        assert part in text, part
    for role in ("learner", "broadcast", "volunteers", "validators"):
        assert any(role in line and "idle" in line for line in text.splitlines()), role


def test_what_is_missing_is_named_by_field() -> None:
    text = shown(
        "learner.hardware.peak_flops=null",
        "samplers.volunteers.tokens_per_s=null",
        profile="laptop",
    )

    assert "its time is not known" in text
    assert "  learner.hardware.peak_flops" in text
    assert "  samplers.volunteers.tokens_per_s" in text


def test_a_model_without_a_known_shape_still_shows_what_it_rests_on() -> None:
    out = StringIO()
    spec, _ = shipped()

    show_estimate(estimate_run(spec, None), Console(file=out, width=80))

    assert "model.hf, as a directory with a config.json" in out.getvalue()
    assert "mean new tokens" in out.getvalue()
