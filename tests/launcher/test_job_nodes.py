"""Which nodes are in a job: joining, names, spares, losses and returns, exclusion, and the smaller job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.job import FLAP_WINDOW_NS, FLAPS
from keepstep.launcher.coordination.journal import read_records
from tests.launcher.lives import (
    ONE,
    SWAPPED,
    THREE,
    TWO,
    Closed,
    Event,
    Lead,
    broken,
    failure,
    fault,
    finish,
    halted,
    hello,
    operator_exclude,
    shape,
    started,
    stopped,
    training,
)


def ranks(lead: Lead) -> dict[str, list[int]]:
    """Node -> its ranks in the newest cycle."""
    c = lead.job.cycle
    assert c is not None
    return {n: list(range(f, f + k)) for (n, _, k), f in zip(c.layout, c.first_ranks, strict=True)}


def told(lead: Lead, *nodes: str) -> list[str]:
    return [type(lead.job.command_for(n)).__name__ for n in nodes]


def error(lead: Lead, event: Event) -> str:
    reply = lead.take(event)
    assert reply is not None
    assert not reply.ok
    return reply.error or ""


class TestJoin:
    def test_another_run_is_refused(self, run_dir: Path) -> None:
        assert error(Lead(run_dir, shape()), hello("a", run_id="other")) == "this is run 'run-1', not 'other'"

    def test_no_cycle_before_every_node_is_connected(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"))
        assert (lead.job.phase, lead.job.command_for("a")) == ("forming", None)
        lead.tell(hello("b"))
        commands = [lead.job.command_for(n) for n in ("a", "b")]
        assert [c.first_rank for c in commands if isinstance(c, m.StartCycle)] == [0, 2]
        assert [c.node_index for c in commands if isinstance(c, m.StartCycle)] == [0, 1]

    def test_the_first_cycle_waits_for_spares_until_the_last_call(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2, spares=1))
        lead.tell(hello("a"), hello("b"))
        assert (lead.job.phase, lead.job.waiting) == ("forming", "2 of 2 nodes and 1 spares are here")
        lead.last_call = True
        lead.tell(("a", Closed()), hello("a"))
        assert ranks(lead) == TWO

    def test_a_smaller_job_starts_at_the_last_call_only(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(3, min_nodes=2))
        lead.tell(hello("a"), hello("b"))
        assert lead.job.phase == "forming"
        lead.last_call = True
        lead.tell(hello("b"))
        assert ranks(lead) == TWO

    def test_a_node_that_is_not_connected_any_more_is_waited_for(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), ("a", Closed()), hello("b"))
        assert (lead.job.phase, lead.job.waiting) == ("forming", "not connected: a")
        lead.tell(hello("a"))
        assert ranks(lead) == TWO

    def test_when_the_others_never_come_the_job_ends_and_says_who_was_there(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(3))
        lead.tell(hello("b"), hello("c", problems=["disk full"]))
        for record in lead.job.give_up_joining(9, 60):
            lead.job.apply(record)
        assert lead.ending == ("failed", 1, "join_timeout")
        assert lead.job.verdict is not None
        said = lead.job.verdict.message or ""
        assert "2 of 3 nodes within 60 s (b, c)" in said
        assert "c left out: disk full" in said

    def test_the_same_launcher_that_connects_again_has_lost_nothing(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), hello("b"))
        assert (lead.job.phase, lead.job.losses) == ("running", {})

    def test_a_hello_after_the_verdict_gets_the_end(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), ("b", Closed()), *finish(0, TWO, 3))
        assert lead.ending == ("succeeded", 0, "finished")
        size = lead.journal.path.stat().st_size
        for late in (hello("b"), hello("x")):
            assert lead.take(late) is None
            assert told(lead, late[0]) == ["End"]
        assert lead.journal.path.stat().st_size == size

    def test_ranks_follow_the_order_of_the_topology(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(4))
        leaves = {"a": "leaf2", "b": "leaf1", "c": "leaf2", "d": "leaf1"}
        lead.tell(*[hello(n, levels=["spine", leaf]) for n, leaf in leaves.items()])
        assert list(ranks(lead)) == ["b", "d", "a", "c"]

    def test_the_users_topology_goes_before_what_nodes_say(self, run_dir: Path) -> None:
        topology = {n: ["spine", leaf] for n, leaf in {"a": "leaf2", "b": "leaf1", "c": "leaf2", "d": "leaf1"}.items()}
        lead = Lead(run_dir, shape(4, topology=topology))
        lead.tell(*[hello(n, levels=["all", "one"]) for n in "abcd"])
        assert list(ranks(lead)) == ["b", "d", "a", "c"]


class TestNames:
    TAKEN = "node name 'a' is taken by host host-a pid 100; start this one with another --node-name"

    def test_a_name_that_is_taken_says_by_whom(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"))
        for other in (hello("a", pid=200), hello("a", boot_id="elsewhere"), hello("a", pid=200, boot_id="elsewhere")):
            reply = lead.take(other)
            assert reply is not None
            assert (reply.error, reply.result) == (self.TAKEN, None)
        assert lead.job.nodes["a"].pid == 100

    def test_another_launcher_on_the_same_boot_takes_the_name_of_one_that_is_gone(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), ("b", Closed()))
        lead.tell(hello("b", pid=101))
        assert told(lead, "a", "b") == ["StopCycle", "NoneType"]
        lead.tell(stopped("a", 0, {0: 0, 1: 0}, step=3))
        assert told(lead, "a", "b") == ["StartCycle", "StartCycle"]
        assert (lead.job.counted, ranks(lead)) == (0, TWO)

    def test_another_boot_is_asked_to_wait_until_the_lease_has_told(self, run_dir: Path) -> None:
        """The host may have been started again, or it is another host, and that name's ranks still run."""
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), ("b", Closed()))
        again = hello("b", pid=101, boot_id="after")
        reply = lead.take(again)
        assert reply is not None
        assert (reply.ok, reply.result) == (False, {"retry": True})
        assert "node name 'b' is taken" in (reply.error or "")
        assert lead.job.phase == "running"
        lead.tell(("b", None))
        assert lead.take(again) is None
        lead.tell(stopped("a", 0, {0: 0, 1: 0}, step=3))
        assert (ranks(lead), lead.job.nodes["b"].pid) == (TWO, 101)

    def test_refused_launchers_leave_no_record(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("a", pid=7), hello("x", run_id="other"))
        assert [r["node"] for r in read_records(run_dir) if r["type"] == "node"] == ["a"]


