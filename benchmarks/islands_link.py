"""How much of their time two islands compute behind 50 Mb/s and 100 ms, and what `plan` says of it.

    python -m benchmarks.islands_link [--quick] [--cases "overlap float16"]

Each case is a real run of two islands, as processes. All HTTP between the islands, and from each to
the coordinator, goes through a TCP proxy of its own, with 50 Mb/s each way and a round trip of
100 ms (`tests/throttle.py`). A new connection costs one round trip more; TCP's slow start is not
imitated. Both islands compute on this machine's processors, so the updates of a step are chosen to
take 10 to 20 s.

Of each step, the island that computed longest counts: the other also waits for it. Its seconds of
work (`train_s` of metrics.jsonl) and of waiting for the exchange (`waits.islands`) are summed over
the steps but the first and last, at which a run with overlap has no exchange to hide, or nothing to
hide it behind. `utilization` is compute_s / (compute_s + exposed_s). `predicted` is what
`runspec.estimate.broadcast` says for the same links and seconds of work; `error` is the predicted
over the measured utilization, less 1. `request_s` is a request by a new connection through a link:
how true the links are. It should be two round trips.

Asked for: a utilization of at least .95 with overlap, and errors of at most .1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.wire.processes import Processes
from learner_jax.__main__ import main as learner
from runspec.core.http_client import fetch_now
from runspec.core.models.family import model_config
from runspec.core.schema import RunSpec
from runspec.estimate.broadcast import exchange
from tests.learner_jax.islands.island_runs import IslandRun

MEGABITS_S, ROUND_TRIP_S = 50.0, 0.1
DEADLINE_S = 1800.0
WORDS = ("red", "green", "blue", "one", "two", "three", "sun", "moon")


@dataclass(frozen=True)
class Size:
    """Size of the model and of the run."""

    hidden: int
    layers: int
    steps: int
    updates: int
    """Of a step, each of one row of `tokens`."""
    tokens: int
    documents: int


LARGE = Size(hidden=192, layers=2, steps=5, updates=100, tokens=128, documents=1500)
QUICK = Size(hidden=64, layers=2, steps=4, updates=2, tokens=64, documents=400)
CASES = {
    "float32": ("float32", 0),
    "float16": ("float16", 0),
    "overlap float16": ("float16", 1),
    "overlap sparse": ("sparse", 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--updates", type=int, help="of a step, in place of the usual number")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--quick", action="store_true", help="a small model, and short steps")
    options = parser.parse_args()
    size = QUICK if options.quick else LARGE
    updates = options.updates or size.updates
    found = {}
    for name in options.cases.split(","):
        with Processes(options.folder) as processes:
            write_documents(processes.folder, size)
            spec = spec_of(processes.folder, size, updates, *CASES[name])
            found[name] = measure(processes, spec)
        print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "islands_link", "cases": found}, indent=1))


def write_documents(folder: Path, size: Size) -> None:
    draw = np.random.default_rng(1)
    texts = (" ".join(draw.choice(WORDS, 100)) for _ in range(size.documents))
    (folder / "words.txt").write_text("".join(f"{text}\n" for text in texts))
    words, tokenizer = str(folder / "words.txt"), str(folder / "tokenizer")
    if learner(["tokenizer", "train", words, "--vocab", "280", "-o", tokenizer]) != 0:
        raise SystemExit("no tokenizer")


def spec_of(folder: Path, size: Size, updates: int, codec: str, overlap: int) -> RunSpec:
    """Two islands that the links join; nothing is stored or published between first and last
    step, so that nothing but the exchange is waited for."""
    link = {"upload": f"{MEGABITS_S}Mbit/s", "download": f"{MEGABITS_S}Mbit/s"}
    link["latency"] = f"{ROUND_TRIP_S * 1e3:g}ms"
    shape = {
        "model_type": "qwen2",
        "vocab_size": 300,
        "hidden_size": size.hidden,
        "intermediate_size": 4 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    source = {"name": "words", "kind": "text", "uri": str(folder / "words.txt")}
    return RunSpec.model_validate(
        {
            "version": "runspec/v1",
            "name": "islands-link",
            "seed": 7,
            "steps": size.steps,
            "model": {
                "shape": shape,
                "max_context": size.tokens,
                "tokenizer": {"hf": str(folder / "tokenizer")},
            },
            "data": {"sources": [source]},
            "algorithm": {
                "kind": "pretrain",
                "tokens_per_update": 2 * size.tokens,
                "updates_per_step": updates,
                "publish_every": size.steps,
                "held_out": {"tokens": 1000, "every": size.steps},
            },
            "optimizer": {"lr": 1e-3},
            "learner": {
                "hardware": {"kind": "cpu", "count": 1},
                "packing": {"tokens": size.tokens, "rows": 1},
                "compute_dtype": "float32",
                "islands": {
                    "members": [{"name": "a", **link}, {"name": "b", **link}],
                    "codec": {"kind": codec},
                    "overlap": overlap,
                },
            },
            "broadcast": {"dtype": "float32"},
            "checkpoints": {"every": size.steps},
            "verify": {"validators": 0},
        }
    )


def measure(processes: Processes, spec: RunSpec) -> dict[str, Any]:
    """Trains one case to its end."""

    def through(url: str) -> str:
        (linked,), _ = processes.links(MEGABITS_S * 1e6, url, round_trip_s=ROUND_TRIP_S)
        return linked

    folder = processes.folder
    run = IslandRun(folder / "runs" / spec.name, spec, folder / "tokenizer", through)
    with run:
        request_s = _request_s(run.links["a"].coordinator + "/v1/roles")
        run.train(deadline_s=DEADLINE_S)
    slowest = [
        max(lines, key=lambda line: line["train_s"])
        for lines in zip(*(run.lines(name)[1:-1] for name in run.names), strict=True)
    ]
    compute_s = statistics.mean(line["train_s"] for line in slowest)
    exposed_s = statistics.mean(line["waits"]["islands"] for line in slowest)
    other_s = statistics.mean(line["wait_s"] for line in slowest) - exposed_s
    config, islands = model_config(spec), spec.learner.islands
    assert config is not None and islands is not None
    sent = exchange(spec, config)
    predicted_s = sent.exposed_seconds(islands, dict.fromkeys(run.names, compute_s))
    measured, predicted = (compute_s / (compute_s + s) for s in (exposed_s, predicted_s))
    return {
        "share_bytes": sent.share_bytes,
        "compute_s": round(compute_s, 2),
        "exposed_s": round(exposed_s, 2),
        "predicted_s": round(predicted_s, 2),
        "utilization": round(measured, 3),
        "predicted": round(predicted, 3),
        "error": round(predicted / measured - 1, 3),
        "other_waits_s": round(other_s, 2),
        "settle_s": [round(line["islands"]["settle_s"], 2) for line in slowest],
        "steps": [(round(x["train_s"], 2), round(x["waits"]["islands"], 2)) for x in slowest],
        "request_s": round(request_s, 3),
    }


def _request_s(url: str) -> float:
    started = time.monotonic()
    fetch_now("GET", url, max_bytes=1 << 20, timeout_s=60.0)
    return time.monotonic() - started


if __name__ == "__main__":
    main()
