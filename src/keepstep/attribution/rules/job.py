"""The rules on what a training job's own output says, in the order they run."""

from __future__ import annotations

from keepstep.attribution.rules.late import who_is_late
from keepstep.attribution.rules.leftovers import leftovers
from keepstep.attribution.rules.lives import (
    no_restart_lost,
    same_again,
    seat_taken,
    standby_left,
    teardown_after_success,
)
from keepstep.attribution.rules.mismatch import mismatches
from keepstep.attribution.rules.pairs import node_pairs, transport_changes
from keepstep.attribution.rules.watching import context_not_recovered, missing_dumps, probe_crashed_it

JOB_RULES = (
    mismatches,
    who_is_late,
    node_pairs,
    transport_changes,
    leftovers,
    teardown_after_success,
    standby_left,
    seat_taken,
    same_again,
    no_restart_lost,
    missing_dumps,
    context_not_recovered,
    probe_crashed_it,
)
"""Each: `(events, catalog) -> list[Event]`."""
