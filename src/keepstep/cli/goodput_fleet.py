"""`keepstep goodput --fleet`: where the time of many runs went, what it was lost to, and how often nodes fail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from keepstep.cli.goodput import UNLIMITED, find_run, loss_table, make_table, ratio_lines, runs_root
from keepstep.cli.model_flags import parse_duration
from keepstep.cli.output import NotFoundError, emit, format_duration_s, format_share, note
from keepstep.cli.runs import clock, harmless
from keepstep.goodput.calibration import Score, score
from keepstep.goodput.fleet import FleetGoodput, LeftOut, RunRecord, exposures_of, failures_of, fleet
from keepstep.goodput.fleetrates import prior_file, prior_of_others
from keepstep.goodput.rates import Prior
from keepstep.goodput.slo import check_objective
from keepstep.launcher.views.forecasts import telling
from keepstep.launcher.views.ledger import UNKNOWN, read_ledger
from keepstep.launcher.views.view import is_led, run_dirs
from keepstep.records.codec import from_rfc3339, to_pretty_json
from keepstep.records.errors import ConfigError, KeepstepError, StorageError
from keepstep.records.losses import PARTS, Amount

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

T = TypeVar("T")
MAX_ROWS = 20
"""Rows of a table without -o wide."""


def show_fleet(
    runs: Sequence[str],
    *,
    since: str | None,
    slo: float | None,
    price: float | None,
    by: str,
    prior: str | None,
    sku: str | None,
    output: str,
) -> None:
    """Read, account and print. Raises NotFoundError where nothing is left to account, ConfigError for flags."""
    now_ns = time.time_ns()
    begin_ns = None if since is None else since_ns(since, now_ns)
    if slo is not None:
        check_objective(slo)
    folders = fleet_folders(runs)
    records, left_out = read_fleet(folders, now_ns, sku=sku or UNKNOWN)
    record = account(records, left_out, begin_ns, now_ns, slo=slo, price=price)
    record = msgspec.structs.replace(record, forecasts=forecast_score(folders, left_out, now_ns))
    if prior is not None:
        write_prior(Path(prior), record)
    emit(
        record,
        output,
        table=lambda console, wide: render_fleet(record, console, by=by, wide=wide),
        name=lambda r: "\n".join(run.run_id for run in r.runs),
    )


def write_prior(path: Path, record: FleetGoodput) -> None:
    """The fleet's failure rates as `keepstep.failure_prior/1`. Raises StorageError."""
    try:
        path.write_bytes(to_pretty_json(prior_file(record.rates)))
    except OSError as error:
        raise StorageError(f"--write-prior {path}: {error.strerror}") from error
    note(f"wrote {path}: for --failure-prior")


def fleet_prior(sku: str, without_run: str | None) -> Prior:
    """What all runs there are but one say about a GPU model. Raises NotFoundError without any run."""
    records, _ = read_fleet(fleet_folders(()), time.time_ns())
    failures = [failure for record in records for failure in failures_of(record)]
    exposures = [exposure for record in records for exposure in exposures_of(record)]
    return prior_of_others(failures, exposures, sku, without_run=without_run)


def since_ns(text: str, now_ns: int) -> int:
    """Begin of the window: a span before now (30d, 12h), or an RFC 3339 time. Raises ConfigError naming flag and value."""
    if "T" not in text:
        try:
            return now_ns - round(parse_duration(text, "--since", above=True) * 1e9)
        except ConfigError:
            raise ConfigError(
                f"--since {text}: give a time before now, such as 30d or 12h, or a time such as 2026-01-31T12:00:00Z"
            ) from None
    try:
        begin_ns = from_rfc3339(text)
    except ValueError as error:
        raise ConfigError(f"--since {text}: not an RFC 3339 time such as 2026-01-31T12:00:00Z: {error}") from None
    if begin_ns >= now_ns:
        raise ConfigError(f"--since {text}: that is not in the past")
    return begin_ns


def fleet_folders(runs: Sequence[str]) -> list[Path]:
    """Run folders that are meant, each once: those named, those in folders named, without any name all there are.

    Raises NotFoundError.
    """
    if not runs:
        found = run_dirs([runs_root()])
        if not found:
            raise NotFoundError(f"{runs_root()} holds no runs; name run folders, or set KEEPSTEP_HOME")
        return found
    named: dict[Path, Path] = {}
    for run in runs:
        inside = [] if _is_run(Path(run)) else run_dirs([Path(run)])
        for folder in inside or [find_run(run)]:
            named.setdefault(folder.resolve(), folder)
    return list(named.values())


def _is_run(folder: Path) -> bool:
    return (folder / "journal").is_dir() or (folder / "run.json").is_file()


