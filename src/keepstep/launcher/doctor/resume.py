"""`keepstep doctor resume`: does a script come back as it was? Three short runs, compared bit by bit.

Run A is not interrupted. Run A2 is the same once more: what differs between the two is not deterministic by itself and says
nothing about resuming. In run B a rank is killed and the job resumes. The checkpoints after the resume are compared with those of
run A in the order of their steps, so the first difference is found where it begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from keepstep.launcher.doctor.resumestate import (
    Difference,
    checkpoints_by_step,
    compare_states,
    last_life,
    read_state,
)
from keepstep.records import frames
from keepstep.records.codec import to_json
from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.resumecheck import CheckPlan

Outcome = Literal["same", "diverged", "nondeterministic"]
MAX_LISTED = 200
"""Differences that are written down; more of them say nothing new."""
_END_GRACE_S = 30.0
_LOG_TAIL_LINES = 15
_HIDDEN = ("KEEPSTEP_", "PET_", "TORCHELASTIC_")
"""Settings of an outer launcher or of the user's own runs must not reach the runs that are compared."""


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. `steps`: completed steps to compare up to; `kill_step`: rank `kill_rank` is killed before this step begins."""

    script: str
    args: tuple[str, ...] = ()
    folder: str
    nproc: int = 1
    steps: int = 8
    kill_step: int = 5
    kill_rank: int = 0
    every: int = 1
    limit_s: float = 600.0
    ignore: tuple[str, ...] = ()


Runner = Callable[[CheckOptions, "RunFolder", str | None], None]
"""Runs the script once in a folder, with an injection or None. Raises KeepstepError when it does not end well."""


class ResumeCheck(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.resume_check/1`.

    `first`: the difference that is most likely the cause of the others; `why` and `fix` speak of it. `differences`: the likely
    cause first, at most MAX_LISTED. `nondeterministic`: keys that differ already between two uninterrupted runs, or before the
    kill; they are not compared.
    """

    schema: str = "keepstep.resume_check/1"
    outcome: Outcome
    script: str
    nproc: int
    kill_step: int
    restored_step: int
    compared_steps: list[int]
    first: Difference | None = None
    why: str = ""
    fix: str = ""
    differences: list[Difference] = []
    differing_keys: int = 0
    nondeterministic: list[str] = []
    folder: str


class RunFolder(msgspec.Struct, frozen=True):
    """Where one of the runs keeps its things."""

    path: Path

    @property
    def run_dir(self) -> Path:
        """The launcher's run folder."""
        return self.path / "run"

    @property
    def root(self) -> Path:
        """Root of its checkpoints."""
        return self.path / "checkpoints"

    @property
    def observed(self) -> Path:
        """What its ranks observed."""
        return self.path / "observed"

    @property
    def log(self) -> Path:
        """Its output."""
        return self.path / "output.log"


def check_options(options: CheckOptions) -> None:
    """Raises ConfigError for numbers that leave nothing to compare."""
    if not Path(options.script).is_file():
        raise ConfigError(f"SCRIPT {options.script!r}: no such file (working directory {Path.cwd()})")
    if not options.every < options.kill_step < options.steps:
        raise ConfigError(
            f"--kill-at {options.kill_step}: must lie after the first save (--every {options.every}) and before the last step "
            f"(--steps {options.steps}), so that there is something to resume from and something to compare"
        )
    if not 0 <= options.kill_rank < options.nproc:
        raise ConfigError(f"--kill-rank {options.kill_rank}: the check has {options.nproc} ranks (--nproc-per-node)")
    if options.steps // options.every * options.every < options.kill_step + 1:
        raise ConfigError(
            f"--every {options.every}: no checkpoint between the kill at {options.kill_step} and --steps {options.steps}"
        )


