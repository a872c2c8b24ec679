"""No forged proof passes where a chunk decides."""

from __future__ import annotations

from tests.campaigns._benchmark import printed


def run() -> dict[str, dict[str, object]]:
    """Passes of decided chunks by forgery, for each model."""
    return {
        f"hidden {found['hidden']}": {
            name: f"{each['pass_decided']} of {each['decided']}"
            for name, each in found["forgeries"].items()
        }
        for found in printed("toploc_null")
    }
