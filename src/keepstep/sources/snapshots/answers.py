"""Short answers to short questions: whose an address is (`getent hosts`), whether device files are there (`ls /dev/...`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.snapshots.making import lines_of, make

MOST_LINES = 64
"""Lines of an answer that are looked at: a longer one answers another question."""
_LOOKUP = re.compile(r"(?:\A|[ ;&|])(?:getent (?:ahosts|hosts)|host|nslookup|dig (?:\S+ )*-x) ")
_ADDRESS = r"(?P<address>(?:\d{1,3}\.){3}\d{1,3}|[0-9a-f:]{3,39}:[0-9a-f:.]{1,39})"
_HOSTS_ROW = re.compile(rf"\s*{_ADDRESS}\s+(?:STREAM\s+)?(?P<name>[A-Za-z][\w.-]{{0,120}})\b")
_POINTER = re.compile(r"(?:domain name pointer|\bname = |\bPTR\s)\s*(?P<name>[A-Za-z][\w.-]{0,120}?)\.?\s*\Z")
_ASKED = re.compile(rf"(?:\s|=){_ADDRESS}(?=\s|\Z)")
_LS = re.compile(r"(?:\A|[ ;&|])ls(?= |\Z)")
_DEVICE = re.compile(r"(?P<device>/dev/(?:infiniband|nvidia|kfd|dri|davinci|accel|habanalabs|gdrdrv|neuron)\w{0,20})\b")
_FILES = re.compile(r"(?:\A|\s)(?:uverbs\d+|rdma_cm|card\d+|renderD\d+|accel\d+)(?=\s|\Z)")


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Names of addresses and device files that are there; None for all else."""
    title = document.title
    if len(title) > 400 or len(document.lines) > MOST_LINES:
        return None
    if _LOOKUP.search(title):
        return list(_names(document, catalog)) or None
    if _LS.search(title) and "/dev/" in title:
        return list(_present(document, catalog)) or None
    return None


def _names(document: Document, catalog: Catalog) -> Iterator[Event]:
    asked = _ASKED.search(document.title)
    for line in lines_of(document):
        row, pointer = _HOSTS_ROW.match(line.text), _POINTER.search(line.text)
        if row is not None:
            attrs = {"address": row["address"], "name": row["name"]}
        elif pointer is not None and asked is not None:
            attrs = {"address": asked["address"], "name": pointer["name"]}
        else:
            continue
        yield make(catalog, "command.host_name", document, line, attrs=attrs)


def _present(document: Document, catalog: Catalog) -> Iterator[Event]:
    asked = [m["device"] for m in _DEVICE.finditer(document.title)]
    for line in lines_of(document):
        if "ls:" in line.text or "cannot" in line.text:
            continue
        own = _DEVICE.search(line.text)
        if own is not None:
            yield make(catalog, "container.device_present", document, line, attrs={"device": own["device"]})
        elif len(asked) == 1 and _FILES.search(line.text):
            yield make(catalog, "container.device_present", document, line, attrs={"device": asked[0]})