def check_resume(options: CheckOptions, run_script: Runner | None = None) -> ResumeCheck:
    """Run the script three times and compare. Raises ConfigError, or KeepstepError when a run did not do its part.

    `run_script` runs the script once, in another way than under `keepstep run`.
    """
    check_options(options)
    run_script = run_script or supervised
    whole, again, stopped = (RunFolder(Path(options.folder, name)) for name in ("whole", "again", "stopped"))
    run_script(options, whole, None)
    expected = _committed(whole, options)
    run_script(options, again, None)
    run_script(options, stopped, f"kill@step={options.kill_step},rank={options.kill_rank}")
    restored = _restored_step(stopped, options)
    found = checkpoints_by_step(stopped.root, {0: restored})
    noise = _nondeterministic(whole, again, expected, _committed(again, options))
    noise |= _nondeterministic(whole, stopped, expected, {s: f for s, f in found.items() if s <= restored})
    steps = [step for step in expected if step > restored and step in found]
    if not steps:
        raise KeepstepError(
            f"the run resumed at step {restored} and the uninterrupted one saved at {list(expected)}: no checkpoint after the "
            f"resume to compare; give more --steps (see {options.folder})"
        )
    differences: dict[tuple[str, int | None], Difference] = {}
    for step in steps:
        one = read_state(whole.root, expected[step], whole.observed)
        two = read_state(stopped.root, found[step], stopped.observed)
        for difference in compare_states(one, two, step):
            key = (difference.key, difference.rank)
            if (
                key not in noise
                and not _ignored(difference.key, options.ignore)
                and not _is_begin(difference, restored)
            ):
                differences.setdefault(key, difference)
    return _judge(options, restored, steps, list(differences.values()), noise)


def _ignored(key: str, patterns: Sequence[str]) -> bool:
    return any(key == pattern or key.startswith((f"{pattern}/", f"{pattern}.")) for pattern in patterns)


def _is_begin(difference: Difference, restored: int) -> bool:
    """A variable that keeps what restore() returned is another one for a good reason."""
    return difference.kind == "variable" and (difference.expected, difference.found) == ("0", str(restored))


# ---- running


