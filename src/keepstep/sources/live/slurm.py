"""What Slurm knows about a job: accounting with all attempts, the controller's record, and the job's nodes.

Only commands that read. `sacct --json` is not used: Slurm 22.05 prints 0 there for every exit code.
"""

from __future__ import annotations

import re

from keepstep.records.errors import ConfigError
from keepstep.records.hostlist import expand_hosts
from keepstep.sources.live.commands import Runner, Transcript, run, transcript

FIELDS = "JobID,JobIDRaw,JobName,Partition,State,ExitCode,DerivedExitCode,Reason,NodeList,Start,End,Elapsed,Timelimit,ReqMem,MaxRSS"
MAX_NODES = 512
"""Nodes of a job that are asked about."""

_JOB = re.compile(r"\d{1,10}(?:[_+]\d{1,7})?")
_NODES = re.compile(r"^\s+NodeList=(\S+)", re.MULTILINE)
_HOSTS = re.compile(r"[\w.,\[\]-]+")


def slurm_transcript(job: str, runner: Runner = run) -> Transcript:
    """Everything about a job as a transcript for `reading.read_text`. Raises ConfigError when `job` is no job id."""
    if not _JOB.fullmatch(job):
        raise ConfigError(f"{job!r} is no Slurm job id; give a number, such as 4711 or 4711_3 (see squeue, sacct)")
    known = transcript(
        [["sacct", "-D", "--parsable2", f"--format={FIELDS}", "-j", job], ["scontrol", "show", "job", job]], runner
    )
    match = _NODES.search(known.text)
    names = match[1] if match is not None and _HOSTS.fullmatch(match[1]) else ""
    try:
        wanted = bool(names) and len(expand_hosts(names)) <= MAX_NODES
    except ValueError:
        wanted = False
    if not wanted:
        return known
    nodes = transcript([["scontrol", "show", "node", names]], runner)
    return Transcript(known.text + nodes.text, [*known.notes, *nodes.notes])
