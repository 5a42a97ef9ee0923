"""Flight-recorder dumps beside logs: what they add to a verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.catalog.load import shipped
from keepstep.launcher.coordination.incidents import FAILED_CYCLE, Incident, incident_id, incident_path
from keepstep.launcher.diagnosis import MOST_PAST, diagnose, diagnose_cycle, diagnosis_fields, earlier_incidents
from keepstep.records.codec import rfc3339, to_json
from keepstep.records.cycle import Cycle, RankPlace

TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/home/u/train.py", line 9, in step\n'
    "    loss = weights[task]\n"
    "KeyError: 'task_3'\n"
)

GATEWAY = """
[[signature]]
id = "site.gateway"
kind = "storage.error"
title = "gateway down"
severity = "error"
role = "root"
scope = "storage"
depth = 2
weights = { storage = 3.0 }
pattern = ['GATEWAY-(?P<node>\\w+) IS DOWN']
examples = ["GATEWAY-g3 IS DOWN"]
source = "our gateway"
reason = "its own words"
"""


def dump(rank: int, last: int, op: str = "nccl:all_reduce", size: int = 1024) -> str:
    """A dump of a group of four whose collectives up to `last` were enqueued, the last one not finished."""
    entries = [
        {
            "record_id": n,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": n,
            "p2p_seq_id": 0,
            "op_id": n,
            "profiling_name": op if n == last else "nccl:all_reduce",
            "time_created_ns": 1_900_000_000_000_000_000 + n,
            "input_sizes": [[size if n == last else 1024]],
            "input_dtypes": ["Float"],
            "output_sizes": [[size if n == last else 1024]],
            "output_dtypes": ["Float"],
            "state": "scheduled" if n == last else "completed",
            "retired": n != last,
            "is_p2p": False,
            "timeout_ms": 600000,
        }
        for n in range(1, last + 1)
    ]
    status = {"last_enqueued_collective": last, "last_started_collective": last, "last_completed_collective": last - 1}
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}
    return json.dumps({"version": "2.10", "pg_config": {"0": group}, "pg_status": {"0": status}, "entries": entries})


def folder(path: Path, dumps: dict[int, str]) -> str:
    for rank, text in dumps.items():
        (path / f"nccl_trace_rank_{rank}.json").write_text(text)
    return str(path)


def test_the_rank_that_did_not_come_is_the_cause(tmp_path: Path) -> None:
    found = diagnose([folder(tmp_path, {rank: dump(rank, 4 if rank == 2 else 5) for rank in range(4)})])
    verdict = found.judgement.verdict
    assert found.hang is not None and [c.rank for c in found.hang.culprits] == [2]
    assert verdict.signature == "hang.absent_rank" and verdict.entity.rank == 2
    assert verdict.action not in ("cordon_node", "reset_gpu")


@pytest.mark.parametrize("different", [{"op": "nccl:broadcast"}, {"size": 7}])
def test_calls_that_differ_are_the_programs_and_never_cost_a_node(tmp_path: Path, different: dict[str, object]) -> None:
    dumps = {rank: dump(rank, 5, **(different if rank == 1 else {})) for rank in range(4)}  # type: ignore[arg-type]
    verdict = diagnose([folder(tmp_path, dumps)]).judgement.verdict
    assert (verdict.fault_class, verdict.action) == ("user_code", "fail_fast")


def test_one_dump_of_four_blames_nobody(tmp_path: Path) -> None:
    found = diagnose([folder(tmp_path, {0: dump(0, 5)})])
    assert found.judgement.verdict.action in ("none", "ask_human")
    assert "hang.absent_rank" not in {w.event.signature for w in found.judgement.verdict.evidence}


def test_the_log_of_the_absent_rank_says_why(tmp_path: Path) -> None:
    folder(tmp_path, {rank: dump(rank, 4 if rank == 2 else 5) for rank in range(4)})
    (tmp_path / "rank2.log").write_text(TRACEBACK)
    verdict = diagnose([str(tmp_path)]).judgement.verdict
    assert (verdict.fault_class, verdict.action, verdict.entity.rank) == ("user_code", "fail_fast", 2)


def run_with(top: Path, nodes: list[str]) -> Path:
    """A run folder whose cycles failed alike, each on its node, and have incidents but for the last."""
    for name in ("cycles", "logs", "incidents"):
        (top / name).mkdir(parents=True)
    for number, node in enumerate(nodes):
        cycle = Cycle(
            run_id="r",
            attempt=0,
            cycle=number,
            started_at=rfc3339(number * 10**12),
            ranks=[RankPlace(rank=3, local_rank=0, node=node, host=node)],
            active_nodes=[node],
        )
        (top / f"cycles/cycle-{number:04d}.json").write_bytes(to_json(cycle))
        (top / f"logs/cycle-{number:04d}.log").write_text(
            "".join(f"[rank 3] {line}\n" for line in TRACEBACK.splitlines())
        )
        if number + 1 < len(nodes):
            keep_incident(top, number, diagnosis_fields(diagnose_cycle(top, number), shipped()))
    return top


def keep_incident(top: Path, number: int, verdict: dict[str, object]) -> None:
    record = Incident(
        id=incident_id(number + 1),
        run_id="r",
        attempt=number // 2,
        cycle=number,
        time=rfc3339((1 + number) * 10**12),
        kind=FAILED_CYCLE,
        attrs={},
        verdict=verdict,
    )
    incident_path(top, record.id).write_bytes(to_json(record))


def history_of(top: Path, cycle: int) -> list[str]:
    evidence = diagnose_cycle(top, cycle).judgement.verdict.evidence
    return [w.event.signature for w in evidence if w.event.signature.startswith("derived.history.")]


def test_a_failure_that_came_on_another_node_before_travels_with_the_job(tmp_path: Path) -> None:
    top = run_with(tmp_path / "r", ["a", "b"])
    assert history_of(top, 0) == [] and history_of(top, 1) == ["derived.history.software"]
    assert history_of(run_with(tmp_path / "same", ["a", "a"]), 1) == []


def test_a_slow_place_is_no_news_of_what_failed(tmp_path: Path) -> None:
    top = run_with(tmp_path / "r", ["a", "b"])
    (top / "logs/cycle-0001.log").write_text("[rank 3] torch.OutOfMemoryError: CUDA out of memory.\n")
    assert history_of(top, 1) == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"id": 1}', '{"schema": "keepstep.incident/1", "kind": "cycle.failed", "cycle": 0}']
)
def test_incidents_that_cannot_be_read_are_left_out(tmp_path: Path, text: str) -> None:
    top = run_with(tmp_path / "r", ["a", "b"])
    (top / "incidents/INC-0009.json").write_text(text)
    assert history_of(top, 1) == ["derived.history.software"]


def test_an_incident_without_a_verdict_of_the_files_says_nothing(tmp_path: Path) -> None:
    top = run_with(tmp_path / "r", ["a", "b"])
    keep_incident(top, 0, {"class": "user_code", "tier": "unknown", "action": "ask_human", "summary": "exit 1"})
    assert earlier_incidents(top, 1) == [] and history_of(top, 1) == []


def test_of_very_many_incidents_the_newest_count(tmp_path: Path) -> None:
    top = run_with(tmp_path / "r", ["a", "b"])
    said = json.loads(incident_path(top, "INC-0001").read_bytes())["verdict"]
    for number in range(MOST_PAST + 50):
        keep_incident(top, number, said)
    past = earlier_incidents(top, MOST_PAST + 20)
    assert [p.time_ns for p in past] == [(1 + n) * 10**12 for n in range(20, MOST_PAST + 20)]


def test_a_coordinator_judges_by_the_sites_catalog(tmp_path: Path) -> None:
    top = run_with(tmp_path / "r", ["a"])
    (top / "logs/cycle-0000.log").write_text("12:00:01 GATEWAY-g3 IS DOWN\n")
    changes = tmp_path / "home" / "catalog.d" / "site.toml"
    changes.parent.mkdir(parents=True)
    changes.write_text(GATEWAY)
    command = [sys.executable, "-m", "keepstep.launcher.diagnosis", str(top), "0"]
    env = {**os.environ, "KEEPSTEP_HOME": str(tmp_path / "home")}
    said = json.loads(subprocess.run(command, env=env, capture_output=True, check=True, timeout=60).stdout)
    assert (said["class"], said["signature"]) == ("storage", "site.gateway")
