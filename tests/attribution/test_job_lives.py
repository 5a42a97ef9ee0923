"""What the lives of a job say: good ends, spares, repeated failures, lost exit codes."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, timeout, verdict_of

SUCCESS = (
    "INFO:torch.distributed.elastic.agent.server.api:[default] worker group successfully finished. Waiting 300 seconds."
)
BARRIER = "ERROR:torch.distributed.elastic.agent.server.api:Error waiting on exit barrier. Elapsed: 0.0298 seconds"
RESTART = "I0214 [default] Worker group FAILED. 2/3 attempts left; will restart worker group"


def raised(message: str) -> str:
    return f'[rank2]: Traceback (most recent call last):\n[rank2]:   File "/w/pretrain.py", line 33, in step\n[rank2]: {message}'


def test_errors_after_success_are_of_the_teardown() -> None:
    verdict = verdict_of(lines(SUCCESS, BARRIER, "RuntimeError: Connection reset by peer"))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


def test_the_same_error_without_success_is_a_fault() -> None:
    assert "derived.teardown_error" not in conclusions(lines(BARRIER, "RuntimeError: Connection reset by peer"))


def test_success_of_an_earlier_life_excuses_nothing() -> None:
    assert "derived.teardown_error" not in conclusions(lines(SUCCESS, RESTART, BARRIER))


def test_a_failed_rank_beside_success_is_a_failure() -> None:
    assert "derived.teardown_error" not in conclusions(lines(SUCCESS, raised("KeyError: 'x'"), BARRIER))


def test_a_watchdog_stuck_after_the_training_ended_is_of_the_teardown() -> None:
    stuck = (
        "[rank4]:[E205 18:11:06.3 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank 4] ProcessGroupNCCL's watchdog "
        "got stuck for 480 seconds without making progress in monitoring enqueued collectives."
    )
    assert "derived.teardown_error" in conclusions(lines("{'train_runtime': 18070.2, 'epoch': 1.0}", stuck))


def test_one_rank_that_ended_while_others_wait_is_no_good_end() -> None:
    text = lines(
        "[rank0]: 2031-02-14 11:00:00 {'train_runtime': 18070.2}", *[timeout(r, 9, "ALLREDUCE") for r in (1, 2, 3)]
    )
    assert "derived.teardown_error" not in conclusions(text)


def test_a_spare_that_stumbles_over_its_graceful_exit_is_no_fault() -> None:
    text = lines(
        "I0825 Rendezvous gracefully exited: The node 'spare_1_0' has been terminated; pending rendezvous closed",
        "AttributeError: 'NoneType' object has no attribute 'is_failed'",
    )
    verdict = verdict_of(text)
    assert (verdict.action, verdict.no_current_fault) == ("none", True)


def test_the_stumble_alone_is_a_bug_that_ends_the_job() -> None:
    verdict = verdict_of(lines("AttributeError: 'NoneType' object has no attribute 'is_failed'"))
    assert (verdict.fault_class, verdict.action) == ("framework", "restart_job")


@pytest.mark.parametrize(
    "late", ["node-7 (healthy, previously active) joined -> standby", "worker-7 late joiner, assigned standby"]
)
def test_a_node_whose_seat_was_given_to_a_spare_is_healthy(late: str) -> None:
    verdict = verdict_of(lines("node-1 failed (excluded)", "spare-0 joined round 2", late))
    assert (verdict.signature, verdict.no_current_fault) == ("derived.seat_taken", True)


def test_the_node_that_was_excluded_did_not_lose_its_seat_by_chance() -> None:
    text = lines("node-7 failed (excluded)", "spare-0 joined round 2", "node-7 (back) joined -> standby")
    assert "derived.seat_taken" not in conclusions(text)


def test_the_same_exception_in_two_lives_fails_fast() -> None:
    text = lines(
        "step 41 loss 2.0", raised("ValueError: shard 7"), RESTART, "step 41 loss 2.0", raised("ValueError: shard 7")
    )
    assert conclusions(text)["derived.same_failure_again"].attrs["lives"] == 2


def test_the_same_exception_of_two_ranks_in_one_life_is_once() -> None:
    other = raised("ValueError: shard 7").replace("[rank2]", "[rank3]")
    assert "derived.same_failure_again" not in conclusions(lines(raised("ValueError: shard 7"), other))


def test_three_lives_that_stall_after_one_step() -> None:
    life = ["step 512 loss 2.0", timeout(0, 9, "ALLREDUCE"), timeout(1, 9, "ALLREDUCE")]
    logs = [part for n in range(3) for part in (f"==> attempt-{n}.log <==", *life)]
    assert conclusions(lines(*logs))["derived.stalls_at_one_step"].attrs["step"] == 512


def test_lives_that_stall_at_different_steps_are_no_program() -> None:
    parts: list[str] = []
    for step in (512, 701, 903):
        parts += [
            f"==> attempt-{step}.log <==",
            f"step {step} loss 2.0",
            timeout(0, step, "ALLREDUCE"),
            timeout(1, step, "ALLREDUCE"),
        ]
    assert "derived.stalls_at_one_step" not in conclusions(lines(*parts))


def test_an_agreed_exit_code_that_was_lost_on_the_way_is_not_restarted() -> None:
    text = lines(
        "NVRx decided the job must not be restarted (no_progress): x. Agent's exit code = 93",
        "srun: task 1: exit code 143",
    )
    verdict = verdict_of(text)
    assert (verdict.signature, verdict.action) == ("derived.no_restart_lost", "fail_fast")


def test_ranks_that_cannot_connect_after_a_restart_read_old_addresses() -> None:
    failing = "[rank1]: RuntimeError: Gloo connectFullMesh failed with [../pair.cc:144] Connection refused"
    assert "derived.stale_store" in conclusions(lines(RESTART, failing))
    assert "derived.stale_store" not in conclusions(lines(failing))


def test_a_scheduler_that_clears_up_after_success_is_no_fault() -> None:
    cancel = "slurmstepd: error: *** JOB 7 ON n0 CANCELLED AT 2031-02-14T22:00:00 DUE TO TIME LIMIT ***"
    assert verdict_of(lines(SUCCESS, cancel)).no_current_fault
    assert not verdict_of(lines("step 9 loss 2.0", cancel)).no_current_fault


def test_a_good_end_with_monitors_that_close_is_a_good_end() -> None:
    text = lines("monitor_server.py:214 RankMonitorServer: connection from rank 3 closed", SUCCESS)
    assert verdict_of(text).no_current_fault


def test_a_host_out_of_memory_that_killed_the_jobs_process() -> None:
    kernel = "Feb 14 11:00:01 w2 kernel: Out of memory: Killed process 4107 (python3) total-vm:4kB, anon-rss:3kB, file-rss:0kB"
    launcher = "[ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python3'] exits with return code = -9"
    assert "derived.outgrew_host" in conclusions(lines(launcher, kernel))
    assert "derived.outgrew_host" not in conclusions(lines(kernel))


def failure(rank: int, code: int, time: str, host: str) -> str:
    return (
        f"[0]:\n  time      : 2031-02-14_{time}\n  host      : {host}\n  rank      : {rank} (local_rank: 0)\n"
        f"  exitcode  : {code} (pid: 4000)\n  error_file: <N/A>\n  traceback : x"
    )


def test_the_rank_that_failed_first_by_time_is_first_wherever_it_is_printed() -> None:
    text = lines("==> n0 <==", failure(0, -6, "11:30:05", "n0"), "==> n1 <==", failure(9, 1, "11:00:04", "n1"))
    first = conclusions(text)["derived.first_failure"]
    assert (first.rank, first.node) == (9, "n1")
