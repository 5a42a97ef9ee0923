"""Who is late when others wait, and with what."""

from __future__ import annotations

import time

import msgspec
import pytest

from keepstep.attribution.rules.job import JOB_RULES
from keepstep.catalog.load import shipped
from tests.attribution.jobtexts import conclusions, events_of, lines, status, timeout, verdict_of

OTHERS = [timeout(r, 40, "ALLREDUCE") for r in (1, 2, 3)]


@pytest.mark.parametrize(
    ("busy", "conclusion"),
    [
        ("evaluating 4000 documents", "derived.late_in_evaluation"),
        ("make_plots(): 12/38", "derived.late_in_evaluation"),
        ("building sample index for train", "derived.late_in_data"),
        ("Map (num_proc=4):  71%|#######   | 8520/12000 [30:02<12:16, 4723.1 examples/s]", "derived.late_in_data"),
        ("saving checkpoint to /ckpt/17", "derived.late_in_checkpoint"),
        ("Loading checkpoint shards:  40%|####      | 12/30 [03:12<05:00]", "derived.late_in_loading"),
        ("AUTOTUNE mm(4096x8192, 8192x1024)", "derived.late_in_compilation"),
        ("dataloader exhausted after 1250 batches", "derived.late_finished"),
    ],
)
def test_what_the_rank_that_does_not_wait_is_busy_with_is_the_cause(busy: str, conclusion: str) -> None:
    found = conclusions(lines(f"[rank0]: 2031-02-14 11:01:00 {busy}", *OTHERS))
    assert conclusion in found
    assert found[conclusion].rank == 0


def test_a_rank_that_waits_is_not_late_whatever_it_did_before() -> None:
    text = lines(
        "[rank1]: 2031-02-14 11:01:00 evaluating 4000 documents", *[timeout(r, 40, "ALLREDUCE") for r in range(4)]
    )
    assert conclusions(text) == {}


def test_a_rank_that_failed_is_explained_by_its_failure_alone() -> None:
    text = lines(
        "[rank0]: 2031-02-14 11:00:30 evaluating 4000 documents",
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/w/eval.py", line 3, in run',
        "[rank0]: KeyError: 'label'",
        *OTHERS,
    )
    assert "derived.late_in_evaluation" not in conclusions(text)
    assert verdict_of(text).signature == "python.user_exception"


def test_work_before_the_wait_began_is_not_what_was_waited_for_when_there_is_work_during_it() -> None:
    text = lines(
        "[rank0]: 2031-02-14 10:20:00 evaluating 100 documents",
        "[rank0]: 2031-02-14 11:02:00 saving checkpoint to /ckpt/17",
        *OTHERS,
    )
    assert list(conclusions(text)) == ["derived.late_in_checkpoint"]


def test_only_waiters_name_nobody() -> None:
    verdict = verdict_of(lines(*[timeout(r, 40, "ALLREDUCE") for r in range(4)]))
    assert (verdict.fault_class, verdict.action) == ("unknown", "ask_human")


def test_one_rank_missing_among_the_waiters_is_named_without_a_class() -> None:
    found = conclusions(lines(*[timeout(r, 40, "ALLREDUCE") for r in (0, 1, 3, 4)]))
    assert list(found) == ["derived.absent_rank"]
    assert found["derived.absent_rank"].rank == 2


def test_most_ranks_silent_says_that_their_logs_are_not_there_rather_than_that_they_are_late() -> None:
    assert conclusions(lines(timeout(3, 40, "ALLREDUCE"), timeout(40, 40, "ALLREDUCE"))) == {}


def test_a_barrier_that_knows_names_the_late_rank() -> None:
    text = lines(
        "[rank0]: RuntimeError: [Rank 0]: Rank 12 failed to pass monitoredBarrier in 1800000 ms",
        "[rank12]: 2031-02-14 11:00:00 tokenizing shard 3",
    )
    assert conclusions(text)["derived.late_in_data"].rank == 12


def test_counters_name_the_rank_that_never_called() -> None:
    text = lines(
        *[f"{timeout(r, 40, 'ALLREDUCE')}\n{status(r, 40, 41, 39)}" for r in (0, 1, 3)],
        "[rank2]:[E214 11:10:05.1 ProcessGroupNCCL.cpp:1858] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received "
        "a dump signal due to a "
        "collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL "
        "work: 39, last completed "
        "NCCL work: 39.",
        "[rank2]: 2031-02-14 11:09:00 Validation: 880/1000 validating",
    )
    assert conclusions(text)["derived.late_in_evaluation"].rank == 2


def test_ranks_of_another_group_are_not_taken_for_ranks_of_the_job() -> None:
    # The second rank of a group of two waits for the first of that group, which is not rank 0 of the job.
    text = lines(
        "[rank9]: torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving "
        "ncclUniqueId from [0] via c10d "
        "key-value store by key '0', but store->get('0') got error: Timeout waiting for key: x after 600000 ms",
        "[rank0]: 2031-02-14 11:09:00 tokenizing shard 3",
        *[timeout(r, 40, "ALLREDUCE") for r in (0, 1, 2)],
    )
    assert "derived.late_in_data" not in conclusions(text)


def test_work_without_ranks_that_spans_the_wait_is_somebodys() -> None:
    text = lines(
        "2031-02-14 10:58:00 INFO evaluating split test 1/40",
        *[t.replace("[rank", "[RANK", 0) for t in OTHERS],
        "2031-02-14 11:12:00 INFO evaluating split test 39/40",
    )
    assert "derived.late_in_evaluation" in conclusions(text)


def test_a_stack_outside_collectives_beats_what_the_log_says() -> None:
    text = lines(
        *OTHERS,
        "==> rank0.stack <==",
        "Process 80: python train.py",
        'Thread 80 (active): "MainThread"',
        "    save_file (safetensors/torch.py:286)",
        "    main (train.py:188)",
    )
    assert conclusions(text)["derived.late_in_checkpoint"].rank == 0


