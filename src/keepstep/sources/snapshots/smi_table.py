"""The table that `nvidia-smi` prints without options, and `nvidia-smi -L`.

Each GPU has two or three rows between rules. Cells are cut at "|". Drivers moved columns and units about, so a cell is searched for
what it holds instead of being cut at fixed places.
"""

from __future__ import annotations

import re

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.fields import BY_NAME
from keepstep.sources.snapshots.gpu_health import gpu_events, process_event
from keepstep.sources.snapshots.making import gpu_named, lines_of, mentions
from keepstep.sources.snapshots.samples import Building, GpuSample
from keepstep.sources.snapshots.smi_full import listing_time

_VERSIONS = re.compile(r"NVIDIA-SMI\s+\S+\s+Driver Version:\s*(?P<driver>[\d.]+)")
_FIRST = re.compile(
    r"\|\s*(?P<index>\d{1,3}|ERR!)\s+(?P<name>\S.*?)\s*\|\s*(?P<pci>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)"
)
_ECC = re.compile(r"\|\s*(?P<ecc>\d+|N/A|Off|ERR!)\s*\|\s*\Z")
_SECOND = re.compile(
    r"\|\s*(?P<fan>\d+%|N/A|ERR!)\s+(?P<temp>\d+C|N/A|ERR!)\s+(?P<pstate>P\d+|N/A|ERR!)\s+"
    r"(?P<power>[\d.]+W|N/A|ERR!)\s*/\s*(?P<limit>[\d.]+W|N/A|ERR!)"
)
_MEMORY = re.compile(r"(?P<used>\d+)MiB\s*/\s*(?P<total>\d+)MiB")
_USED = re.compile(r"\|\s*+(?P<util>\d+%|N/A|ERR!)\s++(?P<mode>[\w.]+(?: [\w.]+)*)\s*+\|\s*\Z")
_PROCESS = re.compile(
    r"\|\s*(?P<gpu>\d{1,3})\s+(?:\S+\s+\S+\s+)?(?P<pid>\d{1,10})\s+(?P<type>[CGM+]{1,5})\s+(?P<name>\S.*?)\s+(?P<used>\d+MiB)\s*\|"
)
_GONE = re.compile(r"\|\s*+(?P<index>\d{1,3})?.*\bERR!.*\|")
_DATE = re.compile(r"(?P<date>[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\s*\Z")
_WORDS = ("MiB /", "NVIDIA-SMI", "ERR!", "MiB |")


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of a table; None when the document has no row of one."""
    if not mentions(document, _WORDS):
        return None
    samples = list(read(document))
    processes = [
        process_event(catalog, document, line, int(match["pid"]), match["used"], gpu_named(index=int(match["gpu"])))
        for line in lines_of(document)
        if (match := _PROCESS.match(line.text.strip()))
    ]
    if not samples and not processes:
        return None
    return gpu_events(samples, document, catalog) + processes


def read(document: Document) -> list[GpuSample]:
    """The samples of all tables in the document."""
    driver: tuple[str, Line] | None = None
    time_ns: int | None = None
    building: list[Building] = []
    current: Building | None = None
    for line in lines_of(document):
        text = line.text.strip()
        if match := _DATE.search(text):
            time_ns = listing_time(match["date"])
        if match := _VERSIONS.search(text):
            driver, current = (match["driver"], line), None
        elif match := _FIRST.match(text):
            current = _first(match, line, building)
            current.time_ns = time_ns
            current.node = line.node
            if driver is not None:
                current.set(BY_NAME["driver"], *driver)
        elif current is not None and text.startswith("|"):
            _second(text, line, current)
        elif not text.startswith(("|", "+")):
            current = None
    found = [b.finish() for b in building]
    if driver is not None and not building:
        alone = Building()
        alone.set(BY_NAME["driver"], *driver)
        found.append(alone.finish())
    return [s for s in found if s is not None]


def _first(match: re.Match[str], line: Line, building: list[Building]) -> Building:
    """The row with index, name, address and uncorrected errors."""
    again = [b for b in building if b.identity.get("pci") == match["pci"]]
    sample = Building(number=len(again))
    sample.identity = {"index": match["index"], "pci": match["pci"]}
    building.append(sample)
    if match["index"] == "ERR!":
        sample.lost = line
    # The flag of persistence mode stands at the end of the name.
    name = re.sub(r"\s+(?:On|Off)\Z", "", match["name"])
    sample.set(BY_NAME["product"], name, line)
    ecc = _ECC.search(line.text.strip())
    if ecc is not None:
        sample.set(BY_NAME["ecc_uncorrected_volatile"], ecc["ecc"] if ecc["ecc"] != "Off" else "N/A", line)
    return sample


def _second(text: str, line: Line, sample: Building) -> None:
    """The row with temperature, state, power, memory and utilisation."""
    match = _SECOND.match(text)
    if match is None:
        if _GONE.match(text) and sample.lost is None:
            sample.lost = line
        return
    sample.set(BY_NAME["temperature"], match["temp"], line)
    sample.set(BY_NAME["pstate"], match["pstate"], line)
    sample.set(BY_NAME["power"], match["power"], line)
    sample.set(BY_NAME["power_limit"], match["limit"], line)
    if memory := _MEMORY.search(text):
        sample.set(BY_NAME["memory_used_mib"], memory["used"], line)
        sample.set(BY_NAME["memory_total_mib"], memory["total"], line)
    if used := _USED.search(text):
        sample.set(BY_NAME["utilisation"], used["util"], line)
        sample.set(BY_NAME["compute_mode"], used["mode"], line)
