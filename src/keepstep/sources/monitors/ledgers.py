"""Tables that people and trackers make of what failed where: runs by job and machine, speeds by pair, numbers of devices.

Nothing is concluded here: what follows a job, or a machine, shows in attribution/rules/machine_relations.py.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.scheduler.tables import headless_columns
from keepstep.sources.snapshots.making import lines_of, make

ROWS_LIMIT = 500
HEADER_LINES = 400
"""Lines of a document in which a header is looked for: a table that somebody made stands in a short text."""
NAMES_LIMIT = 32
"""Machines of one row."""

_HOST = frozenset({"host", "node", "nodes", "hosts", "hostname", "machine", "nodelist"})
_JOB = frozenset({"job", "jobid", "job_id", "jobname", "job_name", "run"})
_RESULT = frozenset({"result", "state", "status", "error", "outcome", "xid", "exit", "reason"})
_RAN = frozenset({"jobs", "runs", "total", "attempts"})
_FAILED = frozenset({"failed", "failures", "fail", "errors"})
_VERSION = re.compile(
    r"(?:[a-z]+_)?(?:driver|kernel|firmware|fw|version|image|release|nccl|cuda|build)(?:_?version)?\Z"
)
_MACHINES = re.compile(r"(?:nodes?|hosts?|machines?|servers?|instances?|total)(?:_total)?\Z")
_AFFECTED = re.compile(
    r"(?:(?:nodes?|hosts?|machines?|servers?)_(?:with|having|showing)_\w+|(?:nodes?_|hosts?_)?(?:affected|failing|failed|unhealthy|bad|hit)|with_\w+)\Z"
)
_PASSED = re.compile(r"(?i)\b(?:completed?|ok|pass(?:ed)?|success\w*|succeeded|finished|fine|done)\b")
_NAME = re.compile(r"[A-Za-z][\w.-]*\d[\w.-]*\Z")
_PAIR = re.compile(
    r"(?P<a>[A-Za-z][\w.]{0,40}\d)(?:\s*(?:,|<->|-|->|/|\t)\s*)(?P<b>[A-Za-z][\w.]{0,40}\d)[\s,:=]{1,8}(?P<speed>\d{1,6}(?:\.\d{1,6})?)\s*(?:G\S{1,5})?\s*\Z"
)
_BARE = re.compile(r"\s*(?P<n>\d{1,5})\s*\Z")
_OTHERS = re.compile(
    r"(?i)#?\s*(?:(?:all |the )?other (?:\d{1,6} )?(?:nodes?|hosts?|machines?|servers?)"
    r"|(?:nodes?|hosts?) (?:of|in) the (?:same )?pool)[^:\n]{0,60}:\s*(?P<n>\d{1,5})\s*\Z"
)
_DEVICE = re.compile(r"(?i)infiniband|\bib_?|mlx5|rdma|issm|umad|uverbs|\bnic\b|/net\b|\befa|roce")


def ledger_events(document: Document, catalog: Catalog) -> list[Event]:
    """The tables of a document, one event each; [] for nearly every document."""
    lines = list(lines_of(document))[: HEADER_LINES + ROWS_LIMIT]
    return [
        *_runs(lines, document, catalog),
        *_versions(lines, document, catalog),
        *_pairs(lines, document, catalog),
        *_counts(lines, document, catalog),
    ]


def _cells(text: str, header: str | None = None) -> list[str]:
    """The cells of a row; `header`: the row that tells by what they are parted, where the row is not one itself."""
    head = text if header is None else header
    if "|" in head:
        return [cell.strip() for cell in text.strip().strip("|").split("|")]
    if "," in head:
        try:
            return [cell.strip() for cell in next(csv.reader([text]), [])]
        except csv.Error:
            return []
    if "\t" in head:
        return [cell.strip() for cell in text.split("\t")]
    return text.split()


def _runs(lines: Sequence[Line], document: Document, catalog: Catalog) -> list[Event]:
    """Rows under a header that names machines, and either jobs with results or numbers of jobs."""
    without = _headless_runs(lines, document, catalog)
    if without:
        return without
    for index, line in enumerate(lines[:HEADER_LINES]):
        names = [cell.lower() for cell in _cells(line.raw)]
        where = next((i for i, n in enumerate(names) if n in _HOST), None)
        if where is None or len(names) < 3:
            continue
        rows = lines[index + 1 : index + 1 + ROWS_LIMIT]
        ran = next((i for i, n in enumerate(names) if n in _RAN), None)
        failed = next((i for i, n in enumerate(names) if n in _FAILED), None)
        job = next((i for i, n in enumerate(names) if n in _JOB), None)
        result = next((i for i, n in enumerate(names) if n in _RESULT), None)
        attrs: dict[str, Any] | None = None
        if ran is not None and failed is not None:
            attrs = {"counts": _counted(rows, where, ran, failed, line.raw)}
        elif job is not None and result is not None:
            attrs = {"runs": _results(rows, where, job, result, line.raw, names[result])}
        if attrs is not None and any(attrs.values()):
            return [make(catalog, "ledger.runs", document, line, attrs=attrs)]
    return []


def _headless_runs(lines: Sequence[Line], document: Document, catalog: Catalog) -> list[Event]:
    """Rows of a scheduler's command that names its columns, pasted without the header."""
    columns = headless_columns(document)
    if columns is None or not {"jobid", "nodelist", "state"} <= set(columns):
        return []
    where, job, result = (columns.index(name) for name in ("nodelist", "jobid", "state"))
    runs = _results(lines[:ROWS_LIMIT], where, job, result, " ".join(columns), "state")
    return [make(catalog, "ledger.runs", document, lines[0], attrs={"runs": runs})] if runs else []


