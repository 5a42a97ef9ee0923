"""Interruptions of a run as the coordinator counts them, as ranks are told, and as the journal says afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.goodput.history import FAILURE_RULES
from keepstep.launcher import messages as m
from keepstep.launcher.coordination.rules import RULES
from keepstep.launcher.views.failures import read_failures
from tests.launcher.lives import Lead
from tests.launcher.whole_lives import LIVES

FAILURES = {
    "finished": 0,
    "hung, then killed": 2,
    "exit 42": 0,
    "exit 43": 0,
    "the same failure at another step, then the end of the budget": 4,
    "interrupted while a fault is handled": 0,
    "a launcher that was started again": 1,
    "killed once": 1,
    "asked to stop while training": 0,
    "a node is lost and a spare takes its place": 1,
    "two nodes lost at once, one spare": 1,
    "checks fail before the first cycle": 0,
    "checks fail after a cycle": 1,
    "a person takes a spare out": 0,
    "a rank asks for the end": 0,
}


@pytest.mark.parametrize("name", LIVES)
def test_ranks_the_coordinator_and_the_journal_agree(name: str, run_dir: Path) -> None:
    life = LIVES[name]
    lead = Lead(run_dir, life.shape, None, life.marker)
    told: dict[int, int] = {}
    for event in life.events:
        lead.take(event)
        for node in lead.connected:
            command = lead.job.command_for(node)
            if isinstance(command, m.StartCycle):
                failures = command.history.failures if command.history is not None else 0
                assert told.setdefault(command.cycle, failures) == failures
    lead.close()
    assert list(told.values()) == sorted(told.values())
    history = lead.job.failures.history()
    assert history == read_failures(run_dir, 0)
    if history is not None:
        assert history.node_s > 0
        assert max(told.values()) <= history.failures
    if name in FAILURES:
        assert (history.failures if history is not None else 0) == FAILURES[name]


def test_the_rules_that_count_exist() -> None:
    assert {text.partition(":")[0] for text, _ in RULES} >= FAILURE_RULES
