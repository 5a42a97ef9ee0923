"""Rules: what follows from several events together and from none alone.

A rule is a function `(events, catalog) -> list[Event]`. The events it makes have signatures of the catalog ("derived.*") like any
other, so that their weight is argued there and shown by `why --explain`. RULES is the list of all, in the order they run; each
sees the events of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepstep.attribution.rules.aftermath import AFTERMATH_RULES
from keepstep.attribution.rules.again import AGAIN_RULES
from keepstep.attribution.rules.alone import ALONE_RULES
from keepstep.attribution.rules.buckets import bucket_order
from keepstep.attribution.rules.calledoff import CALLED_OFF_RULES
from keepstep.attribution.rules.checkpoints import CHECKPOINT_RULES
from keepstep.attribution.rules.common_cause import common_cause
from keepstep.attribution.rules.comparisons import COMPARISON_RULES
from keepstep.attribution.rules.descriptions import DESCRIPTION_RULES
from keepstep.attribution.rules.endings import ENDING_RULES
from keepstep.attribution.rules.exits import EXIT_RULES
from keepstep.attribution.rules.fewlinks import FEW_LINK_RULES
from keepstep.attribution.rules.folders import FOLDER_RULES
from keepstep.attribution.rules.gpu_levels import gpu_levels
from keepstep.attribution.rules.job import JOB_RULES
from keepstep.attribution.rules.launched import LAUNCHED_RULES
from keepstep.attribution.rules.libraries import library_empty
from keepstep.attribution.rules.links import links
from keepstep.attribution.rules.machine_relations import MACHINE_RELATION_RULES, quoted_code_over
from keepstep.attribution.rules.monitors import came_up, latched
from keepstep.attribution.rules.noparts import NO_PART_RULES, settled
from keepstep.attribution.rules.nowdue import NOW_DUE_RULES
from keepstep.attribution.rules.outside import OUTSIDE_RULES
from keepstep.attribution.rules.ownstacks import late_ranks
from keepstep.attribution.rules.parts import PART_RULES
from keepstep.attribution.rules.refuted import REFUTED_RULES
from keepstep.attribution.rules.relations import RELATION_RULES
from keepstep.attribution.rules.resumes import RESUME_RULES
from keepstep.attribution.rules.scheduler import SCHEDULER_RULES
from keepstep.attribution.rules.standing import STANDING_RULES
from keepstep.attribution.rules.stragglers import stragglers
from keepstep.attribution.rules.versions import VERSION_RULES
from keepstep.attribution.rules.watchers import WATCHER_RULES
from keepstep.attribution.rules.xid import degrading, xids
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

Rule = Callable[[Sequence[Event], Catalog], list[Event]]

PastRule = Callable[[Sequence[Event], Sequence[Event], Catalog], list[Event]]
"""As a rule; its second argument are the events that are stale, which no other rule sees."""

RULES: tuple[Rule, ...] = (
    late_ranks,
    *JOB_RULES,
    bucket_order,
    *ALONE_RULES,
    *RELATION_RULES,
    gpu_levels,
    links,
    stragglers,
    xids,
    *CHECKPOINT_RULES,
    *SCHEDULER_RULES,
    *RESUME_RULES,
    *FOLDER_RULES,
    *AFTERMATH_RULES,
    *ENDING_RULES,
    came_up,
    latched,
    *MACHINE_RELATION_RULES,
    *OUTSIDE_RULES,
    *DESCRIPTION_RULES,
    *VERSION_RULES,
    library_empty,
    *NO_PART_RULES,
    *AGAIN_RULES,
    *COMPARISON_RULES,
    *STANDING_RULES,
    *REFUTED_RULES,
    *EXIT_RULES,
    *FEW_LINK_RULES,
    *WATCHER_RULES,
    *NOW_DUE_RULES,
    *CALLED_OFF_RULES,
    *LAUNCHED_RULES,
    *PART_RULES,
    common_cause,
)
PAST_RULES: tuple[PastRule, ...] = (degrading, quoted_code_over, settled)
"""Run first."""
