"""A real coordinator process: nodes that hang, vanish, or come late, other coordinators on its folder, and the end of a job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from keepstep.launcher import messages as m
from keepstep.launcher.clock import boot_id
from keepstep.launcher.coordination.connection import OUTGOING_MAX_BYTES
from keepstep.launcher.coordination.journal import read_records
from keepstep.launcher.coordination.leases import KILL_S, MARGIN
from keepstep.launcher.trust import fence_key, prove_fence
from tests.launcher.coordinators import RUN, TOKEN, Client, Served, serving
from tests.launcher.harness import wait_until

LONG_S = 60.0
SHORT_HOLD = "import keepstep.launcher.coordination.coordinator as c; c.HOLD_OPEN_S = 1.0; "


def both(served: Served, **fields: Any) -> tuple[Client, Client]:
    """Two nodes that have started their ranks of cycle 0."""
    a, b = served.join("a", **fields), served.join("b", **fields)
    for rank, client in enumerate((a, b)):
        start = client.until(m.StartCycle)
        assert (start.cycle, start.first_rank) == (0, rank)
        assert client.started(0, rank).ok
    return a, b


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(nnodes=2, lease_s=LONG_S) as served:
        yield served


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    """Two nodes whose ranks run, for tests that change nothing in that."""
    with serving(nnodes=2, lease_s=LONG_S) as served:
        both(served, boot_id=boot_id())
        yield served


class TestSlowReaders:
    def test_an_agent_that_stops_reading_holds_up_nobody(self, served: Served) -> None:
        a, b = both(served)
        assert a.ask(lambda i: m.KvSet(id=i, cycle=0, key="big", value="x" * 500_000)).ok
        # What b asks for and does not read is far more than any buffer between the two holds.
        for number in range(25):
            b.say(m.KvGet(id=1_000_000 + number, cycle=0, key="big"))
        slowest = 0.0
        for number in range(100):
            began = time.monotonic()
            assert a.beat().ok
            assert a.ask(lambda i, n=number: m.KvSet(id=i, cycle=0, key="k", value=n)).ok
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 2.0
        assert served.status()["connected"] == ["a", "b"]

    def test_one_that_never_reads_again_is_given_up(self, served: Served) -> None:
        a, b = both(served)
        assert a.ask(lambda i: m.KvSet(id=i, cycle=0, key="big", value="x" * 50_000)).ok
        for number in range(2 * OUTGOING_MAX_BYTES // 50_000):
            b.say(m.KvGet(id=1_000_000 + number, cycle=0, key="big"))
        wait_until(lambda: served.status()["connected"] == ["a"])
        assert a.beat().ok
        # It is only its connection: the node is not lost, and nothing is forgotten.
        again = served.join("b")
        assert again.beat().ok
        assert served.status()["phase"] == "running"


class TestNames:
    @pytest.mark.parametrize("boots", [("x", "x"), ("x", "y")], ids=["one host", "two hosts"])
    def test_two_launchers_that_come_under_one_name_at_once(self, served: Served, boots: tuple[str, str]) -> None:
        clients = [served.connect(), served.connect()]
        pid = served.processes[-1].pid
        os.kill(pid, signal.SIGSTOP)
        for index, client in enumerate(clients):
            client.greet("a", pid=100 + index, boot_id=boots[index])
        os.kill(pid, signal.SIGCONT)
        welcomed = []
        for index, client in enumerate(clients):
            with contextlib.suppress(ConnectionClosed):
                if isinstance(client.hear(), m.Welcome):
                    welcomed.append(index)
        (winner,) = welcomed
        assert clients[winner].beat().ok
        with served.connect() as again:
            again.greet("a", pid=101 - winner, boot_id=boots[1 - winner])
            assert f"node name 'a' is taken by host h pid {100 + winner}" in (again.hear().error or "")

    def test_a_second_hello_on_a_connection_has_no_effect(self, served: Served) -> None:
        a = served.join("a")
        a.greet("b", pid=7)
        a.greet("a", pid=8)
        assert a.beat().ok
        assert served.status()["nodes"] == {"a": "waiting"}


class TestLeases:
    def test_a_node_that_is_silent_for_its_lease_is_lost_and_the_others_are_told(self) -> None:
        with serving(nnodes=2, lease_s=0.5) as served:
            a, b = both(served)
            began = time.monotonic()
            b.beat()
            while time.monotonic() < began + MARGIN * 0.5 + KILL_S + 0.5:
                # As the launcher does: several times in a lease.
                assert a.beat().ok
                time.sleep(0.05)
            lost = next(r for r in read_records(served.run_dir) if r["type"] == "node_lost")
            assert lost["node"] == "b"
            assert (lost["t_ns"] - lost["seen_ns"]) / 1e9 >= MARGIN * 0.5 + KILL_S
            assert b.hear_end() in (1006, 1012, 1000, 1008)
            assert a.stopped(0, 0, -15).ok
            # It comes back, and the job goes on with both of them.
            again = served.join("b", fenced=True, cycle=0)
            assert again.until(m.StartCycle).cycle == 1
            assert a.until(m.StartCycle).cycle == 1

    def test_when_nobody_is_heard_there_is_nobody_to_give_the_ranks_to(self) -> None:
        with serving("--stays", nnodes=2, lease_s=0.2) as served:
            both(served)
            began = time.monotonic()
            while time.monotonic() < began + 2 * (MARGIN * 0.2 + KILL_S):
                assert served.status()["phase"] == "running"
                time.sleep(0.1)
            assert not any(r["type"] == "node_lost" for r in read_records(served.run_dir))

    def test_a_slow_renewal_gets_a_longer_lease_once_that_is_on_the_disk(self, served: Served) -> None:
        a = served.join("a")
        assert a.ask(lambda i: m.Beat(id=i, rtt_s=20.0)).result["lease_s"] == LONG_S
        wait_until(lambda: any(r["type"] == "lease" for r in read_records(served.run_dir)))

        def longer() -> bool:
            lease_s = a.ask(lambda i: m.Beat(id=i, rtt_s=20.0)).result["lease_s"]
            assert lease_s in (LONG_S, 4 * LONG_S)
            return bool(lease_s == 4 * LONG_S)

        wait_until(longer)
        (record,) = [r for r in read_records(served.run_dir) if r["type"] == "lease"]
        assert record["longest_s"] == 4 * LONG_S
        # Whoever comes after it knows: this node may believe in its lease for that long.
        served.processes[-1].kill()
        served.processes[-1].wait()
        served.start()
        b = served.join("b")
        assert b.ask(lambda i: m.Beat(id=i, rtt_s=20.0)).result["lease_s"] == 4 * LONG_S

    def test_a_host_that_was_started_again_is_let_in_when_its_lease_is_over(self) -> None:
        with serving(nnodes=2, lease_s=0.5) as served:
            a, b = both(served, boot_id="before")
            b.close()
            began = time.monotonic()
            tries = 0
            while True:
                tries += 1
                assert a.beat().ok
                with served.connect() as client:
                    client.greet("b", pid=5, boot_id="after")
                    answer = client.hear()
                    if isinstance(answer, m.Welcome):
                        break
                assert (answer.ok, answer.result) == (False, {"retry": True})
                time.sleep(0.05)
            assert time.monotonic() - began >= MARGIN * 0.5
            assert tries > 1

    def test_and_so_are_all_hosts_when_all_were_started_again(self) -> None:
        with serving("--stays", nnodes=2, lease_s=0.5) as served:
            for client in both(served, boot_id="before"):
                client.close()
            back: list[Client] = []

            def welcomed() -> bool:
                node = "ab"[len(back)]
                client = served.connect()
                client.greet(node, pid=5, boot_id="after")
                if isinstance(client.hear(), m.Welcome):
                    back.append(client)
                for other in back:
                    other.beat()
                return len(back) == 2

            wait_until(welcomed)
            assert [client.until(m.StartCycle).cycle for client in back] == [1, 1]


class TestFenced:
    """A guardian's word: POST /fenced."""

    def word(self, **fields: Any) -> bytes:
        word: dict[str, Any] = {"node": "b", "pid": 100, "boot_id": boot_id(), **fields}
        key = fence_key(None, RUN)
        return json.dumps({"proof": prove_fence(key, word["node"], word["pid"], word["boot_id"]), **word}).encode()

    def test_a_node_whose_guardian_says_so_is_lost_at_once(self, served: Served) -> None:
        a, _ = both(served, boot_id=boot_id())
        assert served.post(self.word()) == (200, {"ok": True})
        assert a.until(m.StopCycle).reason == "node_lost"
        assert served.status()["nodes"] == {"a": "active"}
        # The same again has no second effect.
        assert served.post(self.word()) == (200, {"ok": False})
        assert sum(r["type"] == "node_lost" for r in read_records(served.run_dir)) == 1

    @pytest.mark.parametrize("fields", [{"pid": 99}, {"boot_id": "another"}, {"node": "c"}])
    def test_a_word_about_another_life_changes_nothing(self, running: Served, fields: dict[str, Any]) -> None:
        assert running.post(self.word(**fields)) == (200, {"ok": False})
        assert running.status()["phase"] == "running"

    @pytest.mark.parametrize(
        ("body", "status", "why"),
        [
            (b'{"node":"b","pid":100,"boot_id":"x","proof":"00"}', 403, "no_token"),
            (b"no json", 400, "malformed"),
            (b"[]", 400, "malformed"),
            (b'{"node":"b"}', 400, "malformed"),
            (b'{"node":"b","pid":"x","boot_id":"x","proof":""}', 400, "malformed"),
            (b'{"node":"b"' + b" " * 5000, 413, "oversized"),
        ],
    )
    def test_a_word_without_proof_or_form_is_refused_and_counted(
        self, running: Served, body: bytes, status: int, why: str
    ) -> None:
        before = running.refused()
        assert running.post(body) == (status, {"ok": False})
        assert running.refused() == {**before, why: before.get(why, 0) + 1}
        assert running.status()["phase"] == "running"

    def test_over_the_network_by_the_key_of_the_token(self) -> None:
        with serving(network=True, nnodes=2, lease_s=LONG_S) as served:
            both(served, network=True, boot_id="x")
            word: dict[str, Any] = {"node": "b", "pid": 100, "boot_id": "x"}
            # The key that anybody can make is for jobs without a token.
            assert served.post(self.word(boot_id="x"), network=True)[0] == 403
            proof = prove_fence(fence_key(TOKEN, RUN), "b", 100, "x")
            assert served.post(json.dumps({**word, "proof": proof}).encode(), network=True) == (200, {"ok": True})
            assert served.refused()["no_token"] == 1


