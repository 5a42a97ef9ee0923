"""Tables of measurements, whoever made them -> levels of GPUs, counters of links, and series of speed by rank, GPU or node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots import smi_csv
from keepstep.sources.snapshots.fields import BY_NAME
from keepstep.sources.snapshots.gpu_health import gpu_events
from keepstep.sources.snapshots.making import EVENTS_LIMIT, LINE_LIMIT, gpu_named, make, number
from keepstep.sources.snapshots.metrics import gpu_level, is_counter, metric_kind, reasons_in, words_of
from keepstep.sources.snapshots.rows import Row, Value, read
from keepstep.sources.snapshots.samples import Building, GpuSample
from keepstep.sources.snapshots.totals import Total, total_events

SERIES_LIMIT = 64
"""Metrics of one document."""
ENTITIES_LIMIT = 20_000
POINTS_LIMIT = 200
"""Points of one entity in one series; the newest are kept."""
WORDS = (
    "rank",
    "Rank",
    "gpu",
    "GPU",
    "node",
    "Node",
    "host",
    "Host",
    "slowest",
    "link",
    "worker",
    "nic",
    "pair",
    "hca",
    "device",
    "idx",
    "server",
    "machine",
)

_FLAGGED = re.compile(
    r"(?:straggl\w{0,8}|slow(?:est)?|worse)\b[^\[{(]{0,60}[\[{(](?P<ids>[\w,.'\" :=-]{1,200})[\])}]", re.IGNORECASE
)
"""A report that names its stragglers in brackets: "Affected ranks: [21]"."""
_SAID = re.compile(
    r"\b(?P<what>(?:hw|sw)[ _-]?(?:thermal|power[ _-]?brake|slowdown)(?:[ _-]?slowdown)?)\s*(?::|=|is)?\s*(?:active|engaged)\b",
    re.IGNORECASE,
)
_SAID_LIMIT = re.compile(
    r"power (?:limit|cap)\D{0,20}(?P<limit>\d{2,4}) ?W\b\W{0,4}(?:default|of|tdp|instead of|max(?:imum)?|normal(?:ly)?)"
    r"\D{0,12}(?P<usual>\d{2,4}) ?W\b",
    re.IGNORECASE,
)
_SAID_SLOWER = re.compile(
    r"\b(?:step|iter(?:ation)?)[ _]?time\D{0,16}(?P<was>\d[\d.]*) ?(?P<unit>ms|s)? ?(?:->|=>|→|to) ?(?P<now>\d[\d.]*) ?(?P=unit)?",
    re.IGNORECASE,
)
_ALL = re.compile(r"\b(?:all|every) (?:the )?(?:\d+ )?(?:ranks?|nodes?|gpus?|hosts?|workers?)\b", re.IGNORECASE)
LEAST_SLOWER = 1.1
_LISTED = re.compile(r"\s*[HS]W [A-Za-z ]+?\s*:\s*(?:Not )?Active\s*\Z")
"""A line of the tool's own listing, which has its reader."""
_EXTREMES = re.compile(
    r"(?P<side>Mn|Mx|Min|Max)(?P<what>Rtt|ETpt|RoundTripTime|Throughput)/(?:Rnk|Rank):"
    r"\s*(?P<value>[\d.]+)\s*[A-Za-z%/]*?\s*/\s*(?P<rank>\d{1,7})"
)
"""Megatron-LM's and Composer's reports: the least and greatest value with its rank."""
_EXTREME_KINDS = {"Rtt": "time", "RoundTripTime": "time", "ETpt": "speed", "Throughput": "speed"}
LEAST_SPREAD = 0.05
"""Between fastest and slowest, from which on it is worth saying who is slowest."""
_NAN_SCORES = re.compile(r"(?:perf|score|straggler)[\w/ ]{0,40}['\"]?\s*[:=]\s*nan\b", re.IGNORECASE)


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of tables; None when the document has none."""
    if not any(word in line.text for line in document.lines for word in WORDS) and not any(
        line.rank is not None for line in document.lines
    ):
        return None
    rows = list(read(document))
    # What nvidia-smi wrote itself has its own reader.
    samples = (
        []
        if smi_csv.read(document)
        else [
            *_gpu_samples(rows),
            *_said(document, rows),
            *_said_limits(document),
        ]
    )
    events = gpu_events(samples, document, catalog)
    events += total_events(_totals(rows), document, catalog)
    events += _series(rows, document, catalog)
    events += _slowest(rows, document, catalog) + _said_slower(document, catalog)
    return events[:EVENTS_LIMIT] or None


def _gpu_samples(rows: Iterable[Row]) -> list[GpuSample]:
    """Rows about GPUs that hold at least one level of them."""
    samples = []
    seen: dict[tuple[str, str], int] = {}
    for row in rows:
        index = row.about.get("gpu", row.about.get("rank", ""))
        if not index:
            continue
        key = (row.about.get("node", ""), index)
        building = Building(number=max(row.sample, seen.get(key, -1) + 1))
        named = index.startswith(("GPU-", "MIG-")) or index == "others"
        building.identity = {"uuid": index} if named else {"index": re.sub(r"\D", "", index)[:4]}
        building.node = row.about.get("node") or row.line.node
        for value in row.values:
            _set_level(building, value, row.line)
        sample = building.finish()
        if sample is not None and not _only_timing(sample):
            seen[key] = sample.number
            samples.append(sample)
    return samples


def _said(document: Document, rows: Iterable[Row]) -> list[GpuSample]:
    """Reasons for lower clocks that stand in a sentence, of the GPU that it or the last row before it names."""
    samples = []
    at = {row.line.number: row.about["gpu"] for row in rows if row.about.get("gpu", "others") != "others"}
    last = ""
    for line in document.lines:
        last = at.get(line.number, last)
        match = _SAID.search(line.text[:LINE_LIMIT])
        if match is None or _LISTED.match(line.text):
            continue
        building = Building()
        building.identity = {"index": re.sub(r"\D", "", last)[:4]}
        for reason in reasons_in(match["what"]) or {}:
            building.levels[reason] = True
            building.lines[reason] = line
        sample = building.finish()
        if sample is not None:
            samples.append(sample)
    return samples


def _said_limits(document: Document) -> list[GpuSample]:
    """A power limit and its default in a sentence: "power limit 400 W (default 700 W)"."""
    samples = []
    for line in document.lines:
        match = _SAID_LIMIT.search(line.text[:LINE_LIMIT])
        if match is not None:
            building = Building()
            building.set(BY_NAME["power_limit"], match["limit"], line)
            building.set(BY_NAME["power_default"], match["usual"], line)
            samples += [s for s in [building.finish()] if s is not None]
    return samples


def _said_slower(document: Document, catalog: Catalog) -> list[Event]:
    """A sentence that all ranks became slower: "step time 1.00 s -> 1.38 s on all ranks"."""
    for line in document.lines:
        match = _SAID_SLOWER.search(line.text[:LINE_LIMIT])
        if match is None or _ALL.search(line.text[:LINE_LIMIT]) is None:
            continue
        was, now = number(match["was"]), number(match["now"])
        if was and now and now >= LEAST_SLOWER * was:
            return [make(catalog, "straggler.all_slow_said", document, line, attrs={"ratio": round(now / was, 2)})]
    return []


def _set_level(building: Building, value: Value, line: Line) -> None:
    name = gpu_level(value.name)
    if name is None:
        return
    if name == "reasons":
        for reason, active in (reasons_in(value.text) or {}).items():
            building.levels[reason] = active
            building.lines[reason] = line
        return
    building.set(BY_NAME[name], value.text, line)


def _only_timing(sample: GpuSample) -> bool:
    return not sample.levels and sample.lost is None


def _totals(rows: Iterable[Row]) -> Iterator[Total]:
    """Columns that are error counters, of links or of network devices."""
    for row in rows:
        for value in row.values:
            if (
                gpu_level(value.name) is not None
                or not is_counter(value.name)
                or (amount := number(value.text)) is None
            ):
                continue
            gpu = row.about.get("gpu", "")
            yield Total(
                value.name, amount, row.line,
                nic=row.about.get("nic"),
                gpu=gpu_named(int(gpu[:4])) if gpu.isdigit() else gpu_named(uuid=gpu) if gpu.startswith("GPU-") else None,
                node=row.about.get("node") or row.line.node,
                port=row.about.get("link", row.about.get("port", "")),
                sample=row.sample, elapsed_s=row.elapsed_s, rate=value.unit.endswith("/s"),
            )  # fmt: skip


def _who(row: Row) -> tuple[str, str] | None:
    """What a measurement is about: the finest kind that the row names. GPUs of several nodes are told apart by node."""
    about = row.about
    if "rank" in about:
        return ("rank", about["rank"]) if any(c.isdigit() for c in about["rank"]) else None
    if "gpu" in about:
        return "gpu", f"{about['node']}/{about['gpu']}" if "node" in about else about["gpu"]
    for kind in ("pair", "nic", "link", "node"):
        if kind in about:
            return kind, about[kind]
    return None


def _series(rows: Iterable[Row], document: Document, catalog: Catalog) -> list[Event]:
    """One event for each metric: its values by entity, in the order of the document."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    lines: dict[tuple[str, str], Line] = {}
    for row in rows:
        who = _who(row)
        if who is None:
            continue
        for value in row.values:
            kind = metric_kind(value.name, value.unit)
            amount = _amount(value.text)
            # A column that is called by a number is a line of a log that was taken for a header.
            if kind is None or amount is None or gpu_level(value.name) is not None or value.name[:1].isdigit():
                continue
            key = (who[0], " ".join(words_of(value.name)))
            if key not in found:
                if len(found) >= SERIES_LIMIT:
                    continue
                found[key] = {
                    "metric": value.name,
                    "kind": kind,
                    "unit": value.unit,
                    "by": who[0],
                    "values": {},
                    "nodes": {},
                }
                lines[key] = row.line
            values = found[key]["values"]
            if who[1] not in values and len(values) >= ENTITIES_LIMIT:
                continue
            points = values.setdefault(who[1], [])
            points.append(amount)
            del points[:-POINTS_LIMIT]
            if row.about.get("node"):
                found[key]["nodes"][who[1]] = row.about["node"]
    return [
        make(catalog, "straggler.series", document, lines[key], attrs=attrs)
        for key, attrs in found.items()
        if len(attrs["values"]) > 1 or any(len(p) > 1 for p in attrs["values"].values())
    ]


