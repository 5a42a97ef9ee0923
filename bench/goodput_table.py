"""Each formula of expected goodput beside simulated campaigns, and what was published beside what the formulas give.

The worked table: 1,024, 4,096 and 16,384 GPUs at 6.5 failures per 1000 node-days, blocking 10 to 300 s, restarts of 2 and 15
minutes, at Young's interval; then terms that older formulas leave out. Campaigns are simulated event by event
(keepstep.planner.sim). `--write FILE` puts both tables between the markers in a Markdown file.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _common import Result, Target, argument_parser, emit, say
from _published import published, published_markdown
from keepstep.goodput.campaign import given_rate
from keepstep.goodput.interval import intervals, young_s
from keepstep.goodput.job import FailureKind, Job, RestartPhases, Tier
from keepstep.goodput.renewal import forecast
from keepstep.planner.plan import Circumstances, make_plan
from keepstep.planner.scenario import Scenario
from keepstep.planner.sim.campaign import simulate

DAYS = 54.0
RATE = 6.5e-3
MINUTE, DAY = 60.0, 86_400.0
MARKERS = (
    "<!-- worked table: bench/goodput_table.py --full --write docs/goodput.md -->",
    "<!-- end of the worked table -->",
)
PUBLISHED_MARKERS = ("<!-- published: the same -->", "<!-- end of published -->")


class Cell(NamedTuple):
    """A job, how it is called, and whether failures hit restarts in its simulation."""

    name: str
    job: Job
    exposed: bool = True


class Row(NamedTuple):
    """A cell with what every formula and the simulation say."""

    cell: Cell
    first_order: float
    meta: float
    exact: float
    immune: float
    simulated: float
    standard_error: float
    p5: float
    p95: float

    @property
    def formula(self) -> float:
        return self.exact if self.cell.exposed else self.immune

    @property
    def deviation(self) -> float:
        """Exact minus simulated, in standard errors."""
        return (self.formula - self.simulated) / self.standard_error


def job(
    gpus: int,
    block_s: float,
    restart_s: float,
    *,
    rate: float = RATE,
    lag_s: float = 0.0,
    interval_s: float | None = None,
    kinds: tuple[FailureKind, ...] = (FailureKind(name="failure", share=1.0),),
) -> Job:
    """A job of one tier on nodes of 8 GPUs, at Young's interval unless given."""
    nodes = gpus // 8
    mttf_s = DAY / (rate * nodes)
    return Job(
        nodes=nodes,
        rate_per_node_day=rate,
        interval_s=interval_s or young_s(block_s, mttf_s),
        tiers=(Tier(name="disk", block_s=block_s, persist_lag_s=lag_s),),
        kinds=kinds,
        restart=RestartPhases(start_s=restart_s),
    )


def worked() -> list[Cell]:
    """The 24 cells."""
    return [
        Cell(f"{gpus}, d={block_s:g} s, R={restart_s / MINUTE:g} min", job(gpus, block_s, restart_s))
        for gpus in (1024, 4096, 16_384)
        for block_s in (10.0, 30.0, 60.0, 300.0)
        for restart_s in (2 * MINUTE, 15 * MINUTE)
    ]


def others() -> list[Cell]:
    """What older formulas leave out, other rates, other sizes."""
    cells = [Cell("16384, d=10 s, R=15 min, restarts immune", job(16_384, 10.0, 900.0), False)]
    cells.append(Cell("16384, d=300 s, R=15 min, restarts immune", job(16_384, 300.0, 900.0), False))
    cells += [
        Cell(f"16384, d=10 s, R={r / MINUTE:g} min, durable {p:g} s later", job(16_384, 10.0, r, lag_s=p))
        for p, r in ((60.0, 120.0), (300.0, 120.0), (60.0, 900.0))
    ]
    for share, limit_s in ((0.1, 600.0), (0.3, 600.0), (0.3, 60.0)):
        kinds = (
            FailureKind(name="crash", share=1.0 - share),
            FailureKind(name="hang", share=share, detect_s=limit_s),
        )
        name = f"16384, d=10 s, R=2 min, {100 * share:.0f} % hangs noticed after {limit_s:g} s"
        cells.append(Cell(name, job(16_384, 10.0, 120.0, kinds=kinds)))
    cells.append(Cell("16384 at 3.79 (Llama 3), d=10 s, R=10 min", job(16_384, 10.0, 600.0, rate=3.79e-3)))
    cells.append(Cell("16384 at 23.7 (all causes, Meta), d=10 s, R=15 min", job(16_384, 10.0, 900.0, rate=23.7e-3)))
    cells.append(Cell("131072, d=10 s, R=2 min", job(131_072, 10.0, 120.0)))
    cells.append(Cell("131072, d=10 s, R=15 min", job(131_072, 10.0, 900.0)))
    return cells + tiers()


def tiers() -> list[Cell]:
    """Two and three tiers."""
    near = Tier(name="memory", block_s=5.0, load_s=5.0)
    restart = RestartPhases(decide_s=5.0, start_s=60.0)
    cells = []
    for lag_s in (0.0, 120.0):
        two = Job(
            nodes=2048, rate_per_node_day=RATE, interval_s=240.0, restart=restart,
            tiers=(near, Tier(name="disk", every=5, block_s=8.0, persist_lag_s=lag_s, load_s=60.0)),
            kinds=(FailureKind(name="process", share=0.7, detect_s=5.0), FailureKind(name="node", share=0.3, tier=1)),
        )  # fmt: skip
        cells.append(Cell(f"16384, memory every 4 min, disk every 20 min, durable {lag_s:g} s later", two))
    three = Job(
        nodes=2048, rate_per_node_day=RATE, interval_s=240.0, restart=restart,
        tiers=(near, Tier(name="peer", every=3, block_s=4.0, load_s=10.0), Tier(name="object", every=5, block_s=2.0, load_s=120.0)),
        kinds=(
            FailureKind(name="process", share=0.6, detect_s=5.0), FailureKind(name="node", share=0.3, tier=1),
            FailureKind(name="rack", share=0.1, tier=2),
        ),
    )  # fmt: skip
    return [*cells, Cell("16384, memory 4 min, peer 12 min, object store 1 h", three)]


