"""SARIF 2.1.0 (OASIS, errata 01), which code scanning services read.

A suppressed finding is a result with its suppression and the reason; an unreadable spec is a
notification of an invocation that did not succeed, never a result.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import quote

from runspec.core import distribution
from runspec.core.spec.findings import SET_FILE, Edit, Finding, finite, from_here
from runspec.lint.check import CheckedFiles
from runspec.lint.registry import RULES, Rule

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
VERSION = "2.1.0"
Json = dict[str, Any]


def render(checked: CheckedFiles) -> str:
    """Return one log with one run."""
    results = [_result(finding) for finding in checked.findings]
    for one in checked.suppressed:
        suppression = {"kind": "inSource", "status": "accepted", "justification": one.reason}
        results.append({**_result(one.finding), "suppressions": [suppression]})
    run = {
        "tool": {"driver": _driver()},
        "invocations": [_invocation(checked)],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [run]}, indent=2)


def _driver() -> Json:
    driver: Json = {"name": "runspec", "rules": [_rule(rule) for rule in RULES.values()]}
    with suppress(PackageNotFoundError):  # the package need not be installed
        driver["version"] = version(distribution.NAME)
    return driver


def _rule(rule: Rule) -> Json:
    return {
        "id": rule.code,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.page},
        "help": {"text": f"{rule.page}\n\nMore: runspec explain {rule.code}"},
        "defaultConfiguration": {"level": rule.severity},
        "properties": {"tags": [rule.group]},
    }


def _invocation(checked: CheckedFiles) -> Json:
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
    return invocation


def _result(finding: Finding) -> Json:
    path = f"{finding.path}: " if finding.path else ""
    hint = f" ({finding.suggestion})" if finding.suggestion else ""
    identity = "\n".join((finding.code, finding.path, finding.line_text.strip()))
    result: Json = {
        "ruleId": finding.code,
        "ruleIndex": list(RULES).index(finding.code),
        "level": finding.severity,
        "message": {"text": f"{path}{finding.message}{hint}"},
        "locations": [_location(finding)],
        "partialFingerprints": {"finding/v1": hashlib.sha256(identity.encode()).hexdigest()},
        "properties": {"numbers": finite(finding), "requires": finding.requires},
    }
    if finding.fix is not None:
        result["fixes"] = [_fix(finding, finding.fix)]
    return result


def _location(finding: Finding) -> Json:
    location: Json = {}
    if finding.file != SET_FILE:
        region: Json = {"startLine": finding.line, "startColumn": finding.column}
        if finding.width:
            region["endColumn"] = finding.column + finding.width
        if finding.line_text:
            region["snippet"] = {"text": finding.line_text}
        artifact = _artifact(finding.file)
        location["physicalLocation"] = {"artifactLocation": artifact, "region": region}
    if finding.path:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.path}]
    return location


def _fix(finding: Finding, edit: Edit) -> Json:
    region = {"startLine": edit.line, "startColumn": edit.start, "endColumn": edit.end}
    replacement = {"deletedRegion": region, "insertedContent": {"text": edit.text}}
    change = {"artifactLocation": _artifact(finding.file), "replacements": [replacement]}
    description = finding.suggestion or finding.message
    return {"description": {"text": description}, "artifactChanges": [change]}


def _artifact(file: str) -> Json:
    path = from_here(file)
    if path.is_absolute():
        return {"uri": path.as_uri()}
    # Quoted as bytes, because a name need not be UTF-8.
    return {"uri": quote(os.fsencode(path.as_posix())), "uriBaseId": "%SRCROOT%"}
