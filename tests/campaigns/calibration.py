"""Calibrated limits reject no honest submission and see smaller changes of the weights."""

from __future__ import annotations

from tests.campaigns._benchmark import printed


def run() -> dict[str, object]:
    """Rejected submissions by the validator's weights, under the profile."""
    [found] = printed("calibration")
    return {
        f"{name}:": f"{each['profile']['rejected_submissions']} of {each['profile']['submissions']}"
        for name, each in found["fresh"].items()
    }
