"""How long epochs or steps took, from lines that say so: one series a document."""

from __future__ import annotations

import re
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import lines_of, make, mentions

WORDS = ("poch", "step", "Step", "iter", "Iter")
LEAST = 4
MOST = 1000
"""Points of a series that are kept: the first ones."""

_COUNTER = re.compile(r"(?i)(?<![\w/.-])(?P<unit>epoch|step|iteration|iter)\b[\s\[:=#]{0,3}(?P<number>\d{1,9})\b")
_SECONDS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "min": 60.0}
_TOOK = re.compile(
    r"(?i)(?<![\w-])(?:(?:step|epoch|iter(?:ation)?|batch)[_ ]?time|time|took|elapsed(?: time)?(?: per iteration)?|duration)\b"
    r"(?: ?\((?P<before>ms|s)\))?[\"']?\s{0,3}[:=]?\s{0,3}(?P<value>\d{1,9}(?:\.\d{1,9})?) ?(?P<after>ms|s|secs?|seconds|min)?\b"
)
_DATA = re.compile(
    r"(?i)\bdata[_ ]?(?:time|wait|load\w*)?\s{0,3}[:=]?\s{0,3}(?P<value>\d{1,9}(?:\.\d{1,9})?) ?(?P<unit>ms|s)\b"
)
_KERAS = re.compile(r"\d+/\d+ [^\n]{0,60}?- (?P<value>\d{1,7})s\b[^\n]{0,20}/(?:step|epoch)\b")
_BAR = re.compile(
    r"%\|[^|]{0,200}\|\s*(?P<done>\d{1,12})/(?P<of>\d{1,12})\s*\[(?:(?P<h>\d{1,3}):)?(?P<m>\d{1,2}):(?P<s>\d\d)<"
)
"""A bar that is full tells how long the whole took."""
_COMPILES = re.compile(r"(?i)compil|inductor|autotun|cuda ?graph|cudnn\.benchmark|jit\b|warm")


class _Point(NamedTuple):
    number: int
    seconds: float
    line: Line
    data: float | None


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """One event with the series of the unit that has most points; None where there are fewer than four."""
    if not mentions(document, WORDS):
        return None
    series: dict[str, list[_Point]] = {}
    epoch: int | None = None
    for line in lines_of(document):
        text = line.text
        if not any(word in text for word in WORDS):
            continue
        counter = _COUNTER.search(text)
        if counter is not None and text[: counter.start()].strip() == "" and counter["unit"].lower() == "epoch":
            epoch = int(counter["number"])
        point = _point(line, counter, epoch)
        if point is not None:
            unit, made = point
            points = series.setdefault(unit, [])
            if len(points) < MOST:
                points.append(made)
    unit, points = max(series.items(), key=lambda item: len(item[1]), default=("", []))
    if len(points) < LEAST:
        return None
    attrs = {
        "unit": unit,
        "numbers": [p.number for p in points],
        "seconds": [p.seconds for p in points],
        "lines": [p.line.number for p in points],
        "data_share": None if points[0].data is None else points[0].data / (points[0].seconds or 1.0),
        "compiles": _COMPILES.search(points[0].line.text) is not None,
    }
    return [make(catalog, "pace.series", document, points[0].line, attrs=attrs)]


def _point(line: Line, counter: re.Match[str] | None, epoch: int | None) -> tuple[str, _Point] | None:
    """What one line says. Keras counts epochs in a line of their own."""
    keras = _KERAS.search(line.text)
    if keras is not None and epoch is not None:
        return "epoch", _Point(epoch, float(keras["value"]), line, None)
    if counter is None:
        return None
    bar = _BAR.search(line.text, counter.end())
    if bar is not None and bar["done"] == bar["of"] and counter["unit"].lower() == "epoch":
        seconds = int(bar["h"] or 0) * 3600 + int(bar["m"]) * 60 + int(bar["s"])
        return "epoch", _Point(int(counter["number"]), float(seconds), line, None)
    took = _TOOK.search(line.text, counter.end())
    unit = None if took is None else took["before"] or took["after"]
    if took is None or unit is None:
        return None
    data = _DATA.search(line.text, counter.end())
    share = None if data is None else float(data["value"]) * _SECONDS[data["unit"].lower()]
    name = "step" if counter["unit"].lower() != "epoch" else "epoch"
    return name, _Point(int(counter["number"]), float(took["value"]) * _SECONDS[unit.lower()], line, share)
