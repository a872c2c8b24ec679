"""Orbax checkpoint -> Hugging Face directory, streaming."""

from __future__ import annotations

from pathlib import Path


def export_checkpoint(orbax_dir: Path, out_dir: Path, *, model_dir: Path, dtype: str) -> None:
    """Writes a checkpoint's parameters as a Hugging Face directory, which appears by one rename.

    Args:
        orbax_dir: what `orbax.checkpoint.v1.save` wrote of the parameter tree.
        out_dir: gets model*.safetensors (+ index where sharded), config.json with the new dtype,
            the tokenizer's files, `probe.json` where one lies beside `orbax_dir`, and
            `tensors.json` {"model_digest", "tensors": {name: {dtype, shape, blake3}}}.
        model_dir: Hugging Face directory with the config and the tokenizer.
        dtype: `float32` or `bfloat16`; wider values are rounded to nearest even.

    Raises:
        UserError: unreadable or partial checkpoint, another model's, disk full, `out_dir` exists.
    """
    raise NotImplementedError
