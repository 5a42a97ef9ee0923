"""Kernel and fabric manager logs: real ones where they are at hand, and one that is made here."""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path

import pytest

from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher, chunks


@functools.cache
def matcher() -> Matcher:
    return Matcher(shipped())


def counts(path: Path) -> Counter[str]:
    with path.open("rb") as file:
        return Counter(m.signature.id for part in chunks(file) for hit in matcher().scan(part) for m in hit.matches)


@pytest.fixture
def real() -> Path:
    shared = os.environ.get("KEEPSTEP_SHARED")
    if not shared:
        pytest.skip("KEEPSTEP_SHARED is not set: no real logs here")
    return Path(shared) / "data/kernel-logs"


def test_a_log_of_a_node_whose_program_went_wrong(real: Path) -> None:
    found = counts(real / "memory.dmesg.decode.iso.log")
    assert (found["xid.13"], found["xid.43"]) == (16, 1)
    assert found["oom.cgroup"] == 2 and found["oom.global"] == 3 and found["oom.reaped"] == 1
    assert not [one for one in found if shipped()[one].action in ("cordon_node", "reset_gpu", "drain_at_checkpoint")]


def test_a_fabric_managers_log_tells_of_one_error_that_was_not_fatal(real: Path) -> None:
    found = counts(real / "fabric-manager.fabricmanager.log")
    assert found["sxid.12028"] == 1
    assert not [one for one in found if shipped()[one].role == "root"]


def test_a_boot_without_faults_tells_of_none(real: Path) -> None:
    found = counts(real / "kmsg.kmsg.1.log")
    assert not [one for one in found if shipped()[one].role == "root"]


MADE = """\
kern  :warn  : 2031-01-21T04:41:44,283302+00:00 NVRM: GPU at PCI:0000:9c:00: GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9
kern  :warn  : 2031-01-21T04:41:44,283310+00:00 NVRM: Xid (PCI:0000:9c:00): 48, pid='<unknown>', name=<unknown>, DBE
kern  :warn  : 2031-01-21T04:41:44,283390+00:00 NVRM: Xid (PCI:0000:9c:00): 63, pid=1, name=a, Row Remapper: New row
4,1022,80912345,-;NVRM: Xid (PCI:0000:9c:00): 94, pid=771, name=python3, Contained ECC error.
<4>[  812.104411] NVRM: Xid (PCI:0000:9c:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
Jan 21 04:42:30 node-7 kernel: [  840.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
oom_memcg=/slurm/uid_7/job_4711,task_memcg=/slurm/uid_7/job_4711/step_0,task=python3,pid=902,uid=7
{"MESSAGE":"nfs: server 10.0.0.9 not responding, still trying","_HOSTNAME":"node-7"}
"""


def test_every_way_to_print_a_kernel_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kernel.log"
    path.write_text(MADE)
    assert counts(path) == {
        "nvrm.gpu_uuid": 1,
        "xid.48": 1,
        "xid.63": 1,
        "xid.94": 1,
        "xid.154.reset": 1,
        "oom.cgroup": 1,
        "nfs.not_responding": 1,
    }


def test_who_was_killed_at_a_limit_is_told() -> None:
    pod = "0a1b2c3d_4e5f_6071_8293_a4b5c6d7e8f9"
    slice_name = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{pod}.slice"
    (match,) = matcher().match_line(
        f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x.scope,mems_allowed=0-1,oom_memcg={slice_name},"
        f"task_memcg={slice_name}/cri-containerd-7.scope,task=pt_data_worker,pid=86398,uid=1000"
    )
    assert match.signature.id == "oom.cgroup"
    assert match.groups == {
        "memcg": slice_name,
        "pod_uid": pod.replace("_", "-"),
        "task": "pt_data_worker",
        "pid": "86398",
        "uid": "1000",
    }
    (slurm,) = matcher().match_line(
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=s,mems_allowed=0,"
        "oom_memcg=/system.slice/slurmstepd.scope/job_4711,task_memcg=/system.slice/slurmstepd.scope/job_4711/step_0/user/task_1,"
        "task=python3,pid=9912,uid=1001"
    )
    assert slurm.groups["job"] == "4711"
