"""Whatever stands in a log, the readers of blocks end, in time, and raise nothing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.catalog.load import shipped
from keepstep.sources.documents import split
from keepstep.sources.joblog.blocks import BLOCK_READERS, block_events

PIECES = [
    "Traceback (most recent call last):",
    '  File "/w/train.py", line 3, in f',
    "    x = y[z]",
    "KeyError: 'x'",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
    "  + Exception Group Traceback (most recent call last):",
    "  | ValueError: a",
    "╭── Traceback (most recent call last) ──╮",
    "│ /w/a.py:3 in f │",
    "╰──╯",
    "Failures:",
    "[0]:",
    "  time      : 2031-02-14_11:00:01",
    "  rank      : 3 (local_rank: 3)",
    "  exitcode  : -9 (pid: 1)",
    "  traceback : x",
    "Root Cause (first observed failure):",
    '{"message": {"message": "x", "extraInfo": {"timestamp": "1"}}}',
    "Thread 0x00007f00 (most recent call first):",
    'Thread 7 (idle): "MainThread"',
    "    f (a.py:3)",
    "Stack trace of the failed collective:",
    "#0 f from a.py:3",
    "cycle=1 pid=2 SIGKILL",
    "nccl_trace_rank_7",
    "[rank1]: ",
    "",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=40), max_size=40))
def test_pieces_in_any_order(parts: list[str]) -> None:
    text = "\n".join(parts)
    for document in split("job.log", text):
        for event in block_events(document, shipped()):
            assert event.signature in shipped()
            assert 1 <= event.evidence.line <= len(text.split("\n"))


@given(st.lists(st.tuples(st.sampled_from(["", "[rank0]: ", "[rank1]: "]), st.sampled_from(PIECES)), max_size=40))
def test_pieces_of_two_ranks(parts: list[tuple[str, str]]) -> None:
    for document in split("job.log", "\n".join(prefix + piece for prefix, piece in parts)):
        assert all(e.rank in (None, 0, 1, 3) for e in block_events(document, shipped()))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([r.name for r in BLOCK_READERS]), st.sampled_from(PIECES), st.integers(1, 3))
def test_repetition_costs_linear_time(name: str, piece: str, times: int) -> None:
    reader = next(r for r in BLOCK_READERS if r.name == name)
    (document, *_) = split("job.log", f"{piece}\n" * 2000 * times)
    begin = time.process_time()
    assert len(list(reader.read(document, shipped()))) <= 2000 * times
    assert time.process_time() - begin < 2.0


@pytest.mark.parametrize(
    "piece", ["[" * 5000, "│ " * 5000, "a." * 5000 + "Error: x", "| + " * 5000, 'File "' * 5000, "cycle=" * 5000]
)
def test_long_lines_cost_little(piece: str) -> None:
    begin = time.process_time()
    for document in split("job.log", f"Traceback (most recent call last):\n{piece}\n{piece}\n"):
        list(block_events(document, shipped()))
    assert time.process_time() - begin < 1.0
