"""Steps of GRPO on SmolLM2, ours beside TRL's GRPOTrainer, sampling included; prints JSON.

    RUNSPEC_PEERS=DIR python -m benchmarks.whole_loop        # after `make smollm2`; a quarter hour

The same problems, rollouts a step, sampling and rate, float32, on the same cores. Ours is the whole
run of specs/smollm2.yaml with lag 2: vLLM, proofs, validation and publishing are in its seconds.
TRL samples with transformers and trains in turns, in one process. Groups of one reward train too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.peers import run
from benchmarks.runs import ROOT, measure
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved

STEPS, WARM_UP = 7, 3
CHANGES = {
    "steps": STEPS,
    "evaluations": "null",
    "algorithm.advantage.normalize": "task",
    "algorithm.filters.zero_variance": "false",
}


def figures(seconds: list[float], lengths: list[float], rollouts: int) -> dict[str, float]:
    """Seconds a step, and output tokens a second, after the warm-up."""
    step_s = median(seconds[WARM_UP:])
    tokens = rollouts * fmean(lengths[WARM_UP:])
    return {"seconds a step": round(step_s, 1), "output tokens/s": round(tokens / step_s, 1)}


def trl(spec: RunSpec, rollouts: int) -> dict[str, Any]:
    """What `trl_loop.py` gets: the run's own settings, in TRL's words."""
    lines = (ROOT / "specs" / "problems" / "sums-train.jsonl").read_text().splitlines()
    system = {"role": "system", "content": spec.data.system_prompt}
    return {
        "model": str(ROOT / "models" / "smollm2-135m-instruct"),
        "rows": [
            {
                "prompt": [system, {"role": "user", "content": row["prompt"]}],
                "answer": row["verification_info"]["ground_truth"],
            }
            for row in map(json.loads, lines)
        ],
        "settings": {
            "per_device_train_batch_size": rollouts // 4,
            "gradient_accumulation_steps": 4,
            "num_generations": spec.grpo.group_size,
            "max_completion_length": spec.samplers[0].max_new_tokens,
            "temperature": spec.samplers[0].sampling.temperature,
            "learning_rate": spec.optimizer.lr,
            "lr_scheduler_type": "constant",
            "beta": 0.0,
            "max_steps": STEPS,
            "save_strategy": "no",
        },
    }


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="runspec-bench-") as temporary:
        folder = Path(temporary)
        ours = measure("whole-loop", CHANGES, folder, "specs/smollm2.yaml")
        times = [step["time"] for step in ours.metrics]
        seconds = [0.0, *(later - before for before, later in pairwise(times))]
        spec = load_resolved(folder / "whole-loop")
        rollouts = spec.grpo.prompts_per_step * spec.grpo.group_size
        found = {"ours": figures(seconds, [s["length_mean"] for s in ours.metrics], rollouts)}
        found["ours"] |= {f"CPU s of {name}": round(s) for name, s in ours.cpu_s.items()}
        given = folder / "given.json"
        given.write_text(json.dumps(trl(spec, rollouts)))
        theirs = json.loads(run("trl", "trl_loop", [str(given)]).splitlines()[-1])
        found["trl"] = figures(theirs["seconds"], theirs["lengths"], rollouts)
    print(json.dumps({"benchmark": "whole_loop", "rollouts a step": rollouts, **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
