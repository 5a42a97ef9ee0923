"""Counters of network ports: `perfquery`, `ethtool -S`, `ip -s link`, and files of an InfiniBand sysfs tree."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.catalog.counters import counter_named
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.snapshots.making import lines_of, mentions, number
from keepstep.sources.snapshots.ports import DEVICE, Port, port_events
from keepstep.sources.snapshots.totals import Total, total_events

WORDS = (
    "NIC statistics",
    "ethtool",
    "perfquery",
    "Port counters",
    "counters",
    "SymbolError",
    "LinkDowned",
    "_phy:",
    "ip -s",
    "hw_counters",
    "RX: ",
    "RX:  bytes",
)

_SYSFS = re.compile(
    r"/(?P<nic>[\w.-]+)/ports/(?P<port>\d{1,3})/(?:(?P<kind>counters|hw_counters)/(?P<counter>\w+)|(?P<level>state|phys_state|rate|link_layer))\Z"
)
_ENTRY = re.compile(r"\s*(?P<name>[A-Za-z][\w.-]{2,60}?)\s*(?::\s*\.*|\.{2,})\s*(?P<value>\d{1,20})\s*\Z")
_TITLE_NIC = re.compile(rf"(?:\bethtool\s+-S\s+(?P<eth>[\w.@-]+)|\b(?P<dev>{DEVICE})\b)")
_LID = re.compile(r"Lid (?P<lid>\d+) [Pp]ort (?P<port>\d+)")
_IP_NAME = re.compile(r"\d+:\s+(?P<nic>[\w.@-]+):\s+<")
_IP_HEAD = re.compile(r"\s*(?P<way>RX|TX):\s+(?P<names>bytes\s+packets\s+errors.*)")
_IP_COUNTERS = {
    ("rx", "errors"): "port_rcv_errors",
    ("rx", "crc"): "rx_crc_errors_phy",
    ("tx", "dropped"): "port_xmit_discards",
    ("tx", "carrier"): "carrier_changes",
    ("tx", "carrer"): "carrier_changes",
}
_LATER = re.compile(
    r"(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>s|sec|secs|seconds?|min|mins|minutes?|m|h|hours?|hr|hrs|d|days?)\b\s*(?P<later>later|after|on)?",
    re.IGNORECASE,
)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of counters; None when the document has none."""
    sysfs = _SYSFS.search(document.path.replace("\\", "/"))
    if sysfs is not None:
        return _file(sysfs, document, catalog)
    if not mentions(document, WORDS):
        return None
    totals = list(read(document))
    return total_events(totals, document, catalog) if totals else None


def _file(match: re.Match[str], document: Document, catalog: Catalog) -> list[Event] | None:
    """One file of /sys/class/infiniband: a counter that is not zero, or a level. A counter of zero gives nothing; beside a tree
    that has the port, its absence says zero."""
    line = document.lines[0] if document.lines else None
    if line is None:
        return None
    if match["level"]:
        if match["level"] != "state":
            return None
        ports = [Port(match["nic"], match["port"], line, {"state": line.text.strip()})]
        return port_events(ports, document, catalog)
    value = number(line.text)
    if not value or counter_named(match["counter"], "nic") is None:
        return None
    total = Total(match["counter"], value, line, nic=match["nic"], port=match["port"], family="nic")
    return total_events([total], document, catalog)


def read(document: Document) -> Iterator[Total]:
    """Counters of ethtool and perfquery. A counter that comes again is the next sample; a comment may say how much later."""
    titled = _TITLE_NIC.search(document.title)
    nic = (titled["eth"] or titled["dev"]) if titled is not None else None
    port = ""
    sample, elapsed = 0, 0.0
    seen: set[str] = set()
    columns: list[str] = []
    for line in lines_of(document):
        if lid := _LID.search(line.text):
            port = f"lid {lid['lid']} port {lid['port']}"
            seen = seen if not seen else set()
        if (named := _TITLE_NIC.search(line.text)) and ":" not in line.text[:3]:
            nic = named["eth"] or named["dev"]
        later = elapsed_of(line.text)
        if later is not None:
            sample, elapsed, seen = sample + 1, elapsed + later, set()
        if head := _IP_NAME.match(line.text):
            nic = head["nic"].split("@")[0]
        if head := _IP_HEAD.match(line.text):
            columns = f"{head['way']} {head['names']}".lower().split()
            continue
        if columns:
            for name, value in zip(columns[1:], line.text.split(), strict=False):
                if value.isdigit() and (counter := _IP_COUNTERS.get((columns[0], name))):
                    yield Total(counter, float(value[:20]), line, nic=nic, family="nic", sample=sample, node=line.node)
            columns = []
            continue
        entry = _ENTRY.match(line.text)
        if entry is None:
            continue
        if entry["name"] in seen:
            sample, seen = sample + 1, set()
        seen.add(entry["name"])
        yield Total(
            entry["name"], float(entry["value"]), line, nic=nic, port=port, family="nic", sample=sample,
            elapsed_s=elapsed if elapsed or not sample else None, node=line.node,
        )  # fmt: skip


def elapsed_of(text: str) -> float | None:
    """Seconds between two samples, from a comment such as "# +21 min", "# 20 s later", "after 5 minutes:"; None for other lines."""
    stripped = text.strip()
    if (
        not stripped.startswith(("#", "+", "--", "after", "After", "(", "...", "later", "==", "t+", "T+"))
        and "later" not in stripped
    ):
        return None
    match = _LATER.search(stripped)
    if match is None or len(stripped) > 80:
        return None
    return float(match["amount"]) * _UNITS[match["unit"][0].lower()]
