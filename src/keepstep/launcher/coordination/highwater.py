"""The high-water mark: the newest committed checkpoint of every root, kept in the journal where a checkpoint's store cannot reach.

Who can write to a store can take newer checkpoints away from it, and an older one would be restored without a question. What
follows from a mark is decided where checkpoints are restored; here it is stored, and never lowered without a reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from keepstep.launcher import messages as m

MAX_ROOTS = 256
MAX_REASON_CHARS = 2000
MAX_DETAIL_CHARS = 64 << 10
_ROOT_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
_DIGEST = re.compile(r"(sha256:)?[0-9a-f]{64}")


def raise_high_water(
    held: Mapping[str, m.HighWater], message: m.MarkSet, now_ns: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Journal records of a new mark, or why it is refused. Setting what is set already makes no record."""
    mark, root = message.mark, message.root_id
    if not _ROOT_ID.fullmatch(root) or not _DIGEST.fullmatch(mark.digest) or min(mark.step, mark.cycle) < 0:
        return [], f"high-water mark of {root[:200]!r}: not a root id with step, cycle and the SHA-256 of a manifest"
    if len(mark.detail) > MAX_DETAIL_CHARS:
        return (
            [],
            f"high-water mark of {root}: {len(mark.detail)} characters of detail, the limit is {MAX_DETAIL_CHARS}",
        )
    before = held.get(root)
    if before == mark:
        return [], None
    if before is None and len(held) >= MAX_ROOTS:
        return [], f"there are marks of {MAX_ROOTS} roots already"
    if before is not None and mark.step < before.step and not message.rebase:
        return [], (
            f"the newest committed checkpoint of this root is step {before.step} (manifest {before.digest[:16]}); "
            f"going back to step {mark.step} needs a signed rollback"
        )
    record = {"type": "high_water", "root_id": root, **msgspec.to_builtins(mark), "t_ns": now_ns}
    if message.rebase:
        record["rebase"] = message.rebase[:MAX_REASON_CHARS]
    return [record], None
