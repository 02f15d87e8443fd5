"""A check report as JUnit XML, as CI systems read it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from kvplan.text import literal

if TYPE_CHECKING:
    from kvplan.jobs.check import CheckReport, Verdict


def junit_xml(report: CheckReport) -> str:
    """One test case a check; a failure names each expectation that does not hold, with its line."""
    suite = ET.Element(
        "testsuite",
        name="kvplan check",
        tests=str(len(report.checks)),
        failures=str(len(report.checks) - report.passed),
        errors="0",
        skipped="0",
    )
    for check in report.checks:
        case = ET.SubElement(
            suite,
            "testcase",
            name=literal(check.name),
            classname="kvplan",
            file=literal(report.path),
            line=str(check.line),
        )
        failed = [v for v in check.verdicts if not v.passed]
        if failed:
            texts = [literal(f"{v.figure} is {v.actual_text}, expected {v.expected}") for v in failed]
            failure = ET.SubElement(case, "failure", message="; ".join(texts), type="expectation")
            failure.text = "\n".join(
                f"{literal(report.path)}:{v.line}:{v.column}: {text}{_deployment(v)}"
                for v, text in zip(failed, texts, strict=True)
            )
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _deployment(verdict: Verdict) -> str:
    place = verdict.deployment
    return f" (the command at {literal(place.file)}:{place.line})" if place is not None else ""