def _amount(text: str) -> float | None:
    """A number; NaN stays NaN, because a score that could not be computed says something."""
    if text.strip().lower() == "nan":
        return float("nan")
    return number(text)


def _slowest(rows: Iterable[Row], document: Document, catalog: Catalog) -> list[Event]:
    """Columns and lines that name the slowest of each step, and Megatron's extremes with their ranks."""
    names: list[str] = []
    values: dict[str, list[float]] = {}
    first: Line | None = None
    for row in rows:
        told = next((v.text for v in row.values if v.name == "slowest"), None)
        if told is None:
            continue
        first = first or row.line
        names.append(told)
        for value in row.values:
            amount = number(value.text)
            if value.name != "slowest" and amount is not None:
                values.setdefault(value.name, []).append(amount)
    events = []
    extremes, line = _extremes(document)
    if first is not None:
        attrs = {"slowest": names[-POINTS_LIMIT:], "values": {k: v[-POINTS_LIMIT:] for k, v in values.items()}}
        events.append(make(catalog, "straggler.slowest", document, first, attrs=attrs))
    flagged = _flagged(document)
    if len(flagged) > 1:
        named = {"slowest": [name for name, _ in flagged][-POINTS_LIMIT:], "values": {}}
        events.append(make(catalog, "straggler.slowest", document, flagged[0][1], attrs=named))
    if extremes and line is not None:
        events.append(
            make(
                catalog, "straggler.slowest", document, line, attrs={"slowest": extremes[-POINTS_LIMIT:], "values": {}}
            )
        )
    for said in document.lines:
        if _NAN_SCORES.search(said.text[:2000]):
            events.append(make(catalog, "straggler.no_scores", document, said))
            break
    return events


