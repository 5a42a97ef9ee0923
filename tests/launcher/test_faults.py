"""Each row of the README's failure table, really caused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from keepstep.launcher.coordination.journal import read_records
from keepstep.launcher.procs import descendants
from tests.disks import small_tmpfs
from tests.launcher.harness import Launch, alive, command_line, run, training, wait_until

TWO = ("--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Final digest of the training script without any fault."""
    code, launch = run(tmp_path_factory.mktemp("reference"), training(), *TWO)
    assert code == 0, launch.output
    return launch.wait_line(r"^end 30 (\S+)").group(1)


def test_killed_rank_restarts_from_the_newest_checkpoint_and_ends_bitwise_equal(tmp_path: Path, reference: str) -> None:
    code, launch = run(tmp_path, training(settled=True), *TWO, "--inject", "kill@step=15,rank=1")
    assert code == 0, launch.output
    assert launch.wait_line(r"^end 30 (\S+)").group(1) == reference
    first, second = launch.cycles
    assert first.end_reason == "exit" and first.counted
    assert first.fault is not None and first.fault["rank"] == 1 and "SIGKILL" in first.fault["detail"]
    assert (second.restored_step, second.restored_from) == (10, "shm")
    assert second.master_port != first.master_port
    assert launch.verdict["outcome"] == "succeeded"
    assert launch.summary["steps"] == {"final": 30, "completed": 35, "committed": 30, "rolled_back": 5}
    launch.check_partition()


def test_hung_rank_is_named_and_its_stack_kept(tmp_path: Path, reference: str) -> None:
    code, launch = run(tmp_path, training(), *TWO, "--hang-timeout", "2", "--inject", "hang@step=12,rank=0")
    assert code == 0, launch.output
    assert launch.wait_line(r"^end 30 (\S+)").group(1) == reference
    fault = launch.mark("fault")
    assert fault.attrs["kind"] == "hang" and fault.attrs["rank"] == 0
    assert fault.attrs["detected_ns"] - fault.attrs["occurred_ns"] >= 2_000_000_000
    evidence = launch.run_dir / "evidence" / "cycle-0000"
    assert "hang_forever" in (evidence / "rank-00000.stacks.txt").read_text()
    assert "all_reduce" in (evidence / "rank-00001.stacks.txt").read_text()
    waiter = json.loads((evidence / "rank-00001.json").read_text())
    assert waiter["in_collective"] is True and waiter["page"]["completed"] == 12


def test_rank_stuck_in_native_code_that_holds_the_gil_is_named_with_its_stack(tmp_path: Path) -> None:
    script = """
        import ctypes, os
        import torch, torch.distributed as dist
        import keepstep.trainer as ks
        dist.init_process_group("gloo")
        run = ks.init()
        for step in range(6):
            with run.step(step):
                if step == 3 and dist.get_rank() == 1 and run.cycle == 0:
                    ctypes.PyDLL(None).pause()
                dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    """
    code, launch = run(tmp_path, script, *TWO, "--hang-timeout", "2")
    assert code == 0, launch.output
    fault = launch.mark("fault")
    assert fault.attrs["kind"] == "hang" and fault.attrs["rank"] == 1
    assert "script.py" in (launch.run_dir / "evidence" / "cycle-0000" / "rank-00001.stacks.txt").read_text()


def test_four_ranks(tmp_path: Path) -> None:
    flags = ("--standalone", "--nproc-per-node", "4", "--inject", "kill@step=15,rank=3")
    code, launch = run(tmp_path, training(total=20, settled=True), *flags)
    assert code == 0, launch.output
    assert launch.cycles[1].restored_step == 10 and len(launch.cycles[1].ranks) == 4
    assert len({line.split()[2] for line in launch.lines if line.startswith("end 20")}) == 1
    launch.check_partition()


def test_stopped_rank_is_recorded_as_stopped_and_replaced(tmp_path: Path) -> None:
    code, launch = run(tmp_path, training(), *TWO, "--hang-timeout", "2", "--inject", "stop@step=12,rank=1")
    assert code == 0, launch.output
    assert launch.mark("fault").attrs["rank"] == 1
    found = json.loads((launch.run_dir / "evidence" / "cycle-0000" / "rank-00001.json").read_text())
    assert found["state"] == "T" and found["stacks"] == ""


