"""The no-progress stop: which files are a marker, and how failed cycles are counted, against an oracle of its own."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.launcher.coordination.noprogress import MAX_MARKER_BYTES, Progress, after_failed_cycle, read_marker


@pytest.mark.parametrize(
    ("content", "marker"),
    [
        (b"1200", 1200),
        (b"1200\n", 1200),
        (b"  7 \n", 7),
        (b"0", 0),
        (b"007", 7),
        (b"", None),
        (b"\n", None),
        (b"release", None),
        (b"12.5", None),
        (b"1200 tokens", None),
        (b"-1", None),
        (b"+1", None),
        (b"1_200", None),
        (b"1200\n1300\n", None),
        (b"\xff\xfe1", None),
        ("١٢".encode(), None),
        (b"1" * MAX_MARKER_BYTES, int("1" * MAX_MARKER_BYTES)),
        (b"1" * (MAX_MARKER_BYTES + 1), None),
        (b"1" + b" " * 10_000, None),
        (b"1\0", None),
    ],
)
def test_what_a_file_says(tmp_path: Path, content: bytes, marker: int | None) -> None:
    path = tmp_path / "latest_checkpointed_iteration.txt"
    path.write_bytes(content)
    assert read_marker(str(path)) == marker


def test_no_file_is_no_marker(tmp_path: Path) -> None:
    assert read_marker(None) is None
    assert read_marker(str(tmp_path / "nowhere")) is None
    assert read_marker(str(tmp_path)) is None
    assert read_marker("bad\0name") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_no_marker(tmp_path: Path) -> None:
    path = tmp_path / "marker"
    path.write_text("5")
    path.chmod(0)
    assert read_marker(str(path)) is None


def counts(baseline: int | None, *ends: int | str | None, min_growth: int = 1) -> list[int]:
    """The count after each failed cycle. A text like "50!" is a marker of 50 at the end of a cycle with a rollback."""
    progress = Progress(last=baseline)
    found = []
    for end in ends:
        rolled_back = isinstance(end, str)
        marker = int(end.rstrip("!")) if isinstance(end, str) else end
        progress = after_failed_cycle(progress, marker, min_growth, rolled_back)
        found.append(progress.count)
    return found


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (counts(100, 100, 100, 100), [1, 2, 3]),
        (counts(100, 100, 101, 101, 101), [1, 0, 1, 2]),
        (counts(100, 109, 118, min_growth=10), [1, 2]),
        (counts(100, 110, 119, 128, 138, min_growth=10), [0, 1, 2, 0]),
        # What was not grown in one cycle is not made up for by the next: each is compared with the one before it.
        (counts(100, 105, 110, 115, min_growth=10), [1, 2, 3]),
        # No marker, or none that can be read: as if that cycle had not been.
        (counts(100, 100, None, 100), [1, 1, 2]),
        (counts(100, None, 101), [0, 0]),
        (counts(None, None, None, None), [0, 0, 0]),
        (counts(None, 100, 100, 100), [0, 1, 2]),
        # Nothing was ever written: there is nothing to judge by.
        (counts(0, 0, 0, 0, 0), [0, 0, 0, 0]),
        (counts(None, 0, 0, 0, 0), [0, 0, 0, 0]),
        (counts(0, 0, 5, 5, 5), [0, 0, 1, 2]),
        # Going back without a word is no progress; announced, it is a new baseline.
        (counts(100, 100, 50, 50), [1, 2, 3]),
        (counts(100, 100, "50!", 51), [1, 1, 0]),
        (counts(100, 100, "50!", 50, 50), [1, 1, 2, 3]),
        (counts(100, 100, "100!", "100!", "100!"), [1, 1, 1, 1]),
    ],
)
def test_counting(found: list[int], expected: list[int]) -> None:
    assert found == expected


def oracle(baseline: int | None, cycles: list[tuple[int | None, bool]], min_growth: int) -> int:
    """The rule read off the whole history at once.

    Known ends of cycles stand in a row behind the baseline; each neighbour pair is one judgement: none (a rollback, or still
    nothing ever written), growth enough (the count starts again), or not (one more).
    """
    row = [(baseline, False), *cycles]
    known = [(marker, back) for marker, back in row if marker is not None]
    verdicts = []
    for (before, _), (marker, back) in pairwise(known):
        if back or (before == 0 and marker == 0):
            continue
        verdicts.append(marker - before >= min_growth)
    tail = 0
    while tail < len(verdicts) and not verdicts[-1 - tail]:
        tail += 1
    return tail


@given(
    baseline=st.none() | st.integers(0, 20),
    cycles=st.lists(st.tuples(st.none() | st.integers(0, 20), st.booleans()), max_size=12),
    min_growth=st.integers(1, 6),
)
def test_any_history_counts_as_the_rule_says(
    baseline: int | None, cycles: list[tuple[int | None, bool]], min_growth: int
) -> None:
    progress = Progress(last=baseline)
    for marker, rolled_back in cycles:
        progress = after_failed_cycle(progress, marker, min_growth, rolled_back)
    assert progress.count == oracle(baseline, cycles, min_growth)
    known = [marker for marker, _ in [(baseline, False), *cycles] if marker is not None]
    assert progress.last == (known[-1] if known else None)