def _flagged(document: Document) -> list[tuple[str, Line]]:
    """The one rank or node that each report of a detector names; reports that name none or several are left out."""
    found = []
    for line in document.lines:
        match = _FLAGGED.search(line.text[:LINE_LIMIT])
        if match is None or not re.search("rank|node", line.text, re.IGNORECASE):
            continue
        ids = re.findall(r"(?:rank\W{0,2})?(\b[\w.-]*\d\b)", match["ids"])
        if len(set(ids)) == 1:
            found.append((ids[0], line))
    return found


def _extremes(document: Document) -> tuple[list[str], Line | None]:
    """The slowest rank of each report of extremes, where it is far from the fastest."""
    slow: list[str] = []
    first: Line | None = None
    told: dict[tuple[str, str], tuple[float, str]] = {}
    for line in document.lines:
        if "/Rnk" not in line.text and "/Rank" not in line.text:
            continue
        for match in _EXTREMES.finditer(line.text[:LINE_LIMIT]):
            side = "low" if match["side"] in ("Mn", "Min") else "high"
            told[side, _EXTREME_KINDS[match["what"]]] = (number(match["value"]) or 0.0, match["rank"])
        # Reports of one line hold both kinds; those of a line for each value complete one pair after the other.
        for kind, fast, long in (("time", "low", "high"), ("speed", "high", "low")):
            if (fast, kind) not in told or (long, kind) not in told:
                continue
            best, worst = told[fast, kind], told[long, kind]
            told.clear()
            if best[0] and abs(worst[0] - best[0]) >= LEAST_SPREAD * max(best[0], worst[0]):
                first = first or line
                slow.append(worst[1])
    return slow, first
