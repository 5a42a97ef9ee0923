"""What `keepstep doctor` reads: script text, run folders, /proc and /sys trees, Slurm and Kubernetes output."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.journal import Journal
from keepstep.launcher.doctor import facts
from keepstep.launcher.doctor.scriptscan import Script, scan_source
from keepstep.launcher.files import make_run_dir
from keepstep.records.codec import to_json
from keepstep.records.cycle import Cycle, CyclePhases
from keepstep.records.errors import ConfigError, StorageError
from keepstep.records.timeline import Mark

S = 1_000_000_000


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def scan(text: str) -> Script:
    return scan_source(text, "t.py")


@pytest.mark.parametrize(
    ("call", "seconds", "is_default"),
    [
        ("dist.init_process_group('nccl', timeout=timedelta(minutes=3))", 180, False),
        ("init_process_group(timeout=datetime.timedelta(0, 60 * 5))", 300, False),
        ("dist.init_process_group('gloo', None, timedelta(hours=1, seconds=-30))", 3570, False),
        ("dist.init_process_group('nccl', timeout=LIMIT)", 90, False),
        ("dist.init_process_group('nccl', timeout=timedelta(seconds=LONG))", 1200, False),
        ("dist.init_process_group('nccl')", 600, True),
        ("dist.init_process_group(timeout=None)", 600, True),
        ("dist.init_process_group(backend='gloo')", 1800, True),
        ("dist.init_process_group(BACKEND)", 1800, True),
        ("dist.init_process_group('cpu:gloo,cuda:nccl')", 600, True),
        ("dist.init_process_group(backend=args.backend)", None, True),
        ("dist.init_process_group('nccl', timeout=timedelta(seconds=args.t))", None, False),
        ("dist.init_process_group('nccl', timeout=timedelta(seconds=CHANGING))", None, False),
        ("dist.init_process_group(**options)", None, False),
    ],
)
def test_timeout_of_a_process_group(call: str, seconds: float | None, is_default: bool) -> None:
    text = f"LONG = 20 * 60\nLIMIT = timedelta(seconds=90)\nBACKEND = 'gloo'\nCHANGING = 1\nCHANGING = 2\n{call}\n"
    (found,) = scan(text).timeouts
    assert (found.line, found.seconds, found.is_default) == (6, seconds, is_default)


def test_a_constant_that_names_itself_is_no_number() -> None:
    assert scan("A = B + 1\nB = A + 1\ninit_process_group(timeout=timedelta(seconds=A))").timeouts[0].seconds is None


@pytest.mark.parametrize(
    ("test", "is_one_rank"),
    [
        ("rank == 0", True),
        ("0 == dist.get_rank()", True),
        ("os.environ['RANK'] == '0'", False),  # not seen: a hint, not a proof
        ("not args.local_rank", True),
        ("accelerator.is_main_process and step % 10 == 0", True),
        ("self.trainer.is_global_zero", True),
        ("step == 0", False),
        ("rank == 1", False),
        ("rank == 0 or always", False),
    ],
)
def test_work_of_one_rank(test: str, is_one_rank: bool) -> None:
    found = scan(f"if {test}:\n    log('x')\n    torch.save(model, path)\nelse:\n    torch.save(a, b)\n").one_rank_work
    assert [(w.line, w.call) for w in found] == ([(3, "save")] if is_one_rank else [])


def test_checkpointer_is_noticed() -> None:
    assert scan("ckpt = ks.Checkpointer(root, state=s)").uses_checkpointer
    assert not scan("from keepstep.trainer import Checkpointer").uses_checkpointer


def test_what_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        facts.gather(script=tmp_path / "none.py")
    with pytest.raises(ConfigError, match="not Python"):
        facts.gather(script=put(tmp_path / "job.sh", "set -e\ntrain --lr 1\n"))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two cycles with saves of 4 s and 2.5 s, first steps of 7 s and 3 s, and one restore of 5 s."""
    folder = tmp_path / "run"
    make_run_dir(folder)
    token = put(tmp_path / "token", "x")
    token.chmod(0o644)
    config = RunConfig(
        run_id="r", run_dir=str(folder), node="n", script="t.py", nnodes=2, nproc=4, token_file=str(token)
    )
    (folder / "run.json").write_bytes(to_json(config))
    marks = [
        Mark(t_ns=S, kind="committed", attrs={"step": 1, "persist_ns": 4 * S}),
        Mark(t_ns=2 * S, kind="ckpt_block", attrs={"step": 2, "begin_ns": S, "end_ns": int(3.5 * S)}),
        Mark(t_ns=3 * S, kind="committed", attrs={"step": 3, "persist_ns": "damaged"}),
    ]
    journal = Journal.claim(folder)
    journal.append([{"type": "open", "t_ns": 0}])
    journal.append([{"type": "mark", "t_ns": m.t_ns, "mark": msgspec.to_builtins(m)} for m in marks])
    journal.close()
    for number, phases in enumerate([CyclePhases(first_step_s=7.0), CyclePhases(first_step_s=3.0, restore_s=5.0)]):
        cycle = Cycle(run_id="r", attempt=0, cycle=number, started_at="t", phases=phases)
        (folder / "cycles" / f"cycle-{number:04d}.json").write_bytes(to_json(cycle))
    return folder