def read_fleet(folders: Sequence[Path], now_ns: int, *, sku: str = UNKNOWN) -> tuple[list[RunRecord], list[LeftOut]]:
    """Runs that can be accounted, and those that cannot; both these and what was odd in the others is said on stderr."""
    records: list[RunRecord] = []
    left_out: list[LeftOut] = []
    for folder in folders:
        try:
            record, problems = read_ledger(folder, now_ns, sku=sku)
        except (KeepstepError, OSError) as error:
            note(f"left out: {error}")
            left_out.append(LeftOut(folder=str(folder.absolute()), reason=str(error)))
            continue
        for problem in problems:
            note(problem)
        records.append(record)
    return records, left_out


def forecast_score(folders: Sequence[Path], left_out: Sequence[LeftOut], now_ns: int) -> Score | None:
    """The most telling forecast of every run beside what became of it; None without any. Errors are said on stderr."""
    bad = {row.folder for row in left_out}
    rows = []
    for folder in folders:
        if str(folder.absolute()) in bad:
            continue
        try:
            found = telling(folder, now_ns if is_led(folder) else None)
        except KeepstepError as error:
            note(f"no forecast is compared: {error}")
            continue
        if found is not None:
            rows.append(found)
    return score(rows) if rows else None


def account(
    records: Sequence[RunRecord],
    left_out: Sequence[LeftOut],
    begin_ns: int | None,
    now_ns: int,
    *,
    slo: float | None = None,
    price: float | None = None,
) -> FleetGoodput:
    """The fleet from `begin_ns`, by default from the begin of the first run, up to now. Raises NotFoundError without a run."""
    if not records:
        raise NotFoundError(f"none of {len(left_out)} run folders can be accounted; the lines above say why")
    if begin_ns is None:
        begin_ns = min(record.part.begin_ns for record in records)
    # Runs of hosts whose clocks are ahead may begin after now: an empty window would divide by nothing.
    end_ns = max(now_ns, begin_ns + 1)
    result = fleet(records, begin_ns, end_ns, slo=slo, price=price, left_out=left_out)
    if not result.runs:
        raise NotFoundError(f"none of {len(records)} runs has any time since {result.since}; give an earlier --since")
    return result


# ---- tables


def score_line(found: Score) -> str:
    """How good forecasts were, in a sentence."""
    error = "" if found.mean_error_points is None else f"; measured less forecast {found.mean_error_points:+.2f} points"
    return (
        f"forecasts: {found.inside} of {found.judged} runs within the 90 % interval, {found.below} below, {found.above} above; "
        f"{found.forecasts - found.judged} too early or without steps{error}; {found.failures_measured} failures where "
        f"{found.failures_forecast:.3g} were expected"
    )


def render_fleet(record: FleetGoodput, console: Console, *, by: str, wide: bool) -> None:
    """Draw the account: headline, losses by name, what `by` groups, objective, failure rates."""
    from rich.text import Text

    def say(*lines: str) -> None:
        console.print(*(Text(harmless(line)) for line in lines), sep="\n", soft_wrap=True)

    size = "of unknown size" if record.wall.gpu_h is None else f"{record.wall.gpu_h:.3f} GPU-h"
    say(f"fleet: {len(record.runs)} runs from {clock(record.since)} to {clock(record.until)}, {size}")
    say(*ratio_lines(record.totals))
    names = [n for n in PARTS if (p := record.totals.parts[n]) is None or p.time_ns or wide or n == "productive"]
    console.print(loss_table(record.totals, record.wall, "wall-clock of all runs, by name", names))
    if record.explained is not None:
        say(f"the six losses explain {format_share(record.explained, 1.0)} of the GPU-time that was lost")
    for name, count in record.unknown_in.items():
        say(f"{name} is unknown in {count} of {len(record.runs)} runs")
    say("")
    _print_grouping(record, console, by=by, wide=wide)
    if record.forecasts is not None:
        say("", score_line(record.forecasts))
    if record.slo is not None:
        say("", *_slo_lines(record))
    _print(console, _rate_table(record))
    say(*_rate_lines(record, wide=wide))


def _print_grouping(record: FleetGoodput, console: Console, *, by: str, wide: bool) -> None:
    priced = record.price_usd_per_gpu_h is not None
    if by == "run":
        table = make_table("runs", "run", "GPUs", "ETTR", "lost", "incidents", *_amount_heads("wall", priced))
        for run in _shown(record.runs, "runs", wide):
            ettr = run.losses.ratios.ettr_without_queue
            lost_s = None if run.losses.parts["productive"] is None else _lost_s(run.losses.parts)
            cells = [str(run.gpus or "-"), "unknown" if ettr is None else f"{ettr:.3f}", format_duration_s(lost_s)]
            _add(table, run.run_id, *cells, str(run.incidents), *_amount_cells(run.wall, priced))
    elif by == "incident":
        table = make_table(
            "incidents", "incident", "run", "time", "class", "cause", "node", "wrong", *_amount_heads("cost", priced)
        )
        for one in _shown(record.incidents, "incidents", wide):
            wrong = "-" if not one.acted else {None: "unknown", True: "yes", False: "no"}[one.wrong]
            cells = [one.run_id, clock(one.time), one.fault_class, one.cause, one.node or "-", wrong]
            _add(table, one.incident, *cells, *_amount_cells(one.cost, priced))
    else:
        rows = {"cause": record.by_cause, "class": record.by_class, "node": record.by_node, "rack": record.by_rack}[by]
        if by == "rack" and not rows:
            note("no run's records name racks; nodes tell theirs by KEEPSTEP_TOPOLOGY or Slurm's topology")
        table = make_table(f"lost, by {by}", by, "incidents", "share", *_amount_heads("lost", priced))
        for row in _shown(rows, "rows", wide):
            share = "-" if row.share is None else format_share(row.share, 1.0)
            _add(table, row.key, str(row.incidents), share, *_amount_cells(row.lost, priced))
    _print(console, table)


