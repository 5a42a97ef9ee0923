"""--config FILE: a TOML file with the same names as the flags, under the flags and the PET_* variables.

Strict: an unknown name, a name given twice, a value of the wrong type or a value the flag would refuse is an error that
names file, line, key and the nearest valid name.
"""

from __future__ import annotations

import datetime
import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

import click

from keepstep.records.errors import ConfigError

META = "keepstep.config_file"
"""Key of Context.meta: (path, {parameter name: line}) of the file that was read."""
NOT_IN_FILES = frozenset({"config", "dry_run"})
TABLES = {"section_timeout": None, "rdzv_conf": ","}
"""Flags that may be a table in the file; the text joins its KEY=VALUE pairs, None leaves them a list."""
LISTS = frozenset(
    {"rdzv_endpoint", "preload", "local_ranks_filter", "signals_to_handle"}
    | {"duplicate_stdout_filters", "duplicate_stderr_filters"}
)
"""Flags with comma separated items, which may be an array in the file."""


def use_config_file(ctx: click.Context, _param: click.Parameter, path: str | None) -> str | None:
    """Callback of --config: what the file says becomes the default of the flags. Raises ConfigError at the first mistake."""
    if path is None or ctx.resilient_parsing:
        return path
    values, problems = read_config(ctx, Path(path))
    if problems:
        more = f" (and {len(problems) - 1} more: keepstep config check {path})" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


def read_config(ctx: click.Context, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Values by parameter name for the flags of `ctx.command`, and everything that is wrong with the file.

    Raises ConfigError when it cannot be read or is not TOML.
    """
    try:
        text = path.read_bytes().decode()
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {str(path)!r}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {str(path)!r}: not TOML: {error}") from None
    known = {p.name: p for p in ctx.command.params if isinstance(p, click.Option) and _in_files(p)}
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    problems = []
    for key, raw in table.items():
        name = key.replace("-", "_")
        line = _line(text, key)
        where = f"{path}:{line}: " if line else f"{path}: "
        if name not in known:
            problems.append(f"{where}{_unknown(key, [str(n).replace('_', '-') for n in known])}")
        elif name in values:
            problems.append(f"{where}{key}: given twice in this file, with '-' and with '_'")
        else:
            try:
                values[name] = _value(ctx, known[name], name, raw)
                lines[name] = line
            except (ValueError, ConfigError, click.BadParameter) as error:
                why = error.message if isinstance(error, click.BadParameter) else str(error)
                problems.append(f"{where}{key} = {_shown(raw)}: {why}")
    ctx.meta[META] = (str(path), lines)
    return values, problems


def where_in_file(ctx: click.Context, name: str) -> str:
    """Where the value of a parameter stands, as "FILE:LINE: ", when a file was read and it is from there."""
    path, lines = ctx.meta.get(META, ("", {}))
    if name not in lines or ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT_MAP:
        return ""
    return f"{path}:{lines[name]}: " if lines[name] else f"{path}: "


def _in_files(option: click.Option) -> bool:
    return option.expose_value and option.name not in NOT_IN_FILES


def _unknown(key: str, names: list[str]) -> str:
    if key.replace("_", "-").startswith("ft-"):
        return (
            f"{key}: ft_launcher's names are for the command line only; `keepstep run --{key} ...` names the one to use"
        )
    if key.replace("-", "_") in NOT_IN_FILES:
        return f"{key}: for the command line only"
    near = difflib.get_close_matches(key.replace("_", "-"), names, n=1, cutoff=0.4)
    hint = f"nearest: {near[0]}" if near else "names are those of the flags, see keepstep run --help"
    return f"{key}: no such setting; {hint}"


def _value(ctx: click.Context, option: click.Option, name: str, raw: Any) -> Any:
    """The value as the flag would have it. Raises ValueError, click.BadParameter or ConfigError."""
    if option.is_flag:
        if not isinstance(raw, bool):
            raise ValueError("give true or false")
        return raw
    if name in TABLES and isinstance(raw, dict):
        pairs = [f"{key}={_scalar(value)}" for key, value in raw.items()]
        join = TABLES[name]
        raw = pairs if join is None else join.join(pairs)
    if option.multiple:
        if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
            raise ValueError("give an array of strings")
        return tuple(option.type_cast_value(ctx, raw))
    if name in LISTS and isinstance(raw, list):
        raw = ",".join(_scalar(item) for item in raw)
    if isinstance(option.type, click.types.IntParamType) and (isinstance(raw, bool) or not isinstance(raw, int)):
        raise ValueError("give a whole number")
    if isinstance(raw, bool) and not isinstance(option.type, click.types.StringParamType):
        raise ValueError("give a value, not true or false")
    text = _scalar(raw)
    if isinstance(option.type, click.types.StringParamType | click.types.Choice):
        return option.type_cast_value(ctx, text)
    return option.type_cast_value(ctx, raw)


def _scalar(raw: Any) -> str:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError("give a string or a number")
    return str(raw)


def _shown(raw: Any) -> str:
    if isinstance(raw, datetime.date | datetime.time):
        return raw.isoformat()
    return repr(raw)


def _line(text: str, key: str) -> int:
    """Line of a top-level key, counted from 1; 0 when it is written in a way this does not look for."""
    pattern = re.compile(rf"""\s*(?:\[\s*)?["']?{re.escape(key)}["']?\s*(?:[=.\]]|$)""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 0)
