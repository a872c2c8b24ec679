"""Output of findings for people (pretty, compact), CI systems (github, sarif) and programs (json).

github writes workflow commands: each finding becomes an annotation on its line in a pull request.
json is one object whose `version` changes whenever one of its keys does. sarif is SARIF 2.1.0
(OASIS, errata 01), which code scanning services read: a suppressed finding is a result with its
suppression and the reason; an unreadable spec is a notification of an invocation that did not
succeed, never a result.

`runspec lint --fix` applies the edits of findings to the files. Edits change parts of single lines,
so comments, blank lines, quotes, line ends and a byte order mark stay. All edits of a file are
applied, or none: none if two edits overlap, or if the result would be broken YAML.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runspec.core import entry_points
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.schema.findings import (
    SET_FILE,
    Edit,
    Finding,
    excerpt,
    finite,
    from_here,
    measured,
)
from runspec.core.schema.yaml_nodes import MAX_CHARACTERS, parse_yaml
from runspec.lint import RULES
from runspec.lint.check import CheckedFiles

FORMATS = ("pretty", "compact", "json", "github", "sarif")
FOR_PEOPLE = ("pretty", "compact")
JSON_VERSION = 2
_BOLD, _RED, _YELLOW, _CYAN, _GREEN = "1", "31;1", "33;1", "36", "32"
_SEVERITY = {"error": _RED, "warning": _YELLOW}


def render(checked: CheckedFiles, output: str, *, colour: bool = False) -> str:
    """Return findings as text without a final line end.

    Args:
        checked: what to show.
        output: one of FORMATS.
        colour: whether `pretty` uses the terminal's colours.
    """
    if output == "pretty":
        return "\n\n".join(_pretty_finding(finding, colour) for finding in checked.findings)
    if output == "compact":
        return "\n".join(visible(str(finding)) for finding in checked.findings)
    return {"json": _json, "github": _github, "sarif": _sarif}[output](checked)


def visible(text: str) -> str:
    """Return a line that is safe for a terminal: control characters become escapes."""
    return "".join(
        char if char == "\t" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def _pretty_finding(finding: Finding, colour: bool) -> str:
    place = f"{finding.file}:{finding.line}:{finding.column}:"
    path = f"{finding.path}: " if finding.path else ""
    severity = _painted(f"{finding.severity} {finding.code}:", _SEVERITY[finding.severity], colour)
    head = f"{_painted(visible(place), _BOLD, colour)} {severity} {visible(path + finding.message)}"
    lines = [head]
    if finding.place.source.strip():
        line, carets = excerpt(finding).split("\n")
        lines += [visible(line), _painted(carets, _SEVERITY[finding.severity], colour)]
    margin = " " * (len(str(finding.line)) + 2)
    notes = [_painted(visible(text), _CYAN, colour) for text in measured(finding)]
    if finding.suggestion:
        fixable = "  [--fix]" if finding.fix is not None else ""
        hint = f"suggestion: {finding.suggestion}{fixable}"
        notes.append(_painted(visible(hint), _GREEN, colour))
    return "\n".join([*lines, *(f"{margin}= {note}" for note in notes)])


def _painted(text: str, style: str, colour: bool) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if colour else text


def _json(checked: CheckedFiles) -> str:
    """Keys: version, files, findings, suppressed (with a reason), unreadable, summary.

    Columns count characters from 1; `end_column` is exclusive.
    """
    content = {
        "version": JSON_VERSION,
        "files": list(checked.files),
        "findings": [_json_finding(finding) for finding in checked.findings],
        "suppressed": [
            {**_json_finding(one.finding), "reason": one.reason} for one in checked.suppressed
        ],
        "unreadable": [
            {"file": one.file, "message": one.error.thing, "remedy": one.error.remedy}
            for one in checked.unreadable
        ],
        "summary": {"errors": checked.count("error"), "warnings": checked.count("warning")},
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _json_finding(finding: Finding) -> dict[str, Any]:
    rule = RULES[finding.code]
    return {
        "code": finding.code,
        "group": rule.group,
        "rule": rule.summary,
        "severity": finding.severity,
        "path": finding.path,
        "message": finding.message,
        "file": finding.file,
        "line": finding.line,
        "column": finding.column,
        "end_column": finding.column + finding.place.width,
        "source": finding.line_text,
        "numbers": finite(finding),
        "requires": finding.requires,
        "suggestion": finding.suggestion,
        "fix": None if finding.fix is None else asdict(finding.fix),
        "blocking": finding.blocking,
    }


def _github(checked: CheckedFiles) -> str:
    """Return one command a line, unreadable files first."""
    lines = [
        _command("error", one.error.thing, {"file": from_here(one.file).as_posix()})
        for one in checked.unreadable
    ]
    return "\n".join([*lines, *map(_annotation, checked.findings)])


def _annotation(finding: Finding) -> str:
    properties: dict[str, object] = {"title": f"runspec {finding.code}"}
    if finding.file != SET_FILE:
        properties |= {
            "file": from_here(finding.file).as_posix(),
            "line": finding.line,
            "col": finding.column,
        }
        if finding.place.width:
            properties["endColumn"] = finding.column + finding.place.width
    path = f"{finding.path}: " if finding.path else ""
    hint = [finding.suggestion] if finding.suggestion else []
    text = "\n".join([f"{path}{finding.message}", *measured(finding), *hint])
    return _command(finding.severity, text, properties)


def _command(name: str, text: str, properties: Mapping[str, object]) -> str:
    shown = (
        f"{key}={_escaped(str(value)).replace(':', '%3A').replace(',', '%2C')}"
        for key, value in properties.items()
    )
    return f"::{name} {','.join(shown)}::{_escaped(text)}"


def _escaped(text: str) -> str:
    return "%0A".join(visible(line) for line in text.replace("%", "%25").split("\n"))


SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
VERSION = "2.1.0"
Json = dict[str, Any]


def _sarif(checked: CheckedFiles) -> str:
    """Return one log with one run."""
    results = [_result(finding) for finding in checked.findings]
    for one in checked.suppressed:
        suppression = {"kind": "inSource", "status": "accepted", "justification": one.reason}
        results.append({**_result(one.finding), "suppressions": [suppression]})
    rules = [
        {
            "id": rule.code,
            "shortDescription": {"text": rule.summary},
            "fullDescription": {"text": rule.page},
            "help": {"text": f"{rule.page}\n\nMore: runspec explain {rule.code}"},
            "defaultConfiguration": {"level": rule.severity},
            "properties": {"tags": [rule.group]},
        }
        for rule in RULES.values()
    ]
    driver: Json = {"name": "runspec", "rules": rules}
    with suppress(PackageNotFoundError):  # the package need not be installed
        driver["version"] = version(entry_points.NAME)
    invocation: Json = {"executionSuccessful": not checked.unreadable}
    if checked.unreadable:
        invocation["toolExecutionNotifications"] = [
            {
                "level": "error",
                "message": {"text": one.error.thing},
                "locations": [{"physicalLocation": {"artifactLocation": _artifact(one.file)}}],
            }
            for one in checked.unreadable
        ]
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [run]}, indent=2)


def _result(finding: Finding) -> Json:
    path = f"{finding.path}: " if finding.path else ""
    hint = f" ({finding.suggestion})" if finding.suggestion else ""
    identity = "\n".join((finding.code, finding.path, finding.line_text.strip()))
    location: Json = {}
    if finding.file != SET_FILE:
        region: Json = {"startLine": finding.line, "startColumn": finding.column}
        if finding.place.width:
            region["endColumn"] = finding.column + finding.place.width
        if finding.line_text:
            region["snippet"] = {"text": finding.line_text}
        artifact = _artifact(finding.file)
        location["physicalLocation"] = {"artifactLocation": artifact, "region": region}
    if finding.path:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.path}]
    result: Json = {
        "ruleId": finding.code,
        "ruleIndex": list(RULES).index(finding.code),
        "level": finding.severity,
        "message": {"text": f"{path}{finding.message}{hint}"},
        "locations": [location],
        "partialFingerprints": {"finding/v1": hashlib.sha256(identity.encode()).hexdigest()},
        "properties": {"numbers": finite(finding), "requires": finding.requires},
    }
    if (edit := finding.fix) is not None:
        region = {"startLine": edit.line, "startColumn": edit.start, "endColumn": edit.end}
        replacement = {"deletedRegion": region, "insertedContent": {"text": edit.text}}
        change = {"artifactLocation": _artifact(finding.file), "replacements": [replacement]}
        description = {"text": finding.suggestion or finding.message}
        result["fixes"] = [{"description": description, "artifactChanges": [change]}]
    return result


def _artifact(file: str) -> Json:
    path = from_here(file)
    if path.is_absolute():
        return {"uri": path.as_uri()}
    # Quoted as bytes, because a name need not be UTF-8.
    return {"uri": quote(os.fsencode(path.as_posix())), "uriBaseId": "%SRCROOT%"}


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
