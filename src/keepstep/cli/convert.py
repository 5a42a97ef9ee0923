"""`keepstep convert`: records in the forms of other tools.

A verb of its own and no `-o` format of `get cycles`: what others read is a folder of files with fixed names and a link, not one
stream.
"""

from __future__ import annotations

from pathlib import Path

import click

from keepstep.cli.goodput import read_cycles
from keepstep.cli.output import NotFoundError, emit, output_option
from keepstep.cli.runs import RUN_HELP, resolve_run, run_argument
from keepstep.launcher.views.nvrx import write_cycle_infos
from keepstep.launcher.views.runstate import read_state


@click.group("convert")
def convert() -> None:
    """Write records in the forms that other tools read."""


@convert.command("cycle-info", epilog=RUN_HELP)
@run_argument
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Where to; default RUN/nvrx.")
@output_option
def cycle_info(run: str | None, out: Path | None, output: str) -> None:
    """Write NVIDIA Resiliency Extension's cycle info: cycle_info.JOB.ATTEMPT.CYCLE for each cycle, and its .current link.

    What that form has no place for (cause, ranks with their exits, phases, restored step) stays in cycles/.
    """
    run_dir = resolve_run(run)
    cycles = read_cycles(run_dir)
    if not cycles:
        raise NotFoundError(f"{run_dir / 'cycles'} holds no cycle records; nothing to convert")
    hosts = {node.node: node.host for node in read_state(run_dir).nodes.values() if node.host}
    written = [str(path) for path in write_cycle_infos(cycles, run_dir, out or run_dir / "nvrx", hosts)]
    emit(
        written,
        output,
        table=lambda console, _: console.print("\n".join(written), markup=False, soft_wrap=True),
        name=str,
    )
