"""Rows of tables and of lines with `key=value`: what each says about which rank, GPU, node or link.

People paste measurements as aligned columns, CSV, Markdown, JSON lines, "rank 3: 612 ms" or "0:610/402 1:612/400". Each becomes
rows of the same form here; what they mean is told elsewhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import LINE_LIMIT, lines_of, node_of
from keepstep.sources.snapshots.metrics import gpu_level, is_counter, is_speed, metric_kind
from keepstep.sources.snapshots.port_counters import elapsed_of

ROWS_LIMIT = 20_000

_ENTITY_NAMES = {
    "rank": "rank rank_id global_rank worker task rank_num",
    "gpu": "gpu gpu_id idx index gpu_index device local_rank entity",
    "node": "node host hostname nodename server machine nodes pod",
    "nic": "nic hca dev iface interface",
    "port": "port",
    "link": "link lane",
    "pair": "pair nodepair",
}
ENTITIES = {name: kind for kind, names in _ENTITY_NAMES.items() for name in names.split()}
"""Names of columns and keys that say what a row is about."""
STEPS = frozenset({"step", "iter", "iteration", "window", "round", "epoch", "sample", "time", "timestamp", "ts", "t"})
SLOWEST = frozenset(
    {"slowest_rank", "slowest", "slow_rank", "straggler", "slowest_gpu", "slowest_node", "last_rank", "straggler_rank"}
    | {"max_rank", "slowest_host"}
)

_UNITS = r"(?:ms|us|secs?|seconds|s|min|GB/s|Gb/s|MB/s|GiB/s|MHz|TFLOPS?|TFLOP/s|tok/s|tokens/s|it/s|samples/s|°C|C|W|%|MiB|GiB|x)"
_VALUE = (
    rf"(?P<value>[-+]?(?:\d[\d.]*(?:[eE][-+]?\d{{1,3}})?|nan|NaN|NAN|inf)(?:/[\d.]+)*)\s?(?P<unit>{_UNITS}(?![\w/]))?"
)
_GLUED = re.compile(rf"(?<=\d) (?={_UNITS}(?:[\s|,;]|\Z))")
_CELL = re.compile(rf"{_VALUE}\Z")
_PAREN = re.compile(r"\s*[(\[](?P<unit>[^)\]]*)[)\]]\s*\Z")
_KEYED = re.compile(
    rf"(?<![\w.%-])(?P<key>[A-Za-z_][\w.%-]*+(?:/Rnk)?)\"?\s*[=:]\s*\"?(?:{_VALUE}|(?P<word>[A-Za-z][\w.:-]*+)(?!\s*=))"
)
_NAMED = re.compile(
    r"\b(?P<key>[Rr]ank|GPU|gpu|[Nn]ode|[Hh]ost|[Ww]orker)[ #-]{0,2}(?P<id>\d{1,7}|[a-z][\w.-]*\d)\b(?![.\d]*\s?(?:ms|GB/s|%))"
)
_LOOSE = re.compile(
    r"(?<![\w-])(?P<key>[A-Za-z_][\w-]*+(?: time| clock| bandwidth)?)\s+(?:is |was |of |at |took )?"
    rf"(?P<value>\d[\d.]*)\s?(?P<unit>{_UNITS})(?![\w/])"
)
_ALONE = re.compile(rf"[:=\s]\s*(?P<value>\d[\d.]*)\s?(?P<unit>{_UNITS})(?![\w/])")
_OTHERS = re.compile(
    r"\b(?:others?|peers|rest|median|elsewhere|all other \w+)\b\W{0,3}(?:ranks?|gpus?|nodes?)?\W{0,3}"
    r"(?:at|is|are|run at|=|:|~|about)?\s*~?(?P<value>\d[\d.]*)",
    re.IGNORECASE,
)
_COMPACT = re.compile(r"(?<!\S)(?P<id>\d{1,6}):(?P<values>\d[\d.]*(?:/\d[\d.]*)*)(?!\S)")
_DIRECT = re.compile(r"[A-Za-z]+[ #=:_-]{0,3}[\w.-]+[\s:=,-]*")
"""An entity with nothing but punctuation behind it."""
_CLOCK = re.compile(r"[012]?\d:[0-5]\d")
"""A time of day, which looks like an entity with its value."""
_HEADING = re.compile(r"\s*(?P<name>[A-Za-z][\w /-]{1,40}?)(?:\s*\((?P<unit>\w+)\))?:\s*\Z")


class Value(NamedTuple):
    """A cell: its column, the unit that cell or column gives, its text."""

    name: str
    unit: str
    text: str


class Row(NamedTuple):
    """`about`: kind of entity -> which. `step`: of the run, where the row says it. `sample`: counted up by comments like "+5
    min"."""

    line: Line
    about: dict[str, str]
    values: list[Value]
    step: str = ""
    sample: int = 0
    elapsed_s: float | None = None


class _Header(NamedTuple):
    """One way to take a header apart; aligned columns may be cut at every space or at wide gaps only."""

    separator: str
    columns: list[tuple[str, str]]


