"""Records of jobs that are well: nothing in them is a cause, and no action follows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.catalog.tables import data_text
from keepstep.sources.reading import read_text

TELLING = (
    0,
    1,
    9,
    13,
    28,
    31,
    43,
    45,
    48,
    63,
    74,
    79,
    94,
    119,
    122,
    127,
    137,
    139,
    143,
    403,
    404,
    429,
    500,
    503,
    -9,
    -15,
)
"""Numbers that mean something as an Xid, a status, an errno, a signal or an exit code."""
COUNTED = (
    "step {n}: saved checkpoint to s3://bucket/run/{n}",
    "uploaded {n} files to gs://bucket/a in {n} s",
    "reading {n} shards from bucket tokens",
    "batch {n} of 1000 written to minio",
    "rank {n} joined, world size 1024",
    "node {n} ready",
    "GPU 3 temperature {n} C",
    "worker {n} started, pid {n}",
    "WARN loader.py:{n} worker {n} waited 8.5s for shard s3://bucket/part-{n}.tar",
)
HEALTHY = sorted((Path(__file__).parent / "healthy").glob("*.txt"))


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(shipped())


@pytest.mark.parametrize("path", HEALTHY, ids=lambda p: p.stem)
class TestHealthy:
    def test_nothing_is_a_cause(self, path: Path, matcher: Matcher) -> None:
        catalog = shipped()
        events = read_text("a.log", path.read_text(), catalog, matcher).events
        blamed = {
            (e.signature, e.evidence.text)
            for e in events
            if catalog[e.signature].role in ("root", "cascade", "symptom")
        }
        assert blamed == set()

    def test_nothing_is_to_be_done(self, path: Path, matcher: Matcher) -> None:
        verdict = attribute(read_text("a.log", path.read_text(), shipped(), matcher).events, shipped())
        assert verdict.action in ("none", "ask_human")


def test_numbers_of_ordinary_lines_say_nothing(matcher: Matcher) -> None:
    texts = [data_text("ordinary.log"), *(path.read_text() for path in HEALTHY)]
    lines = [line for text in texts for line in text.splitlines()]
    blamed: set[tuple[str, str]] = set()
    for number in TELLING:
        changed = [
            line[: m.start()] + str(number) + line[m.end() :]
            for line in lines
            for m in re.finditer(r"(?<![\w.])\d+(?![\w.])", line)
        ]
        for line in [*changed, *(text.format(n=number) for text in COUNTED)]:
            blamed.update((m.signature.id, line) for m in matcher.match_line(line) if m.signature.role == "root")
    assert blamed == set()
