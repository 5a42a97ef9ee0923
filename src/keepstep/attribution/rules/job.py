"""The rules on what a training job's own output says, in the order they run."""

from __future__ import annotations

from keepstep.attribution.rules.late import (
    limit_too_short,
    own_collectives,
    section_outlasted,
    steps_apart,
    stuck_alone,
    who_is_late,
)
from keepstep.attribution.rules.leftovers import leftovers
from keepstep.attribution.rules.lives import (
    clean_end,
    first_failure,
    no_restart_lost,
    outgrew_host,
    same_again,
    seat_taken,
    stale_store,
    standby_left,
    teardown_after_success,
)
from keepstep.attribution.rules.mismatch import mismatches
from keepstep.attribution.rules.pairs import node_pairs, transport_changes, workarounds
from keepstep.attribution.rules.watching import (
    context_not_recovered,
    false_alarm,
    missing_dumps,
    monitor_off,
    old_dumps,
    probe_crashed_it,
)

JOB_RULES = (
    mismatches,
    who_is_late,
    steps_apart,
    stuck_alone,
    section_outlasted,
    own_collectives,
    limit_too_short,
    node_pairs,
    transport_changes,
    workarounds,
    leftovers,
    teardown_after_success,
    clean_end,
    standby_left,
    seat_taken,
    same_again,
    no_restart_lost,
    stale_store,
    outgrew_host,
    first_failure,
    missing_dumps,
    old_dumps,
    context_not_recovered,
    probe_crashed_it,
    monitor_off,
    false_alarm,
)
"""Each: `(events, catalog) -> list[Event]`."""