def read(document: Document) -> Iterator[Row]:
    """All rows of the document, in order, at most ROWS_LIMIT."""
    headers: list[_Header] = []
    heading = Value("time", "", "")
    sample, elapsed, count = 0, 0.0, 0
    node = node_of(document)
    for line in lines_of(document):
        text = line.text.strip()
        if not text or count >= ROWS_LIMIT:
            continue
        later = elapsed_of(text)
        if later is not None and count:
            sample, elapsed = sample + 1, elapsed + later
            continue
        found = _headers(text)
        if found:
            headers = found
            continue
        if named := _HEADING.match(line.text):
            heading = Value(named["name"], named["unit"] or "", "")
        rows = list(_rows(line, text, headers, heading))
        for row in rows:
            about = row.about if "node" in row.about or node is None else {**row.about, "node": node}
            count += 1
            yield row._replace(about=about, sample=sample, elapsed_s=elapsed if elapsed or sample == 0 else None)


def _rows(line: Line, text: str, headers: list[_Header], heading: Value) -> Iterator[Row]:
    """The rows of one line, by the first form that fits."""
    for header in headers:
        # A time in the first column may have been taken for the prefix of a log.
        row = _table_row(line, text, header) or (
            _table_row(line, line.raw[:LINE_LIMIT].strip(), header) if line.raw != line.text else None
        )
        if row is not None:
            yield row
            return
    if text.startswith("{"):
        yield from _json_rows(line, text)
        return
    compact = [m for m in _COMPACT.finditer(text) if not _CLOCK.fullmatch(m.group())]
    if len(compact) > 1:
        yield from _compact_rows(line, text, compact)
        return
    yield from _keyed_rows(line, text, heading)


def cells_of(text: str, separator: str) -> list[str]:
    """Cells of a row; a unit behind a number is part of its cell."""
    text = _GLUED.sub("", text)
    if separator == "|":
        return [cell.strip() for cell in text.strip("| ").split("|")]
    if separator == " ":
        return text.split()
    if separator == "  ":
        return [cell.strip() for cell in re.split(r"\s{2,}", text)]
    return [cell.strip() for cell in text.split(separator)]


def _headers(text: str) -> list[_Header]:
    """The header that a line is, in every way it can be cut: names of entities and of something measured, and no numbers."""
    bare = text.lstrip("#").strip()
    if not bare or re.search(r"(?<![\w.])\d[\d.]*(?![\w.])", bare) or len(bare) > 600 or "=" in bare:
        return []
    found = []
    for separator in ("|", "\t", ",", "  ", " "):
        if separator not in bare:
            continue
        cells = cells_of(bare, separator)
        columns = []
        for cell in cells:
            match = _PAREN.search(cell)
            unit = match["unit"] if match is not None else ""
            columns.append((cell[: match.start()] if match is not None else cell, unit))
        plain = [_plain(name) for name, _ in columns]
        about = [name for name in plain if name in ENTITIES or name in SLOWEST or name in STEPS]
        measured = [n for (n, unit), p in zip(columns, plain, strict=True) if p not in ENTITIES and _measures(n, unit)]
        if about and (measured or any(name in SLOWEST for name in plain)) and len(columns) > 1 and all(plain):
            found.append(_Header(separator, columns))
    return found


@functools.lru_cache(maxsize=4096)
def _measures(name: str, unit: str) -> bool:
    return (
        metric_kind(name, unit.split("/", maxsplit=1)[0] if unit in {"max/min", "cur/max"} else unit) is not None
        or gpu_level(name) is not None
        or is_counter(name)
    )


@functools.lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _table_row(line: Line, text: str, header: _Header) -> Row | None:
    """A row under a header; None when the line does not fit it."""
    cells = cells_of(text, header.separator)
    if len(cells) != len(header.columns) and header.separator in " \t":
        cells = cells_of(text, "  " if header.separator == " " else " ")
    if len(cells) != len(header.columns) or not any(cell[:1].isdigit() or cell.lower() == "nan" for cell in cells):
        return None
    about: dict[str, str] = {}
    values: list[Value] = []
    step = ""
    for (name, unit), cell in zip(header.columns, cells, strict=True):
        plain = _plain(name)
        if plain in SLOWEST:
            values.append(Value("slowest", "", cell))
        elif plain in ENTITIES and ENTITIES[plain] not in about:
            about[ENTITIES[plain]] = cell
        elif plain in STEPS and not _measures(name, unit):
            step = cell
        else:
            values += _split_value(name, unit, cell)
    return Row(line, about, values, step) if values else None


def _split_value(name: str, unit: str, cell: str) -> list[Value]:
    """A cell; "56.2/0.4" under "max/min" gives both, "2/5" under a link's name its level and maximum."""
    match = _CELL.match(cell)
    if match is None:
        return [Value(name, unit, cell)]
    parts = match["value"].split("/")
    told = match["unit"] or (unit if "/" not in unit or unit in {"GB/s", "tok/s"} else "")
    if len(parts) == 2 and gpu_level(name) in {"pcie_gen", "pcie_width"}:
        return [Value(name, told, parts[0]), Value(f"{gpu_level(name)}_max", told, parts[1])]
    if len(parts) > 1 and "/" in unit and len(unit.split("/")) == len(parts):
        return [Value(f"{name} {sub}", told, part) for sub, part in zip(unit.split("/"), parts, strict=True)]
    return [Value(name, told, parts[0])]


