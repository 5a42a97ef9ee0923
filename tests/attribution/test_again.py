"""What came again or was tried again, each beside a nearly equal text that is another matter."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, timeout, verdict_of

DOWN = "n07:311:405 [3] transport/net_ib/common.cc:144 NCCL WARN NET/IB : {nic}:1 Got async error event: port error"
UP = "n07:311:405 [3] transport/net_ib/common.cc:144 NCCL WARN NET/IB : mlx5_6:1 Got async error event: port active"
ABORT = (
    "n07:311:404 [3] transport/net_ib/p2p.cc:219 NCCL WARN NET/IB: Got completion from peer 10.1.0.9<4711> with status=12 "
    "opcode=0 len=0 vendor err 129 (Send) hca mlx5_6"
)
STEPS = ("2031-05-02T10:02:01Z step 830 loss 2.09", "2031-05-02T12:02:01Z step 2630 loss 1.98")


def at(clock: str, line: str, nic: str = "mlx5_6") -> str:
    return f"2031-05-02T{clock}Z {line.format(nic=nic)}"


def test_a_port_that_goes_down_again_takes_its_node_out() -> None:
    text = lines(
        at("09:00:00", DOWN), at("09:00:09", UP), at("09:30:00", DOWN), at("09:40:00", DOWN), at("09:40:20", ABORT)
    )
    verdict = verdict_of(text)
    assert (verdict.fault_class, verdict.action, verdict.signature) == ("fabric", "cordon_node", "derived.port_flaps")


@pytest.mark.parametrize(
    "text",
    [
        lines(at("09:00:00", DOWN), at("09:00:20", ABORT)),
        lines(at("09:00:00", DOWN), at("09:10:00", DOWN, "mlx5_7"), at("09:10:20", ABORT)),
        lines(at("09:00:00", DOWN), at("09:10:00", DOWN), *STEPS),
        lines(at("09:00:00", DOWN), at("09:10:00", DOWN), "KeyError: 'x'"),
    ],
)
def test_once_on_several_ports_or_survived_is_no_flapping_that_stopped_the_job(text: str) -> None:
    assert "derived.port_flaps" not in conclusions(text)


def test_a_short_drop_that_the_job_came_through_is_over() -> None:
    assert verdict_of(lines(at("10:00:00", DOWN), at("10:00:04", UP), *STEPS)).no_current_fault


@pytest.mark.parametrize(
    "text",
    [
        lines(at("10:00:00", DOWN), *STEPS),
        lines(at("10:00:00", DOWN), at("10:00:04", UP)),
        lines(at("10:00:00", DOWN), at("10:00:04", UP), *STEPS, at("12:10:00", ABORT)),
        lines(at("10:00:00", DOWN), at("10:00:04", UP), *STEPS, "# no progress since, job hangs"),
    ],
)
def test_a_port_that_is_not_back_or_a_job_that_does_not_go_on_is_a_fault(text: str) -> None:
    assert not verdict_of(text).no_current_fault


EXISTS = "ValueError: Destination gs://b/run/checkpoints/900 already exists."


def test_a_left_over_that_stops_each_attempt_is_not_restarted_into() -> None:
    text = lines(f"attempt 2: {EXISTS}", "attempt 3: restored step 800", f"attempt 3: {EXISTS}")
    verdict = verdict_of(text)
    assert (verdict.fault_class, verdict.action) == ("framework", "fail_fast")


def test_all_ranks_of_one_attempt_say_it_once() -> None:
    text = lines(*(f"[rank{r}]: FileExistsError: [Errno 17] File exists: '/ckpt/step_900'" for r in range(4)))
    assert "derived.ckpt.exists_again" not in conclusions(text)


def test_a_left_over_that_the_next_attempt_passed_is_over_and_only_then() -> None:
    begin = ("2031-03-03 12:02:44 FileExistsError: [Errno 17] File exists: '/ckpt/step_900'",)
    resumed = "2031-03-03 12:10:00 attempt 2: resumed from /ckpt/step_800"
    steps = ("2031-03-03 12:42:00 step 901 loss 2.0", "2031-03-03 13:42:00 step 1901 loss 1.9")
    assert verdict_of(lines(*begin, resumed, *steps)).no_current_fault
    assert not verdict_of(lines(*begin, resumed)).no_current_fault
    again = "2031-03-03 14:02:44 FileExistsError: [Errno 17] File exists: '/ckpt/step_2000'"
    assert not verdict_of(lines(*begin, resumed, *steps, again)).no_current_fault


RESTART = "2031-09-01 08:10:12 INFO [default] Worker group FAILED. {left}/3 attempts left; will restart worker group"
CLOSED = "2031-09-01 08:10:13 ERROR torch.distributed.elastic.rendezvous.api.RendezvousClosedError"
LEAVES = "2031-09-01 08:10:12 torch.distributed.elastic.multiprocessing.api.SignalException: Process 88 got signal: 15"


def test_a_rendezvous_that_the_restart_itself_closed_gets_a_new_one() -> None:
    verdict = verdict_of(lines(RESTART.format(left=2), CLOSED))
    assert (verdict.fault_class, verdict.action) == ("framework", "restart_job")


@pytest.mark.parametrize(
    "text",
    [
        lines(CLOSED),
        lines(RESTART.format(left=2), LEAVES, CLOSED),
        lines(
            "Traceback (most recent call last):",
            '  File "train.py", line 3, in f',
            "KeyError: 'x'",
            RESTART.format(left=2),
            CLOSED,
        ),
    ],
)
def test_a_rendezvous_that_others_closed_is_not_the_restarts(text: str) -> None:
    assert "derived.rendezvous_closed_by_restart" not in conclusions(text)


LISTENS = "h1:77:99 [0] NCCL INFO bootstrapRoot: listening on 192.168.4.1<{port}>"
DIALS = "h2:61:80 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 192.168.4.1<{port}> failed : Connection refused"


def test_an_address_of_a_former_attempt_is_the_stores_and_the_present_one_the_nets() -> None:
    both = ("==> attempt 0 <==", LISTENS.format(port=40101), "==> attempt 1 <==", LISTENS.format(port=52944))
    assert "derived.dialled_former_attempt" in conclusions(lines(*both, DIALS.format(port=40101)))
    assert "derived.dialled_former_attempt" not in conclusions(lines(*both, DIALS.format(port=52944)))
    assert "derived.dialled_former_attempt" not in conclusions(
        lines(LISTENS.format(port=52944), DIALS.format(port=40101))
    )


RETRY = "2031-06-14 03:0{n}:13 WARNING datasets: Got disconnected from remote data host. Retrying in 5sec [{n}/20]"


def test_a_rank_that_waits_for_its_data_is_what_the_others_wait_for() -> None:
    text = lines(
        "==> rank_5.log <==",
        *(RETRY.format(n=n) for n in (1, 2, 3)),
        "==> rank_0.log <==",
        timeout(0, 412, "ALLREDUCE", clock="E614 03:32:14.118201117"),
    )
    verdict = verdict_of(text)
    assert (verdict.fault_class, verdict.action) == ("storage", "restart_job")


def test_reads_that_were_tried_again_are_nothing_where_steps_follow() -> None:
    steps = ("2031-06-14 03:10:11 step 520 loss 2.75", "2031-06-14 04:06:11 step 1520 loss 2.61")
    tried = [RETRY.format(n=n) for n in (1, 2)]
    assert verdict_of(lines(*tried, *steps)).no_current_fault
    # One try is no stall, and who waits in a collective does not wait for data.
    assert "derived.data_stalled" not in conclusions(
        lines(tried[0], timeout(0, 412, "ALLREDUCE", clock="E614 03:32:14.118201117"))
    )


def test_connections_to_a_store_that_came_later_are_the_frameworks_and_over() -> None:
    refused = "[W socket.cpp:601] [c10d] The client socket has failed to connect to [h2]:29400 (errno: 111 - Connection refused)."
    steps = ("2031-05-06 00:44:31 rank 0 step 1 loss 11.91", "2031-05-06 09:12:07 rank 0 step 20000 loss 2.31")
    verdict = verdict_of(lines(refused, *steps))
    assert (verdict.fault_class, verdict.no_current_fault) == ("framework", True)
    assert not verdict_of(lines(refused)).no_current_fault
