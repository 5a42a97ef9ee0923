"""Short ways from the text of a job's log to what the rules conclude of it, with the shipped catalog."""

from __future__ import annotations

import functools

from keepstep.attribution.verdict import judge
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.records.event import Event
from keepstep.records.verdict import Verdict
from keepstep.sources.reading import read_text


@functools.cache
def matcher() -> Matcher:
    """The shipped patterns, compiled once."""
    return Matcher(shipped())


def events_of(text: str) -> list[Event]:
    """Everything that is read in a text."""
    return read_text("job.log", text, shipped(), matcher()).events


def signatures_of(text: str) -> list[str]:
    """Ids of all events of a text, in order."""
    return [e.signature for e in events_of(text)]


def verdict_of(text: str) -> Verdict:
    """The verdict on a text."""
    return judge(events_of(text), shipped()).verdict


def conclusions(text: str) -> dict[str, Event]:
    """What the rules conclude of a text: events "derived.*" by id, the first of each."""
    judgement = judge(events_of(text), shipped())
    found: dict[str, Event] = {}
    for weighed in judgement.verdict.evidence:
        if weighed.event.signature.startswith("derived."):
            found.setdefault(weighed.event.signature, weighed.event)
    return found


def timeout(
    rank: int, seq: int, op: str, *, ms: int = 600_000, size: int = 1, clock: str = "E214 11:10:04.118201117"
) -> str:
    """A line of the watchdog of torch 2.2 to 2.13."""
    return (
        f"[rank{rank}]:[{clock} ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)={ms}) "
        f"ran for {ms + 40} milliseconds before timing out."
    )


def status(rank: int, seq: int, enqueued: int, completed: int, group: str = "0 PG GUID 0(default_pg)") -> str:
    """The line after it, which names the group."""
    return (
        f"[rank{rank}]:[E214 11:10:04.118301117 ProcessGroupNCCL.cpp:2241] [PG ID {group} Rank {rank}]  "
        f"failure detected by watchdog "
        f"at work sequence id: {seq} PG status: last enqueued work: {enqueued}, last completed work: {completed}"
    )


def lines(*parts: str) -> str:
    """Parts as one text."""
    return "\n".join(parts) + "\n"