class TestSpares:
    def lead(self, run_dir: Path, **fields: Any) -> Lead:
        lead = Lead(run_dir, shape(2, spares=1, **fields))
        lead.tell(hello("a"), hello("b"), hello("c"), *training(0, 3, TWO, 2))
        return lead

    def test_a_spare_has_no_ranks_and_is_told_nothing(self, run_dir: Path) -> None:
        lead = self.lead(run_dir)
        assert [lead.job.role_of(n) for n in "abc"] == ["active", "active", "spare"]
        assert lead.job.command_for("c") is None
        assert lead.job.cycle is not None
        assert lead.job.cycle.spares == ["c"]

    @pytest.mark.parametrize(("gone", "after"), [("a", {"c": [0, 1], "b": [2, 3]}), ("b", SWAPPED)])
    def test_survivors_keep_their_ranks(self, run_dir: Path, gone: str, after: dict[str, list[int]]) -> None:
        lead = self.lead(run_dir)
        stays = "b" if gone == "a" else "a"
        lead.tell((gone, None), stopped(stays, 0, dict.fromkeys(TWO[stays], 1), step=3))
        assert ranks(lead) == after
        assert lead.job.cycle is not None
        assert (lead.job.cycle.path, lead.job.cycle.substituted) == ("spare", [[gone, "c"]])
        assert [k.cycle for k in lead.job.marks if k.kind == "replaced"] == [0]
        # The place of rank 0 is where ranks meet: with it, the address moves.
        command = lead.job.command_for("c")
        assert isinstance(command, m.StartCycle)

    def test_the_spare_next_to_the_lost_node_is_taken(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2, spares=2))
        leaf = {"a": "leaf1", "b": "leaf1", "c": "leaf2", "d": "leaf1"}
        lead.tell(*[hello(n, levels=["s", leaf[n]]) for n in "abcd"])
        assert list(ranks(lead)) == ["a", "b"]
        lead.tell(*training(0, 3, TWO), ("b", None), stopped("a", 0, {0: 1, 1: 1}, step=3))
        assert list(ranks(lead)) == ["a", "d"]

    def test_no_spare_is_taken_for_a_failure_that_leaves_the_node_whole(self, run_dir: Path) -> None:
        lead = self.lead(run_dir)
        lead.tell(*broken(0, failure(2, -9), places=TWO))
        assert lead.job.cycle is not None
        assert (ranks(lead), lead.job.cycle.path, lead.job.counted) == (TWO, "respawn", 1)

    def test_a_spare_that_is_lost_changes_nothing(self, run_dir: Path) -> None:
        lead = self.lead(run_dir)
        lead.tell(("c", None))
        assert (lead.job.phase, lead.job.role_of("c")) == ("running", "spare")
        lead.tell(("b", None), stopped("a", 0, {0: 1, 1: 1}, step=3))
        assert (lead.job.phase, lead.ending) == ("forming", None)
        lead.tell(hello("c"))
        assert ranks(lead) == SWAPPED

    def test_a_node_that_is_only_connecting_again_keeps_its_ranks(self, run_dir: Path) -> None:
        """Its connection is gone at the moment when the next cycle forms, as for all of them when the coordinator is new."""
        lead = self.lead(run_dir)
        lead.tell(fault("a", 0, 0), stopped("b", 0, {2: -15, 3: -15}, step=3), ("b", Closed()))
        lead.tell(stopped("a", 0, {0: -9, 1: -15}, failure(0, -9), step=3))
        assert (lead.job.phase, lead.job.waiting) == ("forming", "not connected: b")
        lead.tell(hello("b"))
        assert lead.job.cycle is not None
        assert (ranks(lead), lead.job.cycle.path) == (TWO, "respawn")

    def test_and_when_it_does_not_come_back_the_spare_takes_them(self, run_dir: Path) -> None:
        lead = self.lead(run_dir)
        lead.tell(fault("a", 0, 0), stopped("b", 0, {2: -15, 3: -15}, step=3), ("b", Closed()))
        lead.tell(stopped("a", 0, {0: -9, 1: -15}, failure(0, -9), step=3))
        assert lead.job.phase == "forming"
        lead.tell(("b", None))
        assert ranks(lead) == SWAPPED
        # What ended the cycle was the rank, which counts.
        assert lead.job.counted == 1

    def test_an_extra_node_waits_as_a_spare_instead_of_being_refused(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), hello("c"))
        assert lead.job.role_of("c") == "spare"
        lead.tell(*training(0, 3, TWO), ("b", None), stopped("a", 0, {0: 1, 1: 1}, step=3))
        assert ranks(lead) == SWAPPED

    def test_a_spare_with_another_number_of_ranks_does_not_fit(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), hello("c", nproc=4))
        lead.tell(("b", None), stopped("a", 0, {0: 1, 1: 1}, step=3))
        assert lead.job.phase == "forming"
        assert lead.job.waiting == "no spare with the same number of ranks for b"