def _print(console: Console, table: Table) -> None:
    """Print a table as wide as it needs to be: names are not cut off."""
    own_width = console.width
    console.width = max(console.measure(table, options=console.options.update(max_width=UNLIMITED)).maximum, 1)
    console.print(table, crop=False)
    console.width = own_width


def _lost_s(parts: dict[str, Amount | None]) -> float:
    return sum(p.time_s for name, p in parts.items() if p is not None and name not in ("productive", "queue"))


def _amount_heads(title: str, priced: bool) -> list[str]:
    return [title, "GPU-h", *(["USD"] if priced else [])]


def _amount_cells(amount: Amount, priced: bool) -> list[str]:
    gpu_h = "-" if amount.gpu_h is None else f"{amount.gpu_h:.3f}"
    money = ["-" if amount.usd is None else f"{amount.usd:,.2f}"] if priced else []
    return [format_duration_s(amount.time_s), gpu_h, *money]


def _add(table: Table, *cells: str) -> None:
    """A row of text from elsewhere: no markup, no control characters."""
    from rich.text import Text

    table.add_row(*(Text(harmless(cell)) for cell in cells))


def _shown(rows: Sequence[T], what: str, wide: bool) -> Sequence[T]:
    """The first rows; what is left away is said on stderr."""
    if not wide and len(rows) > MAX_ROWS:
        note(f"showing the first {MAX_ROWS} of {len(rows)} {what}; -o wide shows all")
        return rows[:MAX_ROWS]
    return rows


def _slo_lines(record: FleetGoodput) -> list[str]:
    slo: Any = record.slo
    attained = "unknown" if slo.attained is None else f"{slo.attained:.4f}"
    lines = [f"objective {slo.objective:g}: attained {attained}"]
    if slo.burn_rate is not None:
        recent = "unknown (no time)" if slo.recent_burn_rate is None else f"{slo.recent_burn_rate:.2f}"
        lines += [
            f"error budget {slo.budget_gpu_h:.3f} GPU-h: {slo.spent_gpu_h:.3f} spent, {slo.left_gpu_h:.3f} left "
            f"({format_share(slo.left_share, 1.0)})",
            f"burn rate {slo.burn_rate:.2f} over the window, {recent} since {clock(slo.recent_since)}",
        ]
    if slo.runs_left_out:
        lines.append(f"{slo.runs_left_out} runs are not in the objective: no steps reported, or size unknown")
    return lines


def _rate_table(record: FleetGoodput) -> Table:
    rates = record.rates
    level = f"{rates.rates[0].level:.0%} interval" if rates.rates else "interval"
    table = make_table(
        "failures per 1000 node-days", "GPU model", "class", "time", "failures", "node-days", "rate", level
    )
    groups = [("window", rates.rates), (f"last {rates.recent_days} d", rates.recent)]
    for what, rows in [*groups, ("no lemons", rates.without_lemons)]:
        for row in rows:
            cells = [row.fault_class, what, str(row.failures), f"{row.node_days:.4g}"]
            _add(table, row.sku, *cells, f"{row.per_1000_node_days:.3g}", f"{row.low:.3g} to {row.high:.3g}")
    return table


def _rate_lines(record: FleetGoodput, *, wide: bool) -> list[str]:
    rates = record.rates
    spread = rates.dispersion
    source = "of a published trace, too little was seen" if spread.source == "typical" else f"of {spread.source} counts"
    lines = [
        f"{rates.nodes} nodes, {rates.failures} failures, {rates.incidents} incidents; their counts vary "
        f"{spread.value:.2f} times as much as chance ({source})"
    ]
    for lemon in _shown(rates.lemons, "lemon nodes", wide):
        lines.append(
            f"lemon node {lemon.node}: {lemon.failures} failures in {lemon.node_days:.4g} node-days, "
            f"{lemon.expected:.2g} expected, p = {lemon.p_value:.2g}"
        )
    for burst in _shown(rates.bursts, "bursts", wide):
        where = f" on {', '.join(burst.nodes)}" if burst.nodes else ""
        lines.append(f"burst at {clock(burst.time)}: {burst.failures} failures are one {burst.fault_class}{where}")
    return lines
