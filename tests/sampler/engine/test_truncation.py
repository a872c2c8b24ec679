"""Top-k and top-p keep what vLLM's own operators keep."""

from __future__ import annotations

import pytest

from tests.verify.test_truncation import RULES, VOCABULARY, arguments, logits
from verify.truncation import Truncation, kept_from


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
