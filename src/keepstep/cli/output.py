"""How verbs print: one option for the format, one function that prints records in it, and helpers for terminals.

Tables go to a terminal or to whoever asks for one; without a terminal the default is JSON, so that a pipe gets data.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keepstep.records.errors import KeepstepError
from keepstep.records.exits import EXIT_NOT_FOUND

if TYPE_CHECKING:
    from rich.console import Console

FORMATS = ("table", "json", "jsonl", "yaml", "wide", "name")
"""What -o accepts, everywhere."""

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*\Z")
_RESERVED = frozenset(
    {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}
)  # YAML 1.1 reads these as other types
PIPE_COLUMNS = 120
"""Width of a table that is asked for without a terminal."""


class NotFoundError(KeepstepError):
    """Raised when a run, checkpoint or file named by the user does not exist; says where it was looked for."""

    exit_code = EXIT_NOT_FOUND


def output_option(function: F) -> F:
    """Add `-o/--output` to a command; the function receives `output`, one of FORMATS.

    The default is `table` when standard output is a terminal and `json` otherwise.
    """

    def choose(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str:
        return value or ("table" if sys.stdout.isatty() else "json")

    option = click.option(
        "-o",
        "--output",
        type=click.Choice(FORMATS),
        callback=choose,
        help="Format; the default is table on a terminal, else json.",
    )
    return option(function)


def emit(
    value: Any,
    output: str,
    *,
    table: Callable[[Console, bool], None],
    name: Callable[[Any], str],
) -> None:
    """Print a record, or a sequence of records, to standard output in the format `output`.

    `table` draws to a console, more of it when its second argument is true; `name` gives the identifier of a record. A
    sequence is a JSON array, a line each in jsonl and name, and a YAML sequence.
    """
    from keepstep.records.codec import to_json, to_pretty_json

    records = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    if output in ("table", "wide"):
        table(make_console(), output == "wide")
    elif output == "name":
        for record in records:
            click.echo(name(record))
    elif output == "jsonl":
        for record in records:
            click.echo(to_json(record).decode())
    elif output == "yaml":
        click.echo(to_yaml(json.loads(to_json(value))), nl=False)
    else:
        click.echo(to_pretty_json(value).decode(), nl=False)


def make_console(*, stderr: bool = False) -> Console:
    """Console on standard output or error. NO_COLOR is honoured; off a terminal it has no colour and a fixed width."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PIPE_COLUMNS)


def note(message: str) -> None:
    """Say something to the user on standard error, which never carries data."""
    click.echo(f"keepstep: {message}", err=True)


def format_duration_s(seconds: float | None) -> str:
    """Duration for people: 0.042 -> '42 ms', 12.34 -> '12.3 s', 245 -> '4m 05s', 11520 -> '3h 12m'; None -> '-'."""
    if seconds is None:
        return "-"
    if seconds < 0:
        return "-" + format_duration_s(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def format_share(part: float | None, whole: float) -> str:
    """Share in percent with one decimal; '-' when it is unknown."""
    return "-" if part is None or whole == 0 else f"{100 * part / whole:.1f} %"


def to_yaml(value: Any) -> str:
    """JSON value as block-style YAML that YAML 1.1 and 1.2 readers understand alike; ends with a newline."""
    if isinstance(value, dict | list) and value:
        return "\n".join(_yaml_lines(value)) + "\n"
    return _yaml_scalar(value) + "\n"


def _yaml_lines(value: dict[str, Any] | list[Any]) -> list[str]:
    lines: list[str] = []
    heads = [f"{_yaml_string(key)}:" for key in value] if isinstance(value, dict) else ["-"] * len(value)
    for head, item in zip(heads, value.values() if isinstance(value, dict) else value, strict=True):
        if not isinstance(item, dict | list) or not item:
            lines.append(f"{head} {_yaml_scalar(item)}")
            continue
        inner = [f"  {line}" for line in _yaml_lines(item)]
        if head == "-":  # the first line of a nested block stands beside the dash
            lines.append(f"- {inner[0][2:]}")
            lines += inner[1:]
        else:
            lines.append(head)
            lines += inner
    return lines


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, str):
        return _yaml_string(value)
    if isinstance(value, float):
        text = repr(value)
        # YAML 1.1 takes 1e-05 for a string: a number needs its point.
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list):
        return "[]"
    return json.dumps(value)


def _yaml_string(text: str) -> str:
    if _PLAIN.match(text) and text.lower() not in _RESERVED:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)
