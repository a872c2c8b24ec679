"""`runspec lint --fix`: applies the edits of findings to the files.

Edits change parts of single lines, so comments, blank lines, quotes, line ends and a byte order
mark stay. All edits of a file are applied, or none: none if two edits overlap, or if the result
would be broken YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.spec.findings import Edit, Finding
from runspec.core.spec.yaml_nodes import MAX_CHARACTERS, parse_yaml

_BREAK = re.compile("(\r\n|[\r\n\x85\u2028\u2029])")
_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Fixed:
    """Result of the edits, before anything is written."""

    texts: dict[str, str] = field(default_factory=dict)
    """New texts by file."""
    findings: list[Finding] = field(default_factory=list)
    """Findings whose edits are in `texts`."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reason by file, for files whose edits are not applied."""


def fix_texts(findings: Iterable[Finding], texts: Mapping[str, str]) -> Fixed:
    """Apply the edits of findings to the texts that they were found in."""
    fixed = Fixed()
    by_file: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.fix is not None and finding.file in texts:
            by_file.setdefault(finding.file, []).append(finding)
    for file, found in by_file.items():
        edits = {finding.fix for finding in found if finding.fix is not None}
        pairs = pairwise(sorted(edits, key=lambda edit: (edit.line, edit.start, edit.end)))
        overlaps = (b.line for a, b in pairs if a.line == b.line and b.start < a.end)
        if (conflict := next(overlaps, None)) is not None:
            fixed.refused[file] = f"two edits of line {conflict} want the same characters"
            continue
        text = apply_edits(texts[file], edits)
        if any(finding.blocking for finding in parse_yaml(text, file).findings):
            fixed.refused[file] = "the edits would break its YAML"
            continue
        fixed.texts[file] = text
        fixed.findings.extend(found)
    return fixed


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits to a text, from its end to its start; a line that becomes blank is removed."""
    parts = _BREAK.split(text)  # line, break, line, break, ..., line
    for edit in sorted(edits, key=lambda edit: (edit.line, edit.start), reverse=True):
        at = 2 * (edit.line - 1)
        parts[at] = parts[at][: edit.start - 1] + edit.text + parts[at][edit.end - 1 :]
        if not parts[at].strip():
            del parts[at : at + 2]
    return "".join(parts)


def write_fixed(fixed: Fixed, texts: Mapping[str, str]) -> None:
    """Write the new texts, each file by a rename.

    Args:
        fixed: the texts to write.
        texts: the texts of the files when they were checked.

    Raises:
        UserError: a file has changed since, or cannot be written.
    """
    for file, text in fixed.texts.items():
        path = Path(file).resolve()  # a symbolic link stays one
        try:
            data, mode = read_bounded(path, MAX_CHARACTERS), path.stat().st_mode
        except OSError as error:
            raise UserError(f"cannot read: {error.strerror or error}", place=file) from error
        if data.decode("utf-8-sig", errors="replace") != texts[file]:
            raise UserError("changed while it was checked", place=file, remedy="run it again")
        write_atomic(path, (_MARK if data.startswith(_MARK) else b"") + text.encode())
        path.chmod(mode)
