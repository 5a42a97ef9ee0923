"""`dcgmi health -c` and `dcgmi diag`, as tables or with -j.

Both JSON forms changed between DCGM 2, 3 and 4. What stayed: a test or a watched system has a name and a verdict, and messages
below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import EVENTS_LIMIT, gpu_named, lines_of, make, mentions

WORDS = ("dcgmi", "Health Monitor", "Overall Health", "Diagnostic", "test_categories", "DCGM")
DEPTH_LIMIT = 30
TEXT_LIMIT = 4_000_000

_SETUP = frozenset({
    "denylist", "blacklist", "nvml library", "cuda main library", "cuda toolkit library", "permissions and os blocks",
    "permissions and os-related blocks", "persistence mode", "environment variables", "environmental variables",
    "graphics processes",
    "software", "deployment", "fabric manager",
})  # fmt: skip
"""Tests of how the machine is set up, not of its hardware."""
_VERDICT = re.compile(r"(?P<verdict>Pass|Fail|Warn(?:ing)?|Skip|Healthy|Failure)\b(?P<rest>.*)\Z")
_GPUS = re.compile(r"GPUs?:?\s*(?P<ids>\d{1,3}(?:\s*,\s*\d{1,3})*)")
_LINE = re.compile(r"dcgmi diag\b[^:|,;]{0,30}?(?:[:=]\s*|\s)(?P<verdict>Pass|PASS|pass|Fail|FAIL|fail)\w*")
_SYSTEM = re.compile(r"(?:PCIe|NVLink|Memory|SM|InfoROM|Thermal|Power|Driver|NVSwitch|MCU|PMU|CPUSet)\b", re.IGNORECASE)
_WATCH = re.compile(r"(?P<system>[A-Z][\w /]+?): (?P<verdict>Warning|Failure)\b(?: - (?P<what>.*))?")


class Finding(NamedTuple):
    """A verdict of a test or watch. `gpus`: those it is about, none when all or unknown."""

    test: str
    verdict: str
    gpus: tuple[int, ...]
    message: str
    line: Line | None
    health: bool


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of health reports and diagnostics; None when the document has neither."""
    if not mentions(document, WORDS):
        return None
    findings = list(_json_findings(document) if _is_json(document) else _table_findings(document))
    if not findings:
        return None
    events = [event for finding in findings for event in _events(finding, document, catalog)]
    tests = [f for f in findings if not f.health]
    if tests and all(f.verdict in {"pass", "skip"} for f in tests):
        attrs = {"tests": sorted({f.test for f in tests})[:50]}
        events.append(make(catalog, "dcgm.diag_passed", document, tests[0].line, attrs=attrs))
    return events[:EVENTS_LIMIT]


def _events(finding: Finding, document: Document, catalog: Catalog) -> Iterator[Event]:
    if finding.health:
        signature = _health_signature(finding)
    elif finding.verdict == "fail":
        signature = "dcgm.diag_setup" if finding.test.lower() in _SETUP else "dcgm.diag_failed"
    else:
        signature = None
    if signature is None:
        return
    attrs = {"test": finding.test, "message": finding.message[:500]}
    for index in finding.gpus or (None,):
        yield make(catalog, signature, document, finding.line, gpu=gpu_named(index=index), attrs=attrs)


def _health_signature(finding: Finding) -> str | None:
    """The entry for a watched system that is not healthy."""
    system = finding.test.lower()
    if finding.verdict not in {"warning", "failure"}:
        return None
    if "pcie" in system:
        return "dcgm.health_pcie"
    if "nvlink" in system or "nvswitch" in system:
        return "dcgm.health_nvlink"
    return "dcgm.health_failure" if finding.verdict == "failure" else "dcgm.health_warning"