def test_rank_that_hangs_before_init_is_noticed(tmp_path: Path) -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "1" and os.environ["KEEPSTEP_CYCLE"] == "0":
            time.sleep(3600)
        import keepstep.trainer as ks
        run = ks.init()
        if os.environ["KEEPSTEP_CYCLE"] == "0":
            time.sleep(3600)
        print("through", flush=True)
    """
    code, launch = run(tmp_path, script, *TWO, "--hang-timeout", "2")
    assert code == 0, launch.output
    assert launch.mark("fault").attrs["kind"] == "hang"
    assert "through" in launch.output


def test_exception_of_the_first_failing_rank_is_shown_not_the_cascade(tmp_path: Path) -> None:
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise KeyError("the real reason")
        dist.all_reduce(torch.ones(1))
    """
    code, launch = run(tmp_path, script, *TWO, "--max-restarts", "0")
    assert code == 1
    assert launch.verdict["first_failing_rank"] == 1
    assert "the real reason" in launch.verdict["traceback"]
    assert launch.verdict["cause"] == "budget_exhausted"
    assert launch.mark("fault").attrs["cause"] == "user_code"
    error = json.loads((next(launch.run_dir.glob("nodes/*/errors/cycle-0000-rank-00001.json"))).read_text())
    assert "the real reason" in error["message"]["message"]


def test_same_failure_twice_stops_as_a_code_bug(tmp_path: Path) -> None:
    code, launch = run(tmp_path, "def go():\n    raise ValueError('always')\ngo()\n", *TWO, "--max-restarts", "9")
    assert code == 42
    assert len(launch.cycles) == 2
    assert launch.verdict["cause"] == "code_bug" and "ValueError" in launch.verdict["message"]
    assert "in go" in launch.verdict["message"]


@pytest.mark.parametrize(("status", "expected", "cycles"), [(42, 42, 1), (43, 43, 1), (4, 1, 1), (7, 1, 1)])
def test_exit_codes_of_the_script(tmp_path: Path, status: int, expected: int, cycles: int) -> None:
    code, launch = run(tmp_path, f"import sys\nsys.exit({status})\n", "--max-restarts", "0", "--no-zygote")
    assert code == expected, launch.output
    assert len(launch.cycles) == cycles
    assert launch.verdict["original_exit"] == f"exit {status}"


def test_nan_gradient_stops_for_a_human(tmp_path: Path) -> None:
    code, launch = run(tmp_path, training(), *TWO, "--inject", "nan@step=12,rank=1")
    assert code == 43, launch.output
    assert launch.verdict["cause"] == "numerical_guard" and launch.verdict["last_committed_step"] == 10
    assert "grad_norm is nan at step 12" in launch.output


def test_training_goes_on_while_the_coordinator_is_dead_and_a_later_fault_is_handled(
    tmp_path: Path, reference: str
) -> None:
    flags = ("--inject", "coordinator-kill@step=5", "--inject", "kill@step=22,rank=0")
    code, launch = run(tmp_path, training(), *TWO, *flags)
    assert code == 0, launch.output
    assert launch.wait_line(r"^end 30 (\S+)").group(1) == reference
    assert "the coordinator ended" in launch.output
    assert len(launch.cycles) == 2
    assert launch.cycles[1].restored_step in (10, 20)  # whether the save of step 20 was done by then
    assert sorted(p.name for p in (launch.run_dir / "journal").iterdir()) == ["000001.jsonl", "000002.jsonl"]
    launch.check_partition()


def test_sigterm_saves_at_once_and_the_same_run_id_goes_on_from_there(tmp_path: Path, reference: str) -> None:
    launch = Launch(tmp_path, training(total=100000, every=100000), *TWO)
    launch.wait_line(r"^completed 12$", count=2)
    launch.signal(signal.SIGTERM)
    assert launch.finish() == 143
    verdict = launch.verdict
    assert (verdict["outcome"], verdict["cause"]) == ("stopped", "preempted")
    steps = [int(line.split()[1]) for line in launch.lines if line.startswith("end ")]
    assert steps == [verdict["last_committed_step"]] * 2
    code, again = run(tmp_path, training(total=steps[0] + 5), *TWO)
    assert code == 0, again.output
    assert again.wait_line(r"^restored (\d+)").group(1) == str(steps[0])
    assert again.verdict["attempt"] == 1
    assert (tmp_path / "run" / "verdict-0000.json").exists()


