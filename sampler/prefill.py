"""Prefill of a validator in torch: transformers' model, on GPUs or a CPU.

It returns the log-probs of given output tokens under a published policy version, and imports
neither vLLM nor JAX. A validator loads it by name (`verify.plugins.PrefillEngine`, entry point
`torch`). Its results equal those of the JAX engine up to rounding. The body is transformers' own
model, in `learner.compute_dtype`. The head sees only the positions that predict a sampled token, a
chunk at a time, so [B, T, V] never exists. It multiplies the rounded states of the body in float32.

Each device of the validator holds a *stage*: consecutive layers; the first also the embedding, the
last also the final norm. Hidden states go from stage to stage. Tensor parallelism would need a
process for each device, and a second way to load and to stop a validator. Kernels are launched
without waiting, so the first stage begins a batch while later stages compute earlier ones. B
batches on S stages take (B + S - 1) / S of the time that one device would take for one batch. Every
number is computed by the same kernel on operands of the same shape as on one device, so the results
are equal bit for bit.

The samples of a group share one prompt. If the prompts are much of the work, each one is computed
once: its keys and values go before those of every output that continues it, under a mask that hides
their padding, as a sampler's prefix cache does. Otherwise rollouts of similar length share a batch,
padded at the end, so that causal attention needs no mask and no cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from bridge.model_files import VersionedPrefill
from runspec.core.errors import UserError
from runspec.core.models.family import load_config
from runspec.core.models.parameters import prefill_bytes
from runspec.core.schema import RunSpec
from runspec.core.schema.learner import Hardware, Learner
from verify.plugins import PrefillInput, PrefillOutput, WeightsLocation, by_prompt, require_fits
from verify.recompute import Drawn, TokenFacts, Vocabulary, Wanted, facts_of, outputs_of
from verify.truncation import Choices, Truncation

CPU_POSITIONS, CPU_NUMBERS = 1 << 11, 1 << 18
"""Positions of a batch on a CPU, or, if that is more, numbers of hidden states in a batch."""
CUDA_POSITIONS = 1 << 15
"""Positions of a batch on a GPU."""
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits that exist at once, by device. A product of fewer rows would use the head less well."""
JUDGED_LOGITS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Logits that are evaluated at once, by device. On a CPU the results then stay in the caches."""


class TorchPrefill(VersionedPrefill["Policy"]):
    """See `verify.plugins.PrefillEngine`. Runs on `verify.hardware.count` GPUs, else the CPU.

    Raises:
        UserError: this process sees fewer GPUs.
    """

    def __init__(self, spec: RunSpec, weights: WeightsLocation) -> None:
        learner = spec.learner
        devices = _devices(spec.verify.hardware)
        super().__init__(
            spec,
            weights,
            load=lambda path: load_policy(path, learner, devices),
            has_room=lambda size: _has_room(size, devices),
            compute=prefill,
        )


@dataclass(frozen=True)
class Policy:
    """A policy version on its devices."""

    body: Any
    """transformers' model without its head, in the compute type."""
    head: torch.Tensor
    """f32 [V, D] on the last device; its values are rounded to the compute type."""
    longest: int
    """Longest rollout, in tokens, for which the model is exact."""
    devices: Sequence[torch.device]
    """Device of each stage of the layers."""


def load_policy(weights_dir: Path, learner: Learner, devices: Sequence[torch.device]) -> Policy:
    """Load a weights directory onto devices. Nothing is fetched, and no code in it is run.

    The files are mapped, and weights are copied from there a layer at a time. The host stores no
    copy if the published type is the compute type, else one. A device stores only its own layers.

    Raises:
        UserError: a file is unreadable, tensors are missing or unknown, the learner does not have
            the model's family, or its rows are longer than the model is exact for.
    """
    config = load_config(weights_dir)
    config.check_length(learner.packing.tokens, place="learner.packing.tokens")
    disable_progress_bar()  # it would fill the role's log
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            weights_dir,
            dtype=getattr(torch, learner.compute_dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"cannot load the weights: {error}", place=str(weights_dir)) from error
    amiss = {what: names for what, names in report.items() if names}
    if amiss:
        raise UserError(f"the weights are not this model's: {amiss}", place=str(weights_dir))
    model.requires_grad_(False).eval()
    head = model.get_output_embeddings().weight.to(devices[-1]).float()
    divide(model.base_model, devices)
    return Policy(model.base_model, head, learner.packing.tokens, devices)