def supervised(options: CheckOptions, run: RunFolder, inject: str | None) -> None:
    """One `keepstep run` of the script. Raises KeepstepError, with the end of its output, when it does not end well."""
    run.path.mkdir(parents=True)
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--standalone", "--run-dir", str(run.run_dir)]
    command += ["--nproc-per-node", str(options.nproc), "--max-restarts", "1" if inject else "0"]
    if inject:
        command += ["--inject", inject]
    env = {k: v for k, v in os.environ.items() if not k.startswith(_HIDDEN)}
    plan = CheckPlan(folder=str(run.observed), until_step=options.steps)
    env |= {
        "KEEPSTEP_HOME": str(Path(options.folder, "home")),
        frames.ENV_CKPT_ROOT: str(run.root),
        frames.ENV_CKPT_EVERY_STEPS: str(options.every),
        frames.ENV_RESUME_CHECK: to_json(plan).decode(),
    }
    with run.log.open("wb") as log:
        child = subprocess.Popen(
            [*command, options.script, *options.args],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
        )
        try:
            code = child.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            raise KeepstepError(
                f"the run in {run.path} was not over after {options.limit_s:g} s; make the script's steps smaller or give --timeout"
            ) from None
        finally:
            if child.poll() is None:
                _end(child)
    if code:
        tail = "\n".join(run.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        raise KeepstepError(f"the script ended with exit code {code} (all output: {run.log}):\n{tail}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a launcher as a person would, so that it ends its ranks."""
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_GRACE_S)
        return
    child.kill()
    child.wait()


def _committed(run: RunFolder, options: CheckOptions) -> dict[int, str]:
    found = checkpoints_by_step(run.root)
    if not found:
        raise KeepstepError(
            f"{options.script} saved nothing in {options.steps} steps (output: {run.log}). It must use ks.Checkpointer with "
            "restore() before its loop and maybe_save(step) after each step; root and cadence are set by this check"
        )
    return found


def _restored_step(run: RunFolder, options: CheckOptions) -> int:
    cycle, restored = last_life(run.root)
    if cycle == 0:
        raise KeepstepError(
            f"no rank was killed and resumed: the script ended before step {options.kill_step} began, has no `with run.step(n)`, "
            f"or saved nothing afterwards (output: {run.log}); give a smaller --kill-at"
        )
    if not restored:
        raise KeepstepError(
            f"the job began at step 0 again instead of resuming from a checkpoint (output: {run.log}). "
            "Does the script call Checkpointer.restore() before its loop?"
        )
    return restored


# ---- judging


def _nondeterministic(
    one: RunFolder, two: RunFolder, expected: dict[int, str], found: dict[int, str]
) -> set[tuple[str, int | None]]:
    """Keys that differ where nothing was resumed."""
    noise = set()
    for step in expected.keys() & found.keys():
        mine = read_state(one.root, expected[step], one.observed)
        other = read_state(two.root, found[step], two.observed)
        noise |= {(difference.key, difference.rank) for difference in compare_states(mine, other, step)}
    return noise


def _judge(
    options: CheckOptions,
    restored: int,
    steps: list[int],
    differences: list[Difference],
    noise: set[tuple[str, int | None]],
) -> ResumeCheck:
    lost = [difference for difference in differences if difference.kind != "variable"]
    begin = min((difference.first_step for difference in lost), default=0)
    # Variables are shown where the state begins to differ; alone, or later, they mean little.
    shown = [d for d in differences if lost and (d.kind != "variable" or d.first_step <= begin)]
    noisy = sorted({key for key, _ in noise})
    # A generator that nobody seeds and nobody draws from harms nothing; one that is drawn from shows in other keys.
    state_noise = [key for key in noisy if "/" in key and not key.startswith("rng/")]
    outcome: Outcome = "diverged" if lost else ("nondeterministic" if state_noise else "same")
    first = next((d for d in shown if d.first_step <= begin), None)
    why, fix = explain(first) if first is not None else ("", "")
    if outcome == "nondeterministic":
        why = (
            f"two uninterrupted runs differ from one another ({len(state_noise)} keys, the first is {state_noise[0]}), so an "
            "interrupted one cannot be compared bit by bit"
        )
        fix = (
            "seed Python, numpy and torch at the start of the script, before the model is made, and ask torch for deterministic "
            "kernels (torch.use_deterministic_algorithms(True))"
        )
    return ResumeCheck(
        outcome=outcome,
        script=options.script,
        nproc=options.nproc,
        kill_step=options.kill_step,
        restored_step=restored,
        compared_steps=steps,
        first=first,
        why=why,
        fix=fix,
        differences=shown[:MAX_LISTED],
        differing_keys=len(shown),
        nondeterministic=noisy[:MAX_LISTED],
        folder=options.folder,
    )


def explain(first: Difference) -> tuple[str, str]:
    """Why the first difference comes about as far as its place tells, and what to change."""
    entry = first.key.partition("/")[0]
    if first.kind == "saved" and entry == "rng":
        return (
            "the random state after the resume is another one than at the same step without interruption",
            "seed before Checkpointer.restore(), which sets the saved random state, and draw nothing between restore() and the "
            "loop; iterating a DataLoader draws from it: give it a generator of its own, or use ks.ResumableSampler",
        )
    if first.kind == "not_saved":
        return (
            f"`{entry}` ({first.type}) has a state of its own, and it is in no checkpoint",
            f'add it to the state: ks.Checkpointer(root, state={{..., "{entry.rpartition(".")[2]}": {entry}}})',
        )
    if first.kind == "variable":
        return (
            f"`{first.key}` is a plain value of the script that no checkpoint holds; it was {first.expected} and is {first.found}",
            "save it: give the object that holds it state_dict() and load_state_dict(state), and put it into the Checkpointer's "
            "state (for the place in the data: ks.ResumableSampler)",
        )
    if first.is_tensor and first.rank is None:
        return (
            f"tensors of {entry!r} differ, while random state and plain values that come before them agree: the training after "
            "the resume saw other data, or used state that the check cannot see",
            "put the place in the data into the state (ks.ResumableSampler); save only when no accumulation window is open, or "
            "save the gradients; with DDP on more than two ranks the first step after any start adds gradients in another order "
            "(find_unused_parameters=True avoids it)",
        )
    return (
        f"`{first.key}` is saved, and was {first.found} instead of {first.expected} after the resume",
        f"load_state_dict of {entry!r} does not bring back all that its state_dict gives, or the script changes it after restore()",
    )
