"""NVLink as `nvidia-smi nvlink -s` (speed), `-e` (errors), and `nvidia-smi topo -m` show it."""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections.abc import Iterator
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Gpu
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import EVENTS_LIMIT, gpu_named, index_of, lines_of, make, mentions, number
from keepstep.sources.snapshots.port_counters import elapsed_of
from keepstep.sources.snapshots.totals import Total, total_events

WORDS = ("Link ", "GPU0", "nvlink", "topo -m")

_GPU = re.compile(r"\s*GPU (?P<index>\d{1,3}):\s*(?:.*?\(UUID:\s*(?P<uuid>GPU-[0-9a-fA-F-]+)\))?")
_LINK = re.compile(r"\s*Link (?P<link>\d{1,2}):\s*(?P<rest>.+?)\s*\Z")
_ERROR = re.compile(
    r"(?P<what>Replay|Recovery|CRC(?: FLIT| Data| Lane \d)?|Link recovery (?:successful|failed)|Symbol|Effective)"
    r"\s*(?:Errors?|events)?:\s*(?P<value>\S+)",
    re.IGNORECASE,
)
_ERRORS = {
    "replay": "nvlink_replay",
    "recovery": "nvlink_recovery",
    "crc": "nvlink_crc_flit",
    "crc flit": "nvlink_crc_flit",
    "crc data": "nvlink_crc_data",
    "link recovery successful": "nvlink_recovery",
    "symbol": "nvlink_symbol",
}
_ROW = re.compile(
    r"\s*GPU(?P<index>\d{1,3})\s+(?P<cells>(?:(?:X|NV\d+|SYS|NODE|PHB|PXB|PIX|OK|NS|CNS|DR|N/A)\s+)*(?:X|NV\d+|SYS|NODE|PHB|PXB|PIX))\b"
)
_NONE_ACTIVE = re.compile(r"(?i)all links are in-?active")
ALL = -1
"""In place of the number of a link: the tool says it of all links of a GPU in one line."""


class Link(NamedTuple):
    """A link as -s shows it. `gbps`: None for an inactive one."""

    gpu: Gpu | None
    link: int
    gbps: float | None
    line: Line


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of links and of the matrix of connections; None when there is neither."""
    if not mentions(document, WORDS):
        return None
    links, totals = read(document)
    events = _link_events(links, document, catalog) + total_events(totals, document, catalog)
    events += _matrix_events(document, catalog)
    return events[:EVENTS_LIMIT] or None


def read(document: Document) -> tuple[list[Link], list[Total]]:
    """Links with their speed, and their error counters."""
    links: list[Link] = []
    totals: list[Total] = []
    gpu = gpu_named(index=index_of(document))
    sample, elapsed = 0, 0.0
    seen: set[tuple[Gpu | None, int, str]] = set()
    for line in lines_of(document):
        later = elapsed_of(line.text)
        if later is not None:
            sample, elapsed, seen = sample + 1, elapsed + later, set()
        if (head := _GPU.match(line.text)) is not None:
            gpu = gpu_named(index=int(head["index"]), uuid=head["uuid"])
            continue
        if _NONE_ACTIVE.search(line.text) is not None:
            links.append(Link(gpu, ALL, None, line))
            continue
        match = _LINK.match(line.text)
        if match is None:
            continue
        link, rest = int(match["link"]), match["rest"]
        error = _ERROR.match(rest)
        if error is not None:
            counter, value = _ERRORS.get(error["what"].lower(), ""), number(error["value"])
            if not counter or value is None:
                continue
            if (gpu, link, counter) in seen:
                sample, seen = sample + 1, set()
            seen.add((gpu, link, counter))
            totals.append(
                Total(counter, value, line, gpu=gpu, node=line.node, port=str(link), family="nvlink", sample=sample,
                      elapsed_s=elapsed if elapsed or not sample else None)
            )  # fmt: skip
        elif "inactive" in rest.lower():
            links.append(Link(gpu, link, None, line))
        elif "GB/s" in rest:
            links.append(Link(gpu, link, number(rest), line))
    return links, totals


def _link_events(links: list[Link], document: Document, catalog: Catalog) -> list[Event]:
    """An event for each GPU some of whose links are inactive or slow while others, its own or of its peers, are not."""
    by_gpu: dict[Gpu | None, list[Link]] = {}
    for link in links:
        by_gpu.setdefault(link.gpu, []).append(link)
    speeds = [link.gbps for link in links if link.gbps]
    usual = max(speeds, default=0.0)
    events = []
    for gpu, own in by_gpu.items():
        dead = [link for link in own if not link.gbps]
        slow = [link for link in own if link.gbps and link.gbps < 0.9 * usual]
        if dead and len(dead) == len(own) and all(not link.gbps for link in links):
            # No link of any GPU is active: boards without NVLink, or all of it is down; the rest of the text has to say which.
            signature = "nvlink.all_inactive"
        elif len(dead) == len(own) and (dead[0].link == ALL or len(own) > 1):
            signature = "nvlink.gpu_isolated"
        elif dead or slow:
            signature = "nvlink.inactive"
        else:
            continue
        attrs = {"inactive": [link.link for link in dead], "slow": [link.link for link in slow], "links": len(own)}
        events.append(make(catalog, signature, document, (dead or slow)[0].line, gpu=gpu, attrs=attrs))
        if signature == "nvlink.all_inactive":
            break
    return events


def _matrix_events(document: Document, catalog: Catalog) -> list[Event]:
    """An event for a GPU whose NVLinks to its peers are fewer than those of the other pairs."""
    rows = list(_matrix(document))
    pairs = [
        cell for _, index, cells in rows for other, cell in enumerate(cells) if other != index and other < len(rows)
    ]
    usual = Tally(cell for cell in pairs if cell.startswith("NV")).most_common(1)
    if len(rows) < 3 or not usual or usual[0][1] * 2 < len(pairs):
        return []
    worse: dict[int, list[int]] = {}
    for _, index, cells in rows:
        for other, cell in enumerate(cells[: len(rows)]):
            if other != index and _links(cell) < _links(usual[0][0]):
                worse.setdefault(index, []).append(other)
    if not worse:
        return []
    # A GPU with bad pairs to everybody is meant itself; its peers each have one bad pair, with it.
    most = max(len(others) for others in worse.values())
    events = []
    for line, index, _ in rows:
        if len(worse.get(index, [])) == most:
            attrs = {"usual": usual[0][0], "worse_to": worse[index]}
            events.append(make(catalog, "nvlink.pair_missing", document, line, gpu=gpu_named(index=index), attrs=attrs))
    return events


def _matrix(document: Document) -> Iterator[tuple[Line, int, list[str]]]:
    for line in lines_of(document):
        match = _ROW.match(line.text)
        if match is not None:
            yield line, int(match["index"]), match["cells"].split()


def _links(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") and cell[2:].isdigit() else 0
