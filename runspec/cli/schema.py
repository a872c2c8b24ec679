"""`runspec schema`: prints the JSON Schema of spec files."""

from __future__ import annotations

import json
import sys

EXIT_USAGE = 2


def schema_command(draft: str) -> int:
    """Prints the schema in a draft's words; returns the exit code."""
    from runspec.core.spec.json_schema import DRAFTS, json_schema

    if draft not in DRAFTS:
        print(f"error: no draft {draft!r}; there are: {', '.join(DRAFTS)}", file=sys.stderr)
        return EXIT_USAGE
    print(json.dumps(json_schema(draft), indent=2, ensure_ascii=False))
    return 0
