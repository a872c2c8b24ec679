"""No forged proof passes where a chunk decides, and honest proofs of other precisions pass."""

from __future__ import annotations

from tests.campaigns._benchmark import printed


def run() -> dict[str, dict[str, object]]:
    """Decided chunks and passes of every forgery, by model."""
    return {
        found["model"]: {
            name: f"{each['pass_decided']} of {each['decided']}"
            for name, each in found["forgeries"].items()
        }
        for found in printed("toploc_null")
    }
