"""Different sizes under one sequence number, where a library chose what to reduce: its order, not the program's shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import number, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

LEAST_CALLS = 1000
"""Calls of one group that agreed: from here on the shapes of the program are known not to differ."""
OF_BUCKETS = frozenset({"_REDUCE_SCATTER_BASE", "REDUCE_SCATTER", "_ALLGATHER_BASE", "ALLGATHER", "ALLREDUCE"})
_LIBRARY = re.compile(
    r"(?i)megatron_fsdp|param_and_grad_buffer|distrib_optimizer|(?:^|/)_?fsdp|fully_shard|flat_param|torch/nn/parallel/|"
    r"deepspeed/runtime|zero/stage|colossalai/zero|fairscale|grad_?buffer|reducer\.(?:py|cpp)"
)
"""Files of libraries that put gradients or parameters into buckets and start collectives for them."""


def bucket_order(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ranks whose sizes differ in a library's own reduction, after thousands of calls that agreed."""
    for told in of(events, "derived.size_mismatch"):
        seq = number(told.attrs.get("seq"))
        if seq is None or seq < LEAST_CALLS or told.attrs.get("op") not in OF_BUCKETS:
            continue
        calls = [e for e in of(events, "fr.call") if number(e.attrs.get("seq")) == seq]
        frames = [str(e.attrs["frame"]) for e in calls if e.attrs.get("frame")]
        if len(frames) < 2 or not all(_LIBRARY.search(f.rpartition(":")[0]) for f in frames):
            continue
        attrs = {"seq": seq, "frame": frames[0]}
        return [derive(catalog, "derived.bucket_order", told, attrs=attrs, explains=["derived.size_mismatch"])]
    return []
