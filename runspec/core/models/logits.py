"""How many positions' logits the learner makes at a time."""

from __future__ import annotations

from runspec.core.spec.schema import Learner

MAX_LOGITS = 2**29
"""Logits of a chunk, over all shards of the vocabulary, are no more: 2 GiB in float32."""
KEPT_LOGITS = 2**26
"""The backward pass finds all logits of a device kept where they are no more: 256 MiB."""
MIN_CHUNK, MAX_CHUNK = 512, 2048
"""Positions of a chunk: a chunk reads and writes the head's gradient once, D x V numbers, for
chunk x D x V products; fine chunks skip more positions without a target."""


def chunk_tokens(positions: int, vocab: int) -> int:
    """Positions whose logits a device computes at a time, a power of two.

    An eighth of them all, 512 to 2048; fewer where the vocabulary is above 262,144.
    """
    wanted = min(max(positions // 8, MIN_CHUNK), MAX_CHUNK, MAX_LOGITS // vocab)
    return 1 << (max(wanted, 1).bit_length() - 1)


def device_positions(learner: Learner) -> int:
    """Positions of a microbatch on one device: rows are cut over data x fsdp, columns over
    context; every device of a tensor group has the same."""
    mesh, packing = learner.mesh, learner.packing
    return packing.rows * packing.tokens // (mesh.data * mesh.fsdp * mesh.context)


def logits_chunk(learner: Learner, vocab: int) -> int:
    """Positions whose logits a device has at a time: `learner.logits_chunk`, or `chunk_tokens`."""
    positions = device_positions(learner)
    return min(positions, learner.logits_chunk or chunk_tokens(positions, vocab))
