"""The sides of `benchmarks.supervised`: the learner's step, and a plain transformers loop.

python -m benchmarks.peers.supervised_sides FOLDER REPEATS SIDE

A side makes one update of cross entropy on the same documents: gradients of microbatches of as many
rows, added up, clip by norm, AdamW. `padded` pads each microbatch to its longest document, as
transformers' collators do. `packed` has the learner's rows: transformers keeps the documents of a
row apart by their position ids.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.side import Step, run_side
from runspec.local.machine import jax_environment

DEVICES = len(os.sched_getaffinity(0))
"""Threads of torch; virtual devices of the learner, which the local backend makes one a core."""
IGNORED = -100
"""Label that transformers leaves out of the loss."""


def documents_of(arrays: dict[str, Any]) -> list[np.ndarray]:
    """Return the documents' tokens."""
    ends = arrays["lengths"].cumsum()[:-1]
    return np.split(arrays["tokens"], ends)


def packed_rows(settings: dict[str, Any], documents: list[np.ndarray]) -> Any:
    """Return the documents as microbatches of the learner's rows, a `Packed`."""
    from learner_jax.packing import Sample, pack

    tokens, rows = settings["case"]["packing"]
    samples = [Sample(document[:1], document[1:]) for document in documents]
    return pack(samples, tokens=tokens, rows=rows, shards=DEVICES)


def spec_of(settings: dict[str, Any], microbatches: int) -> Any:
    """The run spec that a person would write for this batch."""
    from runspec.core.schema import RunSpec

    shape = dict(settings["model"])
    context = shape.pop("max_position_embeddings")
    tokens, rows = settings["case"]["packing"]
    return RunSpec.model_validate(
        {
            "version": "runspec/v1",
            "name": "benchmark",
            "seed": 0,
            "steps": 1000,
            "model": {"shape": shape, "max_context": context},
            "data": {"sources": [{"name": "none", "kind": "text"}]},
            "algorithm": {"kind": "pretrain", "tokens_per_update": microbatches * rows * tokens},
            "optimizer": {name: settings[name] for name in ("lr", "betas", "clip_norm")},
            "learner": {
                "hardware": {"kind": "cpu", "count": DEVICES},
                "mesh": {"data": DEVICES},
                "packing": {"tokens": tokens, "rows": rows},
                "remat": settings["case"]["remat"],
                "compute_dtype": "float32",
            },
            "broadcast": {"dtype": "float32"},
        }
    )


def ours(folder: Path, settings: dict[str, Any], arrays: dict[str, Any]) -> Step:
    """The learner's supervised step, as its loop calls it."""
    # Before JAX is imported.
    os.environ |= jax_environment(os.environ, on_cpu=True, devices=DEVICES)
    import jax

    from learner_jax.corpus.packed import CorpusRows
    from learner_jax.leaves import load_params
    from learner_jax.sharding import make_mesh
    from learner_jax.step import build_programs
    from learner_jax.training import supervised_step
    from runspec.core.models.family import load_config

    packed = packed_rows(settings, documents_of(arrays))
    spec, config = spec_of(settings, packed.microbatches), load_config(folder / "model")
    mesh = make_mesh(spec.learner.mesh)
    programs = build_programs(spec, config, mesh)
    state = programs.init_state(load_params(folder / "model", config, mesh))
    batch = jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]), packed.batch)
    rows = CorpusRows(batch, (batch.targets >= 0).astype(np.float32))

    def step() -> tuple[float, float]:
        nonlocal state
        result = supervised_step(spec, mesh, programs, state, rows)
        state = result.state
        return result.numbers["loss"], result.numbers["grad_norm"]

    return step


def padded_inputs(settings: dict[str, Any], documents: list[np.ndarray]) -> list[dict[str, Any]]:
    """Return microbatches of the documents in their order."""
    rows, made = settings["case"]["packing"][1], []
    for first in range(0, len(documents), rows):
        some = documents[first : first + rows]
        longest = max(len(document) for document in some)
        ids = np.stack([np.pad(document, (0, longest - len(document))) for document in some])
        mask = np.arange(longest) < np.array([[len(document)] for document in some])
        labels = np.where(mask, ids, IGNORED)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def packed_inputs(settings: dict[str, Any], documents: list[np.ndarray]) -> list[dict[str, Any]]:
    """Return microbatches of the learner's rows."""
    batch = packed_rows(settings, documents).batch
    # A label is that of its own position: transformers shifts them.
    labels = np.where((batch.segment_ids > 0) & (batch.positions > 0), batch.tokens, IGNORED)
    return [
        {"input_ids": ids, "position_ids": positions, "labels": label}
        for ids, positions, label in zip(batch.tokens, batch.positions, labels, strict=True)
    ]


def torch_loop(make_inputs: Any) -> Any:
    """A plain loop on microbatches that `make_inputs` makes."""

    def make_step(folder: Path, settings: dict[str, Any], arrays: dict[str, Any]) -> Step:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(DEVICES)
        model = AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        microbatches = [
            {name: torch.from_numpy(array).long() for name, array in inputs.items()}
            for inputs in make_inputs(settings, documents_of(arrays))
        ]
        targets = sum(int((inputs["labels"][:, 1:] != IGNORED).sum()) for inputs in microbatches)
        optimizer = torch.optim.AdamW(
            model.parameters(), settings["lr"], settings["betas"], weight_decay=0.0, fused=True
        )

        def step() -> tuple[float, float]:
            total = 0.0
            for inputs in microbatches:
                # The number of targets of the whole update: a sum over microbatches is its mean.
                loss = model(**inputs, use_cache=False, num_items_in_batch=targets).loss
                loss.backward()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
            return total, norm.item()

        return step

    return make_step


SIDES = {
    "ours": ours,
    "torch, padded": torch_loop(padded_inputs),
    "torch, packed": torch_loop(packed_inputs),
}


if __name__ == "__main__":
    run_side(sys.argv[3], SIDES[sys.argv[3]])
