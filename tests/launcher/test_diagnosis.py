"""Flight-recorder dumps beside logs: what they add to a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.launcher.diagnosis import diagnose


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
    (tmp_path / "rank2.log").write_text(
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 9, in step\n'
        "    loss = weights[task]\n"
        "KeyError: 'task_3'\n"
    )
    verdict = diagnose([str(tmp_path)]).judgement.verdict
    assert (verdict.fault_class, verdict.action, verdict.entity.rank) == ("user_code", "fail_fast", 2)
