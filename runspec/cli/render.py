"""`runspec render`: prints the resolved spec."""

from __future__ import annotations

import json
import sys

from runspec.core.errors import UserError, bad_usage
from runspec.core.spec.load import SpecFiles

EXIT_FINDINGS, EXIT_UNREADABLE = 1, 2


@bad_usage()
def render_command(files: SpecFiles, show_origin: bool, output: str) -> int:
    """Prints the spec that the layers make, every default written out; returns the exit code.

    Secrets are there by the names of their variables, as in the spec itself.
    """
    from runspec.core.spec.findings import format_finding
    from runspec.core.spec.load import origin, origins
    from runspec.core.spec.yaml_text import to_yaml
    from runspec.lint.check import check_spec

    checked = check_spec(files)
    if checked.layered.kind != "Run":
        what = f"a file of kind {checked.layered.kind} is no spec"
        raise UserError(what, place=str(files.path), remedy="render a spec")
    errors = [finding for finding in checked.findings if finding.severity == "error"]
    if checked.spec is None or errors:
        for finding in errors:
            print(format_finding(finding), file=sys.stderr)
        return EXIT_FINDINGS
    resolved, layered = checked.spec.model_dump(mode="json", by_alias=True), checked.layered
    if output == "json":
        shown = (
            {"spec": resolved, "origin": origins(layered, files, resolved)}
            if show_origin
            else resolved
        )
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    elif show_origin:
        print(to_yaml(resolved, lambda at: origin(layered, files, at)), end="")
    else:
        print(to_yaml(resolved), end="")
    return 0
