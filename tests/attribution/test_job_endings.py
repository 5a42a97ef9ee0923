"""Ends of jobs that others brought about or that were good ones: what calms, and the nearly equal text that must not."""

from __future__ import annotations

import pytest

from keepstep.records.event import Event
from tests.attribution.jobtexts import conclusions, lines, verdict_of

STUCK = (
    "18:11:06.680 [rank4]:[E205 18:11:06.375750231 ProcessGroupNCCL.cpp:1870] [PG ID 12 PG GUID 99 Rank 4] ProcessGroupNCCL's"
    " watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives."
)
LEAKED = "18:00:34.257 [rank0]:[W205 18:00:34.95 PG.cpp:1538] Warning: destroy_process_group() was not called before program exit"
GONE = "[rank1]:[E614 11:14:03.08 PG.cpp:1319] [PG 0 Rank 1] Failed to get exception dump flag from the global store.Broken pipe"


@pytest.mark.parametrize(
    ("before", "calm"),
    [
        ("18:00:31.711 [INFO:swift] End time of running main: 2031-02-05 18:00:31.710947", True),
        ("18:00:31.711 [INFO:swift] Start time of running main: 2031-02-05 18:00:31.710947", False),
    ],
)
def test_a_watchdog_that_sticks_after_the_end_of_the_program_is_of_taking_down(before: str, calm: bool) -> None:
    verdict = verdict_of(lines(before, LEAKED, STUCK))
    assert verdict.no_current_fault is calm
    if calm:
        assert (verdict.fault_class, verdict.action) == ("framework", "none")


@pytest.mark.parametrize(
    ("last", "calm"), [("final weights written to /out/final.pt", True), ("step 40 loss 2.1", False)]
)
def test_a_store_that_is_gone_is_nothing_after_the_end_only(last: str, calm: bool) -> None:
    assert verdict_of(lines(f"[rank0]: {last}", GONE)).no_current_fault is calm


@pytest.mark.parametrize(("status", "calm"), [("0", True), ("1", False), ("137", False)])
def test_the_remark_of_an_exit_does_not_make_a_bad_status_good(status: str, calm: bool) -> None:
    verdict = verdict_of(lines("STEP-100: loss = 21.1, step_time = 0.1 sec", LEAKED, "$ echo $?", status))
    assert verdict.no_current_fault is calm
    assert verdict.action in ("none", "ask_human")


PREEMPTED = "2031-07-29T03:14:05Z scheduler: job 01K1 preempted by higher priority job, sending SIGTERM"
TOLD = "W0729 03:14:05.310000 71 elastic/agent/server/api.py:725] Received Signals.SIGTERM death signal, shutting down workers"
PEER = "[rank3]: torch.AcceleratorError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"


def test_errors_of_gpus_after_the_stop_are_of_the_stop() -> None:
    verdict = verdict_of(lines(PREEMPTED, TOLD, PEER))
    assert (verdict.fault_class, verdict.action) == ("platform", "restart_job")


@pytest.mark.parametrize(
    "text",
    [
        lines(PEER, PREEMPTED, TOLD),
        lines("[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", TOLD, PEER),
        lines(PREEMPTED, TOLD, PEER, "kernel: NVRM: Xid (PCI:0000:1b:00): 48, pid=7, DBE (double bit error)"),
        PEER,
    ],
)
def test_an_error_before_the_stop_or_with_a_word_of_the_driver_is_of_the_gpu(text: str) -> None:
    assert "derived.errors_of_stop" not in conclusions(text)


LEAVES = lines("node-b | Received Signals.SIGTERM death signal, shutting down workers")
CLOSED = "node-a | torch.distributed.elastic.rendezvous.api.RendezvousClosedError"


@pytest.mark.parametrize(
    ("command", "right"),
    [
        ("torchrun --nnodes=1:2 train.py", True),
        ("torchrun --nnodes=2 train.py", False),
        ("torchrun --nnodes=2:2 t.py", False),
    ],
)
def test_a_closed_rendezvous_is_the_leavers_doing_only_where_fewer_nodes_are_enough(command: str, right: bool) -> None:
    assert ("derived.rendezvous_closed_by_leaver" in conclusions(lines(command, LEAVES, CLOSED))) is right


def test_whoever_left_finds_its_own_rendezvous_closed_and_that_is_nothing() -> None:
    own = CLOSED.replace("node-a", "node-b")
    assert "derived.rendezvous_closed_by_leaver" not in conclusions(lines("torchrun --nnodes=1:2 t.py", LEAVES, own))


BUSY = "RuntimeError: Address already in use"
HOLDER = 'LISTEN 0 2048 *:29500 *:* users:(("torchrun",pid=40112,fd=6))'
AT_WORK = lines("==> a.log <==", "10:31:05 step 812 loss 1.40", "10:31:09 step 813 loss 1.39")


def _port(*parts: str) -> dict[str, Event]:
    return conclusions(lines("==> b.err <==", *parts))


