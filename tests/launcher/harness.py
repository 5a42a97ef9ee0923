"""Real runs for tests: a script, real `keepstep run` processes, and what their run folder says afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from keepstep.launcher.coordination.journal import read_marks
from keepstep.launcher.coordination.runfolder import read_cycles
from keepstep.records.cycle import Cycle
from keepstep.records.timeline import Mark

LIMIT_S = 90.0

TRAIN = """
import os, time
import torch, torch.distributed as dist
import keepstep.trainer as ks
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
run = ks.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optim = torch.optim.AdamW(model.parameters())
ckpt = ks.Checkpointer(os.environ["ROOT"], state={"model": model, "optim": optim}, every_steps=EVERY)
step = ckpt.restore()
print("restored", step, "pid", os.getpid(), flush=True)
while step < TOTAL:
    with run.step(step) as s:
        optim.zero_grad()
        with s.section("compute"):
            loss = model(torch.full((2, 8), float(step))).pow(2).mean()
            loss.backward()
            if dist.is_initialized():
                for p in model.parameters():
                    dist.all_reduce(p.grad)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        s.observe(loss=loss, grad_norm=norm)
        optim.step()
        time.sleep(0.01)
    step += 1
    print("completed", step, flush=True)
    ckpt.maybe_save(step)
    if step % EVERY == WAITED_AFTER:
        ckpt.wait()
    if run.stop_requested:
        break
ckpt.close()
run.finish()
digest = float(sum(p.double().sum() for p in model.parameters()))
print("end", step, digest.hex(), flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
"""


def training(total: int = 30, every: int = 10, settled: bool = False) -> str:
    """A small real training script: `total` steps, a checkpoint every `every`.

    `settled`: a save is waited for after the step that follows it, for tests that say which one a killed rank goes on from.
    """
    waited_after = "1" if settled else "None"
    return TRAIN.replace("TOTAL", str(total)).replace("EVERY", str(every)).replace("WAITED_AFTER", waited_after)


class Launch:
    """A running `keepstep run`. Its output is read by a thread, so that the test can wait for lines of it."""

    started: ClassVar[list[Launch]] = []
    """All that were started in this test; the fixture in conftest.py ends what is left."""

    def __init__(
        self,
        folder: Path,
        script: str | None,
        *flags: str,
        args: tuple[str, ...] = (),
        prefix: Sequence[str] = (),
        verb: str = "run",
        run_dir: Path | None = None,
        **env: str,
    ) -> None:
        """Failed cycles get a verdict, which takes a second each, only where `flags` say so.

        `prefix`: a command that execs the launcher (`ip netns exec NAME`). `run_dir`: default `folder`/run."""
        self.folder = folder
        self.run_dir = run_dir or folder / "run"
        if verb == "run" and "--attribution" not in flags:
            flags = ("--attribution", "off", *flags)
        command = [*prefix, sys.executable, "-m", "keepstep.cli.main", verb, "--run-dir", str(self.run_dir), *flags]
        if script is not None:
            (folder / "script.py").write_text(textwrap.dedent(script))
            command.append("script.py")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "KEEPSTEP_", "SLURM_"))}
        own = {"ROOT": str(folder / "ckpt"), "KEEPSTEP_HOME": str(folder / "home")}
        environment = {**clean, **own, **env}
        self.process = subprocess.Popen(
            [*command, *args], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        Launch.started.append(self)
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self.lines.append("<end of output>")
            self._news.notify_all()

    def wait_line(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait until `count` lines match; returns the last of these matches."""
        with self._news:

            def found() -> list[re.Match[str]]:
                return [m for m in (re.search(pattern, line) for line in self.lines) if m]

            self._news.wait_for(lambda: len(found()) >= count or self.lines[-1:] == ["<end of output>"], LIMIT_S)
            matches = found()
        assert len(matches) >= count, f"{pattern!r} {count} times not in:\n{self.output}"
        return matches[count - 1]

    def signal(self, signum: int) -> None:
        """Send a signal to the launcher."""
        self.process.send_signal(signum)

    def finish(self) -> int:
        """Wait for the end; returns the exit code."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            raise AssertionError(f"still running after {LIMIT_S} s:\n{self.output}") from None
        self._reader.join(10)
        return code

    @property
    def output(self) -> str:
        """All output so far."""
        return "\n".join(self.lines)

    @property
    def marks(self) -> list[Mark]:
        """The run's timeline."""
        return read_marks(self.run_dir)

    def mark(self, kind: str, cycle: int = 0) -> Mark:
        """The first mark of a kind in a cycle."""
        return next(m for m in self.marks if m.kind == kind and m.cycle == cycle)

    @property
    def cycles(self) -> list[Cycle]:
        """The run's cycle records."""
        return read_cycles(self.run_dir)

    @property
    def verdict(self) -> dict[str, Any]:
        """The verdict file."""
        result: dict[str, Any] = json.loads((self.run_dir / "verdict.json").read_text())
        return result

    @property
    def summary(self) -> dict[str, Any]:
        """The goodput summary."""
        result: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return result

    def check_partition(self) -> None:
        """The phases add up to wall-clock exactly."""
        summary = self.summary
        assert sum(summary["phases_ns"].values()) == summary["wall_ns"]


def run(folder: Path, script: str | None, *flags: str, args: tuple[str, ...] = (), **env: Any) -> tuple[int, Launch]:
    """Run to the end; returns (exit code, launch)."""
    launch = Launch(folder, script, *flags, args=args, **env)
    return launch.finish(), launch


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll a condition about files (a missing file is "not yet") until it holds."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(0.01)
    raise AssertionError("the condition did not come true")


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :][:1] not in (b"Z", b"X")


def command_line(pid: int) -> bytes:
    """The command line of a process, its arguments separated by NUL; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
