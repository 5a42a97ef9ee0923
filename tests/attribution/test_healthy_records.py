"""Records of jobs that are well: nothing in them is a cause, and no action follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.sources.reading import read_text

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
