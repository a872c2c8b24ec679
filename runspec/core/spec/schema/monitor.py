"""Tools that a run logs to."""

from __future__ import annotations

from typing import Any, Literal

from runspec.core.spec.fields import Block, Duration, Name


class Monitor(Block):
    """A tool that gets the run's figures, evaluations, spec, and some of its rollouts."""

    CHANGE = "restart"

    name: Name
    """Names its process, monitor-<name>, and its folder in the run directory."""
    kind: Name
    """`tensorboard`, `wandb`, `trackio`, or a kind that an installed package offers."""
    dir: str | None = None
    """Folder of the tool's files; null: monitors/<name> in the run directory."""
    project: Name = "runspec"
    """For `wandb` and `trackio`: project that the run is part of."""
    mode: Literal["online", "offline"] = "online"
    """For `wandb`: `offline` writes files, which `wandb sync` sends later."""
    python: str | None = None
    """For `trackio`: interpreter of the environment in which it is installed."""
    params: dict[str, Any] = {}
    """Settings of a kind that an installed package offers."""
    deadline: Duration = 60.0
    """Longest time that a call of the tool may take, and that the end of a trained run waits until
    everything is sent."""
