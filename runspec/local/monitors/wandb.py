"""Monitor that logs to Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from typing import Any

import wandb

from runspec.local.monitors import Entry, Target


class WeightsAndBiases:
    """A run of Weights & Biases, whose id is the record's name; each restart resumes it.

    The entry's number is its `_step`, by which a server leaves out what comes a second time.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, target: Target) -> None:
        setting, folder = target.setting, target.folder
        folder.mkdir(parents=True, exist_ok=True)
        # Nothing of this run goes to folders of the user's; error reports go nowhere.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder))
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = wandb.init(
            project=setting.project,
            id=target.record,
            name=target.record,
            dir=str(folder),
            mode=setting.mode,
            resume="allow" if setting.mode == "online" else None,
            config=dict(target.spec),
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                quiet=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("evaluations/*", step_metric="version")

    def send(self, entry: Entry) -> None:
        values: dict[str, Any] = {entry.axis: entry.at, **entry.scalars}
        if entry.rollouts:
            # A table would be an artifact, for which the call asks the server, and can fail.
            values["rollouts"] = wandb.Html("<hr>".join(map(_rollout, entry.rollouts)))
        self._run.log(values, step=entry.number, commit=True)

    def flush(self) -> None:
        """Wait until wandb's own process, which outlives this one, has everything."""
        self._run.summary.get("step")  # it answers in order

    def close(self) -> None:
        self._run.finish()


def _rollout(row: Mapping[str, Any]) -> str:
    """Return a rollout as HTML in which nothing of the model's own is HTML."""
    known = ((key, value) for key, value in row.items() if value is not None)
    return "".join(
        f"<p>{escape(key)}</p><pre>{escape(value)}</pre>"
        if isinstance(value, str)
        else f"<p>{escape(key)} {value}</p>"
        for key, value in known
    )