def test_a_run_folder(run_dir: Path) -> None:
    found = facts.gather(run_dir=run_dir, env={})
    assert found.measured is not None
    assert (found.measured.save_s, found.measured.first_step_s, found.measured.restore_s) == (4.0, 7.0, 5.0)
    assert found.gpus == 8
    assert found.token is not None
    assert (found.token.mode, found.token.is_own) == (0o644, True)
    assert found.open_files is not None
    assert found.run_dir_type == facts.file_system(run_dir)
    assert found.script is None, "the run's script is gone"
    assert facts.gather(run_dir=run_dir, gpus=64, env={}).gpus == 64


def test_a_run_that_measured_nothing(tmp_path: Path) -> None:
    make_run_dir(tmp_path)
    assert facts.measure(tmp_path) is None
    Journal.claim(tmp_path).close()
    measured = facts.measure(tmp_path)
    assert measured is not None
    assert (measured.save_s, measured.first_step_s, measured.restore_s) == (None, None, None)


def test_a_damaged_run_json_is_named(run_dir: Path) -> None:
    (run_dir / "run.json").write_text("{")
    with pytest.raises(StorageError, match=r"run\.json"):
        facts.gather(run_dir=run_dir)


@pytest.mark.parametrize(
    ("collective", "sections", "expected"),
    [
        ([False, True, True], [["save", 1]], [(3, 0, "save", 2)]),
        ([None, True, True], [["step", 1], ["eval", 2]], [(3, 0, "eval", 2)]),
        ([False, True, True], [], []),
        ([False, False, True], [["save", 1]], []),
        ([True, True, True], [["save", 1]], []),
        ([False], [["save", 1]], []),
    ],
)
def test_a_rank_that_others_wait_for(
    tmp_path: Path, collective: list[bool | None], sections: list[list[object]], expected: list[tuple[object, ...]]
) -> None:
    for rank, waits in enumerate(collective):
        record = {"rank": rank, "in_collective": waits, "page": {"sections": sections if rank == 0 else []}}
        put(tmp_path / "evidence" / "cycle-0003" / f"rank-{rank:05d}.json", to_json(record).decode())
    put(tmp_path / "evidence" / "cycle-0003" / "rank-00000.stacks.txt", "no stack")
    assert [(r.cycle, r.rank, r.section, r.waiting) for r in facts.read_late_ranks(tmp_path)] == expected


def test_infiniband_ports(tmp_path: Path) -> None:
    for name, layer in (("mlx5_0", "InfiniBand"), ("mlx5_1", "Ethernet")):
        port = tmp_path / "sys/class/infiniband" / name / "ports" / "1"
        put(port / "link_layer", f"{layer}\n")
        for index, key in enumerate(("0xffff", "0x8012", "0x0000")):
            put(port / "pkeys" / str(index), f"{key}\n")
    (found,) = facts.read_ib_ports(tmp_path)
    assert (found.name, found.pkeys) == ("mlx5_0:1", {0: 0xFFFF, 1: 0x8012})


