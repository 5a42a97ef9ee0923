"""Which run a verb is about, and how the verbs that look at runs print: tables, selectors, times, text from elsewhere."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from keepstep.cli.goodput import find_run, runs_root
from keepstep.cli.output import NotFoundError, note
from keepstep.launcher.views.view import run_dirs
from keepstep.records.codec import rfc3339
from keepstep.records.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

RUN_HELP = "RUN is a run folder or the id of a run under $KEEPSTEP_HOME/runs; without it, the run that changed last."
# Controls (C0 but tab and newline, DEL, C1) and the marks that turn the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def run_argument(function: F) -> F:
    """Add the optional RUN argument; the function receives `run`."""
    return click.argument("run", metavar="[RUN]", required=False)(function)


def resolve_run(run: str | None) -> Path:
    """Folder of the run that is meant; a run chosen for the user is named on stderr. Raises NotFoundError."""
    if run is not None:
        return find_run(run)
    known = run_dirs([runs_root()])
    if not known:
        raise NotFoundError(f"{runs_root()} holds no runs; name a run folder, or set KEEPSTEP_HOME")
    note(f"run {known[0].name} (changed last of {len(known)} in {runs_root()})")
    return known[0]


# ---- tables


class Column(NamedTuple):
    """A column of a table: its title, what stands in it, whether only `-o wide` has it, whether it is a number."""

    title: str
    value: Callable[[Any], Any]
    wide: bool = False
    right: bool = False


def print_table(console: Console, columns: Sequence[Column], records: Sequence[Any], *, wide: bool) -> None:
    """Print records in plain columns, as wide as they need to be: nothing is cut off."""
    from rich.table import Table
    from rich.text import Text

    chosen = [c for c in columns if wide or not c.wide]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in chosen:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for record in records:
        table.add_row(*(Text(cell(column.value(record))) for column in chosen))
    own_width = console.width
    console.width = max(console.measure(table, options=console.options.update(max_width=100_000)).maximum, 1)
    console.print(table, crop=False)
    console.width = own_width


def cell(value: Any) -> str:
    """A value for a table: '-' for nothing, lists with commas, text made harmless and in one line."""
    if value in (None, "", []):
        return "-"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return harmless(str(value)).replace("\n", " ")


def harmless(text: str) -> str:
    """Text without power over a terminal: control characters appear as ^X, others as their code point."""

    def shown(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"^{chr(code ^ 0x40)}" if code < 0x80 else f"<U+{code:04X}>"

    return _UNSAFE.sub(shown, text)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in their order, runs of consecutive ones shortened: [0, 1, 2, 5] -> '0-2,5'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


# ---- selecting


class Selector(NamedTuple):
    """One condition of `-l`."""

    key: str
    value: str
    equal: bool


def parse_selectors(texts: Sequence[str]) -> list[Selector]:
    """`-l KEY=VALUE,KEY!=VALUE`. Raises ConfigError naming the part that is neither."""
    found = []
    for part in ",".join(texts).split(","):
        if not part:
            continue
        match = re.fullmatch(r"([A-Za-z_]\w*)(==|!=|=)(.*)", part.strip())
        if match is None:
            raise ConfigError(f"-l {part!r}: write KEY=VALUE or KEY!=VALUE")
        found.append(Selector(match[1], match[3], match[2] != "!="))
    return found


def select(records: Sequence[dict[str, Any]], selectors: Sequence[Selector]) -> list[dict[str, Any]]:
    """Records that meet all conditions. Raises ConfigError for a key that no record has."""
    known = sorted({key for record in records for key in record})
    for selector in selectors:
        if records and selector.key not in known:
            raise ConfigError(f"-l {selector.key}={selector.value}: no such field; there are {', '.join(known)}")
    return [r for r in records if all(_meets(r.get(s.key), s) for s in selectors)]


def _meets(value: Any, selector: Selector) -> bool:
    values = value if isinstance(value, list) else [value]
    return (selector.value in ["" if v is None else str(v) for v in values]) is selector.equal


# ---- times


def moment_ns(text: str, now_ns: int, flag: str) -> int:
    """A time or a span before now, as `since_time` reads it, in nanoseconds. Raises ConfigError naming the flag."""
    try:
        time = since_time(text, now_ns)
        day = datetime.datetime.fromisoformat(time[:19]).replace(tzinfo=datetime.UTC)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}") from error
    except ConfigError as error:
        raise ConfigError(str(error).replace("--since", flag, 1)) from error
    return round(day.timestamp()) * 1_000_000_000 + int(time[20:-1])


def since_time(text: str, now_ns: int) -> str:
    """`10m`, `2h`, `30s`, `1d` before now, or an RFC 3339 time, as an RFC 3339 time. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is not None:
        return rfc3339(now_ns - int(float(match[1]) * _UNITS_S[match[2]] * 1e9))
    if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z", text):
        head, _, fraction = text[:-1].partition(".")
        return f"{head}.{fraction.ljust(9, '0')}Z"
    raise ConfigError(f"--since {text!r}: give a time span such as 30s, 10m, 2h, 1d or a time 2026-01-31T12:00:00Z")


def clock(time: str | None) -> str:
    """An RFC 3339 time for a table: to the millisecond."""
    return "-" if not time else time[:23].replace("T", " ")
