"""Which lines show that training goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.load import shipped
from keepstep.sources.documents import split
from keepstep.sources.progress import progress_events, progress_in

GOES_ON = [
    ("step 9100 loss 1.93", 9100),
    ("step: 120 loss: 2.31 lr: 3e-4", 120),
    ("trainer-5      step 8812 loss 2.02", 8812),
    (" iteration     5010/  500000 | consumed samples: 5130240 | elapsed time per iteration (ms): 1413.1 | lm loss: 2.21E+00 |"
     " number of skipped iterations:   0 | number of nan iterations:   0 |", 5010),
    ("iter 700 loss 2.1", 700),
    ("epoch 3 step 2500 begin", 2500),
    ("Epoch 1: | step 40/1000 | loss=2.2", 40),
    ("Training:  50%|#####     | 60/120 [01:00<01:00,  1.02s/it, loss=2.1]", 60),
    (" 12%|#2        | 120/1000 [10:00<1:13:20,  5.00s/it]", 120),
    ("Epoch 0:  31%|###1      | 310/1000 [05:10<11:30,  1.00it/s, v_num=3, loss=2.5]", 310),
    ("[titan] 2031-05-22 10:00:01,123 - root - INFO - step: 10  loss: 8.12  grad_norm: 1.2  memory: 30GiB(31%)  mfu: 40%", 10),
    ("{'loss': 2.1, 'grad_norm': 0.3, 'learning_rate': 5e-05, 'global_step': 400, 'epoch': 0.4}", 400),
    ("train_loss=2.3 global_step=77 lr=0.1", 77),
    ("I1129 01:10:30 train: step 4100 loss 2.01", 4100),
    ("[Rank 0] step=5 loss=2.0 time=0.3s", 5),
    (':::MLLOG {"namespace": "", "time_ms": 1930215751000, "event_type": "INTERVAL_END", "key": "block_stop", "value": null, '
     '"metadata": {"file": "train.py", "lineno": 9, "samples_count": 4096}}', 4096),
    ('0: :::MLLOG {"namespace": "", "time_ms": 1930215751000, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": '
     '{"throughput": 617.4}, "metadata": {"file": "train.py", "lineno": 9, "step": 50}}', 50),
]  # fmt: skip

NOT = [
    ':::MLLOG {"namespace": "", "time_ms": 1930215751000, "key": "seed", "value": 7, "metadata": {"step": 1}}',
    "Resuming from global_step_60 (steps_per_epoch=60)",
    "Training Progress:  50%|#####     | 60/120 [00:00<?, ?it/s]",
    "Map (num_proc=1):  71%|#######   | 8520000/12000000 [30:02<12:16, 4723.1 examples/s]",
    "Loading checkpoint shards:  40%|####      | 12/30 [03:12<05:00,  3.1s/it]",
    "Evaluating:  31%|###1      | 310/1000 [05:10<11:30,  1.00it/s]",
    "saving checkpoint at iteration 4000 to /ckpt (time 12 s)",
    " scheduled an async checkpoint save at iteration     5000 to /ckpt/run",
    "loaded checkpoint from iteration 5000, loss 2.1",
    "attempt=1 async save call_idx=0 step=100 queued",
    "RuntimeError: failed at step 12, loss is nan",
    "NaN loss detected at iteration 300",
    "srun: error: gpu-17: task 0: User defined signal 1",
    "StepId=17020.18",
    "max_steps: 1000, lr: 0.1",
    "eval at step 200: loss 2.2",
    "restart #1 at iter 5000 gas=4: dataloader start_iter=5000 (expected 20000)",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88121, OpType=BROADCAST, Timeout(ms)=1800000)",
    "iter 500 straggler: GPU relative performance: Rank=0 Score=0.99",
    "1001 3 56.2/0.4 70.9",
    "",
]


@pytest.mark.parametrize(("text", "step"), GOES_ON)
def test_goes_on(text: str, step: int) -> None:
    found = progress_in(text)
    assert found is not None and found.step == step


@pytest.mark.parametrize("text", NOT)
def test_does_not(text: str) -> None:
    assert progress_in(text) is None


@given(st.text(max_size=200), st.sampled_from([text for text, _ in GOES_ON]), st.integers(0, 60))
def test_any_text_is_progress_or_not(text: str, line: str, at: int) -> None:
    progress_in(text)
    progress_in(line[:at] + text + line[at:])


def test_one_event_a_rank_from_first_to_last_step() -> None:
    text = "\n".join(
        f"[rank{rank}]: 2031-05-22T10:0{minute}:00Z step {100 + minute} loss 2.{minute}"
        for minute in range(5)
        for rank in (0, 1)
    )
    events = list(progress_events(split("x.log", text)[0], shipped()))
    assert [(e.rank, e.count, e.attrs["first_step"], e.attrs["last_step"]) for e in events] == [
        (0, 5, 100, 104),
        (1, 5, 100, 104),
    ]
    first = events[0]
    assert first.time_ns is not None and first.last_ns == first.time_ns + 240 * 10**9
    assert (first.order, first.attrs["last_order"]) == (1, 9)