def test_injected_preemption_is_a_real_sigterm(tmp_path: Path) -> None:
    code, launch = run(tmp_path, training(total=100000), *TWO, "--inject", "preempt@step=7")
    assert code == 143, launch.output
    assert launch.verdict["cause"] == "preempted"


def test_interrupt_ends_everything_even_daemons(tmp_path: Path) -> None:
    script = """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        print("worker", child.pid, flush=True)
        time.sleep(3600)
    """
    launch = Launch(tmp_path, script, "--no-zygote", "--stop-grace", "5")
    worker = int(launch.wait_line(r"^worker (\d+)").group(1))
    launch.signal(signal.SIGINT)
    assert launch.finish() == 130
    assert launch.verdict["cause"] == "interrupted"
    assert not alive(worker)


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    script = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        while True:
            time.sleep(1)
    """
    launch = Launch(tmp_path, script, "--no-zygote", "--stop-grace", "1")
    launch.wait_line("^ready")
    launch.signal(signal.SIGTERM)
    assert launch.finish() == 143
    assert launch.cycles[0].ranks[0].exit == "SIGKILL"


def test_corrupted_checkpoint_is_quarantined_and_the_older_one_used(tmp_path: Path, reference: str) -> None:
    flags = ("--inject", "corrupt-checkpoint@step=25,rank=1", "--inject", "kill@step=25,rank=1")
    code, launch = run(tmp_path, training(settled=True), *TWO, *flags)
    assert code == 0, launch.output
    assert launch.wait_line(r"^end 30 (\S+)").group(1) == reference
    quarantined = launch.mark("quarantined", cycle=1)
    assert quarantined.attrs["step"] == 20
    assert launch.cycles[1].restored_step == 10
    assert "refused and quarantined" in launch.output


def test_nothing_valid_in_the_root_refuses_to_start_fresh(tmp_path: Path) -> None:
    code, launch = run(tmp_path, training(total=12), *TWO)
    assert code == 0, launch.output
    for shard in (tmp_path / "ckpt").glob("*/rank-*.safetensors"):
        os.truncate(shard, 100)
    code, launch = run(tmp_path, training(total=20), *TWO)
    assert code == 42, launch.output
    assert "--fresh-start" in launch.output
    code, launch = run(tmp_path, training(total=20), *TWO, "--fresh-start")
    assert code == 0, launch.output
    assert launch.wait_line(r"^restored (\d+)").group(1) == "0"


def test_full_disk_during_a_save_costs_the_save_not_the_job(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "ckpt", "size=32k"):
        code, launch = run(tmp_path, training(total=25), *TWO)
    assert code == 0, launch.output
    failed = [m for m in launch.marks if m.kind == "ckpt_failed"]
    assert failed and "No space left" in failed[0].attrs["error"]
    assert launch.summary["checkpoints"]["failed"] == len(failed)


def test_storage_that_fails_or_stalls_costs_a_save_not_the_job(tmp_path: Path, reference: str) -> None:
    faults = ("storage-error@step=9,rank=1,at_byte=100", "storage-stall@step=24,rank=1,seconds=0.3")
    code, launch = run(tmp_path, training(), *TWO, *(part for fault in faults for part in ("--inject", fault)))
    assert code == 0, launch.output
    assert launch.wait_line(r"^end 30 (\S+)").group(1) == reference
    assert len(launch.cycles) == 1, "no rank was lost"
    failed = launch.mark("ckpt_failed")
    assert failed.attrs["step"] == 10
    assert re.search(r"rank 1: cannot write .*/rank-00001-of-00002.*Input/output error", failed.attrs["error"])
    assert "save of step 10 failed: rank 1:" in launch.output
    assert [m.attrs["step"] for m in launch.marks if m.kind == "committed"] == [20, 30]
    assert "injecting storage-stall on rank 1 at step 24" in launch.output
    assert launch.summary["checkpoints"]["failed"] == 1


def test_port_in_use_is_a_free_restart_on_another_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        code, launch = run(tmp_path, training(total=12), *TWO, "--master-port", str(port))
    assert code == 0, launch.output
    assert launch.cycles[0].master_port == port
    assert launch.summary["restarts"] == {"total": 1, "counted": 0, "free": 1}


def test_second_run_with_the_same_id_names_host_and_pid(tmp_path: Path) -> None:
    first = Launch(tmp_path, training(total=100000), "--standalone")
    first.wait_line(r"^completed 3$")
    code, second = run(tmp_path, None, "--standalone", args=("script.py",))
    assert code == 1
    assert socket.gethostname() in second.output and f"pid {first.process.pid}" in second.output
    first.signal(signal.SIGTERM)
    assert first.finish() == 143


def test_killed_launcher_takes_its_ranks_along_and_the_run_can_be_resumed(tmp_path: Path, reference: str) -> None:
    launch = Launch(tmp_path, training(total=100000), *TWO)
    pids = [int(launch.wait_line(r"^restored 0 pid (\d+)", count=n).group(1)) for n in (1, 2)]
    launch.wait_line(r"^completed 12$", count=2)
    wait_until(lambda: any(m.kind == "committed" for m in launch.marks))
    launch.signal(signal.SIGKILL)
    launch.finish()
    for pid in pids:
        fd = os.pidfd_open(pid) if alive(pid) else -1
        if fd >= 0:
            os.close(fd)
    code, again = run(tmp_path, training(), *TWO)
    assert code == 0, again.output
    assert not any(alive(pid) for pid in pids)
    assert int(again.wait_line(r"^restored (\d+)").group(1)) >= 10
    assert again.wait_line(r"^end 30 (\S+)").group(1) == reference


def test_orphaned_workers_do_not_outlive_the_cycle(tmp_path: Path) -> None:
    script = """
        import os, signal, subprocess, sys
        if os.environ["KEEPSTEP_CYCLE"] == "0":
            worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            print("workers", worker.pid, daemon.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    code, launch = run(tmp_path, script, "--no-zygote")
    assert code == 0, launch.output
    found = launch.wait_line(r"^workers (\d+) (\d+)")
    assert not alive(int(found.group(1))) and not alive(int(found.group(2)))


@pytest.mark.slow
def test_zygote_with_a_thread_refuses_and_fresh_interpreters_are_used(tmp_path: Path, reference: str) -> None:
    (tmp_path / "starts_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    flags = ("--preload", "torch,starts_thread", "--inject", "kill@step=15,rank=0")
    code, launch = run(tmp_path, training(), *TWO, *flags, PYTHONPATH=str(tmp_path))
    assert code == 0, launch.output
    assert "not forking ranks: 1 unexpected threads" in launch.output
    assert launch.wait_line(r"^end 30 (\S+)").group(1) == reference


@pytest.mark.slow
def test_killed_zygote_costs_the_fast_path_only(tmp_path: Path, reference: str) -> None:
    launch = Launch(tmp_path, training(), *TWO, "--inject", "kill@step=25,rank=1")
    launch.wait_line(r"^completed 2$", count=2)
    zygotes = [p for p in descendants(launch.process.pid, set()) if b"ranks.zygote" in command_line(p)]
    # Forked ranks and the store host carry the zygote's command line; the zygote is the one that leads its session.
    (zygote,) = [p for p in zygotes if os.getsid(p) == p]
    os.kill(zygote, signal.SIGKILL)
    assert launch.finish() == 0, launch.output
    assert launch.wait_line(r"^end 30 (\S+)").group(1) == reference
    assert "the zygote is gone; starting fresh interpreters instead" in launch.output


def test_slow_rank_is_no_fault(tmp_path: Path) -> None:
    code, launch = run(tmp_path, training(), *TWO, "--inject", "slow@step=5,rank=1,seconds=0.2,steps=3")
    assert code == 0, launch.output
    assert len(launch.cycles) == 1
    assert launch.output.count("injecting slow on rank 1") == 3


def test_two_launchers_on_one_machine_form_one_job(tmp_path: Path, reference: str) -> None:
    flags = ("--nnodes", "2", "--rdzv-id", "job", "--inject", "kill@step=15,rank=1")
    first = Launch(tmp_path, training(), *flags, "--node-name", "a")
    second = Launch(tmp_path, training(), *flags, "--node-name", "b")
    assert (first.finish(), second.finish()) == (0, 0), first.output + second.output
    assert first.wait_line(r"^end 30 (\S+)").group(1) == reference
    cycle = first.cycles[1]
    assert {(r.rank, r.node) for r in cycle.ranks} == {(0, "a"), (1, "b")}
    first.check_partition()


def _two_launchers(tmp_path: Path) -> tuple[Launch, Launch]:
    flags = ("--nnodes", "2", "--rdzv-id", "job", "--rdzv-conf", "join_timeout=2,lease=2")
    first = Launch(tmp_path, training(total=100000), *flags, "--node-name", "a")
    wait_until(lambda: '"type":"node"' in (tmp_path / "run/journal/000001.jsonl").read_text())
    second = Launch(tmp_path, training(total=100000), *flags, "--node-name", "b")
    second.wait_line(r"^completed 3$")
    return first, second


def test_leading_launcher_killed_the_coordinator_waits_for_another_and_then_ends_the_job(tmp_path: Path) -> None:
    first, second = _two_launchers(tmp_path)
    first.signal(signal.SIGKILL)
    assert second.finish() == 1
    assert second.verdict["cause"] == "join_timeout"
    assert second.cycles[0].fault is not None


@pytest.mark.slow
def test_leading_launcher_and_coordinator_killed_the_others_end(tmp_path: Path) -> None:
    first, second = _two_launchers(tmp_path)
    coordinator = next(r for r in read_records(first.run_dir) if r["type"] == "open")["pid"]
    first.signal(signal.SIGKILL)
    os.kill(coordinator, signal.SIGKILL)
    assert second.finish() == 1
    assert "the leading launcher is gone" in second.output


def test_taken_node_name_is_an_error_that_says_so(tmp_path: Path) -> None:
    flags = ("--nnodes", "2", "--rdzv-id", "job", "--node-name", "a", "--no-zygote")
    first = Launch(tmp_path, training(), *flags)
    wait_until(lambda: '"type":"node"' in (tmp_path / "run/journal/000001.jsonl").read_text())
    second = Launch(tmp_path, training(), *flags)
    assert second.finish() == 1
    assert "node name 'a' is taken" in second.output and f"pid {first.process.pid}" in second.output
    assert "--node-name" in second.output
    first.signal(signal.SIGTERM)
    assert first.finish() == 143


def test_node_that_never_comes_ends_the_job_after_the_join_timeout(tmp_path: Path) -> None:
    flags = ("--nnodes", "2", "--rdzv-id", "job", "--node-name", "a", "--no-zygote", "--rdzv-conf", "join_timeout=1")
    code, launch = run(tmp_path, training(), *flags)
    assert code == 1
    assert launch.verdict["cause"] == "join_timeout" and "1 of 2 nodes" in launch.verdict["message"]


@pytest.mark.parametrize(
    ("flags", "script", "code", "words"),
    [
        ((), "def f(:\n", 42, ["script.py", "does not compile", "SyntaxError"]),
        (("--run-dir", "/proc/nowhere"), "pass\n", 1, ["/proc/nowhere", "--run-dir"]),
        (("--nproc-per-node", "many"), "pass\n", 2, ["--nproc-per-node", "'many'"]),
        (("--hang-timeout", "soon"), "pass\n", 2, ["--hang-timeout", "'soon'", "auto"]),
        (("--inject", "explode@step=1"), "pass\n", 2, ["explode", "coordinator-kill"]),
    ],
    ids=["syntax", "run-dir", "nproc", "hang-timeout", "inject"],
)
def test_mistakes_are_told_in_one_message(
    tmp_path: Path, flags: tuple[str, ...], script: str, code: int, words: list[str]
) -> None:
    ended, launch = run(tmp_path, script, *flags)
    assert ended == code, launch.output
    assert all(w in launch.output for w in words), launch.output
    assert "launcher/" not in launch.output


def test_missing_script_is_a_usage_error(tmp_path: Path) -> None:
    code, launch = run(tmp_path, None, args=("nowhere.py",))
    assert code == 2
    assert "'nowhere.py'" in launch.output and "no such file" in launch.output
