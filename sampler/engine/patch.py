"""From one version to the next by overwriting what changed, without loading all of it.

Most published bits stay as they are from step to step. Where a parameter holds the bits of the
files, the changed elements of this rank's slice are overwritten in place, wherever they lie.
Layers that the engine repacked or quantised are loaded alone, by vLLM's own loader, and only those
that changed. Both directories are compared here, on the rank's own machine: the files are checked
already, and a version may be several steps from the last. After it the engine is checked as after
any load. Both ways write into the tensors that are there (vLLM's loader copies what it processed
back into them), so CUDA graphs, which hold addresses, compute with the new version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.delta import ChangedElements, changed_elements
from bridge.safetensors_io import read_headers, read_tensor
from sampler.engine.readback import Place, PlaceFinder, as_torch

Reload = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""vLLM's loader: (name, tensor) of whole layers."""


def patch_weights(model: Any, base_dir: Path, weights_dir: Path, *, reload: Reload) -> bool:
    """Makes a model that holds one version hold another.

    Args:
        model: vLLM's module on this rank.
        base_dir: the version that it holds.
        weights_dir: the version that it is to hold.
        reload: loads layers that cannot be overwritten.

    Returns:
        False where it cannot be done, and nothing was: the versions hold other tensors, or the
        engine has no place for one.

    Raises:
        UserError: a file cannot be read.
    """
    old, new = read_headers(base_dir), read_headers(weights_dir)
    if {n: (i.dtype, i.shape) for n, i in old.items()} != {
        n: (i.dtype, i.shape) for n, i in new.items()
    }:
        return False
    finder = PlaceFinder(model)
    places = {name: place for name in new if (place := finder.find(name)) is not None}
    if len(places) < len(new):
        return False
    tied = bool(model.config.tie_word_embeddings)
    layers, head_changed = set(), False
    for change in changed_elements(base_dir, weights_dir):
        place = places[change.info.name]
        # A tied head has the embedding's parameter; its packed copy is made anew below.
        if place.view is None or (place.packed and not tied):
            layers.add(place.module)
            continue
        _overwrite(place, place.view, change)
        head_changed |= place.packed
    if layers:
        names = [name for name, place in places.items() if place.module in layers]
        reload((name, as_torch(read_tensor(new[name]))) for name in names)
    if head_changed:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    return True


@torch.no_grad()
def _overwrite(place: Place, view: torch.Tensor, change: ChangedElements) -> None:
    """Writes what changed of this rank's slice."""
    where = list(np.unravel_index(change.indices, change.info.shape))
    along = where[place.axis] - place.start
    ours = (along >= 0) & (along < view.shape[place.axis])
    if not ours.any():
        return
    where[place.axis] = along
    index = tuple(torch.from_numpy(axis[ours]).to(view.device) for axis in where)
    bits = change.bits[ours]
    values = as_torch(bits.view(np.float32) if bits.itemsize == 4 else bits)
    view[index] = values.to(view.device, view.dtype)
