"""`keepstep demo`: train, break the run four ways, and prove that nothing was lost.

Two real runs of the example with one seed: an undisturbed reference, then one with faults. Each is a `keepstep run` of
its own; the faults are ordinary `--inject` specifications. What is shown comes from the run folder and from the ledger
in which the ranks wrote every sample they trained on.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib.resources
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from keepstep.cli.goodput import read_cycles, render_goodput
from keepstep.cli.output import emit, make_console, note, output_option
from keepstep.goodput.facts import UNKNOWN_CAUSE, canonical, cycle_facts
from keepstep.launcher.coordination.journal import epochs, read_marks
from keepstep.records.codec import from_json
from keepstep.records.cycle import PHASES, Goodput
from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.exits import EXIT_FAILURE
from keepstep.records.inject import Injection, parse_injection
from keepstep.records.timeline import Mark

WORLD_SIZE = 2
HANG_TIMEOUT_S = 4.0
RUN_LIMIT_S = 600.0  # a run that takes longer is ended and the demo fails; far above the minute that both take
HANGS = ("hang", "stop")
ENDS_CYCLE = ("kill", "raise", "exit", *HANGS)
GOES_ON = ("corrupt-checkpoint", "coordinator-kill", "slow")


class LedgerLine(msgspec.Struct, frozen=True):
    """One optimizer step of one rank: the samples it used, in order, and when it was done."""

    cycle: int
    step: int
    rank: int
    samples: list[int]
    done_ns: int = 0


class DemoFault(msgspec.Struct, frozen=True, kw_only=True):
    """One injected fault. `first_step_s`: from the fault until all ranks had completed a step again."""

    kind: str
    spec: str
    cycle: int
    detected_s: float | None = None
    first_step_s: float | None = None
    fault_class: str = msgspec.field(name="class", default="unknown")
    note: str = ""


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was refused at restore, and the older one used instead."""

    checkpoint: str
    step: int
    reason: str
    cycle: int
    used_instead: str | None
    used_step: int | None


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.demo/1`."""

    schema: str = "keepstep.demo/1"
    seed: int
    steps: int
    world_size: int
    bitwise_equal: bool
    samples_exactly_once: bool
    faults: list[DemoFault]
    quarantined: list[Quarantined]
    goodput: Goodput
    weights_sha256: dict[str, str]
    samples_used: int
    steps_redone: int
    failures: list[str]
    kept: str | None = None


# ---- the ledger


def read_ledger(folder: Path) -> list[LedgerLine]:
    """All lines of all ledger files. The last line of a file may be cut off: its rank was killed while writing it."""
    lines = []
    for path in sorted(folder.glob("ledger-c*-rank*.jsonl")):
        for raw in path.read_bytes().splitlines(keepends=True):
            if raw.endswith(b"\n"):
                lines.append(from_json(raw, LedgerLine))
    return lines


def surviving_history(
    lines: Sequence[LedgerLine], restored: dict[int, int], steps: int, problems: list[str]
) -> dict[tuple[int, int], list[int]]:
    """Samples by (step, rank) in the history that led to the final weights; what does not fit is added to `problems`.

    `restored`: the step each cycle began at. A step belongs to the last cycle that began at or before it; what earlier
    cycles did at that step was rolled back, and no later cycle may have touched it.
    """
    owner = [max((c for c, begin in restored.items() if begin <= step), default=-1) for step in range(steps)]
    history: dict[tuple[int, int], list[int]] = {}
    for line in lines:
        if not 0 <= line.step < steps or line.cycle not in restored or line.cycle > owner[line.step]:
            problems.append(f"cycle {line.cycle} executed step {line.step}, which its records do not explain")
        elif line.cycle == owner[line.step]:
            if (line.step, line.rank) in history:
                problems.append(f"rank {line.rank} executed step {line.step} twice in cycle {line.cycle}")
            history[line.step, line.rank] = line.samples
    return history


def check_samples(
    reference: Sequence[LedgerLine], faulted: Sequence[LedgerLine], restored: dict[int, int], steps: int, world: int
) -> list[str]:
    """Why the faulted run's surviving history is not the reference's samples, each exactly once; empty when it is.

    Sample ids count on over epochs, so one id twice is one sample twice within an epoch.
    """
    problems: list[str] = []
    expected = surviving_history(reference, {0: 0}, steps, problems)
    actual = surviving_history(faulted, restored, steps, problems)
    for name, history in (("reference", expected), ("faulted", actual)):
        missing = [key for key in itertools.product(range(steps), range(world)) if key not in history]
        problems += [f"{name} run: no record of step {step} on rank {rank}" for step, rank in missing]
        counts = collections.Counter(sample for used in history.values() for sample in used)
        repeated = sorted(sample for sample, count in counts.items() if count > 1)
        if repeated:
            problems.append(f"{name} run: {len(repeated)} samples used more than once, the first is {repeated[0]}")
    for key in sorted(expected.keys() & actual.keys()):
        if expected[key] != actual[key]:
            step, rank = key
            problems.append(f"step {step}, rank {rank}: samples {actual[key]} instead of {expected[key]}")
    return problems


# ---- running


class RunFiles:
    """Where one of the two runs keeps its things."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "output.log"
        self.checkpoints, self.ledger, self.weights = folder / "checkpoints", folder / "ledger", folder / "weights.pt"

    def last_step(self, cycle: int) -> int | None:
        """The step rank 0 completed last in `cycle`, from the end of its ledger file."""
        path = self.ledger / f"ledger-c{cycle:04d}-rank0.jsonl"
        with contextlib.suppress(OSError, msgspec.DecodeError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            whole = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
            return from_json(whole, LedgerLine).step + 1
        return None


class Watcher:
    """Live progress of one run on stderr: a bar on a terminal, and a line for each thing that happens."""

    def __init__(self, progress: Progress, title: str, steps: int, files: RunFiles) -> None:
        self.progress, self.title, self.files = progress, title, files
        self.task: TaskID = progress.add_task(title, total=steps)
        self.told: set[tuple[int, str]] = set()

    def look(self) -> None:
        """Show what is new since the last look."""
        cycles = read_cycles(self.files.run_dir)
        for record in cycles:
            if record.cycle and record.restored_step is not None:
                origin = record.restored_checkpoint or "the beginning"
                self._tell(record.cycle, "begin", f"goes on at step {record.restored_step} from {origin}")
            if record.fault:
                what = f"{record.fault.get('kind')} of rank {record.fault.get('rank')}"
                self._tell(record.cycle, "fault", f"ended by {what} ({record.fault.get('detail')})")
        if cycles:
            step = self.files.last_step(cycles[-1].cycle)
            self.progress.update(self.task, description=f"{self.title}, cycle {cycles[-1].cycle}", completed=step)

    def _tell(self, cycle: int, what: str, text: str) -> None:
        if (cycle, what) not in self.told:
            self.told.add((cycle, what))
            self.progress.console.print(f"{self.title}: cycle {cycle} {text}", markup=False)


def example_script() -> Path:
    """The example, from an installed wheel or else from the source checkout. Raises KeepstepError when in neither."""
    folders = (Path(str(importlib.resources.files("keepstep.cli"))), Path(__file__).resolve().parents[3])
    found = [path for folder in folders if (path := folder / "examples" / "train_gpt.py").is_file()]
    if not found:
        raise KeepstepError(f"no examples/train_gpt.py in {folders[0]} or {folders[1]}; install keepstep again")
    return found[0]


def run_example(files: RunFiles, script: Path, watcher: Watcher, *, seed: int, steps: int, specs: Sequence[str]) -> int:
    """One `keepstep run` of the example; returns its exit code."""
    files.folder.mkdir(parents=True)
    run_flags = ["--standalone", "--nproc-per-node", str(WORLD_SIZE), "--run-dir", str(files.run_dir)]
    run_flags += ["--hang-timeout", str(HANG_TIMEOUT_S)]
    for spec in specs:
        run_flags += ["--inject", spec]
    script_flags = ["--steps", str(steps), "--seed", str(seed), "--save-every", str(save_every(steps))]
    script_flags += ["--root", str(files.checkpoints), "--ledger", str(files.ledger), "--out", str(files.weights)]
    command = [sys.executable, "-m", "keepstep.cli.main", "run", *run_flags, str(script), *script_flags]
    # Settings of an outer launcher or of the user's own runs must not reach the two runs that are compared.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCHELASTIC_"))}
    env["KEEPSTEP_HOME"] = str(files.folder / "home")  # keys and marks of two runs that end with it
    deadline = time.monotonic() + RUN_LIMIT_S
    with files.log.open("wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            while child.poll() is None and time.monotonic() < deadline:
                watcher.look()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.3)
            watcher.look()
        finally:
            if child.poll() is None:  # too slow, or the user pressed Ctrl-C here
                child.terminate()
                child.wait()
    return child.returncode


# ---- judging


class Evidence:
    """What the faulted run left behind."""

    def __init__(self, files: RunFiles) -> None:
        self.files, self.ledger = files, read_ledger(files.ledger)
        self.cycles, self.marks = read_cycles(files.run_dir), read_marks(files.run_dir)
        self.epochs = epochs(files.run_dir)
        # The class that the time lost is charged to.
        self.causes = {f.cycle: f.fault.cause for f in cycle_facts(canonical(self.marks)) if f.fault is not None}
        self.goodput = from_json((files.run_dir / "summary.json").read_bytes(), Goodput)

    def mark(self, kind: str, cycle: int) -> Mark | None:
        """The first mark of this kind in this cycle."""
        return next((m for m in self.marks if m.kind == kind and m.cycle == cycle), None)

    def restored(self) -> dict[int, int]:
        """The step each cycle began at; cycles that died before they restored are left out, and may have no ledger."""
        steps = {c.cycle: c.restored_step for c in self.cycles if c.restored_step is not None}
        return {0: 0} | steps


def judge_fault(injection: Injection, spec: str, evidence: Evidence, failures: list[str]) -> DemoFault:
    """Times and class of one injected fault; what should have happened and did not is added to `failures`."""
    fault = DemoFault(kind=injection.kind, spec=spec, cycle=injection.cycle)
    if injection.kind == "coordinator-kill":
        return judge_coordinator(injection, fault, evidence, failures)
    if injection.kind == "slow":
        return fault
    after = injection.cycle + 1
    ended, first = evidence.mark("fault", injection.cycle), evidence.mark("first_step", after)
    if ended is None or first is None:
        failures.append(f"{spec}: cycle {injection.cycle} was not ended by a fault and followed by another cycle")
        return fault
    occurred_ns, detected_ns = int(ended.attrs["occurred_ns"]), int(ended.attrs["detected_ns"])
    text = f"cycle {after} went on at step {evidence.restored().get(after)}"
    cause = evidence.causes.get(injection.cycle, UNKNOWN_CAUSE)
    if injection.kind == "corrupt-checkpoint":
        # Noticed when it is to be restored, before a byte of it is parsed; the flipped bit's time is the file's own.
        refused = evidence.mark("quarantined", after)
        if refused is None:
            failures.append(f"{spec}: no checkpoint was refused in cycle {after}")
            return fault
        name, detected_ns, cause = str(refused.attrs.get("checkpoint")), refused.t_ns, UNKNOWN_CAUSE
        occurred_ns = max(p.stat().st_mtime_ns for p in (evidence.files.checkpoints / name).glob("rank-*"))
        text = f"{name} refused; {text}"
    elif (ended.attrs.get("kind") == "hang", ended.attrs.get("rank")) != (injection.kind in HANGS, injection.rank):
        failures.append(f"{spec}: the records say {ended.attrs.get('kind')} of rank {ended.attrs.get('rank')}")
    times = {"detected_s": (detected_ns - occurred_ns) / 1e9, "first_step_s": (first.t_ns - occurred_ns) / 1e9}
    return msgspec.structs.replace(fault, **times, fault_class=cause, note=text)


def judge_coordinator(injection: Injection, fault: DemoFault, evidence: Evidence, failures: list[str]) -> DemoFault:
    """Training must go on in the same cycle, and a new coordinator must have taken over the journal."""
    step = injection.step or 0
    mine = [line for line in evidence.ledger if line.cycle == injection.cycle]
    after = [line for line in mine if line.step >= step]
    before_ns = max((line.done_ns for line in mine if line.step < step), default=0)
    gap = next((m for m in evidence.marks if m.kind == "gap" and int(m.attrs["end_ns"]) > before_ns), None)
    if gap is None or len(evidence.epochs) < 2:
        failures.append(f"{fault.spec}: no second coordinator took over the journal")
        return fault
    if len({line.step for line in after}) < 2:
        failures.append(f"{fault.spec}: training did not go on in cycle {injection.cycle}")
        return fault
    begin_ns, end_ns = int(gap.attrs["begin_ns"]), int(gap.attrs["end_ns"])
    meanwhile = len({line.step for line in after if line.done_ns < end_ns})
    first_ns = max(line.done_ns for line in after if line.step == min(x.step for x in after))
    text = f"detected: time until a new coordinator was ready; {meanwhile} steps were done without one"
    times = {"detected_s": (end_ns - begin_ns) / 1e9, "first_step_s": (first_ns - begin_ns) / 1e9}
    return msgspec.structs.replace(fault, **times, note=text)


def list_quarantined(evidence: Evidence) -> list[Quarantined]:
    """Every checkpoint that was refused, with what the cycle used instead."""
    found: dict[str, Quarantined] = {}
    used = {c.cycle: c for c in evidence.cycles}
    for mark in (m for m in evidence.marks if m.kind == "quarantined"):
        name, instead = str(mark.attrs.get("checkpoint")), used[mark.cycle]
        found[name] = Quarantined(
            checkpoint=name,
            step=int(mark.attrs.get("step", -1)),
            reason=str(mark.attrs.get("reason", "")),
            cycle=mark.cycle,
            used_instead=instead.restored_checkpoint,
            used_step=instead.restored_step,
        )
    return list(found.values())


def judge(
    reference: RunFiles, evidence: Evidence, *, specs: Sequence[str], seed: int, steps: int, kept: Path | None
) -> DemoReport:
    """Compare the two runs and account for the faulted one."""
    failures: list[str] = []
    injections = [parse_injection(spec) for spec in specs]
    faults = [judge_fault(i, spec, evidence, failures) for i, spec in zip(injections, specs, strict=True)]
    digests = {f.folder.name: hashlib.sha256(f.weights.read_bytes()).hexdigest() for f in (reference, evidence.files)}
    equal = len(set(digests.values())) == 1
    if not equal:
        failures.append(f"the final weights differ: {digests['reference'][:16]} and {digests['faulted'][:16]}")
    expected = read_ledger(reference.ledger)
    sample_problems = check_samples(expected, evidence.ledger, evidence.restored(), steps, WORLD_SIZE)
    failures += [f"samples: {problem}" for problem in sample_problems[:10]]
    ended = {i.cycle for i in injections if i.kind in ENDS_CYCLE}
    if len(evidence.cycles) != len(ended) + 1:
        failures.append(f"{len(evidence.cycles)} cycles instead of {len(ended) + 1}: something else went wrong as well")
    quarantined = list_quarantined(evidence)
    if sum(i.kind == "corrupt-checkpoint" for i in injections) != len(quarantined):
        failures.append(f"{len(quarantined)} checkpoints were quarantined")
    failures += [f"{q.checkpoint}: no older one was used" for q in quarantined if not 0 <= (q.used_step or 0) < q.step]
    total_ns = sum(evidence.goodput.phases_ns.values())
    if total_ns != evidence.goodput.wall_ns or set(evidence.goodput.phases_ns) != set(PHASES):
        failures.append(f"the phases add up to {total_ns} ns, the wall-clock is {evidence.goodput.wall_ns} ns")
    return DemoReport(
        seed=seed,
        steps=steps,
        world_size=WORLD_SIZE,
        bitwise_equal=equal,
        samples_exactly_once=not sample_problems,
        faults=faults,
        quarantined=quarantined,
        goodput=evidence.goodput,
        weights_sha256=digests,
        samples_used=sum(len(line.samples) for line in expected),
        steps_redone=len({(line.cycle, line.step) for line in evidence.ledger}) - steps,
        failures=failures,
        kept=str(kept) if kept else None,
    )


# ---- showing


def faults_table(report: DemoReport) -> Table:
    """Each fault, when it was noticed and when training went on."""
    table = Table(title="faults", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("fault", "detected s", "first step s", "class", "then"):
        table.add_column(name, justify="right" if name.endswith(" s") else "left", overflow="fold")
    for fault in report.faults:
        figures = ["-" if value is None else f"{value:.3f}" for value in (fault.detected_s, fault.first_step_s)]
        table.add_row(fault.spec, *figures, fault.fault_class, fault.note)
    return table


def show(report: DemoReport, evidence: Evidence, console: Console) -> None:
    """The whole story for a person."""
    console.print(faults_table(report))
    render_goodput(report.goodput, console)
    lines = []
    for cycle in evidence.cycles:
        steps = [line.step for line in evidence.ledger if line.cycle == cycle.cycle]
        done = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
        source = f"restored from {cycle.restored_from}: {cycle.restored_checkpoint}"
        lines.append(f"cycle {cycle.cycle}: {done}, {source if cycle.restored_checkpoint else 'from the beginning'}")
    for bad in report.quarantined:
        lines.append(f"quarantined: {bad.checkpoint} (step {bad.step}): {bad.reason}")
        lines.append(f"  used instead: {bad.used_instead} (step {bad.used_step})")
    equal = "bitwise equal to" if report.bitwise_equal else "NOT EQUAL to"
    once = "each used exactly once" if report.samples_exactly_once else "NOT each used exactly once"
    lines += [
        f"final weights: SHA-256 {report.weights_sha256['faulted']}, {equal}",
        f"the reference: SHA-256 {report.weights_sha256['reference']}",
        f"samples: {report.samples_used}, {once} in the {report.steps} steps that led to these weights",
        f"steps done again after a rollback: {report.steps_redone}",
    ]
    if report.kept:
        lines.append(f"weights, ledgers, checkpoints and run folders of both runs: {report.kept}")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


# ---- the command


def save_every(steps: int) -> int:
    """Steps between saves: ten in all."""
    return steps // 10


def default_faults(every: int) -> list[str]:
    """The four faults of the story, each between two saves; `every` is the number of steps between saves."""
    middle = 2 * every // 3
    return [
        f"kill@step={2 * every + middle},rank=1",
        f"hang@step={4 * every + middle},rank=0,cycle=1",
        f"corrupt-checkpoint@step={7 * every + middle},cycle=2",
        f"kill@step={7 * every + middle + 1},rank=1,cycle=2",
        f"coordinator-kill@step={7 * every},cycle=3",
    ]


def parse_faults(texts: Sequence[str], steps: int) -> list[str]:
    """Split and check `--faults`. Raises ConfigError for a kind after which there is nothing to compare."""
    specs = [spec.strip() for text in texts for spec in text.split(";") if spec.strip()]
    for spec in specs:
        injection = parse_injection(spec)
        if injection.kind not in ENDS_CYCLE + GOES_ON:
            valid = ", ".join(ENDS_CYCLE + GOES_ON)
            raise ConfigError(f"--faults {spec!r}: a run does not go on after {injection.kind}; use {valid}")
        if injection.step is None or injection.step >= steps:
            raise ConfigError(f"--faults {spec!r}: needs step=N with N from 0 to {steps - 1} (--steps {steps})")
    return specs


@contextlib.contextmanager
def work_folder(keep: Path | None) -> Iterator[Path]:
    """The folder of both runs. Raises ConfigError when `keep` holds something already."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="keepstep-demo-") as name:
            yield Path(name)
        return
    if keep.exists() and any(keep.iterdir()):
        raise ConfigError(f"--keep {keep}: the folder is not empty; name a new one")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


def both_runs(folder: Path, seed: int, steps: int, specs: Sequence[str]) -> tuple[RunFiles, RunFiles]:
    """Run the reference, then the faulted run. Raises KeepstepError when one of them fails."""
    runs = (RunFiles(folder / "reference"), RunFiles(folder / "faulted"))
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    script = example_script()
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
        for files, faults in zip(runs, ([], specs), strict=True):
            title = f"{files.folder.name} run"
            console.print(f"{title}: {steps} steps on {WORLD_SIZE} ranks, seed {seed}")
            watcher = Watcher(progress, title, steps, files)
            code = run_example(files, script, watcher, seed=seed, steps=steps, specs=faults)
            if code != 0:
                console.print("\n".join(files.log.read_text(errors="replace").splitlines()[-30:]), markup=False)
                raise KeepstepError(f"the {title} ended with exit code {code}; the end of its output is above")
    return runs


@click.command("demo")
@click.option("--seed", default=0, show_default=True, help="Seed of both runs: weights, dropout, order of the data.")
@click.option("--steps", default=160, show_default=True, type=click.IntRange(min=40), help="Optimizer steps.")
@click.option("--faults", multiple=True, metavar="SPEC", help="Other faults, as for run --inject; ';' between several.")
@click.option("--keep", metavar="DIR", type=click.Path(path_type=Path, file_okay=False), help="Keep both runs here.")
@output_option
def demo(seed: int, steps: int, faults: tuple[str, ...], keep: Path | None, output: str) -> None:
    """Train a small GPT, break the run four ways, and prove that nothing was lost (about a minute).

    Rank 1 is killed, rank 0 hangs, the newest checkpoint is corrupted on disk before another kill, and the coordinator
    is killed while training goes on. Exit 0 only if the final weights are bitwise equal to those of an undisturbed run
    of the same seed and every sample was used exactly once. JSON is `keepstep.demo/1`.
    """
    importlib.import_module("keepstep.launcher.node.agent")  # without its extra, say so before anything is trained
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the demo trains with torch, which is not installed: pip install torch numpy")
    specs = parse_faults(faults, steps) or default_faults(save_every(steps))
    with work_folder(keep) as folder:
        reference, faulted = both_runs(folder, seed, steps, specs)
        evidence = Evidence(faulted)
        report = judge(reference, evidence, specs=specs, seed=seed, steps=steps, kept=keep)
    emit(report, output, table=lambda console, _: show(report, evidence, console), name=lambda r: str(r.goodput.run_id))
    for failure in report.failures:
        note(f"demo failed: {failure}")
    sys.exit(EXIT_FAILURE if report.failures else 0)
