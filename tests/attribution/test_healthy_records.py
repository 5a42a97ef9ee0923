"""Records of jobs that are well: nothing in them is a cause, and no action follows."""

from __future__ import annotations

import pytest

from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.sources.reading import read_text

HEALTHY = {
    "Megatron": """
> loading checkpoint from /ckpt/run at iteration 4000
 checkpoint version 3.0
> successfully loaded checkpoint from /ckpt/run [ t 0/8, p 0/4 ] at iteration 4000
(min, max) time across ranks (ms):
    load-checkpoint ................................: (12041.11, 12043.90)
> building train, validation, and test datasets ...
> finished creating GPT datasets ...
[after dataloaders are built] datetime: 2031-01-01 00:00:00
 iteration     4001/  500000 | consumed samples:      4097024 | elapsed time per iteration (ms): 5100.1 | learning rate: 3.000E-04 | lm loss: 2.101E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |
 iteration     4500/  500000 | consumed samples:      4608000 | elapsed time per iteration (ms): 5098.4 | learning rate: 3.000E-04 | lm loss: 2.087E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |
  scheduled an async checkpoint save at iteration    4500 to /ckpt/run
 iteration     4510/  500000 | consumed samples:      4618240 | elapsed time per iteration (ms): 5101.0 | lm loss: 2.085E+00
  successfully saved checkpoint from iteration    4500 to /ckpt/run
  deleting checkpoint iter_0003000
""",
    "torchtitan": """
[titan] 2031-01-01 00:00:00,000 - root - INFO - Loading the checkpoint at step 500.
[titan] 2031-01-01 00:00:21,000 - root - INFO - [GC] GC collection for checkpoint loading. 0.10 seconds.
[titan] 2031-01-01 00:00:21,100 - root - INFO - Finished loading the checkpoint in 20.90 seconds.
[titan] 2031-01-01 00:00:25,000 - root - INFO - step: 501  loss:  2.9180  memory: 61.05GiB(77.09%)  tps: 7,011  mfu: 41.02%
[titan] 2031-01-01 00:10:25,000 - root - INFO - Saving the checkpoint (or staging if async is enabled).
[titan] 2031-01-01 00:10:31,000 - root - INFO - Finished saving the checkpoint (or staging if async is enabled)in 5.93 seconds.
[titan] 2031-01-01 00:10:40,000 - root - INFO - Deleted checkpoint outputs/checkpoint/step-100 in 0.50 seconds.
[titan] 2031-01-01 00:11:25,000 - root - INFO - step: 1010  loss:  2.8121  memory: 61.05GiB(77.09%)  tps: 7,018  mfu: 41.06%
""",
    "Hugging Face": """
***** Running training *****
  Continuing training from checkpoint, will skip to saved global_step
  Continuing training from epoch 1
  Continuing training from global step 1500
  Will skip the first 1 epochs then the first 200 batches in the first epoch.
 51%|█████     | 1510/3000 [00:12<30:01,  1.21s/it]
{'loss': 1.2031, 'grad_norm': 0.71, 'learning_rate': 1.5e-05, 'epoch': 1.01}
Saving model checkpoint to /out/checkpoint-2000
Deleting older checkpoint [/out/checkpoint-500] due to args.save_total_limit
100%|██████████| 3000/3000 [1:00:12<00:00,  1.20s/it]
Training completed. Do not forget to share your model on huggingface.co/models =)
""",
    "orbax": """
I0101 00:00:00.000000 1 checkpoint_manager.py:1991] [process=0] Saving checkpoint at step 800
I0101 00:00:31.000000 1 async_checkpointer.py:99] Finished async_save in 31.2 seconds @ gs://b/run/800
I0101 00:00:31.100000 1 checkpoint_manager.py:2020] Finalizing gs://b/run/800
I0101 00:00:31.200000 1 checkpoint_manager.py:2033] Deleting checkpoint at step 200
I0101 00:05:00.000000 1 metric_logger.py:10] completed step: 900, seconds: 2.1, TFLOP/s/device: 410.2, loss: 2.2
""",
    "Lightning and DeepSpeed": """
Restoring states from the checkpoint path at /out/last.ckpt
Restored all states from the checkpoint at /out/last.ckpt
[2031-01-01 00:00:00,000] [INFO] [engine.py:2800:_get_all_zero_checkpoint_state_dicts] successfully read 16 ZeRO state_dicts for rank 0
[2031-01-01 00:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] [Torch] Saving out/global_step900/mp_rank_00_model_states.pt...
[2031-01-01 00:00:09,000] [INFO] [torch_checkpoint_engine.py:33:commit] [Torch] Checkpoint global_step900 is ready now!
Epoch 3: 100%|██████████| 2000/2000 [20:00<00:00,  1.67it/s, v_num=1, train_loss=2.01]
`Trainer.fit` stopped: `max_epochs=4` reached.
""",
    "Slurm": """
$ squeue -u kim
  JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)
 910022     batch  pretrn       kim  R 2-01:11:40     16 g-[20-35]
 910023     batch  eval         kim PD       0:00      1 (Priority)
$ sinfo
PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST
batch*       up   infinite     16  alloc g-[20-35]
batch*       up   infinite      8   idle g-[36-43]
$ sacct -j 900000 -P -o JobID,State,ExitCode
JobID|State|ExitCode
900000|COMPLETED|0:0
900000.0|COMPLETED|0:0
[2031-01-01T00:00:00.000] _slurm_rpc_submit_batch_job: JobId=910024 InitPrio=4294901759 usec=451
[2031-01-01T00:00:01.000] sched: Allocate JobId=910024 NodeList=g-36 #CPUs=96 Partition=batch
[2031-01-01T01:00:01.000] _job_complete: JobId=910024 WEXITSTATUS 0
[2031-01-01T01:00:01.000] _job_complete: JobId=910024 done
srun: job 910025 queued and waiting for resources
srun: job 910025 has been allocated resources
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
""",
    "Kubernetes": """
NAME       READY   STATUS    RESTARTS   AGE   IP         NODE
w-0        1/1     Running   0          9h    10.0.0.1   g-1
w-1        1/1     Running   0          9h    10.0.0.2   g-2
NAME   STATUS   ROLES    AGE   VERSION
g-1    Ready    <none>   90d   v1.33.2
LAST SEEN   TYPE     REASON      OBJECT    MESSAGE
9h          Normal   Scheduled   pod/w-0   Successfully assigned ml/w-0 to g-1
9h          Normal   Pulled      pod/w-0   Container image "reg/x:1" already present on machine
9h          Normal   Created     pod/w-0   Created container: main
9h          Normal   Started     pod/w-0   Started container main
Conditions:
  Type             Status  LastHeartbeatTime                 LastTransitionTime                Reason                       Message
  MemoryPressure   False   Mon, 07 Jul 2031 01:00:10 +0000   Sun, 06 Jul 2031 01:00:55 +0000   KubeletHasSufficientMemory   kubelet has sufficient memory available
  Ready            True    Mon, 07 Jul 2031 01:00:10 +0000   Sun, 06 Jul 2031 01:00:55 +0000   KubeletReady                 kubelet is posting ready status
Capacity:
  nvidia.com/gpu:  8
Allocatable:
  nvidia.com/gpu:  8
---
apiVersion: kueue.x-k8s.io/v1beta1
kind: Workload
status:
  conditions:
  - {type: QuotaReserved, status: "True", reason: QuotaReserved}
  - {type: PodsReady, status: "True", reason: PodsReady}
""",
    "serving and data": """
INFO 01-01 00:00:00 [scheduler.py:77] Preemption mode recompute, KV cache blocks evicted: 12
INFO datasets: reusing cached dataset, 4 shards skipped as they are done
INFO loader: restored position 41200 of epoch 2, resuming
INFO s3: retrying (1 of 8) after 0.2 s
INFO memory usage 41.2 of 80.0 GiB
INFO elastic: node rank 3 joined, world size 32
""",
}  # fmt: skip


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(shipped())


@pytest.mark.parametrize("name", HEALTHY)
class TestHealthy:
    def test_nothing_is_a_cause(self, name: str, matcher: Matcher) -> None:
        catalog = shipped()
        events = read_text("a.log", HEALTHY[name], catalog, matcher).events
        blamed = {
            (e.signature, e.evidence.text)
            for e in events
            if catalog[e.signature].role in ("root", "cascade", "symptom")
        }
        assert blamed == set()

    def test_nothing_is_to_be_done(self, name: str, matcher: Matcher) -> None:
        verdict = attribute(read_text("a.log", HEALTHY[name], shipped(), matcher).events, shipped())
        assert verdict.action in ("none", "ask_human")
