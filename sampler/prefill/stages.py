"""A model whose layers are divided over the devices of one process.

Each device holds a *stage*: consecutive layers; the first also the embedding, the last also the
final norm. Hidden states go from stage to stage. This is chosen over tensor parallelism, which
needs a process a device (torchrun), NCCL, and a second way to load and to stop a validator. What a
validator needs of several devices is memory, and a prefill has many independent batches: kernels
are launched without waiting, so the first stage begins a batch while later ones still compute those
before it. B batches on S stages take (B + S - 1) / S of the time that one device would take for
one batch, so little is lost where B is far above S. Every number is computed by the same kernel on
operands of the same shape as on one device, so the results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


def divide(body: Any, devices: Sequence[torch.device]) -> None:
    """Moves a model to devices, in place; a layer at a time, so none holds more than its stage.

    Args:
        body: transformers' model without its head: `layers`, `norm`, and what comes before them.
        devices: of the stages, in the order of the layers.
    """
    for name, child in body.named_children():
        if name != "layers":
            child.to(devices[-1] if name == "norm" else devices[0])
    count = len(body.layers)
    for stage, device in enumerate(devices):
        enter = _Entrance(device)
        for layer in body.layers[
            stage * count // len(devices) : (stage + 1) * count // len(devices)
        ]:
            layer.to(device)
            if len(devices) > 1:
                layer.register_forward_pre_hook(enter, with_kwargs=True)


class _Entrance:
    """Brings what the layers of a stage are called with to its device, each tensor once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._here = WeakTensorKeyDictionary()  # a mask is as large as attention, and many need it

    def __call__(
        self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._moved(args), {name: self._moved(value) for name, value in kwargs.items()}

    def _moved(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._moved(each) for each in value)
        if not isinstance(value, torch.Tensor) or value.device == self._device:
            return value  # a cache has each layer's keys and values where the layer is
        if value not in self._here:
            self._here[value] = value.to(self._device)
        return self._here[value]
