"""Deltas between versions of weights: the elements whose bits changed, and their new bits.

A delta is a directory with one `<weights file>.delta` for each safetensors file. It overwrites, so
that applying it again, after a crash or by mistake, is harmless. docs/deltas.md has the format.
"""

from bridge.delta.files import (
    DamagedWeights,
    DeltaSummary,
    TensorChange,
    apply_deltas,
    delta_tensors,
    write_delta,
)
from bridge.delta.layout import ChangedElements, changed_elements

__all__ = [
    "ChangedElements",
    "DamagedWeights",
    "DeltaSummary",
    "TensorChange",
    "apply_deltas",
    "changed_elements",
    "delta_tensors",
    "write_delta",
]
