"""Commands of a cluster that only read, run with bounds, and what they printed as a transcript that is read like a pasted one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

TIMEOUT_S = 20.0
"""Seconds for one command: controllers that are overloaded answer after ten."""
SIZE_LIMIT = 8 << 20
"""Bytes of output that are read of one command."""


class Answer(NamedTuple):
    """What a command printed. `problem`: why it gave nothing that can be used, empty when it did."""

    text: str
    problem: str = ""


Runner = Callable[[Sequence[str]], Answer]


class Transcript(NamedTuple):
    """Commands with their output, one after the other. `notes`: what could not be asked, and why."""

    text: str
    notes: list[str]


def run(command: Sequence[str]) -> Answer:
    """Run a command, at most TIMEOUT_S long; of its output SIZE_LIMIT bytes are kept. Never raises."""
    name = command[0]
    if shutil.which(name) is None:
        return Answer("", f"{name}: not found; run this where the cluster's commands are, or give recorded output")
    # Slurm prints local time without a zone unless it is told otherwise.
    environment = os.environ | {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%Y-%m-%dT%H:%M:%S%z"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer("", f"{shlex.join(command)}: no answer within {TIMEOUT_S:.0f} s")
        except OSError as error:
            return Answer("", f"{shlex.join(command)}: {error.strerror}")
        out.seek(0)
        err.seek(0)
        text = out.read(SIZE_LIMIT).decode(errors="replace")
        if done.returncode != 0:
            said = err.read(2000).decode(errors="replace").strip().splitlines()
            return Answer("", f"{shlex.join(command)}: exit {done.returncode}: {said[0] if said else 'no message'}")
        return Answer(text)


def transcript(commands: Sequence[Sequence[str]], runner: Runner) -> Transcript:
    """Run commands one after the other."""
    parts, notes = [], []
    for command in commands:
        answer = runner(command)
        if answer.problem:
            notes.append(answer.problem)
        else:
            parts.append(f"$ {shlex.join(command)}\n{answer.text.rstrip()}\n")
    return Transcript("".join(parts), notes)
