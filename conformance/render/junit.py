"""A report as JUnit XML, for continuous integration servers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Mapping[str, Any]) -> str:
    """One test case per check; NOT_SUPPORTED, NOT_VERIFIED and the like are skipped ones."""
    suite = ET.Element("testsuite", name=f"kvt-conformance.{report['backend']['name']}")
    totals = {"failures": 0, "errors": 0, "skipped": 0}
    for key, entry in sorted(report["checks"].items()):
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"kvt.{key.split('-')[0]}",
            name=f"{key} {entry['name']}",
            time=f"{entry['seconds']:.3f}",
        )
        kind = _kind(entry)
        if kind:
            element, total = kind
            totals[total] += 1
            words = [entry["status"], entry.get("why", ""), *entry.get("residue", [])]
            text = _clean("\n".join(filter(None, words)))
            ET.SubElement(case, element, message=text.split("\n")[0][:200]).text = text
    suite.set("tests", str(len(report["checks"])))
    for name, value in totals.items():
        suite.set(name, str(value))
    properties = ET.Element("properties")
    suite.insert(0, properties)
    for name, text in (
        ("tier", report["environment"]["tier"]),
        ("why_tier", report["environment"]["why_tier"]),
        ("result", report["result"]),
        ("seed", str(report["suite"]["seed"])),
    ):
        ET.SubElement(properties, "property", name=name, value=_clean(text))
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, "unicode") + "\n"


def _kind(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    status = entry["status"]
    if status == "FAIL" or (status == "PASS" and entry["teardown"] == "LEAK"):
        return "failure", "failures"
    if status in {"ERROR", "TIMEOUT", "CRASH"}:
        return "error", "errors"
    return None if status == "PASS" else ("skipped", "skipped")


def _clean(text: str) -> str:
    """Drop characters that XML cannot carry; backends print anything."""
    return _FORBIDDEN.sub("?", text)
