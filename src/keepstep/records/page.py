"""Layout of the progress page: one small shared-memory file a rank, written by the rank, read by its agent.

Each field is one aligned 8-byte word, written by one native store through `memoryview.cast("Q")`. There is no lock and no
sequence counter: a rank killed in the middle would leave one odd for ever. Every word is valid alone; step number and "inside a
step" share one word; a reader takes two equal looks or calls the look torn. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

PAGE_BYTES = 4096
PAGE_WORDS = PAGE_BYTES // 8
MAGIC = 0x31304547_41505350  # "PSPAGE01"

# Written by the agent before the rank starts.
W_MAGIC = 0
W_CYCLE = 1
W_RANK = 2
W_SPAWNED_NS = 3
# Written by the agent while the rank runs.
W_LEASE_EXPIRY_NS = 4  # no step and no commit begins after this time; 0: no lease
W_STOP_REQUEST = 5  # when the job was asked to stop (at the next shared decision); 0 none
W_DECISIONS = 6
# Written by the rank.
W_ATTACHED_NS = 8  # ks.init() was called
W_STEP = 9  # (step << 8) | 1 inside a step, (completed steps << 8) between steps: >> 8 is the completed count in both
W_BEAT_NS = 10  # when the step was entered
W_HEARTBEAT_NS = 11  # run.heartbeat(), for scripts that report no steps
W_COMPLETED_NS = 12  # when it last left a step normally
W_FIRST_STEP = 13  # the first completed step count of this process
W_FIRST_DONE_NS = 14  # when it left its first step (written when the second begins)
W_FLAGS = 15  # bit 0: finished (run.finish() was called)
W_PHASE = 16  # what the rank does outside steps: see PHASE_*
W_PHASE_NS = 17  # when W_PHASE changed

# Section stack: entries of (name id, entered ns). The first entry that is not open ends the stack: there the id is 0, or,
# once a section was left, the time of that in ns, which no id can be mistaken for.
W_SECTIONS = 32
MAX_SECTION_DEPTH = 8
# Sum of the time spent in each section, by name id.
W_SECTION_SUMS = 64
MAX_SECTION_NAMES = 64
# Section names: 32 bytes each, zero padded UTF-8, written once when a name is first used.
NAMES_OFFSET = 1024
NAME_BYTES = 32

FLAG_FINISHED = 1

PHASE_NONE = 0
PHASE_INIT = 1
PHASE_RESTORE = 2
PHASE_TRAIN = 3
PHASE_CLOSE = 4
PHASE_NAMES = {
    PHASE_NONE: "starting",
    PHASE_INIT: "init",
    PHASE_RESTORE: "restore",
    PHASE_TRAIN: "train",
    PHASE_CLOSE: "close",
}
