"""Findings that were there before: a file of them, so that only new ones are shown.

A finding is known by its code, its path in the spec, its file (relative to the baseline's folder)
and the text of its line, not by the line's number: it stays known when the lines above it change.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.core.canonical import parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.spec.findings import SET_FILE, Finding

VERSION = 1
MAX_BYTES = 4 * 1024 * 1024
_KEYS = ("code", "path", "file", "source")
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Split:
    """Findings by whether a baseline knows them."""

    new: list[Finding]
    known: int
    gone: int
    """Entries of the baseline that were looked for, and are found no more."""


def split(
    findings: Iterable[Finding], path: Path, *, codes: Container[str], files: Iterable[str]
) -> Split:
    """Takes away the findings that a baseline knows, as many of each as it has.

    Args:
        findings: of the files, and of the codes.
        path: of the baseline.
        codes: that were looked for.
        files: that were looked at.

    Raises:
        UserError: the file cannot be read, or is no baseline.
    """
    left = _read(path)
    new: list[Finding] = []
    known = 0
    for finding in findings:
        key = _key(finding, path)
        if not finding.blocking and left[key]:
            left[key] -= 1
            known += 1
        else:
            new.append(finding)
    looked_at = {_from(path, file) for file in files}
    gone = (n for (code, _, file, _), n in left.items() if code in codes and file in looked_at)
    return Split(new, known, sum(gone))


def write_baseline(findings: Sequence[Finding], path: Path) -> int:
    """Writes a baseline that knows all findings but those that leave no spec; says how many.

    Raises:
        UserError: it cannot be written.
    """
    keys = sorted(_key(finding, path) for finding in findings if not finding.blocking)
    entries = [dict(zip(_KEYS, key, strict=True)) for key in keys]
    text = json.dumps({"version": VERSION, "findings": entries}, indent=2, ensure_ascii=False)
    write_atomic(path, (text + "\n").encode())
    return len(entries)


def _key(finding: Finding, baseline: Path) -> Key:
    file = _from(baseline, finding.file)
    return finding.code, finding.path, file, finding.line_text.strip()


def _from(baseline: Path, file: str) -> str:
    """A file's name in a baseline: the way to it from the baseline's folder."""
    if file == SET_FILE:
        return file
    return Path(os.path.relpath(file, baseline.parent)).as_posix()


def _read(path: Path) -> Counter[Key]:
    remedy = "write it with `runspec lint --baseline FILE --write-baseline`"
    try:
        if path.is_fifo():  # it would keep us waiting
            raise OSError("is no regular file")
        content = parse_object(read_bounded(path, MAX_BYTES), max_bytes=MAX_BYTES)
    except OSError as error:
        message = f"cannot read the baseline: {error.strerror or error}"
        raise UserError(message, place=str(path), remedy=remedy) from error
    except ValueError as error:
        raise UserError(f"no baseline: {error}", place=str(path), remedy=remedy) from error
    entries = content.get("findings")
    if content.get("version") != VERSION or not isinstance(entries, list):
        raise UserError(f"no baseline of version {VERSION}", place=str(path), remedy=remedy)
    return Counter(_entry(entry, path, remedy) for entry in entries)


def _entry(entry: Any, path: Path, remedy: str) -> Key:
    values = [entry.get(key) for key in _KEYS] if isinstance(entry, dict) else []
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) != len(_KEYS):
        raise UserError("an entry of the baseline is broken", place=str(path), remedy=remedy)
    code, where, file, source = texts
    return code, where, file, source
