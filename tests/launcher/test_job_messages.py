"""What single messages do to a job: cycles, shared keys, stop requests, attempts, marks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.journal import read_records
from keepstep.records.codec import to_json
from tests.launcher.lives import (
    BUG,
    ONE,
    TWO,
    Lead,
    beat,
    broken,
    failure,
    fault,
    finish,
    grant,
    halted,
    hello,
    note,
    request,
    shape,
    started,
    stop_request,
    stopped,
    training,
)


class TestCycles:
    def test_the_given_port_is_for_the_first_cycle_only(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE))
        first = lead.job.cycle
        lead.tell(*broken(0, failure(1, -9)))
        second = lead.job.cycle
        assert first is not None
        assert second is not None
        assert (first.master_port, second.master_port, second.number) == (29500, 22000, 1)

    def test_only_the_first_fault_of_a_cycle_counts(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), fault("b", 0, 3), fault("a", 0, 0, "hang"))
        assert lead.job.cycle is not None
        assert lead.job.cycle.fault is not None
        assert (lead.job.cycle.fault.rank, lead.job.cycle.fault.kind) == (3, "exit")

    def test_messages_of_an_old_cycle_are_refused_and_change_nothing(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE), *broken(0, failure(1, -9)), *training(1, 3, ONE))
        before = (lead.job.marks[:], lead.journal.path.stat().st_size)
        old: list[m.FromAgent] = [
            m.KvSet(id=1, cycle=0, key="k", value=1),
            m.Grant(id=2, cycle=0, checkpoint="c", step=3),
            m.Note(id=4, cycle=0, rank=0, kind="committed", t_ns=9, attrs={"step": 3}),
        ]
        for message in old:
            reply = lead.take(("a", message))
            assert reply == m.Reply(epoch=1, id=message.id, ok=False, error="cycle 0 is over (current: 1)")
        lead.take(beat("a", 0, 9))
        assert (lead.job.marks, lead.journal.path.stat().st_size) == before

    def test_nothing_may_be_published_once_the_cycle_is_being_stopped(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE))
        granted = lead.take(grant("a", 0, 3))
        lead.take(fault("a", 0, 1))
        refused = lead.take(grant("a", 0, 3))
        assert granted is not None
        assert refused is not None
        assert (granted.result, refused.result) == ({"granted": True}, {"granted": False})
        assert [r["step"] for r in read_records(run_dir) if r["type"] == "grant"] == [3]

    def test_a_rank_cannot_make_the_coordinators_own_marks(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE))
        marks = lead.job.marks[:]
        for kind in ("run_ended", "fault", "cycle_started", "no_such_kind"):
            reply = lead.take(note("a", 0, 0, kind, 9))
            assert reply is not None
            assert (reply.ok, reply.error) == (False, f"no mark {kind!r} from a rank")
        assert lead.job.marks == marks

    def test_progress_is_that_of_the_slowest_node_and_only_rises(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 1, TWO))
        for node, completed in [("a", 5), ("b", 3), ("b", 4), ("b", 9), ("a", 5), ("a", 7)]:
            lead.take(beat(node, 0, completed))
        assert [k.attrs["step"] for k in lead.job.marks if k.kind == "step"] == [3, 4, 5, 7]

    def test_attached_counts_when_the_last_rank_is_there(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), started("a", 0, [0, 1]))
        lead.take(note("a", 0, 1, "attached", 900))
        assert [k for k in lead.job.marks if k.kind == "attached"] == []
        lead.take(note("a", 0, 0, "attached", 800))
        assert [k.t_ns for k in lead.job.marks if k.kind == "attached"] == [900]

    def test_attached_of_a_rank_counts_once(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), started("a", 0, [0, 1]))
        lead.tell(note("a", 0, 1, "attached", 900), note("a", 0, 1, "attached", 901), note("a", 0, 1, "attached", 900))
        assert lead.job.cycle is not None
        assert lead.job.cycle.reported == {"attached": {1: 900}}
        assert [r["rank"] for r in read_records(run_dir) if r["type"] == "reported"] == [1]
        lead.tell(note("a", 0, 0, "attached", 800), note("a", 0, 0, "attached", 1000))
        assert [k.t_ns for k in lead.job.marks if k.kind == "attached"] == [900]

    def test_attached_is_not_asked_for_twice_of_a_coordinator_that_died_in_between(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), started("a", 0, [0, 1]), note("a", 0, 1, "attached", 900))
        lead.close()
        lead = Lead(run_dir, shape(), attempt=0)
        lead.tell(hello("a"), note("a", 0, 0, "attached", 800))
        assert [k.t_ns for k in lead.job.marks if k.kind == "attached"] == [900]

    def test_the_rank_map_of_the_current_cycle(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2, spares=1))
        lead.tell(hello("a"), hello("b"), hello("c"))
        reply = lead.take(("c", m.GetCycle(id=7, cycle=0)))
        assert reply is not None
        result = msgspec.json.decode(to_json(reply))["result"]
        assert isinstance(result.pop("scatter"), dict)
        assert result == {"node_spans": [["a", "host-a", 2], ["b", "host-b", 2]], "spare_nodes": ["c"]}

    def test_in_a_large_job_ranks_are_started_without_the_rank_map(self, run_dir: Path) -> None:
        names = [f"n{i:03d}" for i in range(65)]
        lead = Lead(run_dir, shape(65))
        lead.tell(*[hello(n) for n in names])
        command = lead.job.command_for("n064")
        assert isinstance(command, m.StartCycle)
        assert (command.node_spans, command.first_rank, command.world_size) == ([], 128, 130)
        reply = lead.take(("n064", m.GetCycle(id=7, cycle=0)))
        assert reply is not None
        assert [n for n, _, _ in msgspec.json.decode(to_json(reply))["result"]["node_spans"]] == names


class TestRequests:
    """What a rank may ask for, acted on at once."""

    @pytest.mark.parametrize("what", ["stop", "exclude"])
    def test_every_node_is_told_to_stop_and_nothing_can_be_committed_any_more(self, what: str, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO, 2), request("b", 0, what, 2, "loss diverged"))
        commands = [lead.job.command_for(n) for n in ("a", "b")]
        assert commands == [m.StopCycle(epoch=1, cycle=0, reason=f"{what} asked for by rank 2")] * 2
        refused = lead.take(grant("a", 0, 4))
        assert refused is not None
        assert refused.result == {"granted": False}
        assert lead.job.last_committed == 2

    def test_the_reason_is_in_the_verdict(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE), request("a", 0, "stop", 1, "loss diverged"), *halted(0, ONE))
        assert lead.job.verdict is not None
        assert (lead.job.verdict.outcome, lead.job.verdict.message) == ("no_restart", "loss diverged")

    def test_the_first_request_of_a_cycle_counts(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO))
        lead.tell(request("b", 0, "exclude", 2), request("a", 0, "stop", 0), *halted(0, TWO))
        assert (lead.ending, set(lead.job.excluded)) == (None, {"b"})

    def test_a_request_after_a_fault_changes_nothing(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE), *(e := broken(0, failure(1, -9)))[:1], request("a", 0, "stop", 0))
        lead.tell(*e[1:])
        assert lead.job.cycle is not None
        assert (lead.job.phase, lead.job.cycle.number) == ("running", 1)

    def test_a_signal_goes_before_a_request(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE), request("a", 0, "stop", 1), stop_request("a"), *halted(0, ONE))
        assert lead.ending == ("stopped", 143, "preempted")

    def test_what_cannot_be_asked_for_has_no_effect(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE), request("a", 0, "reboot", 1))
        assert lead.job.phase == "running"

    def test_the_node_of_the_rank_is_meant_when_the_name_says_nothing(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO))
        message = m.WorkloadRequest(id=9, cycle=0, what="exclude", reason="ECC", rank=3, node="?")
        lead.take(("a", message))
        assert lead.job.excluded == {"b": "rank 3 asked for it: ECC"}

    def test_the_cycle_that_was_cut_short_names_the_request_as_its_fault(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2, spares=1))
        lead.tell(hello("a"), hello("b"), hello("c"), *training(0, 3, TWO))
        lead.tell(request("b", 0, "exclude", 2, "ECC errors"), *halted(0, TWO))
        (mark,) = [k for k in lead.job.marks if k.kind == "fault"]
        known = {k: mark.attrs[k] for k in ("kind", "rank", "node", "detail", "completed_step", "rule")}
        assert known == {
            "kind": "node_excluded",
            "rank": 2,
            "node": "b",
            "detail": "ECC errors",
            "completed_step": 3,
            "rule": "node_excluded",
        }
        assert lead.job.counted == 0


class TestBeforeTheFirstStep:
    """Every rank of a script with steps fails by itself before any step: another try would meet the same."""

    def bug(self, rank: int, **fields: Any) -> m.Failure:
        return failure(rank, 1, **{**BUG, **fields})

    def test_on_all_ranks(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 0, TWO))
        lead.tell(*broken(0, *[self.bug(r) for r in range(4)], step=None, places=TWO))
        assert lead.ending == ("failed", 42, "code_bug")
        assert lead.job.verdict is not None
        assert lead.job.verdict.message == "every rank failed before the first step: ValueError at train.py:7 in main"

    def test_on_some_ranks_it_may_be_the_machine(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 0, TWO))
        lead.tell(*broken(0, *[self.bug(r) for r in range(3)], step=None, places=TWO))
        assert (lead.ending, lead.job.counted) == (None, 1)

    def test_not_after_a_step_of_an_earlier_cycle(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE), *broken(0, failure(1, -9)), *training(1, 0, ONE))
        lead.tell(*broken(1, *[self.bug(r) for r in (0, 1)], step=None))
        assert (lead.ending, lead.job.counted) == (None, 2)

    def test_not_for_a_script_that_reports_no_steps(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), started("a", 0, [0, 1], expect_steps=False))
        lead.tell(*broken(0, *[self.bug(r) for r in (0, 1)], step=None))
        assert (lead.ending, lead.job.counted) == (None, 1)

    @pytest.mark.parametrize(
        "fields",
        [{"error_type": "OSError"}, {"error_type": "torch.distributed.DistNetworkError"}, {"injected": True}],
        ids=["disk", "network", "injected"],
    )
    def test_not_for_what_says_nothing_about_the_script(self, run_dir: Path, fields: dict[str, Any]) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 0, ONE))
        lead.tell(*broken(0, self.bug(0), self.bug(1, **fields), step=None))
        assert (lead.ending, lead.job.counted) == (None, 1)


class TestSharedKeys:
    @pytest.fixture
    def lead(self, run_dir: Path) -> Iterator[Lead]:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 2, ONE))
        yield lead
        lead.close()

    @staticmethod
    def result(lead: Lead, message: m.FromAgent) -> Any:
        reply = lead.take(("a", message))
        assert reply is not None
        return reply.result

    @pytest.mark.parametrize("value", [1, "x", None, False, 0, {}, [None]])
    def test_the_first_compare_and_set_wins_whatever_its_value(self, lead: Lead, value: Any) -> None:
        first = m.KvSet(id=1, cycle=0, key="k", value=value, only_if_absent=True)
        second = m.KvSet(id=2, cycle=0, key="k", value="later", only_if_absent=True)
        assert self.result(lead, first) == {"value": value}
        assert self.result(lead, second) == {"value": value}
        assert self.result(lead, m.KvGet(id=3, cycle=0, key="k")) == {"found": True, "value": value}

    def test_a_set_replaces(self, lead: Lead) -> None:
        self.result(lead, m.KvSet(id=1, cycle=0, key="k", value=1))
        assert self.result(lead, m.KvSet(id=2, cycle=0, key="k", value=2)) == {"value": 2}
        assert self.result(lead, m.KvGet(id=3, cycle=0, key="k")) == {"found": True, "value": 2}

    def test_an_absent_key(self, lead: Lead) -> None:
        assert self.result(lead, m.KvGet(id=3, cycle=0, key="k")) == {"found": False, "value": None}

    def test_keys_end_with_their_cycle(self, lead: Lead) -> None:
        self.result(lead, m.KvSet(id=1, cycle=0, key="k", value=1))
        lead.tell(*broken(0, failure(1, -9)))
        assert self.result(lead, m.KvGet(id=2, cycle=1, key="k")) == {"found": False, "value": None}


class TestStopRequest:
    """In every phase of a cycle."""

    def test_between_two_cycles(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), ("b", None), *finish(0, ONE, 3))
        assert lead.job.phase == "forming"
        lead.take(stop_request("a", 2))
        assert lead.ending == ("stopped", 130, "interrupted")
        assert [k.cycle for k in lead.job.marks if k.kind == "cycle_ended"] == [0]

    def test_before_the_ranks_were_started(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), started("a", 0, [0, 1]), stop_request("a"))
        assert [lead.job.command_for(n) for n in ("a", "b")] == [m.AskStop(epoch=1, cycle=0, signum=15)] * 2
        lead.take(stopped("b", 0, {}))
        lead.take(stopped("a", 0, {0: -15, 1: -15}, failure(0, -15, stopped_by_us=True)))
        assert lead.ending == ("stopped", 143, "preempted")

    def test_the_first_signal_names_the_exit_code(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE), stop_request("a", 15), stop_request("a", 2))
        lead.tell(*finish(0, ONE, 3))
        assert lead.ending == ("stopped", 143, "preempted")

    def test_after_the_verdict_it_changes_nothing(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE), *finish(0, ONE, 3), stop_request("a"))
        assert lead.ending == ("succeeded", 0, "finished")


class TestAttempts:
    def test_a_new_attempt_forms_again_and_goes_on_counting_cycles(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE, 2), *broken(0, failure(1, -9)), *training(1, 2, ONE))
        lead.close()
        lead = Lead(run_dir, shape())
        assert (lead.job.attempt, lead.job.phase, lead.job.counted, lead.job.nodes) == (1, "forming", 0, {})
        assert lead.job.last_committed == 2
        lead.take(hello("a", pid=101))
        assert lead.job.cycle is not None
        assert (lead.job.cycle.number, lead.job.cycle.started) == (2, {})

    def test_the_same_attempt_goes_on_with_its_cycle(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape())
        lead.tell(hello("a"), *training(0, 3, ONE))
        lead.close()
        lead = Lead(run_dir, shape(), attempt=0)
        assert (lead.job.phase, lead.job.epoch) == ("running", 2)
        assert lead.job.command_for("a") is None


class TestFaultMark:
    def test_the_first_failing_rank_is_named_and_not_the_loudest(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        quiet = failure(3, -9, time_ns=600)
        loud = failure(0, 1, time_ns=590, cascade=True, error_type="DistBackendError", traceback="long\n" * 50)
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), *broken(0, loud, quiet, places=TWO))
        (mark,) = [k for k in lead.job.marks if k.kind == "fault"]
        assert (mark.attrs["rank"], mark.attrs["node"], mark.attrs["cause"]) == (3, "b", "unknown")
        assert mark.attrs["detail"] == "rank 3: SIGKILL"

    def test_a_loss_names_the_node(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), ("b", None), *finish(0, ONE, 3))
        (mark,) = [k for k in lead.job.marks if k.kind == "fault"]
        assert (mark.attrs["kind"], mark.attrs["node"], mark.t_ns) == ("node_lost", "b", 5_000)
        # It was last heard of some time before it was known to be lost.
        assert (mark.attrs["occurred_ns"], mark.attrs["detected_ns"]) == (4_000, 5_000)

    def test_a_node_that_was_lost_may_still_say_that_it_stopped(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), ("b", None))
        reply = lead.take(stopped("b", 0, {2: -9, 3: -9}))
        assert reply is not None
        assert reply.ok
        assert "b" not in lead.job.nodes
