"""JUnit XML, which most CI systems show: a suite a file, a case a finding.

Findings that fail the command are failures, milder ones pass and are quoted, suppressed ones are
skipped; a spec that cannot be read is an error, one without a finding a case that passes.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as Xml

from runspec.core.spec.findings import Finding, format_finding
from runspec.lint.report import Report

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, not even escaped."""


def render(report: Report) -> str:
    suites = Xml.Element("testsuites", name="runspec lint")
    suppressed = [one.finding for one in report.suppressed]
    files = [*report.files, *(f.file for f in [*report.findings, *suppressed])]
    for file in dict.fromkeys(files):
        suite = Xml.SubElement(suites, "testsuite", name=_text(file))
        _fill(suite, report, file)
        _count(suite)
    _count(suites)
    Xml.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(suites, encoding="unicode")


def _fill(suite: Xml.Element, report: Report, file: str) -> None:
    for one in report.unreadable:
        if one.file == file:
            case = _case(suite, file, "readable")
            message = _text(one.error.thing)
            Xml.SubElement(case, "error", message=message, type="unreadable").text = message
    for finding in report.findings:
        if finding.file == file:
            _add(suite, finding, fails=report.fails(finding))
    for hidden in report.suppressed:
        if hidden.finding.file == file:
            case = _case(suite, file, _name(hidden.finding))
            Xml.SubElement(case, "skipped", message=_text(hidden.reason))
    if not len(suite):
        _case(suite, file, "lint")


def _add(suite: Xml.Element, finding: Finding, *, fails: bool) -> None:
    case = _case(suite, finding.file, _name(finding))
    if fails:
        message = _text(f"{finding.path}: {finding.message}" if finding.path else finding.message)
        told = Xml.SubElement(case, "failure", message=message, type=finding.code)
    else:
        told = Xml.SubElement(case, "system-out")
    told.text = _text(format_finding(finding))


def _case(suite: Xml.Element, file: str, name: str) -> Xml.Element:
    return Xml.SubElement(suite, "testcase", classname=_text(file), name=name, time="0")


def _name(finding: Finding) -> str:
    return f"{finding.code} {finding.line}:{finding.column}"


def _count(element: Xml.Element) -> None:
    for attribute, tag in (
        ("tests", "testcase"),
        ("failures", "failure"),
        ("errors", "error"),
        ("skipped", "skipped"),
    ):
        element.set(attribute, str(len(list(element.iter(tag)))))
    element.set("time", "0")


def _text(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