def _table_findings(document: Document) -> Iterator[Finding]:
    """Rows of the tables. In a health report the GPU stands in an earlier row, and what is wrong in the rows below."""
    gpus: tuple[int, ...] = ()
    health = False
    pending: Finding | None = None
    for line in lines_of(document):
        if said := _LINE.search(line.text):
            yield Finding("diag", said["verdict"].lower(), (), line.text.strip(), line, False)
            continue
        health = "Health" in line.text or (health and "Diagnostic" not in line.text)
        row = _row(line.text)
        name = row[0].lstrip("-> ") if row is not None else ""
        if pending is not None and (row is None or name):
            yield pending
            pending = None
        if row is None:
            continue
        if pending is not None:
            pending = pending._replace(message=f"{pending.message} {row[1]}".strip())
        elif not health:
            yield from _test_row(name, row[1], line)
        elif named := re.fullmatch(r"(?:GPU(?: ID)?:? )?(\d{1,3})", name):
            gpus = (int(named.group(1)),)
        if health and (watch := _WATCH.search(row[1])) is not None:
            yield Finding(watch["system"], watch["verdict"].lower(), gpus, watch["what"] or "", line, True)
        elif health and row[1] in {"Warning", "Failure"} and _SYSTEM.match(name):
            pending = Finding(name, row[1].lower(), gpus, "", line, True)
    if pending is not None:
        yield pending


def _row(text: str) -> tuple[str, str] | None:
    """The two cells of a row."""
    cells = [cell.strip() for cell in text.strip().split("|", 4)]
    return (cells[1], cells[2]) if len(cells) in (3, 4) and not cells[0] else None


def _test_row(name: str, result: str, line: Line) -> Iterator[Finding]:
    """A test of a diagnostic with its verdict and the GPUs that it names."""
    verdict = _VERDICT.match(result)
    if verdict is None or not name or name.lower().startswith("warning"):
        return
    told = _GPUS.search(verdict["rest"])
    ids = tuple(int(i) for i in told["ids"].split(",")) if told is not None else ()
    yield Finding(name, verdict["verdict"].lower(), ids, verdict["rest"], line, False)


def _is_json(document: Document) -> bool:
    return any(line.text.strip() for line in document.lines[:50]) and next(
        line.text.strip() for line in document.lines if line.text.strip()
    ).startswith("{")


def _json_findings(document: Document) -> Iterator[Finding]:
    text = document.text
    if len(text) > TEXT_LIMIT:
        return
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return
    line = next((line for line in document.lines if line.text.strip()), None)
    yield from _walk(body, "", None, line, 0)


def _walk(node: Any, name: str, gpu: int | None, line: Line | None, depth: int) -> Iterator[Finding]:
    """Everything that has a verdict, with the nearest name and GPU above it."""
    if depth > DEPTH_LIMIT:
        return
    if isinstance(node, list):
        for child in node:
            yield from _walk(child, name, gpu, line, depth + 1)
        return
    if not isinstance(node, dict):
        return
    if isinstance(node.get("name"), str):
        name = node["name"]
    status = node.get("status")
    if isinstance(status, str) and name:
        ids = node.get("gpu_ids", node.get("gpu_id", node.get("entity_id")))
        gpus = tuple(int(i) for i in re.findall(r"\d{1,3}", str(ids))[:64]) if ids is not None else ()
        messages = [
            m.get("warning", "") if isinstance(m, dict) else str(m)
            for m in _list(node.get("warnings", node.get("warning")))
        ]
        yield Finding(name, status.lower(), gpus, "; ".join(str(m) for m in messages), line, False)
    value = node.get("value")
    children = node.get("children")
    if isinstance(value, str) and value in {"Warning", "Failure"} and name and not name.isdigit():
        told = " ".join(_texts(children, 0))
        yield Finding(name, value.lower(), () if gpu is None else (gpu,), told, line, True)
    for key, child in node.items():
        index = int(key) if isinstance(key, str) and key.isdigit() and len(key) < 4 else gpu
        inner = (
            key
            if isinstance(key, str) and key not in {"children", "body", "results", "tests", "test_categories"}
            else name
        )
        if isinstance(child, dict | list):
            yield from _walk(child, str(inner), index, line, depth + 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _texts(node: Any, depth: int) -> Iterator[str]:
    if depth > DEPTH_LIMIT:
        return
    if isinstance(node, str):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _texts(child, depth + 1)