class TestEnd:
    def test_the_verdict_is_held_open_for_a_node_that_has_not_heard_it(self, served: Served) -> None:
        a, b = both(served)
        assert b.stopped(0, 1).ok
        b.close()
        wait_until(lambda: served.status()["connected"] == ["a"])
        assert a.stopped(0, 0).ok
        assert a.until(m.End).exit_code == 0
        # The verdict is on the disk before anybody is told.
        assert json.loads((served.run_dir / "verdict.json").read_text())["outcome"] == "succeeded"
        a.close()
        process = served.processes[-1]
        wait_until(lambda: served.status()["connected"] == [])
        time.sleep(1.5)
        assert process.poll() is None
        late = served.join("b")
        assert late.until(m.End).outcome == "succeeded"
        late.close()
        assert process.wait(20) == 0

    @pytest.mark.parametrize("stuck", [True, False], ids=["connected", "away"])
    def test_it_is_held_open_for_so_long_and_no_longer(self, stuck: bool) -> None:
        """A node that stands still with its connection open is no reason to stay either."""
        with serving(before=SHORT_HOLD, nnodes=2, lease_s=LONG_S) as served:
            a, b = both(served)
            assert b.stopped(0, 1).ok
            if not stuck:
                b.close()
                wait_until(lambda: served.status()["connected"] == ["a"])
            began = time.monotonic()
            assert a.stopped(0, 0).ok
            a.until(m.End)
            a.close()
            assert served.processes[-1].wait(20) == 0
            assert time.monotonic() - began >= 1.0

    def test_everybody_has_heard_it_and_it_leaves(self, served: Served) -> None:
        a, b = both(served)
        assert b.stopped(0, 1).ok
        assert a.stopped(0, 0).ok
        for client in (a, b):
            client.until(m.End)
            client.close()
        assert served.processes[-1].wait(20) == 0

    def test_a_node_that_was_lost_hears_why_the_job_will_not_go_on(self) -> None:
        """For as long as it may take to find out that it was lost."""
        with serving(nnodes=2, lease_s=1.0) as served:
            a, b = both(served, boot_id=boot_id())
            assert served.post(TestFenced().word()) == (200, {"ok": True})
            assert a.stopped(0, 0, -15).ok
            assert served.operate("stop").ok is True
            assert a.until(m.End).outcome == "stopped"
            del b

    def test_a_stop_of_a_person_ends_the_job(self, served: Served) -> None:
        a, b = both(served)
        assert served.operate("stop").ok
        for client in (a, b):
            assert client.until(m.AskStop).signum == 15
        assert b.stopped(0, 1).ok
        assert a.stopped(0, 0).ok
        assert a.until(m.End).exit_code == 143
        assert not served.operate("stop").ok