@pytest.mark.parametrize("base", ["sys/fs/cgroup", "sys/fs/cgroup/memory"])
def test_the_tightest_cgroup_counts(tmp_path: Path, base: str) -> None:
    put(tmp_path / "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   1000 kB\n")
    first = base.endswith("memory")
    put(tmp_path / "proc/self/cgroup", "3:cpu:/a\n2:memory:/job/step\n" if first else "0::/job/step\n")
    limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    assert facts.available_memory(tmp_path) == (1_024_000, "/proc/meminfo MemAvailable")
    put(tmp_path / base / "job/step" / limit, "9223372036854771712" if first else "max")
    put(tmp_path / base / "job/step" / used, "10")
    put(tmp_path / base / "job" / limit, "5000")
    put(tmp_path / base / "job" / used, "2000")
    available, where = facts.available_memory(tmp_path)
    assert available == 3000
    assert where.startswith(str(tmp_path / base / "job" / limit))


def test_memory_of_this_host() -> None:
    available, where = facts.available_memory(Path("/"))
    assert available is not None
    assert 0 < available < 2**50
    assert where


def test_file_system_of_the_longest_mount(tmp_path: Path) -> None:
    space = str(tmp_path / "a b").replace(" ", "\\040")
    put(
        tmp_path / "proc/mounts",
        f"x / ext4 rw 0 0\nx {tmp_path} lustre rw 0 0\nx {space} xfs rw 0 0\nx {space} tmpfs rw 0 0\n",
    )
    assert facts.file_system(tmp_path / "run", tmp_path) == "lustre"
    assert facts.file_system(tmp_path / "a b" / "run", tmp_path) == "tmpfs"
    assert facts.file_system(Path("/usr"), tmp_path) == "ext4"


SCONTROL = """Configuration data as of 2026-01-01T00:00:00
KillOnBadExit           = 1
KillWait                = 30 sec
RequeueExit             = (null)
RequeueExitHold         = 42,93
SlurmctldHost[0]        = ctl(10.0.0.1)
"""


def test_slurm_from_a_file(tmp_path: Path) -> None:
    settings, where = facts.read_slurm(put(tmp_path / "conf", SCONTROL))
    assert settings == {"KillOnBadExit": "1", "KillWait": "30 sec", "RequeueExit": "", "RequeueExitHold": "42,93"}
    assert where == str(tmp_path / "conf")
    with pytest.raises(ConfigError, match="scontrol show config"):
        facts.read_slurm(put(tmp_path / "empty", "no\n"))


@pytest.mark.parametrize(("body", "works"), [(f"cat <<'END'\n{SCONTROL}END\n", True), ("exit 1\n", False)])
def test_slurm_from_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, works: bool) -> None:
    put(tmp_path / "scontrol", f'#!/bin/sh\n[ "$*" = "show config" ] || exit 9\n{body}').chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    settings, where = facts.read_slurm(None)
    assert (settings or {}).get("KillOnBadExit") == ("1" if works else None)
    assert where == ("scontrol show config" if works else "")


@pytest.mark.skipif("KEEPSTEP_SHARED" not in os.environ, reason="KEEPSTEP_SHARED names no folder of recorded samples")
def test_recorded_slurm_configuration() -> None:
    path = Path(os.environ["KEEPSTEP_SHARED"]) / "data" / "slurm-samples" / "slurm.conf.used.txt"
    settings, _ = facts.read_slurm(path)
    assert settings is not None
    assert (settings["KillOnBadExit"], settings["KillWait"], settings["MessageTimeout"]) == ("1", "3", "5")


def test_tolerations_of_a_pod(tmp_path: Path) -> None:
    one = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    pod = {"kind": "Pod", "spec": {"tolerations": [one, {"operator": "Exists"}]}}
    first, second = facts.read_tolerations(put(tmp_path / "pod.json", to_json(pod).decode()))
    assert (first.key, first.toleration_seconds) == ("node.kubernetes.io/not-ready", 300)
    assert (second.key, second.toleration_seconds) == ("", None)
    assert facts.read_tolerations(put(tmp_path / "bare.json", '{"spec": {}}')) == []


@pytest.mark.parametrize("text", ["kind: Pod", "[]", "{}", '{"spec": {"tolerations": [{"key": 3}]}}'])
def test_what_is_no_pod(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="kubectl get pod"):
        facts.gather(pod=put(tmp_path / "pod.json", text))


def test_bytes_of_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    for step, whole in ((10, True), (20, True), (30, False)):
        folder = root / f"r-step-{step:08d}-c0000-a0001"
        put(folder / "data", "x" * (step * 10))
        if whole:
            put(folder / "manifest.json", "1")
    assert facts.newest_shard_bytes(root, nodes=2) == 101
    for empty in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="no whole checkpoint"):
            facts.newest_shard_bytes(empty, nodes=1)
