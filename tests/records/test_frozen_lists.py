"""What users and other programs rely on, spelled out: adding is free, changing one of these needs a decision record."""

from __future__ import annotations

from typing import get_args

import pytest

from keepstep.records import exits
from keepstep.records.codec import from_json, to_json
from keepstep.records.cycle import PHASES, Cycle, CyclePhases, Goodput, VerdictFile
from keepstep.records.errors import ConfigError, KeepstepError, NumericalError, RankExit, RefuseToStartError
from keepstep.records.timeline import MarkKind


def test_phase_names() -> None:
    names = "queue, init, productive, rolled_back, ckpt_block, detect, capture, teardown, decide, replace, rendezvous, "
    names += "start, restore, first_step, drain, other"
    assert ", ".join(PHASES) == names


def test_exit_codes() -> None:
    assert list(exits.MEANINGS) == [0, 1, 2, 3, 4, 5, 6, 42, 43, 93]
    assert (exits.EXIT_FAILURE, exits.EXIT_USAGE, exits.EXIT_PROBLEM, exits.EXIT_UNREACHABLE) == (1, 2, 3, 4)
    assert (exits.EXIT_DENIED, exits.EXIT_NOT_FOUND, exits.EXIT_CONFIG) == (5, 6, 42)
    assert (exits.EXIT_NUMERICAL, exits.EXIT_NO_RESTART) == (43, 93)


def test_mark_kinds_only_grow() -> None:
    known = "run_started run_ended gap cycle_started assigned attached restored first_step step ckpt_block committed "
    known += "ckpt_failed quarantined fault captured stopped decided replaced drain cycle_ended"
    assert set(known.split()) <= set(get_args(MarkKind))


def keys(value: object) -> set[str]:
    decoded = from_json(to_json(value), dict[str, object])
    return set(decoded)


CYCLE = Cycle(run_id="r", attempt=0, cycle=0, started_at="2026-01-01T00:00:00.000000000Z")


def test_goodput_keys() -> None:
    record = Goodput(
        run_id="r",
        attempt=0,
        wall_ns=0,
        phases_ns={},
        wall_s=0.0,
        ettr=None,
        productive_s=None,
        phases={},
        lost_by_cause={},
    )
    assert record.schema == "keepstep.goodput/1"
    assert keys(record) >= {
        *("schema", "run_id", "attempt", "wall_ns", "phases_ns", "wall_s", "ettr", "productive_s", "phases"),
        *("lost_by_cause", "straggler_tax_s", "false_positive_tax_s", "steps", "restarts", "checkpoints", "cycles"),
    }
    assert keys(record.steps) >= {"final", "completed", "committed", "rolled_back"}
    assert keys(record.restarts) >= {"total", "counted", "free"}
    assert keys(record.checkpoints) >= {"committed", "failed", "last_step", "block_s_median"}


def test_cycle_keys() -> None:
    assert CYCLE.schema == "keepstep.cycle/1"
    assert keys(CYCLE) >= {
        *("schema", "run_id", "attempt", "cycle", "started_at", "ended_at", "end_reason", "incident", "restored_step"),
        *(
            "restored_from",
            "restored_checkpoint",
            "recovery",
            "phases",
            "scatter",
            "ranks",
            "active_nodes",
            "spare_nodes",
        ),
        "counted",
    }
    assert keys(CyclePhases()) >= {
        *("detect_s", "capture_s", "teardown_s", "decide_s", "replace_s", "rendezvous_s", "start_s", "restore_s"),
        "first_step_s",
    }


def test_verdict_file_keys() -> None:
    record = VerdictFile(run_id="r", attempt=0, outcome="succeeded", exit_code=0, cause="finished")
    assert record.schema == "keepstep.verdict_file/1"
    assert keys(record) >= {"outcome", "exit_code", "cause", "incident", "last_committed_step"}


def test_json_is_deterministic_and_readable_back() -> None:
    assert to_json({"b": 1, "a": [1, None]}) == b'{"a":[1,null],"b":1}'
    assert from_json(to_json(CYCLE), Cycle) == CYCLE


class TestErrors:
    def test_what_the_command_line_ends_with(self) -> None:
        assert (KeepstepError("x").exit_code, ConfigError("x").exit_code) == (1, 2)

    @pytest.mark.parametrize(("error", "code"), [(RefuseToStartError, 42), (NumericalError, 43)])
    def test_a_rank_ends_with_its_code_and_says_why(
        self, error: type[RankExit], code: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        raised = error("loss is nan at step 7")  # type: ignore[call-arg]
        assert (raised.code, str(raised)) == (code, "loss is nan at step 7")
        assert not isinstance(raised, Exception)
        assert capsys.readouterr().err == "keepstep: loss is nan at step 7\n"


class TestExplainExit:
    @pytest.mark.parametrize(
        ("code", "part"),
        [
            (0, "success"),
            (2, "usage"),
            (42, "do not retry"),
            (43, "numerical guard"),
            (93, "do not requeue"),
            (130, "SIGINT"),
            (137, "ended by SIGKILL (128+9)"),
            (143, "SIGTERM (128+15): asked to stop"),
            (77, "no meaning in keepstep"),
            (128, "no meaning in keepstep"),
            (255, "no meaning in keepstep"),
        ],
    )
    def test_sentence(self, code: int, part: str) -> None:
        assert part in exits.explain_exit(code)

    def test_statuses_as_waitid_gives_them(self) -> None:
        assert [exits.exit_status_name(code) for code in (0, 3, -9, -99)] == [
            "exit 0",
            "exit 3",
            "SIGKILL",
            "signal 99",
        ]
