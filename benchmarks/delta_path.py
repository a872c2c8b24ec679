"""A version's way from the learner's disk into a sampler's directory, as a delta and whole.

    python -m benchmarks.delta_path [--gigabytes 1.0] [--share 0.01] [--gigabits 1]

Two Orbax steps as the learner saves them, the second with a share of the bf16 elements changed by
one unit in the last place. Then what the publisher and a sampler do, through an origin and a relay
in processes of their own: export, compare and encode (`diff_s`), publish, hear of it
(`announce_s`), fetch, apply and check. A client that holds the first version gets the second once
as a delta and once whole; `end_to_end_s` is from the Orbax step to the checked directory.
`wire_bytes` is what the relay sent of chunks. The folder needs room for ten versions.

Limits, of the sizes and of two rates measured in the same run: the exported files are written
once, whatever travels, and so is the sampler's copy of them (`copy_gb_s`); the comparison reads
both versions; the sampler hashes every tensor (`blake3_gb_s`, one core). So no delta can take less
than size x (2 / copy + 1 / blake3) on one core, and the bytes of a delta are at least
n (H(s) / 8) for the places alone (`runspec.estimate.broadcast`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.wire.processes import Tree
from bridge.conversion import export_checkpoint
from bridge.delta import write_delta
from learner_jax.checkpoint import save_params
from learner_jax.model import abstract_params
from runspec.core.canonical import digest_file
from runspec.core.models import ModelConfig
from runspec.core.models.family import parse_config
from runspec.core.run_files import PARAMS_NAME
from runspec.estimate.broadcast import delta_bytes, version_bytes

SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B's, with a smaller vocabulary, and as many layers as the size asks for."""
DEADLINE_S = 600.0
BASE, NEW = 1, 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of a whole version")
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change")
    parser.add_argument("--gigabits", type=float, help="a second, of each link; else loopback")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    fields = SHAPE | {"num_hidden_layers": layers_of(options.gigabytes * 1e9)}
    config = parse_config(fields, place="benchmark")
    size = version_bytes(config, "bfloat16")
    with Tree(options.folder) as tree:
        model = tree.folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(fields))
        save_steps(tree.folder / "params", config, options.share)
        say(f"two versions of {size / 1e9:.2f} GB are on the learner's disk")
        exported = {v: timed(partial(export, tree.folder, v)) for v in (BASE, NEW)}
        base, new = (tree.folder / f"v{version}" for version in (BASE, NEW))
        shutil.rmtree(tree.folder / "params")
        begun = time.monotonic()
        summary = write_delta(base, new, new / "delta", threads=os.cpu_count() or 1)
        diff_s = time.monotonic() - begun
        copied = timed(lambda: shutil.copyfile(new / "model.safetensors", tree.folder / "copy"))
        hashed = timed(lambda: digest_file(tree.folder / "copy"))
        (tree.folder / "copy").unlink()
        way = partial(travel, options.folder, base, new, options.gigabits, export_s=exported[NEW])
        delta, whole = way(diff_s=diff_s), way(diff_s=None)
    report = {
        "benchmark": "delta_path",
        "cores": os.cpu_count(),
        "version_bytes": size,
        "gigabits": options.gigabits,
        "changed_share": round(summary.changed / summary.elements, 5),
        "delta_bytes": summary.delta_bytes,
        "estimated_delta_bytes": round(delta_bytes(config, "bfloat16", options.share)),
        "copy_gb_s": round(size / copied / 1e9, 2),
        "blake3_gb_s": round(size / hashed / 1e9, 2),
        "limit_s": round(2 * copied + hashed, 3),
        "delta": delta,
        "whole": whole,
        "times_fewer_bytes": round(whole["wire_bytes"] / delta["wire_bytes"], 1),
        "times_sooner": round(whole["end_to_end_s"] / delta["end_to_end_s"], 2),
    }
    print(json.dumps(report, indent=1))
    return 0


