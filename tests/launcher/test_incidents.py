"""Marks about checkpoints that ranks report: all are taken, and a refused checkpoint becomes an incident."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.incidents import incident_of
from keepstep.records.timeline import Mark, MarkKind
from tests.launcher.coordinators import Client, Served, serving
from tests.launcher.harness import wait_until

LONG_S = 60.0
REFUSED = {"checkpoint": "job-step-00000010-c0000-a0000", "step": 10, "reason": "rank-0: SHA-256 differs"}


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(nnodes=1, lease_s=LONG_S) as served:
        yield served


def training(served: Served) -> Client:
    client = served.join("a")
    client.until(m.StartCycle)
    assert client.started(0, 0).ok
    return client


def tell(client: Client, kind: str, **attrs: Any) -> m.Reply:
    return client.ask(
        lambda i: m.Note(id=i, cycle=0, kind=kind, rank=0, t_ns=1_700_000_000_000_000_000 + i, attrs=attrs)
    )


def test_every_mark_of_a_checkpointer_is_taken(served: Served) -> None:
    client = training(served)
    for kind in ("kept", "ckpt_skipped", "tier_reached", "upload_failed", "ckpt_failed", "committed", "ckpt_block"):
        assert tell(client, kind, step=5).ok, kind
    assert not tell(client, "verdict", step=5).ok


def test_a_refused_checkpoint_is_an_incident_and_is_made_again_from_the_journal(served: Served) -> None:
    client, path = training(served), served.run_dir / "incidents" / "INC-0001.json"
    assert tell(client, "quarantined", **REFUSED, tier="disk").ok
    wait_until(path.exists)
    written = json.loads(path.read_bytes())
    assert written["verdict"]["class"] == "storage" and "SHA-256 differs" in written["verdict"]["summary"]
    assert (written["id"], written["cycle"], written["kind"]) == ("INC-0001", 0, "checkpoint.quarantined")
    assert tell(client, "image_refused", **REFUSED, tier="peer").ok
    wait_until((path.parent / "INC-0002.json").exists)
    assert client.stopped(0, 0).ok
    assert client.until(m.End).outcome == "succeeded"
    client.close()
    wait_until(lambda: served.processes[-1].poll() is not None)
    cycle = json.loads((served.run_dir / "cycles" / "cycle-0000.json").read_bytes())
    assert cycle["incident"] == "INC-0001"
    before = path.read_bytes()
    path.unlink()
    served.start(launch="second")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "attrs", "expected"),
    [
        ("quarantined", {"tier": "object"}, "storage"),
        ("quarantined", {"distrust": "key"}, "unknown"),
        ("image_refused", {"tier": "peer"}, "hardware"),
    ],
)
def test_classes(kind: MarkKind, attrs: dict[str, str], expected: str) -> None:
    incident = incident_of("job", "INC-0001", Mark(t_ns=1, kind=kind, attrs={**REFUSED, **attrs}))
    assert incident.verdict["class"] == expected