class TestOperator:
    def test_status(self, running: Served) -> None:
        status = running.status()
        assert (status["phase"], status["cycle"], status["attempt"]) == ("running", 0, 0)
        assert status["nodes"] == {"a": "active", "b": "active"}
        assert set(status["leases"]) == {"a", "b"}

    def test_a_node_is_taken_out(self, served: Served) -> None:
        a, _ = both(served)
        reply = served.operate("exclude", node="x")
        assert (reply.ok, reply.error) == (False, "no node 'x' to leave out (nodes: a, b)")
        assert served.operate("exclude", node="b", reason="looks tired").ok
        assert a.until(m.StopCycle).reason == "node_excluded"
        assert served.status()["excluded"] == {"b": "looks tired"}

    def test_an_injection_reaches_every_node(self, served: Served) -> None:
        a, b = both(served)
        assert served.operate("inject", spec="kill@rank=1").result == {"cycle": 0}
        for client in (a, b):
            assert client.until(m.DoInjection).spec == "kill@rank=1"

    def test_what_is_not_known_or_not_now(self, served: Served) -> None:
        assert served.operate("dance").error == "cannot do 'dance' now"
        assert served.operate("inject", spec="kill@rank=1").error == "the job is forming"


class TestCoordinators:
    """One after the other on one folder."""

    def test_the_next_one_goes_on_while_ranks_run(self, served: Served) -> None:
        both(served)
        served.processes[-1].kill()
        served.processes[-1].wait()
        served.start()
        back = [served.join(n, cycle=0) for n in "ab"]
        assert [(c.welcome.epoch, c.welcome.attempt, c.welcome.role) for c in back if c.welcome] == [
            (2, 0, "active")
        ] * 2
        status = served.status()
        assert (status["phase"], status["cycle"], status["attempt"]) == ("running", 0, 0)
        assert back[0].stopped(0, 0).ok
        assert back[1].stopped(0, 1).ok
        assert back[0].until(m.End).outcome == "succeeded"

    @pytest.mark.parametrize(("more", "attempt", "phase"), [((), 1, "forming"), (("--takes-over",), 0, "running")])
    def test_one_of_another_launcher(self, served: Served, more: tuple[str, ...], attempt: int, phase: str) -> None:
        """A launcher that was started again begins an attempt; one that takes over goes on with it: the other ranks live on."""
        both(served)
        served.processes[-1].kill()
        served.processes[-1].wait()
        served.start(*more, launch="second")
        status = served.status()
        assert (status["attempt"], status["phase"]) == (attempt, phase)

    def test_the_older_one_leaves_when_there_is_a_newer_one(self, served: Served) -> None:
        old = served.processes[-1]
        served.start("--takes-over", launch="second")
        assert old.wait(20) == 0
        assert "a newer epoch exists; leaving" in served.log

    def test_a_paused_one_that_was_superseded_acknowledges_nothing_more(self) -> None:
        with serving(network=True, nnodes=2, lease_s=LONG_S) as served:
            a = served.join("a", network=True)
            old = served.processes[-1]
            os.kill(old.pid, signal.SIGSTOP)
            first, served.endpoint = served.endpoint, ""
            served.start("--takes-over", launch="second")
            # What it was told before it stood still is answered, if at all, by nobody.
            a.say(m.StopRequest(id=77, signum=15, node="a"))
            os.kill(old.pid, signal.SIGCONT)
            assert old.wait(20) == 0
            assert a.hear_end() in (1001, 1006, 1012)
            assert not any(r["type"] == "stop_request" for r in read_records(served.run_dir))
            assert first

    def test_it_leaves_when_no_launcher_is_left(self) -> None:
        with serving(nnodes=1, lease_s=0.3) as served:
            served.join("a").close()
            assert served.processes[-1].wait(20) == 0
            assert "no agent left; leaving" in served.log


class TestMistakes:
    def test_a_port_that_is_taken(self, tmp_path: Path) -> None:
        with serving(network=True, nnodes=2) as first:
            other = Served(tmp_path, network=True, nnodes=2)
            other.endpoint = first.endpoint
            process = other.start()
            assert process.wait(20) == 2
            assert f"cannot listen on {first.endpoint}: Address already in use" in other.log
            assert "--rdzv-endpoint" in other.log

    def test_tls_without_a_token(self, tmp_path: Path) -> None:
        served = Served(tmp_path, network=True, nnodes=2)
        process = served.start(token=None)
        assert process.wait(20) == 2
        assert "TLS needs the job token: --token-file or KEEPSTEP_JOB_TOKEN" in served.log

    def test_without_tls_the_token_is_proved_all_the_same(self) -> None:
        with serving(network=True, tls=False, nnodes=2, lease_s=LONG_S) as served:
            with served.connect(network=True) as client:
                client.greet("b", proof="")
                assert "no proof of the job token" in (client.hear().error or "")
            with served.join("b", network=True) as good:
                assert good.beat().ok
