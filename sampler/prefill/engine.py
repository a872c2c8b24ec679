"""Prefill engine in torch: log-probs of given output tokens under a published policy version.

A validator loads it by name (`verify.plugins.PrefillEngine`, entry point `torch`). Its results
equal those of the JAX engine up to rounding. The body is transformers' own model, in
`learner.compute_dtype` (`states`), its layers divided over the devices of the validator. The head
sees only the positions that predict an output token, a chunk at a time, so [B, T, V] never exists.
It multiplies the rounded states of the body in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bridge.prefill import VersionedPrefill
from runspec.core.errors import UserError
from runspec.core.models.family import load_config
from runspec.core.models.parameters import prefill_bytes
from runspec.core.schema import Hardware, Learner, RunSpec
from sampler.prefill.states import divide, hidden_states, spans, upload
from verify.plugins import PrefillInput, PrefillOutput, WeightsLocation, require_fits
from verify.token_facts import Drawn, TokenFacts, Vocabulary, Wanted, facts_of, outputs_of
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
    most = _positions(policy.head.shape[1], device)
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


def _positions(hidden_size: int, device: torch.device) -> int:
    """Return the positions of a batch, padding included."""
    return (
        CUDA_POSITIONS if device.type == "cuda" else max(CPU_POSITIONS, CPU_NUMBERS // hidden_size)
    )


def _facts(
    head: torch.Tensor,
    hidden: torch.Tensor,
    batch: Sequence[PrefillInput],
    temperature: float,
    wanted: Wanted,
) -> TokenFacts:
    """Return the facts of the output tokens of a batch, one rollout after the other.

    Args:
        head: f32 [V, D].
        hidden: [N, D], the states that produced the tokens.
        batch: the rollouts.
        temperature: T.
        wanted: facts to compute.
    """
    device = head.device
    columns = upload(_columns(batch), device)
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
    return _joined(found)._replace(hidden=hidden.to(torch.bfloat16).view(torch.int16))


def _portions(count: int, size: int) -> Iterator[slice]:
    """Divide 0 .. count into slices of a size, of at least 1."""
    step = max(1, size)
    return (slice(begin, begin + step) for begin in range(0, count, step))


def _columns(batch: Sequence[PrefillInput]) -> np.ndarray:
    """Return i32 [4, N]: the fields of `Drawn` of each output token."""
    counts = [len(each.output_tokens) for each in batch]
    keys = np.array([each.noise_key or (0, 0) for each in batch], np.int32)
    tokens = np.concatenate([each.output_tokens for each in batch])
    positions = spans([0] * len(batch), counts)
    return np.stack([tokens, positions, *np.repeat(keys, counts, axis=0).T]).astype(np.int32)


def _joined(parts: Sequence[TokenFacts]) -> TokenFacts:
    """Concatenate all chunks, on their device."""

    def join(arrays: Sequence[Any]) -> Any:
        return None if arrays[0] is None else torch.cat(list(arrays))

    choices = None
    if parts[0].choices is not None:
        columns = zip(*(part.choices for part in parts if part.choices is not None), strict=True)
        choices = Choices(*(join(column) for column in columns))
    return TokenFacts(
        join([part.logprobs for part in parts]), join([part.gaps for part in parts]), choices
    )


def _on_host(facts: TokenFacts) -> TokenFacts:
    """Return the facts in numpy; waits for the device."""
    return TokenFacts(
        facts.logprobs.cpu().numpy(),
        None if facts.gaps is None else facts.gaps.cpu().numpy(),
        None if facts.choices is None else Choices(*(each.cpu().numpy() for each in facts.choices)),
        facts.hidden.cpu().numpy().view(np.uint16),
    )


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
