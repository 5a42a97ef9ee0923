"""Machines that are not what their scheduler, their check or their launcher takes them for: a description that is out of date, a
node that was set up otherwise, one that left by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.order import canonical, compare
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import number, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

GONE = ("xid.79", "xid.119", "xid.120", "nvrm.", "gpu.lost", "gpu.missing")
"""Beginnings of signs that a GPU is gone for certain."""
MEMORY_SHARE = 0.97
"""A module that fails takes a larger share than what kernel and firmware keep for themselves."""
LEAST_ALIKE = 3
"""Machines that report the same number: parts do not fail alike."""
LEAST_NODES = 3
MOST = 256

_COUNTS = re.compile(r"\((?P<have>\d{1,12}) < (?P<want>\d{1,12})\)")
_REAL = re.compile(r"real\s{1,4}(?P<m>\d{1,4})m(?P<s>\d{1,2})")
_ASKS = re.compile(r"\b(?:sinfo|squeue|scontrol|sacct|sacctmgr|sdiag)\b")
SLOW_ANSWER_S = 10


def gres_outdated(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Fewer GPUs than described on a node whose GPUs were divided anew, and none that is gone."""
    short = of(events, "slurm.node_lost_gpus")
    if not short or not of(events, "fact.mig_layout") or any(e.signature.startswith(GONE) for e in events):
        return []
    counts = _COUNTS.search(short[0].evidence.text)
    attrs = {"have": counts["have"], "want": counts["want"]} if counts is not None else {"have": "?", "want": "?"}
    return [derive(catalog, "derived.slurm.gres_outdated", short[0], attrs=attrs, explains=["slurm.node_lost_gpus"])]


def memory_outdated(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Machines that report the same too small memory, or a few percent less than described."""
    low = of(events, "slurm.node_low_memory")[:MOST]
    read = [(number(e.attrs.get("have")), number(e.attrs.get("want"))) for e in low]
    sizes = {(have, want) for have, want in read if have is not None and want is not None and want > 0}
    if not sizes or (None, None) in read:
        return []
    alike = len(sizes) == 1 and len({e.node for e in low if e.node is not None}) >= LEAST_ALIKE
    if not alike and not all(have >= MEMORY_SHARE * want for have, want in sizes):
        return []
    have, want = min(sizes)
    explains = ["slurm.node_low_memory"]
    attrs = {"have": have, "want": want}
    first = min(low, key=canonical)
    return [derive(catalog, "derived.slurm.memory_outdated", first, attrs=attrs, explains=explains, placed=False)]


def node_setup(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A machine on which jobs fail that pass elsewhere, and where they fail before they begin, or under another description."""
    for follows in of(events, "derived.ledger.follows_node"):
        node = follows.node
        differs = [e for e in of(events, "slurm.conf_differs") if e.node == node or e.attrs.get("node") == node]
        launch = of(events, "slurm.launch_failed")
        if node is not None and (launch or differs):
            explains = ["derived.ledger.follows_node", "slurm.launch_failed", "slurm.conf_differs", "slurm.job_failed"]
            attrs = {"node": node}
            return [derive(catalog, "derived.ledger.node_setup", follows, attrs=attrs, explains=explains, node=node)]
    return []


def controller_slow(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Checks that ran out of time on several machines, and a scheduler that takes long to answer."""
    late = of(events, "check.not_runnable", "monitor.cannot_look")[:MOST]
    nodes = {e.node for e in late if e.node is not None}
    slow = [*of(events, "fact.controller_slow"), *(e for e in of(events, "fact.took") if _asked_slowly(e))]
    if len(nodes) < LEAST_NODES or not slow:
        return []
    explains = ["check.not_runnable", "check.failed", "monitor.cannot_look"]
    attrs = {"nodes": len(nodes)}
    first = min(late, key=lambda e: (e.evidence.line or 0, canonical(e)))
    return [derive(catalog, "derived.sched.controller_slow", first, attrs=attrs, explains=explains, placed=False)]


def _asked_slowly(event: Event) -> bool:
    """Whether a command that was timed is a question to the scheduler, and took long."""
    took = _REAL.search(event.evidence.text)
    seconds = 0 if took is None else 60 * int(took["m"]) + int(took["s"])
    return seconds >= SLOW_ANSWER_S and _ASKS.search(event.source) is not None


LINKS = ("nvrx.nvlink_down", "ib.port_not_active", "nvlink.", "ib.port")


def left_for_link(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A node that took itself out of the job after it had seen a link down."""
    links = [e for e in events if e.signature.startswith(LINKS) and catalog[e.signature].role == "root"][:MOST]
    for left in of(events, "nvrx.left_before_rendezvous"):
        node = left.attrs.get("node") or left.node
        if node is None:
            continue
        seen = [e for e in links if compare(e, left) != "after" and e.node in (None, node)]
        if seen:
            explains = ["nvrx.left_before_rendezvous", *sorted({e.signature for e in links})]
            explains += ["elastic.rendezvous_timeout", "elastic.rendezvous_closed", "slurm.step_exit"]
            first = min(seen, key=canonical)
            return [
                derive(
                    catalog,
                    "derived.nvrx.left_for_link",
                    first,
                    attrs={"node": node},
                    explains=explains,
                    node=str(node),
                )
            ]
    return []


def rerun_wanted(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A value that came twice on one GPU, where the trainer asks for a run on another and has not had it."""
    wanted = of(events, "loss.rerun_wanted")
    told = of(events, "loss.rerun_agrees", "loss.rerun_differs")
    values = of(events, "loss.not_finite_on_rank")
    if not wanted or told:
        return []
    first = min((*values, *wanted), key=canonical)
    explains = ["loss.not_finite_on_rank", "loss.not_finite", "slurm.job_failed", "exit.failed"]
    return [derive(catalog, "derived.loss.rerun_wanted", first, explains=explains)]


DESCRIPTION_RULES = (
    gres_outdated,
    memory_outdated,
    node_setup,
    controller_slow,
    left_for_link,
    rerun_wanted,
)
"""Each: `(events, catalog) -> list[Event]`. After the tables of machine_relations.py."""