def prefill(
    policy: Policy,
    inputs: Sequence[PrefillInput],
    *,
    temperature: float,
    truncation: Truncation | None = None,
) -> list[PrefillOutput]:
    """Implement `verify.plugins.PrefillEngine.prefill` for a loaded version."""
    if not inputs:
        return []
    wanted, device = Wanted.of(inputs, truncation), policy.devices[0]
    require_fits(inputs, policy.longest)
    outputs: dict[int, PrefillOutput] = {}
    most = CUDA_POSITIONS
    if device.type != "cuda":
        most = max(CPU_POSITIONS, CPU_NUMBERS // policy.head.shape[1])
    with torch.inference_mode():
        computed = (
            (
                members,
                _facts(policy.head, hidden, [inputs[m] for m in members], temperature, wanted),
            )
            for members, hidden in hidden_states(policy.body, inputs, positions=most, device=device)
        )
        for members, facts in _fetched(computed, len(policy.devices)):
            own = outputs_of(facts, [inputs[member] for member in members])
            outputs |= zip(members, own, strict=True)
    return [outputs[number] for number in range(len(inputs))]


def _fetched(
    computed: Iterable[tuple[list[int], TokenFacts]], stages: int
) -> Iterator[tuple[list[int], TokenFacts]]:
    """Yield each batch's facts in numpy. A batch is fetched once `stages` batches are launched."""
    waiting: deque[tuple[list[int], TokenFacts]] = deque()
    for batch in computed:
        waiting.append(batch)
        if len(waiting) == stages:
            members, facts = waiting.popleft()
            yield members, _on_host(facts)
    for members, facts in waiting:
        yield members, _on_host(facts)


def _facts(
    head: torch.Tensor,
    hidden: torch.Tensor,
    batch: Sequence[PrefillInput],
    temperature: float,
    wanted: Wanted,
) -> TokenFacts:
    """Return the facts of the sampled tokens of a batch, one rollout after the other.

    Args:
        head: f32 [V, D].
        hidden: [N, D], the states that produced the tokens.
        batch: the rollouts.
        temperature: T.
        wanted: facts to compute.
    """
    device = head.device
    sampled = [each.output_tokens[each.sampled] for each in batch]
    counts = [len(tokens) for tokens in sampled]
    keys = np.array([each.noise_key or (0, 0) for each in batch], np.int32)
    positions = [np.arange(count) for count in counts]
    noise_keys = np.repeat(keys, counts, axis=0).T
    fields = [np.concatenate(sampled), np.concatenate(positions), *noise_keys]
    columns = upload(np.stack(fields).astype(np.int32), device)  # i32 [4, N]: those of `Drawn`
    ends = {each.end_token for each in batch if each.end_token is not None}
    vocabulary = Vocabulary.of(torch.arange(len(head), dtype=torch.int32, device=device)[None, :])
    end = max(ends, default=0)
    found = []
    for rows in _portions(len(hidden), CHUNK_LOGITS[device.type] // len(head)):
        logits = hidden[rows].float() @ head.T
        for part in _portions(len(logits), JUDGED_LOGITS[device.type] // len(head)):
            drawn = Drawn(*columns[:, rows][:, part, None])
            scaled = logits[part] / temperature  # [n, V]
            found.append(facts_of(torch, scaled, drawn, vocabulary, end, wanted))
    return _each(torch.cat, found)._replace(hidden=hidden.to(torch.bfloat16).view(torch.int16))


def _portions(count: int, size: int) -> Iterator[slice]:
    """Divide 0 .. count into slices of a size, of at least 1."""
    step = max(1, size)
    return (slice(begin, begin + step) for begin in range(0, count, step))


def _each(function: Callable[[Sequence[Any]], Any], parts: Sequence[TokenFacts]) -> TokenFacts:
    """Apply a function to the arrays that several facts have for one field, for each field."""

    def apply(arrays: Sequence[Any]) -> Any:
        if isinstance(arrays[0], Choices):
            return Choices(*map(apply, zip(*arrays, strict=True)))
        return None if arrays[0] is None else function(arrays)

    return TokenFacts(*map(apply, zip(*parts, strict=True)))


def _on_host(facts: TokenFacts) -> TokenFacts:
    """Return the facts in numpy; waits for the device."""
    facts = _each(lambda arrays: arrays[0].cpu().numpy(), [facts])
    return facts._replace(hidden=facts.hidden.view(np.uint16))


def _devices(hardware: Hardware | None) -> list[torch.device]:
    """Return the devices of one validator: `count` of the GPUs that this process sees, by default
    all; the CPU if there are none.

    Args:
        hardware: `verify.hardware`.
    """
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    seen = torch.cuda.device_count()
    wanted = seen if hardware is None or hardware.count is None else hardware.count
    if wanted > seen:
        raise UserError(
            f"{wanted} GPUs a validator, and this process sees {seen}",
            place="verify.hardware.count",
            remedy="give it more with placement.devices, or a smaller count",
        )
    return [torch.device("cuda", number) for number in range(wanted)]


def _has_room(size: int, devices: Sequence[torch.device]) -> bool:
    """Whether each device has room for its layers of a version and for working with them."""
    if devices[0].type == "cpu":
        return True
    torch.cuda.empty_cache()  # memory of versions that were dropped
    needed = prefill_bytes(size, len(devices))
    return all(torch.cuda.mem_get_info(device)[0] >= needed for device in devices)


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


def hidden_states(
    body: Any, inputs: Sequence[PrefillInput], *, positions: int, device: torch.device
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Compute the final hidden states of rollouts; every rollout is in one batch.

    Args:
        body: transformers' model without its head.
        inputs: the rollouts.
        positions: most positions of a batch, padding included; a longer rollout is a batch alone.
        device: of the model's first layers; the states are on that of its last.

    Yields:
        Indices of the rollouts of a batch, and the states [N, D] that produced their N sampled
        tokens, in the compute type, one rollout after the other.
    """
    lengths = [len(each.prompt_tokens) + len(each.output_tokens) for each in inputs]
    groups = by_prompt(each.prompt_tokens for each in inputs)
    repeated = sum(len(inputs[same[0]].prompt_tokens) * (len(same) - 1) for same in groups)
    if repeated >= WORTH_SHARING * sum(lengths):
        yield from _continued(body, inputs, groups, positions, device)
        return
    for members in batches_by_length(lengths, positions=positions):
        batch = [inputs[member] for member in members]
        texts = [np.concatenate([each.prompt_tokens, each.output_tokens]) for each in batch]
        states = body(input_ids=_padded(texts, device), use_cache=False).last_hidden_state
        places = [len(each.prompt_tokens) - 1 + each.sampled for each in batch]
        yield members, _rows(states, places)


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
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Compute rollouts in groups that share a prompt."""
    lengths = [len(inputs[same[0]].prompt_tokens) for same in groups]
    for portion in batches_by_length(lengths, positions=positions):
        same = [groups[number] for number in portion]
        prompts = [inputs[numbers[0]].prompt_tokens for numbers in same]
        cache = DynamicCache()
        states = body(
            input_ids=_padded(prompts, device), past_key_values=cache, use_cache=True
        ).last_hidden_state
        firsts = _rows(states, [np.array([len(prompt) - 1]) for prompt in prompts])  # [U, D]
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
            yield [members[number] for number in chosen], hidden


def _outputs(
    body: Any,
    prompts: DynamicCache,
    rows: np.ndarray,
    firsts: torch.Tensor,
    batch: Sequence[PrefillInput],
    device: torch.device,
) -> torch.Tensor:
    """Compute the states [N, D] that produced the sampled tokens of outputs that continue prompts.

    Args:
        body: the model.
        prompts: keys and values of U prompts, each [U, K, P, h], padded at the end.
        rows: i64 [B], the prompt of each rollout.
        firsts: [U, D], the states of the prompts' last tokens.
        batch: the B rollouts.
        device: of the model's first layers.
    """
    layers = prompts.layers
    firsts = firsts[upload(rows, firsts.device)]  # [B, D]
    if max(len(each.output_tokens) for each in batch) == 1:
        return firsts
    here = {at: upload(rows, at) for at in {each.keys.device for each in layers}}
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
    return _rows(torch.cat([firsts[:, None], states], 1), [each.sampled for each in batch])


def _padded(texts: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Return i64 [B, T], padded with zeros at the end."""
    tokens = np.zeros((len(texts), max(len(text) for text in texts)), np.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return upload(tokens, device)


def _rows(states: torch.Tensor, places: Sequence[np.ndarray]) -> torch.Tensor:
    """Return [N, D] of states [B, T, D]: those at the given positions of each row."""
    flat = np.concatenate([row * states.shape[1] + at for row, at in enumerate(places)])
    return states.flatten(0, 1)[upload(flat, states.device)]


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for the device."""
    return torch.from_numpy(array).to(device, non_blocking=True)
