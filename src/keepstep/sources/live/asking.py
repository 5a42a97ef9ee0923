"""`--live SOURCE`: what this machine, or its cluster, says now, to be read with files and folders."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from keepstep.catalog.load import Catalog
from keepstep.records.errors import ConfigError
from keepstep.records.event import Event
from keepstep.sources.live import ibsysfs
from keepstep.sources.live.commands import Runner, run, transcript
from keepstep.sources.live.dcgm import ScrapeError, scrape
from keepstep.sources.live.kubernetes import kubernetes_transcript
from keepstep.sources.live.nvml import sample_gpus
from keepstep.sources.live.slurm import slurm_transcript
from keepstep.sources.reading import Answered

METRICS_URL = "http://localhost:9400/metrics"
"""Where dcgm-exporter listens by default."""
COUNTERS_APART_S = 2.0
"""Seconds between two readings of counters: a link that loses packets counts up within one."""
MOST_APART_S = 3600.0
TOOLS = (
    ("nvidia-smi", "-q"),
    ("nvidia-smi", "nvlink", "-s"),
    ("nvidia-smi", "nvlink", "-e"),
    ("dcgmi", "health", "-c", "-j"),
    ("ibstat",),
    ("perfquery", "-x"),
    ("lspci", "-vvv"),
)
"""What people paste of a machine; all of them only read."""
FORMS = "kernel, gpu, tools, dcgm[=URL], ib[=SECONDS], slurm[=JOB], kubernetes=NAMESPACE/SELECTOR"


def ask_all(sources: Sequence[str], catalog: Catalog) -> list[Answered]:
    """Each source once, in turn. Raises ConfigError for one that is none, before any is asked."""
    asked = [_asking(source, catalog) for source in dict.fromkeys(sources)]
    return [ask() for ask in asked]


def _asking(source: str, catalog: Catalog) -> Callable[[], Answered]:
    """The call that asks a source, with its argument checked."""
    kind, _, given = source.partition("=")
    match kind:
        case "kernel" if not given:
            return kernel
        case "gpu" if not given:
            return lambda: gpus(catalog)
        case "tools" if not given:
            return tools
        case "dcgm":
            return lambda: metrics(given or METRICS_URL)
        case "ib":
            apart_s = _seconds(given)
            return lambda: ports(catalog, apart_s)
        case "slurm":
            job = given or os.environ.get("SLURM_JOB_ID", "")
            if not job:
                raise ConfigError("--live slurm: SLURM_JOB_ID is not set here; name the job, such as slurm=4711")
            return lambda: slurm(job)
        case "kubernetes":
            namespace, _, selector = given.partition("/")
            if not namespace or not selector:
                raise ConfigError(
                    f"--live {source}: write kubernetes=NAMESPACE/SELECTOR, "
                    "such as kubernetes=train/jobset.sigs.k8s.io/jobset-name=run7"
                )
            return lambda: kubernetes(namespace, selector)
    raise ConfigError(f"--live {source}: no such source; there are {FORMS}")


def _seconds(given: str) -> float:
    try:
        seconds = float(given or COUNTERS_APART_S)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MOST_APART_S:
        raise ConfigError(
            f"--live ib={given}: seconds between two readings, more than 0 and at most {MOST_APART_S:.0f}"
        )
    return seconds


def kernel(runner: Runner = run) -> Answered:
    """The kernel's log since boot, as far as it is still in its ring."""
    found = transcript([["dmesg", "--time-format", "iso"]], runner)
    return Answered("live:kernel", found.text, node=socket.gethostname(), notes=found.notes)


def gpus(catalog: Catalog) -> Answered:
    """State of the GPUs through NVML."""
    sample = sample_gpus(catalog)
    notes = [] if sample.problem is None else [sample.problem]
    return Answered("live:gpu", events=_now(sample.events), node=socket.gethostname(), notes=notes)


def tools(runner: Runner = run) -> Answered:
    """Output of the tools of this machine, as far as they are installed."""
    here = [command for command in TOOLS if shutil.which(command[0]) is not None]
    if not here:
        names = ", ".join(dict.fromkeys(command[0] for command in TOOLS))
        return Answered("live:tools", notes=[f"none of {names} is installed here"])
    found = transcript(here, runner)
    return Answered("live:tools", found.text, node=socket.gethostname(), notes=found.notes)


def metrics(url: str) -> Answered:
    """The levels that a DCGM exporter publishes."""
    try:
        return Answered("live:dcgm", scrape(url))
    except ScrapeError as error:
        return Answered("live:dcgm", notes=[str(error)])


def ports(catalog: Catalog, apart_s: float, root: Path = ibsysfs.ROOT) -> Answered:
    """InfiniBand and RoCE ports, their counters read twice, `apart_s` seconds apart."""
    if not ibsysfs.available(root):
        return Answered("live:ib", notes=[f"{root}: no InfiniBand or RoCE device here"])
    begin = time.monotonic()
    before = ibsysfs.read(root)
    time.sleep(apart_s)
    after = ibsysfs.read(root, before.denied)
    node = socket.gethostname()
    events = ibsysfs.events_of(before, after, time.monotonic() - begin, catalog, node)
    denied = [f"{nic} port {port}: its counters may not be read" for nic, port in after.denied]
    return Answered("live:ib", events=_now(events), node=node, notes=denied)


def slurm(job: str) -> Answered:
    """What Slurm knows about a job. Raises ConfigError when `job` is no job id."""
    found = slurm_transcript(job)
    return Answered("live:slurm", found.text, notes=found.notes)


def kubernetes(namespace: str, selector: str) -> Answered:
    """What Kubernetes knows about the pods of a selector. Raises ConfigError when it can be none."""
    found = kubernetes_transcript(namespace, selector)
    return Answered("live:kubernetes", found.text, notes=found.notes)


def _now(events: Sequence[Event]) -> list[Event]:
    """Levels that were just read are of this moment."""
    now_ns = time.time_ns()
    return [
        e if e.time_ns is not None else msgspec.structs.replace(e, time_ns=now_ns, time_quality="exact") for e in events
    ]
