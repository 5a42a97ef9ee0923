"""Stacks: who waits in a collective, and what the others are in. Listings of dumps and summaries of cycles."""

from __future__ import annotations

import pytest

from keepstep.catalog.load import shipped
from keepstep.records.event import Event
from keepstep.sources.documents import split
from keepstep.sources.joblog.cycles import read_cycles, read_dump_listing
from keepstep.sources.joblog.stacks import read_stacks


def stacks(text: str) -> list[Event]:
    return [e for d in split("job.log", text) for e in read_stacks(d, shipped())]


def listing(text: str) -> list[Event]:
    return [e for d in split("job.log", text) for e in read_dump_listing(d, shipped())]


def cycles(text: str) -> list[Event]:
    return [e for d in split("job.log", text) for e in read_cycles(d, shipped())]


FAULTHANDLER = """\
Thread 0x00007f0011223344 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/w/train.py", line 99 in step
"""


def test_faulthandler_of_a_rank_that_waits() -> None:
    (event,) = stacks(FAULTHANDLER)
    assert (event.signature, event.attrs["collective"]) == ("stack.collective", "all_reduce")
    assert event.attrs["frame"] == "train.py:99 step"


@pytest.mark.parametrize(
    ("frame", "doing"),
    [
        ('File "/v/lib/python3.11/site-packages/safetensors/torch.py", line 286 in save_file', "saving"),
        ('File "/w/eval.py", line 3 in evaluate', "evaluating"),
        ('File "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 9 in _next_data', "data"),
        ('File "/v/lib/python3.11/site-packages/torch/_inductor/compile_fx.py", line 9 in go', "compiling"),
        (
            'File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in destroy_process_group',
            "teardown",
        ),
        ('File "/w/maths.py", line 9 in solve', "code"),
    ],
)
def test_what_a_rank_outside_collectives_is_busy_with(frame: str, doing: str) -> None:
    (event,) = stacks(f"Current thread 0x00007f00 (most recent call first):\n  {frame}\n")
    assert (event.signature, event.attrs["doing"]) == ("stack.outside", doing)


def test_py_spy_tells_the_main_thread_from_the_others() -> None:
    text = """\
Process 80: python train.py
Thread 80 (active): "MainThread"
    bleu (sacrebleu/metrics/bleu.py:88)
    evaluate_samples (train.py:96)
Thread 81 (idle): "pin_memory"
    wait (threading.py:320)
"""
    (event,) = stacks(text)
    assert (event.signature, event.attrs["doing"]) == ("stack.outside", "evaluating")


def test_saving_a_sharded_checkpoint_passes_through_torch_distributed_and_is_no_wait() -> None:
    text = """\
Thread 80 (active): "MainThread"
    write_data (torch/distributed/checkpoint/filesystem.py:500)
    save (torch/distributed/checkpoint/state_dict_saver.py:150)
    main (train.py:20)
"""
    (event,) = stacks(text)
    assert (event.signature, event.attrs["doing"]) == ("stack.outside", "saving")


def test_the_stack_that_torch_prints_of_a_failed_collective() -> None:
    text = """\
[rank1]:[E214 11:10:04.3 ProcessGroupNCCL.cpp:801] Stack trace of the failed collective:
#0 broadcast from /v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:2726
#1 sync_config from /w/train.py:44
"""
    (event,) = stacks(text)
    assert (event.signature, event.attrs["collective"], event.rank) == ("stack.collective", "broadcast", 1)


def test_a_listing_names_the_ranks_that_have_a_dump_and_those_that_have_none() -> None:
    (event,) = listing("$ ls dumps/\nnccl_trace_rank_0  nccl_trace_rank_2  nccl_trace_rank_3\n")
    assert (event.attrs["ranks"], event.attrs["missing"]) == ([0, 2, 3], [1])


def test_a_log_that_says_where_it_wrote_a_dump_is_no_listing() -> None:
    text = "step 1 loss 2\nstep 2 loss 2\nstep 3 loss 2\nwrote dump to /tmp/nccl_trace_rank_0\n"
    assert listing(text) == []


def test_a_cycle_line_keeps_its_pairs_and_its_outcome() -> None:
    (event,) = cycles("cycle=2 local_rank=0 pid=81220 start t+5s -> RuntimeError: Engine core initialization failed")
    assert event.cycle == 2
    assert (event.attrs["pid"], event.attrs["type"]) == ("81220", "RuntimeError")


def test_a_sentence_about_a_cycle_is_none() -> None:
    assert cycles("we saw this in cycle 3 too") == []