class TestLoss:
    def test_a_node_that_stopped_its_ranks_by_itself_is_known_by_its_hello(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), ("b", Closed()))
        back = hello("b", fenced=True, cycle=0)
        lead.tell(back)
        assert (lead.job.phase, len(lead.job.losses["b"])) == ("stopping", 1)
        assert lead.job.command_for("b") is None
        # The welcome did not reach it: the same again is no second loss.
        lead.tell(("b", Closed()), back, ("b", Closed()), back)
        assert len(lead.job.losses["b"]) == 1
        assert lead.job.excluded == {}

    def test_a_fence_of_an_earlier_cycle_says_nothing_about_this_one(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), *broken(0, failure(0, -9), places=TWO))
        lead.tell(*training(1, 3, TWO), hello("b", fenced=True, cycle=0))
        assert (lead.job.phase, lead.job.losses) == ("running", {})

    def test_a_lost_node_that_says_that_it_stopped_has_no_second_effect(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), ("b", None), ("b", None))
        assert lead.take(stopped("b", 0, {2: -9, 3: -9})) is not None
        assert "b" not in lead.job.nodes
        assert lead.job.phase == "stopping"
        lead.tell(stopped("a", 0, {0: 1, 1: 1}, step=3))
        assert len(lead.job.losses["b"]) == 1
        assert lead.job.counted == 0

    def test_all_nodes_lost_is_no_cycle_until_they_come_again(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), ("b", None), ("a", None))
        assert (lead.job.phase, lead.job.counted) == ("forming", 0)
        lead.tell(hello("b", pid=7))
        assert lead.job.phase == "forming"
        lead.tell(hello("a", pid=8))
        assert ranks(lead) == TWO

    def test_flapping(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"))
        for cycle in range(FLAPS):
            assert lead.job.excluded == {}
            lead.tell(*training(cycle, 2, TWO), ("b", None), stopped("a", cycle, {0: 1, 1: 1}, step=2), hello("b"))
        assert lead.job.excluded == {"b": "flapping: lost 3 times within 600 s"}
        assert (lead.job.phase, lead.job.role_of("b")) == ("forming", "excluded")
        lead.tell(hello("c"))
        assert ranks(lead) == SWAPPED

    def test_flapping_by_launchers_that_are_started_again(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"))
        for cycle in range(FLAPS):
            lead.tell(*training(cycle, 2, TWO), ("b", Closed()), hello("b", pid=101 + cycle))
            lead.tell(stopped("a", cycle, {0: 1, 1: 1}, step=2))
        assert lead.job.excluded == {"b": "flapping: lost 3 times within 600 s"}

    def test_losses_of_long_ago_do_not_count(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"))
        for cycle in range(FLAPS):
            lead.now_ns += FLAP_WINDOW_NS
            lead.tell(*training(cycle, 2, TWO), ("b", None), stopped("a", cycle, {0: 1, 1: 1}, step=2), hello("b"))
        assert lead.job.excluded == {}


class TestExcluded:
    PROBLEMS = ("gpu 3 does not answer", "disk /scratch is full")

    def test_a_node_whose_checks_fail_is_never_in_a_cycle(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b", problems=list(self.PROBLEMS)))
        assert lead.job.excluded == {"b": "gpu 3 does not answer; disk /scratch is full"}
        assert (lead.job.phase, lead.job.waiting) == ("forming", "1 usable nodes of 2")
        lead.tell(hello("c"))
        assert ranks(lead) == SWAPPED

    def test_it_is_still_there_to_hear_the_end(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(1))
        lead.tell(hello("b", problems=["x"]), hello("a"), *training(0, 2, ONE), *finish(0, ONE, 2))
        assert told(lead, "a", "b") == ["End", "End"]

    def test_a_check_that_fails_between_two_cycles(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2, spares=1))
        lead.tell(hello("a"), hello("b"), hello("c"), *training(0, 3, TWO), fault("a", 0, 0))
        lead.tell(stopped("b", 0, {2: -15, 3: -15}, step=3, problems=self.PROBLEMS))
        lead.tell(stopped("a", 0, {0: -9, 1: -15}, failure(0, -9), step=3))
        assert (ranks(lead), lead.job.role_of("b")) == (SWAPPED, "excluded")

    def test_by_a_person_at_once(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2, spares=1))
        lead.tell(hello("a"), hello("b"), hello("c"), *training(0, 3, TWO), operator_exclude("b"))
        assert told(lead, "a", "b") == ["StopCycle", "StopCycle"]
        lead.tell(*halted(0, TWO))
        assert (ranks(lead), lead.job.counted) == (SWAPPED, 0)
        assert [d["outcome"]["rule"] for d in read_records(run_dir) if d["type"] == "decision"] == ["node_excluded"]

    @pytest.mark.parametrize("node", ["x", "b"])
    def test_a_node_that_is_unknown_or_out_already(self, run_dir: Path, node: str) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b", problems=["x"]))
        assert lead.job.exclude(node, "again") == []

    def test_without_a_spare_the_job_waits_for_another_node(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2))
        lead.tell(hello("a"), hello("b"), *training(0, 3, TWO), operator_exclude("b"), *halted(0, TWO))
        assert (lead.job.phase, lead.ending) == ("forming", None)
        lead.tell(("b", Closed()), hello("b"))
        assert lead.job.phase == "forming"
        lead.tell(hello("c"))
        assert ranks(lead) == SWAPPED


class TestSmallerJob:
    def lead(self, run_dir: Path, **fields: Any) -> Lead:
        lead = Lead(run_dir, shape(3, **{"min_nodes": 2, **fields}))
        lead.tell(hello("a"), hello("b"), hello("c"))
        lead.tell(*training(0, 3, THREE))
        return lead

    def lose(self, lead: Lead, cycle: int, *gone: str) -> None:
        lead.tell(*[(n, None) for n in gone])
        assert lead.job.cycle is not None
        for node in lead.job.cycle.nodes:
            if node not in gone:
                lead.tell(stopped(node, cycle, {0: 1}, step=3))

    def test_it_shrinks_to_the_least_and_no_further(self, run_dir: Path) -> None:
        lead = self.lead(run_dir)
        self.lose(lead, 0, "a")
        assert ranks(lead) == {"b": [0, 1], "c": [2, 3]}
        assert lead.job.cycle is not None
        assert lead.job.cycle.path == "shrink"
        self.lose(lead, 1, "b")
        assert (lead.job.phase, lead.job.waiting) == ("forming", "1 usable nodes of 2")

    def test_it_grows_at_the_next_restart(self, run_dir: Path) -> None:
        lead = self.lead(run_dir)
        self.lose(lead, 0, "a")
        lead.tell(hello("a"))
        assert lead.job.role_of("a") == "spare"
        lead.tell(*broken(1, failure(0, -9), places={"b": [0, 1], "c": [2, 3]}))
        assert set(ranks(lead)) == {"a", "b", "c"}
        assert lead.job.cycle is not None
        assert (lead.job.cycle.path, lead.job.cycle.number) == ("grow", 2)

    def test_a_spare_goes_before_shrinking(self, run_dir: Path) -> None:
        lead = self.lead(run_dir)
        lead.tell(hello("d"))
        self.lose(lead, 0, "b")
        assert ranks(lead) == {"a": [0, 1], "d": [2, 3], "c": [4, 5]}

    def test_whole_replicas_only(self, run_dir: Path) -> None:
        """Four ranks a replica, two a node: nodes go by twos."""
        lead = Lead(run_dir, shape(4, min_nodes=2, replica_size=4))
        lead.tell(*[hello(n) for n in "abcd"])
        self.lose(lead, 0, "c")
        assert ranks(lead) == TWO
        assert lead.job.role_of("d") == "spare"

    def test_nodes_that_only_connect_again_do_not_shrink_it(self, run_dir: Path) -> None:
        """A coordinator that was started again while the job was forming hears of its nodes one after the other."""
        lead = Lead(run_dir, shape(4, min_nodes=2))
        lead.tell(*[hello(n) for n in "abcd"])
        # The cycle is over and "d" is lost for good when the coordinator dies; with it went every connection.
        lead.tell(fault("a", 0, 0), *[(n, Closed()) for n in "abc"])
        for node in "abc":
            lead.tell(stopped(node, 0, {0: 1}, step=3))
        lead.tell(("d", None))
        assert lead.job.phase == "forming"
        lead.close()
        lead = Lead(run_dir, lead.job.shape, attempt=0)
        lead.tell(hello("b"))
        lead.tell(hello("a"))
        assert lead.job.phase == "forming"
        lead.tell(hello("c"))
        assert list(ranks(lead)) == ["a", "b", "c"]


class TestAddresses:
    def test_ranks_meet_at_the_node_of_rank_0_and_its_port(self, run_dir: Path) -> None:
        lead = Lead(run_dir, shape(2, spares=1, master_addr=None, master_port=None))
        lead.tell(hello("a", next_addr="10.0.0.1"), hello("b", next_addr="10.0.0.2"), hello("c", next_addr="10.0.0.3"))
        first = lead.job.command_for("b")
        assert isinstance(first, m.StartCycle)
        assert (first.master_addr, first.master_port) == ("10.0.0.1", 21000 + ord("a"))
        lead.tell(started("a", 0, [0, 1]), started("b", 0, [2, 3]), ("a", None), stopped("b", 0, {2: 1, 3: 1}))
        second = lead.job.command_for("b")
        assert isinstance(second, m.StartCycle)
        assert (second.master_addr, second.master_port) == ("10.0.0.3", 21000 + ord("c"))