def _json_rows(line: Line, text: str) -> Iterator[Row]:
    """A JSON object on a line: flat keys, or lists by rank."""
    try:
        body: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return
    if not isinstance(body, dict):
        return
    about = {ENTITIES[_plain(k)]: str(v) for k, v in body.items() if _plain(k) in ENTITIES and isinstance(v, int | str)}
    step = next((str(v) for k, v in body.items() if _plain(k) in STEPS and isinstance(v, int)), "")
    values = []
    for key, value in list(body.items())[:200]:
        if _plain(key) in SLOWEST:
            values.append(Value("slowest", "", str(value)))
        elif isinstance(value, int | float) and not isinstance(value, bool) and _measures(key, ""):
            values.append(Value(key, "", str(value)))
    if values and (about or any(v.name == "slowest" for v in values)):
        yield Row(line, about, values, step)


def _compact_rows(line: Line, text: str, found: list[re.Match[str]]) -> Iterator[Row]:
    """`rank compute_ms wait_ms: 0:610/402 1:612/400`: names before, then one group an entity."""
    names = re.findall(r"[A-Za-z][\w%-]*", text[: found[0].start()])
    kinds = [n for n in names if _plain(n) in ENTITIES]
    measured = [n for n in names if _measures(n, "")]
    for match in found:
        parts = match["values"].split("/")
        if len(measured) < len(parts):
            return
        values = [
            Value(n, "", p)
            for n, p in zip(measured[-len(parts) :] if len(measured) > len(parts) else measured, parts, strict=True)
        ]
        yield Row(line, {ENTITIES[_plain(kinds[0])] if kinds else "rank": match["id"]}, values)


def _keyed_rows(line: Line, text: str, heading: Value) -> Iterator[Row]:
    """`Rank=0 Node=a Score=0.99 Rank=1 ...`, `rank 3: fwd 312 ms`, `Rank 3: 9.98ms` below a heading."""
    marks: list[tuple[int, str, str]] = []
    values: list[tuple[int, Value]] = []
    step = ""
    for match in _KEYED.finditer(text):
        plain = _plain(match["key"])
        content = match["value"] if match["value"] is not None else match["word"]
        if plain in ENTITIES:
            marks.append((match.start(), ENTITIES[plain], content))
        elif plain in SLOWEST:
            values.append((match.start(), Value("slowest", "", content)))
        elif plain in STEPS and not _measures(match["key"], match["unit"] or ""):
            step = content
        elif match["value"] is not None and _measures(match["key"], match["unit"] or ""):
            values.append((match.start(), Value(match["key"], match["unit"] or "", match["value"])))
    taken = {position for position, _, _ in marks}
    marks += [(m.start(), ENTITIES[m["key"].lower()], m["id"]) for m in _NAMED.finditer(text) if m.start() not in taken]
    if not values:
        values = [
            (m.start(), Value(m["key"], m["unit"], m["value"]))
            for m in _LOOSE.finditer(text)
            if is_speed(m["key"], m["unit"])
        ]
    kinds = {kind for _, kind, _ in marks}
    alone = _ALONE.search(text, marks[-1][0]) if not values and marks and len(kinds) == len(marks) else None
    direct = alone is not None and _DIRECT.fullmatch(text, marks[-1][0], alone.start("value")) is not None
    if alone is not None and direct and metric_kind(heading.name, alone["unit"]) is not None:
        values = [(alone.start(), Value(heading.name, alone["unit"], alone["value"]))]
    if not values:
        return
    if not marks:
        if line.rank is not None:
            marks = [(0, "rank", str(line.rank))]
        elif not any(v.name == "slowest" for _, v in values):
            return
    yield from _grouped(line, sorted(marks), sorted(values), step)
    others = _OTHERS.search(text)
    if others is not None and marks:
        before = [v for position, v in sorted(values, key=lambda p: p[0]) if position < others.start()]
        if before:
            yield Row(line, {marks[0][1]: "others"}, [before[-1]._replace(text=others["value"])], step)


def _grouped(
    line: Line, marks: list[tuple[int, str, str]], values: list[tuple[int, Value]], step: str
) -> Iterator[Row]:
    """Values with the entities before them; an entity of a kind that was there already begins the next row."""
    about: dict[str, str] = {}
    mine: list[Value] = []
    items: list[tuple[int, int, Any]] = [(p, 0, (k, v)) for p, k, v in marks] + [(p, 1, v) for p, v in values]
    for _, what, item in sorted(items, key=lambda i: (i[0], i[1])):
        if what == 0:
            kind, which = item
            if kind in about and mine:
                yield Row(line, about, mine, step)
                about, mine = {}, []
            about = {**about, kind: which}
        else:
            mine.append(item)
    if mine:
        yield Row(line, about, mine, step)
