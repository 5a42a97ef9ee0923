"""Tables of flight records with a row a rank and call: `rank  pg  seq  name  numel  state  frame`.

The columns are known by the header; a name of a function behind the last column belongs to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.joblog.calls import OPEN, call_of
from keepstep.sources.joblog.making import event_at

TRIGGERS = ("rank",)
MAX_ROWS = 100_000
LINE_LIMIT = 2000
_RANK = frozenset({"rank", "global_rank"})
_SEQ = frozenset({"seq", "seq_id", "seqid", "seqnum", "collective_seq_id", "seq_no", "sequence"})
_OP = frozenset({"name", "op", "optype", "op_type", "collective", "profiling_name", "call"})
_STATE = frozenset({"state", "status"})
_GROUP = frozenset({"pg", "group", "pg_name", "process_group", "pg_id"})
_SIZE = frozenset({"numel", "numelin", "numel_in", "size", "input_sizes", "sizes", "shape"})
_DIGITS = re.compile(r"[0-9]{1,12}")
_SPLIT = re.compile(r"\s*\|\s*|\s+")


def read_tables(document: Document, catalog: Catalog) -> Iterator[Event]:
    """An event for the open call of each rank and group."""
    columns: dict[str, int] = {}
    seen: set[tuple[int, str]] = set()
    for line in document.lines:
        text = line.text[:LINE_LIMIT].strip(" |#")
        if not columns and "rank" not in text.lower():
            continue
        cells = _SPLIT.split(text)
        header = _columns(cells)
        if header:
            columns = header
            continue
        if not columns:
            continue
        row = {name: cells[at] for name, at in columns.items() if at < len(cells)}
        if len(row) < len(columns) or not _DIGITS.fullmatch(row["rank"]) or not _DIGITS.fullmatch(row["seq"]):
            columns = {}
            continue
        rank, group = int(row["rank"]), row.get("group", "")
        if row["state"].lower() not in OPEN or (rank, group) in seen or len(seen) >= MAX_ROWS:
            continue
        seen.add((rank, group))
        attrs = call_of(rank, row["seq"], row["op"], row.get("size", ""), group, None, None)
        yield event_at("fr.call", line, document, catalog, attrs)


def _columns(cells: list[str]) -> dict[str, int]:
    """Where the columns stand; empty for a row that is no header of such a table."""
    found: dict[str, int] = {}
    for at, cell in enumerate(cells[:20]):
        name = cell.lower().strip("[]():")
        for what, names in (
            ("rank", _RANK), ("seq", _SEQ), ("op", _OP), ("state", _STATE), ("group", _GROUP), ("size", _SIZE),
        ):  # fmt: skip
            if name in names:
                found.setdefault(what, at)
    return found if {"rank", "seq", "op", "state"} <= found.keys() else {}