def _versions(lines: Sequence[Line], document: Document, catalog: Catalog) -> list[Event]:
    """Rows of versions, each with the number of its machines and of those that show something."""
    for index, line in enumerate(lines[:HEADER_LINES]):
        names = [cell.lower() for cell in _cells(line.raw)]
        what = next((i for i, n in enumerate(names) if _VERSION.match(n)), None)
        ran = next((i for i, n in enumerate(names) if _MACHINES.match(n)), None)
        hit = next((i for i, n in enumerate(names) if _AFFECTED.match(n)), None)
        if what is None or ran is None or hit is None:
            continue
        rows = _counted(lines[index + 1 : index + 1 + ROWS_LIMIT], what, ran, hit, line.raw)
        if len(rows) > 1:
            return [make(catalog, "ledger.versions", document, line, attrs={"versions": rows})]
    return []


def _counted(rows: Sequence[Line], where: int, ran: int, failed: int, header: str) -> list[list[Any]]:
    found: list[list[Any]] = []
    for row in rows:
        cells = _cells(row.raw, header)
        if len(cells) <= max(where, ran, failed):
            continue
        both = cells[ran] + cells[failed]
        if both.isascii() and cells[ran].isdigit() and cells[failed].isdigit() and len(both) < 18:
            found.append([cells[where], int(cells[ran]), int(cells[failed])])
    return found


def _results(rows: Sequence[Line], where: int, job: int, result: int, header: str, what: str) -> list[list[Any]]:
    """[job, machines, passed, what] of each row. Without commas the last columns may be of several words."""
    found: list[list[Any]] = []
    quoted = "," in header or "|" in header
    for row in rows:
        cells = _cells(row.raw, header)
        if len(cells) <= max(where, job, result) or row.raw.lstrip().startswith("#"):
            continue
        said = cells[result] if quoted or result < len(cells) - 1 else " ".join(cells[result:])
        machines = [n for n in re.split(r"[\s;+|]+", cells[where]) if _NAME.match(n)][:NAMES_LIMIT]
        if machines and said not in ("", "-"):
            code = said if what == "xid" else ""
            found.append([cells[job].split(" (")[0], machines, _PASSED.search(said) is not None, code])
    return found


def _pairs(lines: Sequence[Line], document: Document, catalog: Catalog) -> list[Event]:
    """Lines that give a speed for two machines."""
    found: list[list[Any]] = []
    first = None
    for line in lines[: HEADER_LINES + ROWS_LIMIT]:
        match = _PAIR.match(line.text.strip()) if len(line.text) < 160 else None
        if match is not None and match["a"] != match["b"] and len(found) < ROWS_LIMIT:
            first = first or line
            found.append([match["a"], match["b"], float(match["speed"])])
    return [make(catalog, "ledger.pairs", document, first, attrs={"pairs": found})] if first and len(found) > 3 else []


def _counts(lines: Sequence[Line], document: Document, catalog: Catalog) -> list[Event]:
    """A number alone on its line, and the same number of other machines within the three lines that follow."""
    for index, line in enumerate(lines[:HEADER_LINES]):
        own = _BARE.match(line.text)
        if own is None:
            continue
        for after in lines[index + 1 : index + 4]:
            others = _OTHERS.match(after.text)
            if others is not None and int(others["n"]) != int(own["n"]):
                network = _DEVICE.search(document.title) or _DEVICE.search(lines[index - 1].text if index else "")
                attrs = {"have": int(own["n"]), "others": int(others["n"]), "network": network is not None}
                return [make(catalog, "ledger.counts", document, line, attrs=attrs)]
    return []
