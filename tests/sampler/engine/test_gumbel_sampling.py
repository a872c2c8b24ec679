"""The winner of a race is the argmax of logits and public noise, of what top-k and top-p keep."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from sampler.engine import gumbel_sampling
from sampler.engine.gumbel_sampling import GumbelSampler, Rules
from tests.verify.test_truncation import RULES, VOCABULARY, arguments, logits
from verify.noise import gumbel
from verify.truncation import Truncation, kept_from

CPU = torch.device("cpu")
CUTS = {"whole": (None, None), "top_k": (None, 12), "top_p": (0.8, None), "both": (0.9, 12)}


def column(values: object, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=dtype)[:, None]


def rules_of(
    seed: int,
    rows: int,
    *,
    temperature: float = 1.0,
    top_p: float | None = None,
    top_k: int | None = None,
) -> Rules:
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (2, rows))
    return Rules(
        column(words[0], torch.int32),
        column(words[1], torch.int32),
        None if temperature == 1.0 else column([temperature] * rows, torch.float32),
        None if top_p is None else column([top_p] * rows, torch.float32),
        None if top_k is None else column([top_k] * rows, torch.int32),
    )


def peaked_logits(rows: int, size: int) -> torch.Tensor:
    return 3.0 * torch.randn((rows, size), generator=torch.Generator().manual_seed(size))


def positions_of(rows: int) -> torch.Tensor:
    return column(np.arange(rows) * 7, torch.int32)


def expected_scores(
    logits: torch.Tensor, rules: Rules, positions: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """f64 [B, V] in numpy: logits / T + noise, and log_softmax(logits / T), of what is kept."""
    scaled = logits.numpy().astype(np.float64)
    if rules.temperature is not None:
        scaled = scaled / rules.temperature.numpy()
    if rules.top_p is not None or rules.top_k is not None:
        single = scaled.astype(np.float32)
        top_p, top_k = (None if c is None else c.numpy() for c in (rules.top_p, rules.top_k))
        scaled = np.where(
            single >= kept_from(np, single, top_p=top_p, top_k=top_k), scaled, -np.inf
        )
    tokens = np.arange(logits.shape[1], dtype=np.int32)[None, :]
    with np.errstate(over="ignore"):
        noise = gumbel(np, rules.key_0.numpy(), rules.key_1.numpy(), positions.numpy(), tokens)
    total = np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1, keepdims=True))
    return scaled + noise, scaled - scaled.max(-1, keepdims=True) - total


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("rows", "size"), [(64, 192), (40, 5000), (3, 151_936)])
def test_the_winner_is_the_argmax_of_scaled_logits_plus_noise(
    rows: int, size: int, temperature: float, cut: tuple[float | None, int | None]
) -> None:
    rules = rules_of(1, rows, temperature=temperature, top_p=cut[0], top_k=cut[1])
    logits, positions = peaked_logits(rows, size), positions_of(rows)
    scores, logprobs = expected_scores(logits, rules, positions)

    tokens, found = GumbelSampler(CPU).run(marks := logits.clone(), rules, positions)

    chosen = np.take_along_axis(scores, tokens.numpy()[:, None], 1)[:, 0]
    assert (scores.max(-1) - chosen).max() < 1e-5  # of two that are all but equal either may win
    at_token = np.take_along_axis(logprobs, tokens.numpy()[:, None], 1)[:, 0]
    # Sums in float32 end top-p a token earlier or later, of which nothing depends.
    assert np.abs(found.numpy() - at_token).max() < (2e-6 if cut[0] is None else 1e-3)
    # What vLLM is given has one largest mark, that of the winner.
    assert torch.equal(marks.argmax(-1), tokens)
    assert (marks == marks.amax(-1, keepdim=True)).sum(-1).max() == 1


def test_portions_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, size = 37, 192
    rules, positions = rules_of(2, rows, temperature=0.7, top_k=50), positions_of(rows)
    whole = GumbelSampler(CPU).run(of_whole := peaked_logits(rows, size), rules, positions)

    monkeypatch.setattr(gumbel_sampling, "_CPU_ELEMENTS", 5 * size)
    parts = GumbelSampler(CPU).run(of_parts := peaked_logits(rows, size), rules, positions)

    assert torch.equal(of_whole, of_parts)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


def test_winners_are_distributed_as_the_softmax() -> None:
    rows, size = 200_000, 16
    logits = peaked_logits(1, size).expand(rows, size).clone()
    rules = rules_of(3, 1)
    rules = Rules(*(None if c is None else c.expand(rows, 1) for c in rules))
    p = logits[0].double().softmax(-1).numpy()

    tokens, _ = GumbelSampler(CPU).run(logits, rules, column(np.arange(rows), torch.int32))

    counts = np.bincount(tokens.numpy(), minlength=size)
    chi_square = ((counts - rows * p) ** 2 / (rows * p)).sum()
    assert chi_square < 37.7  # one in a thousand, 15 degrees of freedom


def test_rows_that_are_nan_say_so_and_leave_the_others_alone() -> None:
    rules, positions = rules_of(4, 3), positions_of(3)
    tokens, logprobs = GumbelSampler(CPU).run(peaked_logits(3, 50), rules, positions)
    broken = peaked_logits(3, 50)
    broken[1] = torch.nan

    found, of_found = GumbelSampler(CPU).run(broken, rules, positions)

    assert found[1] == broken[1].argmax() and of_found[1].isnan()
    assert found[[0, 2]].tolist() == tokens[[0, 2]].tolist()
    assert of_found[[0, 2]].tolist() == logprobs[[0, 2]].tolist()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
def test_compiled_as_on_cuda_it_is_the_same_function() -> None:
    compiled = torch.compile(gumbel_sampling._win, dynamic=True, fullgraph=True)
    for rows, size, seed in ((8, 192, 5), (20, 1000, 6)):
        rules, positions = rules_of(seed, rows, temperature=0.8), positions_of(rows)
        vocabulary = gumbel_sampling.Vocabulary.of(size, CPU)
        scores, _ = expected_scores(peaked_logits(rows, size), rules, positions)
        plain = gumbel_sampling._win(peaked_logits(rows, size), rules, positions, vocabulary)

        tokens, logprobs = compiled(peaked_logits(rows, size), rules, positions, vocabulary)

        chosen = np.take_along_axis(scores, tokens.numpy()[:, None], 1)[:, 0]
        assert (scores.max(-1) - chosen).max() < 1e-5
        same = tokens == plain[0]
        assert same.float().mean() > 0.9
        assert (logprobs - plain[1])[same].abs().max() < 2e-6


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_keeps_what_vllm_keeps(rule: Truncation) -> None:
    torch = pytest.importorskip("torch")
    operators = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    rows = torch.from_numpy(logits())
    count = len(rows)
    theirs = operators.apply_top_k_top_p(
        rows.clone(),
        torch.full((count,), min(rule.top_k, VOCABULARY)) if rule.top_k > 0 else None,
        torch.full((count,), rule.top_p) if rule.top_p < 1.0 else None,
    )

    ours = rows >= kept_from(torch, rows, **arguments(rule))

    assert (ours == theirs.isfinite()).all(dim=1).float().mean() > 0.99
