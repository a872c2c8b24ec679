"""`--fix`: the edits that findings carry, put into files that stay otherwise as they are.

Edits change parts of single lines, so comments, blank lines, quotes, line ends and a byte order
mark stay. A file is changed as a whole or not at all: not where two edits want the same characters,
and not where the outcome would be broken YAML.
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
class Mended:
    """What the edits of findings come to, before anything is written."""

    texts: dict[str, str] = field(default_factory=dict)
    """New texts of files."""
    findings: list[Finding] = field(default_factory=list)
    """Those whose edits are in them."""
    refused: dict[str, str] = field(default_factory=dict)
    """Files that stay as they are although findings have edits for them, and why."""


def mend(findings: Iterable[Finding], texts: Mapping[str, str]) -> Mended:
    """Applies the edits of findings to the texts that they were found in."""
    mended = Mended()
    by_file: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.fix is not None and finding.file in texts:
            by_file.setdefault(finding.file, []).append(finding)
    for file, found in by_file.items():
        edits = {finding.fix for finding in found if finding.fix is not None}
        conflict = _conflict(edits)
        if conflict is not None:
            mended.refused[file] = f"two edits of line {conflict} want the same characters"
            continue
        text = apply_edits(texts[file], edits)
        if any(finding.blocking for finding in parse_yaml(text, file).findings):
            mended.refused[file] = "the edits would break its YAML"
            continue
        mended.texts[file] = text
        mended.findings.extend(found)
    return mended


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Puts edits into a text, from its end to its beginning; a line left blank by one goes."""
    parts = _BREAK.split(text)  # line, break, line, break, ..., line
    for edit in sorted(edits, key=lambda edit: (edit.line, edit.start), reverse=True):
        at = 2 * (edit.line - 1)
        parts[at] = parts[at][: edit.start - 1] + edit.text + parts[at][edit.end - 1 :]
        if not parts[at].strip():
            del parts[at : at + 2]
    return "".join(parts)


def write_mended(mended: Mended, texts: Mapping[str, str]) -> None:
    """Writes the new texts, each file by a rename.

    Args:
        mended: what to write.
        texts: what the files held when they were checked.

    Raises:
        UserError: a file was changed since, or cannot be written.
    """
    for file, text in mended.texts.items():
        path = Path(file).resolve()  # a link stays one
        try:
            data, mode = read_bounded(path, MAX_CHARACTERS), path.stat().st_mode
        except OSError as error:
            raise UserError(f"cannot read: {error.strerror or error}", place=file) from error
        if data.decode("utf-8-sig", errors="replace") != texts[file]:
            raise UserError("changed while it was checked", place=file, remedy="run it again")
        write_atomic(path, (_MARK if data.startswith(_MARK) else b"") + text.encode())
        path.chmod(mode)


def _conflict(edits: Iterable[Edit]) -> int | None:
    """The line of two edits that overlap; equal ones are one."""
    ordered = sorted(edits, key=lambda edit: (edit.line, edit.start, edit.end))
    for before, after in pairwise(ordered):
        if before.line == after.line and after.start < before.end:
            return after.line
    return None