def test_a_watchdog_without_heartbeat_is_explained_by_the_stack_that_holds_the_interpreter() -> None:
    text = lines(
        "[rank2]:[E214 03:13:05.609 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank 2] "
        "ProcessGroupNCCL's watchdog got "
        "stuck for 480 seconds without making progress in monitoring enqueued collectives.",
        "$ py-spy dump --pid 3311",
        'Thread 3311 (active+gil): "MainThread"',
        "    levenshtein (metrics/edit.py:55)",
        "    compute_metrics (finetune.py:301)",
    )
    assert "derived.late_in_evaluation" in conclusions(text)


@pytest.mark.parametrize(
    ("section", "conclusion"),
    [("checkpointing", "derived.section_checkpoint"), ("evaluation", "derived.section_user"), ("step", None)],
)
def test_a_section_that_outlasted_its_limit_is_judged_by_its_name(section: str, conclusion: str | None) -> None:
    line = f"[Cycle 0] Section '{section}' has been open for 701.20 seconds. Timeout is 600.00 seconds."
    assert list(conclusions(lines(line))) == ([] if conclusion is None else [conclusion])


def test_ranks_that_wait_in_a_monitors_own_collective_blame_the_monitor() -> None:
    text = lines(
        "[rank0]: straggler report interval reached: gathering scores (all_gather_object)",
        *[timeout(r, 9, "ALLGATHER") for r in (0, 1, 2)],
    )
    verdict = verdict_of(text)
    assert (verdict.signature, verdict.fault_class) == ("derived.monitor_deadlock", "framework")


def test_a_monitor_that_gathered_long_before_the_wait_is_not_blamed() -> None:
    text = lines(
        "[rank0]: 2031-02-14 10:00:00 straggler report interval reached: gathering scores (all_gather_object)",
        "[rank0]: 2031-02-14 10:55:00 step 900 loss 2.0",
        *[timeout(r, 9, "ALLGATHER") for r in (0, 1, 2)],
    )
    assert "derived.monitor_deadlock" not in conclusions(text)


def test_ranks_that_wait_in_a_saves_own_collective() -> None:
    text = lines(
        "[rank0]: finalize_async_save: waiting for other ranks (collective)",
        *[timeout(r, 9, "ALLREDUCE") for r in (0, 1)],
    )
    assert "derived.save_deadlock" in conclusions(text)


def test_a_heartbeat_missed_while_compiling_is_a_limit_that_is_too_short() -> None:
    lost = "[Cycle 0] Did not get initial heartbeat. Waited 1800.00 seconds."
    assert "derived.limit_too_short" in conclusions(lines("compiling model with torch.compile", lost))
    assert conclusions(lines(lost)) == {}


def bar(rank: int, step: int, of: int) -> str:
    return f"[rank{rank}]: Epoch 0:  99%|#########9| {step}/{of} [20:11<00:09,  1.50s/it]"


def test_a_rank_that_had_made_all_its_steps_left_the_others_behind() -> None:
    waiting = [timeout(0, 2415, "ALLGATHER"), timeout(1, 2433, "ALLREDUCE")]
    found = conclusions(lines(bar(0, 812, 812), bar(1, 806, 812), *waiting))
    assert found["derived.epoch_left"].rank == 0


def test_ranks_a_step_apart_are_as_they_should_be() -> None:
    waiting = [timeout(0, 9, "ALLREDUCE"), timeout(1, 9, "ALLREDUCE")]
    assert conclusions(lines(bar(0, 401, 812), bar(1, 400, 812), *waiting)) == {}
    assert "derived.steps_apart" in conclusions(lines(bar(0, 410, 812), bar(1, 400, 812), *waiting))


def test_what_readers_of_dumps_print_names_the_late_rank() -> None:
    text = lines("missing ranks: {5}", "[rank5]: 2031-02-14 11:05:00 generating samples for eval")
    assert conclusions(text)["derived.late_in_evaluation"].rank == 5


def test_counters_that_a_script_printed_name_who_has_nothing_pending() -> None:
    text = lines(
        *[f"rank {r}: last_completed=4101 last_enqueued={4101 if r == 2 else 4103}" for r in range(4)],
        "==> rank2.log <==",
        "2031-02-14 11:00:00 plotting attention maps 40/64",
    )
    assert conclusions(text)["derived.late_in_evaluation"].rank == 2


def test_a_rank_whose_stack_is_in_a_network_read_waits_for_a_server() -> None:
    text = lines(
        "RuntimeError: [Rank 0]: Ranks 3 failed to pass monitoredBarrier in 600000 ms",
        "==> rank3.stack <==",
        'Thread 55 (idle): "MainThread"',
        "    read (ssl.py:1166)",
        "    _make_request (urllib3/connectionpool.py:536)",
        "    load_tokenizer (/w/data.py:30)",
    )
    assert verdict_of(text).fault_class == "storage"


def test_a_job_of_sixteen_thousand_ranks_is_judged_in_time() -> None:
    catalog = shipped()
    text = lines(*[timeout(r, 40, "ALLREDUCE") for r in range(40)])
    few = [e for e in events_of(text) if e.signature == "torch.watchdog_timeout"]
    waiting = [msgspec.structs.replace(few[r % len(few)], rank=r) for r in range(12_000)]
    busy = [msgspec.structs.replace(few[0], signature="job.evaluating", rank=r) for r in range(12_000, 16_000)]
    begin = time.process_time()
    for rule in JOB_RULES:
        assert len(rule([*waiting, *busy], catalog)) <= 64
    assert time.process_time() - begin < 5.0
