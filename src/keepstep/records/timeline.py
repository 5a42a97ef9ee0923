"""The coordinator's timeline: what happened when, in the order the coordinator recorded it.

The partition of wall-clock (`keepstep.goodput`) is computed from these marks alone, so that a journal can be accounted again
at any time with the same result.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MarkKind = Literal[
    # run level
    "run_started",  # this attempt's launcher began (t = when the first launcher process started)
    "run_ended",  # the verdict was written; end of wall-clock. attrs: outcome, exit_code
    "gap",  # no coordinator recorded anything: attrs begin_ns, end_ns (crash until the next one was ready)
    # life of one cycle, in their usual order; any of them may be missing when a fault cuts the cycle short
    "cycle_started",  # decision to start it is durable; agents are being told (rendezvous begins)
    "assigned",  # every agent has its assignment (start begins: processes are forked)
    "attached",  # every rank runs the script; with the trainer library: called ks.init (restore begins)
    "restored",  # every rank returned from restore(). attrs: step, source ("none"|"shm"|"peer"|"disk"|"object"), checkpoint
    "first_step",  # every rank completed its first step of the cycle. attrs: step (the count of completed steps)
    "step",  # every rank completed this step. attrs: step (count of completed steps); sampled, not every step
    "ckpt_block",  # training stood still for staging. attrs: step, begin_ns, end_ns
    "committed",  # a checkpoint's marker is durable. attrs: step, checkpoint, persist_ns, tier, kept (memory holds it too)
    "kept",  # memory holds an image of all ranks that is written nowhere. attrs: step, checkpoint
    "tier_reached",  # a checkpoint is complete in one more place. attrs: step, checkpoint, tier ("shm"|"peer"|...), files
    "ckpt_failed",  # a save failed. attrs: step, error, tier ("shm": of an image in memory only)
    "ckpt_skipped",  # a save fell due while one was in flight, and was left out. attrs: step, skipped (how many so far)
    "upload_failed",  # a committed checkpoint did not arrive in the object store. attrs: step, checkpoint, error, failed (so far)
    "quarantined",  # a checkpoint was refused at restore. attrs: checkpoint, step, reason, tier, distrust (policy, not damage)
    "image_refused",  # an image in memory was refused at restore. attrs: checkpoint, step, reason, tier
    "rollback_announced",  # the script goes back on purpose. attrs: to_step, reason
    "fault",  # attrs: occurred_ns, detected_ns, rank, node, kind, cause ("hardware", ..., "unknown"), completed_step
    "attributed",  # the verdict on a fault, at its time. attrs: incident, class, signature, confidence, tier, action, entity, ...
    "captured",  # evidence of living ranks is on disk (teardown begins)
    "stopped",  # no process of the cycle is left (decide begins)
    "decided",  # what to do next is durable. attrs: action, counted
    "replaced",  # the nodes of the next cycle are there (only when nodes change)
    "drain",  # ranks left their training loop on purpose: finished, or asked to stop. attrs: completed_step
    "cycle_ended",  # attrs: reason
    # beside the life of a cycle
    "advised",  # a setting follows what was measured. attrs: what, value, before, reason, and what it was computed from
]


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One mark. `t_ns` is UTC nanoseconds, derived from CLOCK_BOOTTIME anchored once a boot."""

    t_ns: int
    kind: MarkKind
    cycle: int = 0
    attempt: int = 0
    attrs: dict[str, Any] = {}