def evaluate(cell: Cell, runs: int, seed: int) -> Row:
    """Formulas and simulation of one cell."""
    there = forecast(cell.job)
    found = simulate(Scenario(job=cell.job, days=DAYS, restart_exposed=cell.exposed), runs, seed)
    good = found.goodput
    return Row(
        cell,
        there.first_order,
        there.meta,
        there.exact,
        there.exact_restart_immune,
        good.mean,
        good.standard_error,
        good.p5,
        good.p95,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table for docs/goodput.md; exact values in bold where the first-order form is off by more than a point."""
    lines = [
        "| job | interval, min | first order | Meta | exact | restart immune | simulated | exact - simulated, s.e. "
        "| 5 % to 95 % of campaigns |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bold = "**" if abs(row.first_order - row.formula) > 0.01 else ""
        cells = [
            row.cell.name,
            f"{row.cell.job.interval_s / MINUTE:.1f}",
            f"{row.first_order:.4f}",
            f"{row.meta:.4f}",
            f"{bold}{row.exact:.4f}{bold}",
            f"{row.immune:.4f}",
            f"{row.simulated:.5f} +- {row.standard_error:.5f}",
            f"{row.deviation:+.1f}",
            f"{row.p5:.3f} to {row.p95:.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def timings() -> tuple[list[float], list[float]]:
    """Seconds of a plan with its interval, spares, tornado and goal, and of the closed forms of one job alone; 16,384 GPUs."""
    kinds = (
        FailureKind(name="crash", share=0.7, replace=True),
        FailureKind(name="hang", share=0.3, detect_s=600.0, replace=True),
    )
    one = job(16_384, 10.0, 120.0, lag_s=60.0, kinds=kinds)
    around = Circumstances(rate=given_rate(RATE, "given"), price_usd=2.5, repair_s=DAY, goal=0.95, block_nodes=8)
    plans, forms = [], []
    for _ in range(20):
        began = time.perf_counter()
        make_plan(one, around, {})
        plans.append(time.perf_counter() - began)
        began = time.perf_counter()
        intervals(10.0, one.mttf_s, 60.0)
        forecast(one)
        forms.append(time.perf_counter() - began)
    return plans, forms


def put(path: Path, markers: tuple[str, str], text: str) -> None:
    """Replace what stands between two markers of a file. Raises SystemExit when they are not there."""
    begin, end = markers
    old = path.read_text()
    if begin not in old or end not in old:
        raise SystemExit(f"{path} has no {begin}")
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    path.write_text(re.sub(pattern, lambda _: f"{begin}\n\n{text}\n\n{end}", old, flags=re.DOTALL))


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--runs", type=int, help="campaigns a cell (1000, with --full 4000)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this Markdown file")
    arguments = parser.parse_args()
    runs = arguments.runs or (4000 if arguments.full else 1000)
    rows = []
    for cell in [*worked(), *others()]:
        # Each cell its own campaigns: common ones would err to the same side.
        rows.append(evaluate(cell, runs, 1000 * arguments.seed + len(rows)))
        say(
            f"{cell.name}: exact {rows[-1].formula:.5f}, simulated {rows[-1].simulated:.5f}, {rows[-1].deviation:+.2f} s.e."
        )
    if arguments.write:
        put(arguments.write, MARKERS, markdown(rows))
        put(arguments.write, PUBLISHED_MARKERS, published_markdown())
    results = [
        Result(
            row.cell.name,
            system,
            "1",
            [value],
            note=f"{row.deviation:+.2f} standard errors" if system == "exact" else None,
        )
        for row in rows
        for system, value in (
            ("first order", row.first_order),
            ("Meta", row.meta),
            ("exact", row.formula),
            ("simulated", row.simulated),
        )
    ]
    results += [
        Result(row.says, "here", "", note=f"published {row.published}; {row.here}; reproduces: {row.reproduces}")
        for row in published()
    ]
    plans, forms = timings()
    results += [
        Result("plan with interval, spares, tornado, goal", "keepstep", "s", plans),
        Result("closed forms of one job", "keepstep", "s", forms),
    ]
    worst = max(abs(row.deviation) for row in rows)
    mean_square = math.sqrt(math.fsum(row.deviation**2 for row in rows) / len(rows))
    targets = [
        Target(
            "worst_deviation_se",
            worst,
            "standard errors",
            "<=",
            3.0,
            f"{len(rows)} cells of {runs} campaigns; root mean square {mean_square:.2f}",
        ),
        Target("plan_s", statistics.median(plans), "s", "<=", 2.0, "compute alone; the verb takes 0.2 s more to start"),
        Target("closed_forms_ms", 1e3 * statistics.median(forms), "ms", "<=", 50.0),
    ]
    emit("goodput_table", results, targets, output=arguments.output, packages=["numpy", "numba"])


if __name__ == "__main__":
    main()
