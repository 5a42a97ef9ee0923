"""Where the wall-clock of a run went: pure accounting over the marks of its timeline.

`partition` gives every nanosecond to exactly one phase; `summarise` builds `keepstep.goodput/1` from it;
`cycle_phases` says what one cycle cost. Beside it what follows for the future: failure rates (`rates`, `history`), the interval
between checkpoints and its goodput (`interval`, `advice`), power that rises slowly (`ramp`). Nothing here reads a clock or a file.
"""

from keepstep.goodput.partition import CAUSE_NONE, CAUSE_STARTUP, Interval, Partition, partition
from keepstep.goodput.summary import cycle_phases, summarise

__all__ = ["CAUSE_NONE", "CAUSE_STARTUP", "Interval", "Partition", "cycle_phases", "partition", "summarise"]