def test_a_port_of_a_job_that_works_is_no_left_over() -> None:
    assert "derived.port_of_other" in _port(BUSY, AT_WORK, "==> ss -ltnp <==", HOLDER)


@pytest.mark.parametrize(
    "parts",
    [
        (BUSY, "==> ss -ltnp <==", HOLDER),
        (BUSY, AT_WORK),
        ("step 1 loss 2.0", "step 2 loss 2.0", BUSY, "==> ss -ltnp <==", HOLDER),
    ],
)
def test_a_port_whose_holder_is_not_seen_to_work_may_be_a_left_over(parts: tuple[str, ...]) -> None:
    assert "derived.port_of_other" not in _port(*parts)


FULL = "shm              64M   64M     0 100% /dev/shm"


@pytest.mark.parametrize(
    ("spec", "right"),
    [
        (lines("    volumeMounts:", "    - {name: scratch, mountPath: /scratch}"), True),
        ("docker run --gpus all my/train:latest python train.py", True),
        (lines("    volumeMounts:", "    - {name: dshm, mountPath: /dev/shm}"), False),
        ("docker run --gpus all --shm-size=64m my/train:latest python train.py", False),
        ("", False),
    ],
)
def test_shared_memory_is_the_jobs_to_ask_for_where_its_specification_shows_that_it_did_not(
    spec: str, right: bool
) -> None:
    assert ("derived.shm_not_asked" in conclusions(lines(FULL, spec))) is right


def _waits(*ranks: int) -> str:
    return lines(
        *(
            f"[rank{r}]:[E ProcessGroupNCCL.cpp:523] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,"
            " OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600659 milliseconds before timing out."
            for r in ranks
        )
    )


FITTING = "Clustering 111099511 points in 128D to 524288 clusters, redo 1 times, 4 iterations"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (lines(FITTING, _waits(1, 2, 3)), True),
        (lines(FITTING, _waits(0, 1, 2, 3)), False),
        (lines(_waits(1, 2, 3), "[rank0]: step 5 loss 2.0"), False),
    ],
)
def test_work_of_one_process_is_what_the_others_wait_for_where_one_is_missing(text: str, right: bool) -> None:
    assert ("derived.late_in_data" in conclusions(text)) is right


def _cache(rank: int, what: str, key: str = "a6tq3v") -> str:
    return f"[rank{rank}]: I0811 09:40:02.117000 autograd_cache.py: [0/0] AOTAutograd cache {what} for key {key}"


@pytest.mark.parametrize(
    ("looks", "right"),
    [
        ((_cache(0, "miss"), _cache(2, "hit")), True),
        ((_cache(0, "miss"), _cache(2, "miss")), False),
        ((_cache(0, "miss"), _cache(2, "hit", "other1")), False),
        ((_cache(0, "miss"), _cache(2, "miss"), _cache(2, "hit")), False),
    ],
)
def test_a_compile_cache_that_only_some_ranks_have_parts_them(looks: tuple[str, ...], right: bool) -> None:
    assert ("derived.compile_cache_split" in conclusions(lines(*looks, _waits(0, 2)))) is right


def test_split_caches_without_anybody_who_waits_are_no_fault() -> None:
    assert "derived.compile_cache_split" not in conclusions(lines(_cache(0, "miss"), _cache(2, "hit")))


ABORTED = "terminate called without an active exception"
COMPLETED = lines("==> sacct -P -j 12 -o JobID,State,ExitCode <==", "JobID|State|ExitCode", "12|COMPLETED|0:0")
ENDED = "[rank0]: training done, total 3 h 12 min"


def test_errors_between_finished_work_and_a_good_status_are_of_taking_down() -> None:
    verdict = verdict_of(lines(ENDED, ABORTED, COMPLETED))
    assert (verdict.fault_class, verdict.action, verdict.no_current_fault) == ("framework", "none", True)


@pytest.mark.parametrize(
    "text",
    [
        lines(ABORTED, ENDED, COMPLETED),
        lines(ENDED, ABORTED, COMPLETED.replace("COMPLETED|0:0", "FAILED|134:0")),
        lines(ENDED, ABORTED),
        lines(ABORTED, COMPLETED),
        lines(
            ENDED, "Traceback (most recent call last):", '  File "/w/a.py", line 1, in eval', "KeyError: 'x'", COMPLETED
        ),
        lines(ENDED, "OSError: [Errno 28] No space left on device: '/out/final.pt'", COMPLETED),
        lines(ENDED, ABORTED, "kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=0, GPU has fallen off the bus.", COMPLETED),
    ],
)
def test_errors_before_the_end_without_one_or_of_other_things_are_faults(text: str) -> None:
    assert not verdict_of(text).no_current_fault


WELL = "[INFO] [launch.py:351:main] Process 3311 exits successfully."


@pytest.mark.parametrize(("late", "calm"), [(STUCK, True), (_waits(1, 2), False)])
def test_a_process_that_exits_well_excuses_a_stuck_watchdog_and_no_rank_that_waits(late: str, calm: bool) -> None:
    assert verdict_of(lines(WELL, late)).no_current_fault is calm
