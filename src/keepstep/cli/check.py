"""`keepstep check`: is this node fit to train (`node`), and do a job's nodes reach their bandwidth together (`gang`)?"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keepstep.cli.output import NotFoundError, emit, note, output_option
from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.exits import EXIT_PROBLEM

if TYPE_CHECKING:
    from rich.console import Console

WORDS = {True: "ok", False: "FAILED", None: "unknown"}


@click.group("check")
def check() -> None:
    """Check this node, or all nodes of a job together. Exit 3: a problem was found."""


@check.command("node")
@click.option(
    "--level", type=click.IntRange(1, 3), default=1, show_default=True, help="1: seconds; 2: + probes; 3: + dcgmi."
)
@click.option("--checkpoint-root", type=click.Path(path_type=Path), default=None, help="Must be writable.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), default=None, help="Must have room [default: $KEEPSTEP_HOME]."
)
@click.option("--gpus", type=click.IntRange(1), default=None, help="Fewer visible GPUs are a failure.")
@output_option
@click.pass_context
def node(
    ctx: click.Context, level: int, checkpoint_root: Path | None, run_dir: Path | None, gpus: int | None, output: str
) -> None:
    """Health of this host: GPUs, links, room, clock, checkpoint root.

    JSON is `keepstep.node_check/1`: node, level, ok (false: a definite failure), took_s, checks [{name, ok (null: could not be
    checked), value, limit, detail, next_step}].
    """
    from keepstep.launcher.files import keepstep_home
    from keepstep.launcher.health.nodecheck import Request, run_checks

    begin = time.monotonic()
    request = Request(run_dir=run_dir or keepstep_home(), checkpoint_root=checkpoint_root, expected_gpus=gpus)
    results = run_checks(level, request)
    ok = all(r.ok is not False for r in results)
    record = {
        "schema": "keepstep.node_check/1",
        "node": socket.gethostname().partition(".")[0],
        "level": level,
        "ok": ok,
        "took_s": round(time.monotonic() - begin, 3),
        "checks": results,
    }
    emit(record, output, table=lambda console, wide: _node_table(console, results, wide), name=lambda r: str(r["node"]))
    if not ok:
        ctx.exit(EXIT_PROBLEM)


def _node_table(console: Console, results: list[Any], wide: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("check", "", "value", "limit", "detail"):
        table.add_column(title)
    for r in results:
        detail = f"{r.detail}; {r.next_step}" if r.next_step and (wide or r.ok is False) else r.detail
        style = "red" if r.ok is False else "dim" if r.ok is None else ""
        cells = (r.name, WORDS[r.ok], r.value, r.limit, detail.strip("; "))
        table.add_row(*map(escape, cells), style=style)
    console.print(table)


@check.command("gang")
@click.option("--nnodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes; start this verb on each.")
@click.option("--nproc-per-node", default="auto", show_default=True, help="Ranks on each node, as `run` takes it.")
@click.option("--rdzv-endpoint", default=None, help="HOST:PORT of the coordinator, as for `run`.")
@click.option("--rdzv-id", default=None, help="The same on every node; needed with several.")
@click.option("--node-name", default=None, help="Name of this node, as for `run`.")
@click.option("--sizes-mb", default="1,16,128", show_default=True, help="Message sizes; the last one is judged.")
@click.option("--iterations", type=click.IntRange(1), default=20, show_default=True, help="All-reduces a measurement.")
@click.option("--tolerance", type=click.FloatRange(0, 1, max_open=True), default=0.2, show_default=True,
              help="Share of the baseline that may be missing.")  # fmt: skip
@click.option("--save-baseline", is_flag=True, help="Keep this result as the baseline of this kind of node.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Folder of the test's run.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=300.0, show_default=True, help="In all, s.")
@output_option
@click.pass_context
def gang(ctx: click.Context, /, output: str, timeout_s: float, run_dir: Path | None, **flags: Any) -> None:
    """All-reduce bandwidth of exactly a job's nodes against a stored baseline; below it, halves are tested to find the slow node.

    JSON is `keepstep.gang_check/1`, see launcher/health/gangcheck.py. With several nodes the one with rank 0 prints it.
    """
    from keepstep.launcher.files import keepstep_home

    if flags["nnodes"] > 1 and not flags["rdzv_id"]:
        raise ConfigError(f"--nnodes {flags['nnodes']}: give every node the same --rdzv-id ID")
    run_id = flags["rdzv_id"] or f"check-gang-{secrets.token_hex(4)}"
    folder = (run_dir or keepstep_home() / "runs" / run_id).absolute()
    result = folder / "gang.json"
    begin_ns = time.time_ns()
    code = _run_gang(_gang_command(flags, run_id, folder, result), timeout_s)
    if not result.exists() or result.stat().st_mtime_ns < begin_ns:
        if code != 0:
            raise KeepstepError(f"the test did not end (exit {code}); see {folder / 'logs'}")
        if flags["nnodes"] > 1:
            note("the node with rank 0 has the result")
            return
        raise NotFoundError(f"{result}: the test ended without a result")
    record = json.loads(result.read_bytes())
    emit(record, output, table=lambda console, _wide: _gang_table(console, record), name=lambda r: str(r["key"]))
    if record["ok"] is False:
        ctx.exit(EXIT_PROBLEM)


def _gang_command(flags: dict[str, Any], run_id: str, folder: Path, result: Path) -> list[str]:
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--run-dir", str(folder), "--rdzv-id", run_id]
    command += ["--nnodes", str(flags["nnodes"]), "--nproc-per-node", flags["nproc_per_node"], "--max-restarts", "0"]
    for name in ("rdzv_endpoint", "node_name"):
        if flags[name]:
            command += [f"--{name.replace('_', '-')}", flags[name]]
    command += ["-m", "keepstep.launcher.health.gangcheck", "--result", str(result), "--sizes-mb", flags["sizes_mb"]]
    command += ["--iterations", str(flags["iterations"]), "--tolerance", str(flags["tolerance"])]
    return command + (["--save-baseline"] if flags["save_baseline"] else [])


def _run_gang(command: list[str], timeout_s: float) -> int:
    # Ranks print to standard error here: standard output is for the result.
    process = subprocess.Popen(command, stdout=sys.stderr.fileno())
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise KeepstepError(f"the test took longer than --timeout {timeout_s:g} s and was stopped") from None
    except BaseException:
        process.terminate()
        raise


def _gang_table(console: Console, record: dict[str, Any]) -> None:
    baseline = record["baseline_gb_per_s"]
    console.print(
        f"{record['nodes_tested']} nodes, {record['ranks']} ranks, {record['backend']}: "
        f"{record['bandwidth_gb_per_s']:.3g} GB/s bus bandwidth, "
        + ("no baseline yet (--save-baseline)" if baseline is None else f"baseline {baseline:.3g} GB/s"),
        markup=False,
        soft_wrap=True,
    )
    for suspect in record["suspects"]:
        console.print(f"suspect: {suspect}", style="red", markup=False)
