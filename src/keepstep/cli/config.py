"""`keepstep config`: what a --config file or a run's flags came to, and where each value is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep.cli.effective import NO_FLAG, SETTINGS, effective_config
from keepstep.cli.output import emit, output_option
from keepstep.cli.rdzv_conf import RdzvConf
from keepstep.records.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from rich.console import Console

PLACEHOLDER = "run"
"""Run id of a file's configuration while none is given; it is not shown."""


@click.group("config")
def config() -> None:
    """Show or check the configuration of a run, or of a --config file."""


@config.command("show")
@click.argument("what", metavar="FILE|RUN")
@output_option
def show(what: str, output: str) -> None:
    """Print the effective settings of a run, or what `keepstep run --config FILE` would use here, each with its origin.

    JSON is `keepstep.config/1`: source, settings [{name, flag, value, origin}]. Origins are flag, PET_X, file, default.
    """
    path = Path(what)
    settings = file_settings(path) if path.is_file() else run_settings(what)
    record = {"schema": "keepstep.config/1", "source": what, "settings": settings}
    emit(record, output, table=lambda console, _wide: _table(console, settings), name=lambda _record: what)


@config.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@output_option
def check(file: Path, output: str) -> None:
    """Check FILE as `keepstep run --config FILE` would read it; exits 2 after naming every mistake.

    JSON is `keepstep.config_check/1`: source, settings (how many the file sets).
    """
    from keepstep.cli.config_file import read_config
    from keepstep.cli.run import run

    values, problems = read_config(click.Context(run), file)
    if problems:
        raise ConfigError("; ".join(problems))
    file_settings(file)
    record = {"schema": "keepstep.config_check/1", "source": str(file), "settings": len(values)}
    emit(
        record,
        output,
        table=lambda console, _wide: console.print(f"{file}: {len(values)} settings, all valid", markup=False),
        name=lambda _record: str(file),
    )


def file_settings(path: Path) -> list[dict[str, Any]]:
    """Every setting of a run that would use this file, in this shell. Raises ConfigError."""
    from keepstep.cli.run import run

    with run.make_context("run", ["--config", str(path), "--", "SCRIPT"]) as ctx:
        named = ctx.params["rdzv_id"] != "none"
        ctx.params["rdzv_id"] = ctx.params["rdzv_id"] if named else PLACEHOLDER
        flags = {name: value for name, value in ctx.params.items() if name not in ("script", "script_args")}
        effective = effective_config(ctx, "SCRIPT", [], flags)
    from keepstep.records.codec import to_json

    settings = _settings(json.loads(to_json(effective)))
    # Without an id a run gets a new one, and its folder is named after it.
    hidden = () if named else ("run_id", "run_dir") if flags["run_dir"] is None else ("run_id",)
    return [setting for setting in settings if setting["name"] not in hidden]


def run_settings(run: str) -> list[dict[str, Any]]:
    """Settings recorded in a run folder. Raises NotFoundError, and StorageError when its run.json cannot be read."""
    from keepstep.cli.goodput import find_run

    path = find_run(run) / "run.json"
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StorageError(f"{path}: missing; it is written by the launcher that leads the run") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from None
    return _settings(fields)


def _settings(fields: dict[str, Any]) -> list[dict[str, Any]]:
    origins = fields.get("origins", {})
    settings = []
    for name, value in fields.items():
        if name in NO_FLAG:
            continue
        parameter = SETTINGS.get(name, name)
        flag = f"--{parameter.replace('_', '-')}"
        origin = origins.get(parameter, "default")
        if parameter == "rdzv_conf" and value == getattr(RdzvConf(), name):
            # One flag with several settings: it does not say which of them it gives.
            origin = "default"
        settings.append({"name": name, "flag": flag, "value": value, "origin": origin})
    return settings


def _table(console: Console, settings: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("SETTING", "VALUE", "FLAG", "ORIGIN"):
        table.add_column(column, overflow="fold")
    for s in settings:
        value = s["value"] if isinstance(s["value"], str) else json.dumps(s["value"])
        table.add_row(s["name"], Text(value), s["flag"], s["origin"])
    console.print(table)
