"""The winner of a race is the argmax of logits and public noise, of what top-k and top-p keep."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from sampler.engine import sampling
from sampler.engine.sampling import GumbelSampler, Rules, Vocabulary
from verify.noise import gumbel
from verify.truncation import kept_from

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CUTS = {"whole": (None, None), "top_k": (None, 12), "top_p": (0.8, None), "both": (0.9, 12)}


def column(values, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=dtype)[:, None]


def rules_of(seed: int, rows: int, *, temperature=1.0, top_p=None, top_k=None) -> Rules:
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (2, rows))
    return Rules(
        column(words[0], torch.int32),
        column(words[1], torch.int32),
        None if temperature == 1.0 else column([temperature] * rows, torch.float32),
        None if top_p is None else column([top_p] * rows, torch.float32),
        None if top_k is None else column([top_k] * rows, torch.int32),
    )


def logits_of(rows: int, size: int) -> torch.Tensor:
    return 3.0 * torch.randn((rows, size), generator=torch.Generator().manual_seed(size))


def positions_of(rows: int) -> torch.Tensor:
    return column(np.arange(rows) * 7, torch.int32)


def run(rows: int, size: int, rules: Rules, logits: torch.Tensor | None = None):
    logits = logits_of(rows, size) if logits is None else logits
    return GumbelSampler(CPU).run(logits, rules, positions_of(rows))


def expected_scores(logits, rules: Rules, positions) -> tuple[np.ndarray, np.ndarray]:
    """f64 [B, V] in numpy: logits / T + noise, and log_softmax(logits / T), of what is kept."""
    scaled = logits.numpy().astype(np.float64)
    if rules.temperature is not None:
        scaled = scaled / rules.temperature.numpy()
    if rules.top_p is not None or rules.top_k is not None:
        single = scaled.astype(np.float32)
        top_p, top_k = (None if c is None else c.numpy() for c in (rules.top_p, rules.top_k))
        least = kept_from(np, single, top_p=top_p, top_k=top_k)
        scaled = np.where(single >= least, scaled, -np.inf)
    tokens = np.arange(logits.shape[1], dtype=np.int32)[None, :]
    with np.errstate(over="ignore"):
        noise = gumbel(np, rules.key_0.numpy(), rules.key_1.numpy(), positions.numpy(), tokens)
    total = np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1, keepdims=True))
    return scaled + noise, scaled - scaled.max(-1, keepdims=True) - total


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("rows", "size"), [(64, 192), (40, 5000), (3, 151_936)])
def test_the_winner_is_the_argmax_of_scaled_logits_plus_noise(rows, size, temperature, cut):
    rules = rules_of(1, rows, temperature=temperature, top_p=cut[0], top_k=cut[1])
    scores, logprobs = expected_scores(logits_of(rows, size), rules, positions_of(rows))

    tokens, found = run(rows, size, rules, marks := logits_of(rows, size))

    chosen = np.take_along_axis(scores, tokens.numpy()[:, None], 1)[:, 0]
    assert (scores.max(-1) - chosen).max() < 1e-5  # of two that are all but equal either may win
    at_token = np.take_along_axis(logprobs, tokens.numpy()[:, None], 1)[:, 0]
    # Sums in float32 end top-p a token earlier or later, of which nothing depends.
    assert np.abs(found.numpy() - at_token).max() < (2e-6 if cut[0] is None else 1e-3)
    # What vLLM is given has one largest mark, that of the winner.
    assert torch.equal(marks.argmax(-1), tokens)
    assert (marks == marks.amax(-1, keepdim=True)).sum(-1).max() == 1


def test_portions_give_what_the_whole_gives(monkeypatch):
    rows, size = 37, 192
    rules = rules_of(2, rows, temperature=0.7, top_k=50)
    whole = run(rows, size, rules, of_whole := logits_of(rows, size))

    monkeypatch.setattr(sampling, "_CPU_ELEMENTS", 5 * size)
    parts = run(rows, size, rules, of_parts := logits_of(rows, size))

    assert torch.equal(of_whole, of_parts)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


def test_winners_are_distributed_as_the_softmax():
    rows, size = 200_000, 16
    logits = logits_of(1, size).expand(rows, size).clone()
    rules = Rules(*(None if c is None else c.expand(rows, 1) for c in rules_of(3, 1)))
    p = logits[0].double().softmax(-1).numpy()

    tokens, _ = GumbelSampler(CPU).run(logits, rules, column(np.arange(rows), torch.int32))

    counts = np.bincount(tokens.numpy(), minlength=size)
    chi_square = ((counts - rows * p) ** 2 / (rows * p)).sum()
    assert chi_square < 37.7  # one in a thousand, 15 degrees of freedom


def test_rows_that_are_nan_say_so_and_leave_the_others_alone():
    rules = rules_of(4, 3)
    tokens, logprobs = run(3, 50, rules)
    broken = logits_of(3, 50)
    broken[1] = torch.nan

    found, of_found = run(3, 50, rules, broken)

    assert found[1] == broken[1].argmax() and of_found[1].isnan()
    assert found[[0, 2]].tolist() == tokens[[0, 2]].tolist()
    assert of_found[[0, 2]].tolist() == logprobs[[0, 2]].tolist()


@pytest.mark.parametrize("cut", [*CUTS.values(), (0.05, None), (None, 1), (0.99, 1000)])
def test_it_keeps_what_vllm_keeps(cut):
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    rows, (top_p, top_k) = logits_of(200, 300), cut
    rules = rules_of(5, 200, top_p=top_p, top_k=top_k)
    theirs = apply_top_k_top_p(
        rows.clone(),
        None if top_k is None else torch.full((200,), min(top_k, 300)),
        None if top_p is None else torch.full((200,), top_p),
    )

    ours = rows >= kept_from(torch, rows, top_p=rules.top_p, top_k=rules.top_k)

    assert (ours == theirs.isfinite()).all(dim=1).float().mean() > 0.99


@pytest.mark.parametrize(
    "backend",
    [
        "eager",  # `fullgraph` fails where Python would look at a number
        pytest.param("inductor", marks=[pytest.mark.nightly, pytest.mark.slow]),
    ],
)
def test_compiled_as_on_cuda_it_is_the_same_function(backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch compiles for CPUs with g++")
    compiled = torch.compile(sampling._win, dynamic=True, fullgraph=True, backend=backend)
    cuts = {"top_p": 0.9, "top_k": 20}
    for rows, size, seed, cut in ((8, 192, 5, {}), (20, 1000, 6, {}), (3, 50, 7, cuts)):
        rules, positions = rules_of(seed, rows, temperature=0.8, **cut), positions_of(rows)
        vocabulary = Vocabulary.of(size, CPU)
        scores, _ = expected_scores(logits_of(rows, size), rules, positions)
        plain = sampling._win(logits_of(rows, size), rules, positions, vocabulary)

        tokens, logprobs = compiled(logits_of(rows, size), rules, positions, vocabulary)

        chosen = np.take_along_axis(scores, tokens.numpy()[:, None], 1)[:, 0]
        assert (scores.max(-1) - chosen).max() < 1e-5
        same = tokens == plain[0]
        assert same.float().mean() > 0.9
        assert (logprobs - plain[1])[same].abs().max() < 2e-6
