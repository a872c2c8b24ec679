"""A prefill engine in this process that has one version, and fetches nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verify.plugins import PrefillInput, PrefillOutput
from verify.truncation import Truncation


@dataclass
class OneVersion:
    """Prefills with a function of an engine's, and the policy that it loaded."""

    prefill_with: Callable[..., list[PrefillOutput]]
    policy: Any
    directory: Path

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        return self.directory

    def prefill(
        self,
        version: int,
        inputs: Sequence[PrefillInput],
        *,
        temperature: float,
        truncation: Truncation | None = None,
    ) -> list[PrefillOutput]:
        return self.prefill_with(
            self.policy, inputs, temperature=temperature, truncation=truncation
        )

    def close(self) -> None:
        """Nothing is open."""