def layers_of(size: float) -> int:
    """As many layers as make a version of about so many bytes."""
    one, two = (
        version_bytes(parse_config(SHAPE | {"num_hidden_layers": n}, place="benchmark"), "bfloat16")
        for n in (1, 2)
    )
    return max(1, round(1 + (size - one) / (two - one)))


def save_steps(folder: Path, config: ModelConfig, share: float) -> None:
    """Saves a random model, and the same with a share of its elements changed, as versions."""
    rng = np.random.default_rng(0)

    def drawn(spec: Any) -> np.ndarray:
        values = rng.standard_normal(spec.shape, np.float32) * spec.initial.std + spec.initial.mean
        return values.astype(ml_dtypes.bfloat16)

    def changed(leaf: np.ndarray) -> np.ndarray:
        bits = leaf.copy().view(np.uint16).reshape(-1)
        where = np.flatnonzero(rng.random(bits.size, np.float32) < share)
        bits[where] += 1
        return bits.view(ml_dtypes.bfloat16).reshape(leaf.shape)

    params = mapped(drawn, abstract_params(config))
    save_params(folder, BASE, params, {})()
    save_params(folder, NEW, mapped(changed, params), {})()


def mapped(function: Callable[[Any], np.ndarray], tree: Any) -> Any:
    """A tree of parameters with every leaf changed."""
    if isinstance(tree, dict):
        return {name: mapped(function, part) for name, part in tree.items()}
    return function(tree)


def export(folder: Path, version: int) -> None:
    orbax = folder / "params" / f"v{version}" / PARAMS_NAME
    export_checkpoint(orbax, folder / f"v{version}", model_dir=folder / "model", dtype="bfloat16")


def travel(
    parent: Path,
    base: Path,
    new: Path,
    gigabits: float | None,
    *,
    diff_s: float | None,
    export_s: float,
) -> dict[str, float]:
    """Publishes the second version to a client that holds the first: as a delta, or whole.

    Args:
        parent: where stores and the client's directory are made.
        base, new: the exported versions, the second with its delta.
        gigabits: a second, of the links to the relay and to the client; None for no limit.
        diff_s: what making the delta took; None to send the version whole.
        export_s: what exporting it took.
    """
    with Tree(parent) as tree:
        tree.publish(BASE, base)
        origin, _ = tree.origin()
        relay, _ = tree.relay(linked(tree, origin, gigabits))
        client = tree.client(linked(tree, relay, gigabits), deadline_s=DEADLINE_S)
        before, began = sent_chunks(relay), time.monotonic()
        if diff_s is None:
            published = tree.publish(NEW, new)
        else:
            published = tree.publish(NEW, new, base=BASE, whole=False)
        done = client.result(DEADLINE_S)
        wire = sent_chunks(relay) - before
    way_s = (diff_s or 0.0) + export_s
    stages = {
        "export_s": export_s,
        "diff_s": diff_s or 0.0,
        "publish_s": published - began,
        "announce_s": max(0.0, done["heard"] - published),
        "fetch_s": done["arrived"] - done["heard"],
        "apply_check_s": done["had"] - done["arrived"],
        "end_to_end_s": way_s + done["had"] - began,
        "client_cpu_s": done["cpu_s"],
    }
    return {name: round(value, 3) for name, value in stages.items()} | {"wire_bytes": wire}


def linked(tree: Tree, url: str, gigabits: float | None) -> str:
    """The address of a server behind a link of its own."""
    return url if gigabits is None else tree.links(gigabits * 1e9, url)[0][0]


def sent_chunks(url: str) -> int:
    """Bytes of chunks that a server has sent so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S) as answer:
        text = answer.read().decode()
    found = re.search(
        r'^runspec_broadcast_sent_bytes_total\{what="chunk"\} (\S+)$', text, re.MULTILINE
    )
    return int(float(found[1])) if found else 0


def timed(work: Callable[[], object]) -> float:
    """Seconds of the clock."""
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
