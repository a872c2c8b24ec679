"""transformers' model on several devices: its layers divided, and final hidden states of rollouts.

Each device holds a *stage*: consecutive layers; the first also the embedding, the last also the
final norm. Hidden states go from stage to stage. Tensor parallelism would need a process for each
device (torchrun), NCCL, and a second way to load and to stop a validator. A validator needs several
devices for their memory, and a prefill has many independent batches. Kernels are launched without
waiting, so the first stage begins a batch while later stages compute earlier ones. B batches on S
stages take (B + S - 1) / S of the time that one device would take for one batch, so little is lost
where B is far above S. Every number is computed by the same kernel on operands of the same shape as
on one device, so the results are equal bit for bit.

The samples of a group share one prompt. If the prompts are much of the work, each one is computed
once: its keys and values go before those of every output that continues it, under a mask that hides
their padding, as a sampler's prefix cache does. Otherwise rollouts of similar length share a batch,
padded at the end, so that causal attention needs no mask and no cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import DynamicCache

from verify.plugins import PrefillInput, by_prompt

WORTH_SHARING = 0.15
"""Least share of repeated prompt positions at which sharing pays for its mask."""


def divide(body: Any, devices: Sequence[torch.device]) -> None:
    """Move a model to devices in place, layer by layer, so that none holds more than its stage.

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
    """Forward hook that moves the arguments of a stage's layers to its device, each tensor once."""

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


class Batch(NamedTuple):
    """Rollouts computed together."""

    members: list[int]
    """Indices of the rollouts."""
    hidden: torch.Tensor
    """[N, D], in the compute type: states that produced the N output tokens, one rollout after the
    other."""


def hidden_states(
    body: Any, inputs: Sequence[PrefillInput], *, positions: int, device: torch.device
) -> Iterator[Batch]:
    """Compute the final hidden states of rollouts; every rollout is in one batch.

    Args:
        body: transformers' model without its head.
        inputs: the rollouts.
        positions: most positions of a batch, padding included; a longer rollout is a batch alone.
        device: of the model's first layers; the states are on that of its last.
    """
    lengths = [len(each.prompt_tokens) + len(each.output_tokens) for each in inputs]
    groups = by_prompt(inputs)
    repeated = sum(len(inputs[same[0]].prompt_tokens) * (len(same) - 1) for same in groups)
    if repeated >= WORTH_SHARING * sum(lengths):
        yield from _continued(body, inputs, groups, positions, device)
        return
    for members in batches_by_length(lengths, positions=positions):
        batch = [inputs[member] for member in members]
        texts = [np.concatenate([each.prompt_tokens, each.output_tokens]) for each in batch]
        states = body(input_ids=_padded(texts, device), use_cache=False).last_hidden_state
        starts = [len(each.prompt_tokens) - 1 for each in batch]
        yield Batch(members, _rows(states, starts, [len(each.output_tokens) for each in batch]))


def batches_by_length(lengths: Sequence[int], *, positions: int) -> Iterator[list[int]]:
    """Divide rollouts into batches, the longest first.

    Args:
        lengths: tokens of each.
        positions: most positions of a batch, its size times its longest; a longer rollout is alone.

    Yields:
        Indices into `lengths`.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > positions:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _continued(
    body: Any,
    inputs: Sequence[PrefillInput],
    groups: Sequence[list[int]],
    positions: int,
    device: torch.device,
) -> Iterator[Batch]:
    """Compute rollouts in groups that share a prompt."""
    lengths = [len(inputs[same[0]].prompt_tokens) for same in groups]
    for portion in batches_by_length(lengths, positions=positions):
        same = [groups[number] for number in portion]
        prompts = [inputs[numbers[0]].prompt_tokens for numbers in same]
        cache = DynamicCache()
        states = body(
            input_ids=_padded(prompts, device), past_key_values=cache, use_cache=True
        ).last_hidden_state
        firsts = _rows(states, [len(prompt) - 1 for prompt in prompts], [1] * len(prompts))  # [U,D]
        members = [member for numbers in same for member in numbers]
        prompt_of = [row for row, numbers in enumerate(same) for _ in numbers]
        sizes = [
            len(prompts[row]) + len(inputs[member].output_tokens)
            for member, row in zip(members, prompt_of, strict=True)
        ]
        for chosen in batches_by_length(sizes, positions=positions):
            rows = np.array([prompt_of[number] for number in chosen])
            batch = [inputs[members[number]] for number in chosen]
            hidden = _outputs(body, cache, rows, firsts, batch, device)
            yield Batch([members[number] for number in chosen], hidden)


def _outputs(
    body: Any,
    prompts: DynamicCache,
    rows: np.ndarray,
    firsts: torch.Tensor,
    batch: Sequence[PrefillInput],
    device: torch.device,
) -> torch.Tensor:
    """Compute states [N, D] of outputs that continue prompts.

    Args:
        body: the model.
        prompts: keys and values of U prompts, each [U, K, P, h], padded at the end.
        rows: i64 [B], the prompt of each rollout.
        firsts: [U, D], the states of the prompts' last tokens.
        batch: the B rollouts.
        device: of the model's first layers.
    """
    counts = [len(each.output_tokens) for each in batch]
    layers = prompts.layers
    here = {at: upload(rows, at) for at in {firsts.device, *(each.keys.device for each in layers)}}
    firsts = firsts[here[firsts.device]]  # [B, D]
    if max(counts) == 1:
        return firsts
    # The last token of an output produces none.
    tokens = _padded([each.output_tokens[:-1] for each in batch], device)  # [B, n]
    lengths = upload(np.array([[len(each.prompt_tokens)] for each in batch]), device)  # [B, 1]
    width, n = prompts.get_seq_length(), tokens.shape[1]
    steps = torch.arange(n, device=device)
    seen = (torch.arange(width, device=device) < lengths)[:, None, :].expand(-1, n, -1)
    causal = (steps <= steps[:, None]).expand(len(batch), -1, -1)
    copied = [
        (each.keys[here[each.keys.device]], each.values[here[each.keys.device]]) for each in layers
    ]
    states = body(
        input_ids=tokens,
        attention_mask=torch.cat([seen, causal], -1)[:, None],  # bool [B, 1, n, P + n]
        position_ids=lengths + steps,
        past_key_values=DynamicCache(copied),
        use_cache=True,
    ).last_hidden_state
    return _rows(torch.cat([firsts[:, None], states], 1), [0] * len(batch), counts)


def _padded(texts: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Return i64 [B, T], padded with zeros at the end."""
    tokens = np.zeros((len(texts), max(len(text) for text in texts)), np.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return upload(tokens, device)


def _rows(states: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Return [N, D] of states [B, T, D]: `counts` positions of each row from its start."""
    offsets = np.arange(len(states)) * states.shape[1] + starts
    places = spans(offsets, counts)
    return states.flatten(0, 1)[upload(places, states.device)]


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for the device."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def spans(starts: Sequence[int] | np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return i64 [sum of counts]: for each start `count` consecutive numbers."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
