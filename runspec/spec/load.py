"""From YAML layers to one `RunSpec`, every finding in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runspec.spec.findings import Finding
from runspec.spec.schema import RunSpec


@dataclass(frozen=True)
class LoadedSpec:
    """A spec and what is wrong with it.

    `spec` is None when the layers do not make a `RunSpec`; a spec with errors among its findings
    must not run (`require` sees to that).
    """

    spec: RunSpec | None
    findings: list[Finding]
    sources: Mapping[str, str]
    """Text of every file read, and of the overrides under `--set`: for carets."""

    def require(self) -> RunSpec:
        """The spec, if it has no errors.

        Raises:
            UserError: listing every error with its place.
        """
        raise NotImplementedError


def load_spec(
    path: Path,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> LoadedSpec:
    """Loads, merges, interpolates and checks a spec.

    Args:
        path: the spec.
        profile: name of an overlay in `profiles/` beside it.
        overrides: `path=value` each, applied last and in order.
        environ: what `${VAR}` reads; the process's environment when None.

    Raises:
        UserError: bad usage or nothing to look at: the file cannot be read, there is no such
            profile, an override is no `path=value`. Everything else is a finding.
    """
    raise NotImplementedError
