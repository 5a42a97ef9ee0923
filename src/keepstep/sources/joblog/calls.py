"""Which collective each rank is in, from flight records that a script or person printed, and how much data ranks say they have.

Forms: entries of torch's flight recorder as JSON, one rank a line (alone, or in "entries"); lines "rank 3: seq 12 all_reduce [4096]
completed, seq 13 all_gather [8] scheduled"; tables with a row a rank under a header with last_enqueued and last_completed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.joblog.making import event_at

TRIGGERS = ("collective_seq_id", "rank ", "rank\t", "Rank ", "[rank")
MAX_RANKS = 20_000
"""Ranks of one document."""
LINE_LIMIT = 20_000

OPEN = ("scheduled", "started", "enqueued", "pending", "running", "launched")
_LISTED = re.compile(r"^\W{0,3}[Rr]ank[ =_]?(?P<rank>\d{1,7})\b(?P<calls>.*)$")
_CALL = re.compile(
    r"(?:#|\bseq(?:uence)?(?:_id)?[ =:#]{0,2})(?P<seq>\d{1,12})[ :,]{1,3}(?:op=)?(?:nccl:)?(?P<op>[A-Za-z_]{3,40})\s*"
    r"(?:(?:size=|numel=)?[\[(](?P<size>[\d, x]{1,60})[\])])?[ ,:]{0,3}(?:state=)?(?P<state>completed|scheduled|started|enqueued|"
    r"pending|running|launched)\b"
)
_HEADER = re.compile(r"^\W{0,3}rank\s+last[_ ]enqueued\s+last[_ ]completed\b", re.IGNORECASE)
_ROW = re.compile(r"^\W{0,3}(?P<rank>\d{1,7})\s+(?P<enqueued>\d{1,12})\s+(?P<completed>\d{1,12})\b")
_COUNT = re.compile(
    r"(?i)\brank[ =_]?(?P<rank>\d{1,7})(?:\.\.\d{1,7})?\]?:?(?P<between>[^\[\]\n]{0,60}?)\b(?P<count>\d{1,12}) "
    r"(?P<unit>batches|samples|minibatches|micro-?batches|shards|examples|sequences)\b"
)
_EQUAL_AFTER = re.compile(
    r"(?i)\b(?:train\w*|epoch|data ?loader|loader|length|len|has|have|ended after|sees|total|shard of)\b"
)
_OPS = {
    "ALLREDUCE": "ALLREDUCE",
    "ALLGATHER": "ALLGATHER",
    "ALLGATHERBASE": "_ALLGATHER_BASE",
    "REDUCESCATTER": "REDUCE_SCATTER",
    "REDUCESCATTERBASE": "_REDUCE_SCATTER_BASE",
    "ALLTOALL": "ALLTOALL",
    "ALLTOALLV": "ALLTOALL",
    "ALLTOALLBASE": "ALLTOALL",
}
"""Names as the watchdog prints them, by those in records without underscores."""


def read_calls(document: Document, catalog: Catalog) -> Iterator[Event]:
    """An event for the open call of each rank, and one where ranks name different amounts of data."""
    seen: set[tuple[int, str]] = set()
    table = False
    for line in document.lines:
        text = line.text[:LINE_LIMIT]
        if _HEADER.match(text):
            table = True
            continue
        row = _ROW.match(text) if table else None
        table = table and row is not None
        found = [_from_row(row)] if row is not None else _open_calls(text)
        for attrs in found:
            key = (attrs["rank"], attrs["pg_name"])
            if key not in seen and len(seen) < MAX_RANKS:
                seen.add(key)
                signature = "torch.rank_counters" if row is not None else "fr.call"
                yield event_at(signature, line, document, catalog, attrs)
    yield from _uneven(document, catalog)


def _from_row(row: re.Match[str]) -> dict[str, Any]:
    return {"rank": int(row["rank"]), "enqueued": row["enqueued"], "completed": row["completed"], "pg_name": ""}


def _open_calls(text: str) -> list[dict[str, Any]]:
    """The first call that is not completed, of each group, that a line tells of."""
    if text.startswith("{") and "collective_seq_id" in text:
        return _from_json(text)
    match = _LISTED.match(text)
    if match is None:
        return []
    rank = int(match["rank"])
    for call in _CALL.finditer(match["calls"]):
        if call["state"] != "completed":
            size = re.sub(r"[ x]+", ",", call["size"] or "")
            return [call_of(rank, call["seq"], call["op"], size, "", None, None)]
    return []


def _from_json(text: str) -> list[dict[str, Any]]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(record, dict) or not _whole(record.get("rank")):
        return []
    entries = record.get("entries", [record])
    found: dict[str, dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or not _whole(entry.get("collective_seq_id")):
            continue
        group = _group(entry)
        splits = entry.get("input_split_sizes"), entry.get("output_split_sizes")
        is_open = entry.get("state") in OPEN
        if group in found or not (is_open or splits != (None, None)):
            continue
        size = str(entry.get("input_sizes") or "") if splits == (None, None) else ""
        attrs = call_of(
            record["rank"], entry["collective_seq_id"], str(entry.get("profiling_name", "")), size, group, *splits
        )
        found[group] = attrs | {"open": is_open, "frame": _frame(entry)}
    return list(found.values())


def _frame(entry: dict[str, Any]) -> str | None:
    """File and function of the innermost frame that was recorded."""
    frames = entry.get("frames")
    first = frames[0] if isinstance(frames, list) and frames else None
    if not isinstance(first, dict):
        return None
    return f"{first.get('filename', '')}:{first.get('name', '')}"[:300]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _group(entry: dict[str, Any]) -> str:
    group = entry.get("process_group", entry.get("pg_name", ""))
    return "/".join(str(part) for part in group[:4]) if isinstance(group, list) else str(group)


def call_of(
    rank: int, seq: object, op: str, size: str, group: str, splits_in: object, splits_out: object
) -> dict[str, Any]:
    """What is told of a call, in the names that events of it use."""
    plain = op.removeprefix("nccl:").replace("_", "").upper()
    return {
        "rank": rank,
        "seq": str(seq),
        "op": _OPS.get(plain, plain),
        "numel_in": size[:200],
        "pg_name": group[:200],
        "splits_in": splits_in if isinstance(splits_in, list) else None,
        "splits_out": splits_out if isinstance(splits_out, list) else None,
    }


def _uneven(document: Document, catalog: Catalog) -> Iterator[Event]:
    """Amounts of data by rank: those told by the same words with the same unit, where they are not the same."""
    by_words: dict[tuple[str, str], dict[int, int]] = {}
    first: dict[tuple[str, str], Line] = {}
    for line in document.lines:
        text = line.text[:LINE_LIMIT]
        if "atch" not in text and "ample" not in text and "shard" not in text and "sequences" not in text:
            continue
        for rank, words, count in _counts(line, text):
            if len(by_words) < 1000 or words in by_words:
                by_words.setdefault(words, {}).setdefault(rank, count)
                first.setdefault(words, line)
    for words, counts in by_words.items():
        if len(set(counts.values())) > 1:
            told = ", ".join(f"rank {r}: {n}" for r, n in sorted(counts.items())[:8])
            yield event_at("job.uneven_data", first[words], document, catalog, {"unit": words[1], "counts": told})
            return


def _counts(line: Line, text: str) -> Iterator[tuple[int, tuple[str, str], int]]:
    for match in _COUNT.finditer(line.raw[:LINE_LIMIT] if line.rank is not None else text):
        between = match["between"]
        if _EQUAL_AFTER.search(between) is not None:
            yield (
                int(match["rank"]),
                (re.sub(r"\s+", " ", between.lower()).strip(), match["unit"].lower()),
                int(match["count"]),
            )
