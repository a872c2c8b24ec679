"""Steps of TRL's GRPOTrainer, generation included: `trl_loop.py GIVEN.json`, in TRL's environment.

GIVEN has `model` (a folder), `rows` of `prompt` (messages) and `answer`, and `settings` of
`GRPOConfig`. Prints the seconds of each step and the mean output tokens as JSON.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer
from trl_trainer import cpu_config


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of an output is the answer."""
    texts = [completion[0]["content"] for completion in completions]
    last = [(re.findall(r"-?\d+", text) or [""])[-1] for text in texts]
    return [float(found == wanted) for found, wanted in zip(last, answer, strict=True)]


class Clock(TrainerCallback):
    """Reads the time at the start, and after each step."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())
        print(f"TRL: step {len(self.times) - 1}", file=sys.stderr, flush=True)


def main(path: Path) -> None:
    given, clock = json.loads(path.read_text()), Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        reward_funcs=right,
        args=cpu_config(logging_steps=1, **given["settings"]),
        train_dataset=Dataset.from_list(given["rows"]),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        callbacks=[clock],
    )
    trainer.train()
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history[:-1]]
    seconds = [later - before for before, later in zip(clock.times, clock.times[1:], strict=False)]
    print(json.dumps({"seconds": seconds, "lengths": lengths}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
