"""Who the others wait for: from stack dumps that real ranks made, and once from ranks that hang right now."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.launcher.node.evidence import RankEvidence, capture, culprits, main_thread, waits_for_others
from keepstep.launcher.node.watch import RankPages

# Recorded with faulthandler from two gloo ranks, of which the other one slept (torch 2.13, Python 3.11).
TORCH = "/venv/lib/python3.11/site-packages/torch"
ALL_REDUCE = f"""\
Current thread 0x00007f28ecdc5b80 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/user/train.py", line 16 in train
  File "/home/user/train.py", line 42 in <module>
"""
RECV = f"""\
Current thread 0x00007fd682434b80 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 2799 in recv
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/user/train.py", line 18 in train
  File "/home/user/train.py", line 42 in <module>
"""
OBJECTS = f"""\
Current thread 0x00007efe2ca1db80 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 4287 in all_gather
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "{TORCH}/distributed/distributed_c10d.py", line 3513 in all_gather_object
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/user/train.py", line 20 in train
  File "/home/user/train.py", line 42 in <module>
"""
DDP_BACKWARD = f"""\
Current thread 0x00007f1061609b80 (most recent call first):
  File "{TORCH}/autograd/graph.py", line 979 in _engine_run_backward
  File "{TORCH}/autograd/__init__.py", line 395 in backward
  File "{TORCH}/_tensor.py", line 623 in backward
  File "/home/user/train.py", line 27 in train
  File "/home/user/train.py", line 42 in <module>
"""
DDP_REBUILDS_BUCKETS = f"""\
Current thread 0x00007f9a7d1f5b80 (most recent call first):
  File "{TORCH}/nn/parallel/distributed.py", line 1775 in _pre_forward
  File "{TORCH}/nn/parallel/distributed.py", line 1886 in forward
  File "{TORCH}/nn/modules/module.py", line 1789 in _call_impl
  File "{TORCH}/nn/modules/module.py", line 1778 in _wrapped_call_impl
  File "/home/user/train.py", line 27 in train
"""
RENDEZVOUS = f"""\
Current thread 0x00007fd207dfdb80 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 2169 in _new_process_group_helper
  File "{TORCH}/distributed/distributed_c10d.py", line 1899 in init_process_group
  File "{TORCH}/distributed/c10d_logger.py", line 97 in wrapper
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/user/train.py", line 5 in init
"""
LOADER = f"""\
Thread 0x00007f8f649ff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 231 in _feed
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f8f8308bb80 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 947 in wait
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 440 in _poll
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 257 in poll
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 113 in get
  File "{TORCH}/utils/data/dataloader.py", line 1291 in _try_get_data
"""
COMPUTE = """\
Current thread 0x00007f0c5563db80 (most recent call first):
  File "/home/user/train.py", line 31 in train
  File "/home/user/train.py", line 42 in <module>
"""
SLEEP = """\
Current thread 0x00007fc066406b80 (most recent call first):
  File "/home/user/train.py", line 8 in idle
  File "/home/user/train.py", line 14 in train
  File "/home/user/train.py", line 42 in <module>
"""


class TestDumps:
    @pytest.mark.parametrize(
        ("dump", "waits"),
        [
            (ALL_REDUCE, True),
            (RECV, True),
            (OBJECTS, True),
            (DDP_BACKWARD, True),
            (DDP_REBUILDS_BUCKETS, True),
            (RENDEZVOUS, True),
            (LOADER, False),
            (COMPUTE, False),
            (SLEEP, False),
            ("", None),
            ("Fatal Python error: Aborted\n\n", None),
            ("Current thread 0x00007f0c5563db80 (most recent call first):\n  <no Python frame>\n", None),
        ],
    )
    def test_waits_for_others(self, dump: str, waits: bool | None) -> None:
        assert waits_for_others(dump) is waits

    def test_only_the_main_thread_counts(self) -> None:
        """A helper thread that sits in a collective (an asynchronous save) says nothing about the training."""
        helper = ALL_REDUCE.replace("Current thread", "Thread")
        assert waits_for_others(helper + "\n" + SLEEP) is False
        assert waits_for_others(SLEEP.replace("Current thread", "Thread") + "\n" + ALL_REDUCE) is True

    def test_the_main_thread_may_not_be_the_one_that_took_the_signal(self) -> None:
        assert waits_for_others(SLEEP + "\n" + ALL_REDUCE.replace("Current thread", "Thread")) is True

    def test_a_collective_far_up_the_stack_is_not_where_the_rank_is(self) -> None:
        """A hook that torch calls from within its own code, and that hangs in the user's."""
        deep = SLEEP.splitlines() + ALL_REDUCE.splitlines()[1:]
        assert waits_for_others("\n".join(deep)) is False

    @pytest.mark.parametrize(
        ("line", "waits"), [("work.wait()", True), ("handles[0].wait(timeout)", True), ("x = a @ b", False)]
    )
    def test_an_asynchronous_collective_is_waited_for_on_the_users_own_line(
        self, line: str, waits: bool, tmp_path: Path
    ) -> None:
        (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
        frame = f'  File "{tmp_path}/train.py", line 2 in <module>'
        assert waits_for_others(f"Current thread 0x00007f56713c3b80 (most recent call first):\n{frame}\n") is waits

    def test_frames_innermost_first(self) -> None:
        assert main_thread(LOADER)[0] == 'File "/usr/lib/python3.11/selectors.py", line 415 in select'
        assert main_thread("garbage\n  File no thread\n") == []

    def test_names_of_threads_as_newer_pythons_print_them(self) -> None:
        assert waits_for_others(ALL_REDUCE.replace("b80 (", "b80 [python3] (")) is True


@pytest.fixture
def found() -> Callable[..., list[RankEvidence]]:
    pages = RankPages(0, 0)
    fresh = pages.look()
    pages.close()

    def make(*dumps: str, states: str = "", steps: list[int] | None = None) -> list[RankEvidence]:
        result = []
        for rank, dump in enumerate(dumps):
            page = msgspec.structs.replace(fresh, completed=steps[rank], completed_ns=1) if steps else fresh
            state = states[rank] if states else "S"
            fields: dict[str, Any] = {"stacks": dump, "in_collective": waits_for_others(dump), "kernel": ""}
            result.append(RankEvidence(rank=rank, pid=10 + rank, state=state, page=page, **fields))
        return result

    return make


class TestCulprits:
    """Ranks by number, in the order of their dumps."""

    CASES: tuple[tuple[str, list[str], dict[str, Any], set[int], list[int]], ...] = (
        ("one sleeps", [ALL_REDUCE, SLEEP, ALL_REDUCE], {}, set(), [1]),
        ("one waits for its data", [DDP_BACKWARD, DDP_BACKWARD, LOADER], {}, set(), [2]),
        ("two compute", [COMPUTE, ALL_REDUCE, COMPUTE], {}, set(), [0, 2]),
        ("one never came to the rendezvous", [RENDEZVOUS, RENDEZVOUS, SLEEP], {}, set(), [2]),
        ("one is stopped", [ALL_REDUCE, "", ALL_REDUCE], {"states": "STS"}, set(), [1]),
        ("one is traced", [ALL_REDUCE, ""], {"states": "St"}, set(), [1]),
        ("one has exited, another is busy", [ALL_REDUCE, SLEEP], {}, {2}, [2]),
        ("all wait, one a step behind", [ALL_REDUCE, RECV, ALL_REDUCE], {"steps": [7, 6, 7]}, set(), [1]),
        ("all wait in the same step", [ALL_REDUCE, ALL_REDUCE], {"steps": [7, 7]}, set(), []),
        ("all wait, steps unknown", [ALL_REDUCE, ALL_REDUCE], {}, set(), []),
        ("all busy, nobody waits", [SLEEP, COMPUTE], {}, set(), []),
        ("all busy, one behind", [SLEEP, COMPUTE], {"steps": [3, 9]}, set(), [0]),
        ("no stack of the quiet one", [ALL_REDUCE, ""], {}, set(), []),
        ("no stack of the quiet one, and it is behind", [ALL_REDUCE, ""], {"steps": [9, 8]}, set(), [1]),
        ("a single rank that does not wait", [SLEEP], {}, set(), [0]),
        ("a single rank of this node, waiting for others", [ALL_REDUCE], {}, set(), []),
        ("nothing is known", [], {}, set(), []),
    )

    @pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
    def test_case(
        self, case: tuple[str, list[str], dict[str, Any], set[int], list[int]], found: Callable[..., list[RankEvidence]]
    ) -> None:
        _, dumps, fields, ended, expected = case
        assert culprits(found(*dumps, **fields), ended) == expected


RANK = """
import faulthandler, os, signal, sys, threading
rank, fd, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
faulthandler.register(signal.SIGRTMIN + 7, file=fd, all_threads=True, chain=False)
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
print("ready", flush=True)
if rank == 0:
    dist.all_reduce(torch.ones(2))
else:
    threading.Event().wait()
"""
PLAIN = """
import faulthandler, signal, sys, threading
faulthandler.register(signal.SIGRTMIN + 7, file=int(sys.argv[1]), all_threads=True, chain=False)
threading.Thread(target=threading.Event().wait, daemon=True, name="helper").start()
def where_it_sits():
    print("ready", flush=True)
    threading.Event().wait()
where_it_sits()
"""
Ranks = dict[int, tuple[int, RankPages]]


class Group:
    """Real processes with real pages."""

    def __init__(self) -> None:
        self.ranks: Ranks = {}
        self.processes: list[subprocess.Popen[str]] = []

    def launch(self, code: str, *args: str) -> None:
        rank = len(self.ranks)
        pages = RankPages(rank, 0)
        argv = [a.format(fd=pages.stacks_fd, rank=rank) for a in args]
        command = [sys.executable, "-c", textwrap.dedent(code), *argv]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[pages.stacks_fd])
        self.processes.append(process)
        self.ranks[rank] = (process.pid, pages)

    def await_ready(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for _, pages in self.ranks.values():
            pages.close()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.close()


def take(group: Group, folder: Path, limit_s: float = 10.0) -> list[RankEvidence]:
    return asyncio.run(capture(group.ranks, folder, limit_s))


class TestCapture:
    def test_a_sleeping_rank_among_gloo_ranks_is_found(self, group: Group, tmp_path: Path) -> None:
        for _ in range(2):
            group.launch(RANK, "{rank}", "{fd}", str(tmp_path / "store"))
        group.await_ready()
        found = take(group, tmp_path / "evidence")
        while found[0].in_collective is not True or "wait" not in found[1].stacks:
            # Between "ready" and the collective lie a few instructions. The test's own time limit bounds this.
            found = take(group, tmp_path / "evidence")
        assert (found[1].in_collective, culprits(found, set())) == (False, [1])
        assert "in all_reduce" in (tmp_path / "evidence" / "rank-00000.stacks.txt").read_text()
        record = json.loads((tmp_path / "evidence" / "rank-00001.json").read_text())
        assert (record["rank"], record["in_collective"], record["page"]["completed"]) == (1, False, 0)

    def test_each_capture_holds_its_own_dump_with_all_threads(self, group: Group, tmp_path: Path) -> None:
        group.launch(PLAIN, "{fd}")
        group.await_ready()
        stacks = [take(group, tmp_path / str(n))[0].stacks for n in range(3)]
        assert all(text.count("most recent call first") == 2 for text in stacks)
        assert all("where_it_sits" in " ".join(main_thread(text)[:3]) for text in stacks)

    def test_a_stopped_rank_is_recorded_and_not_woken(self, group: Group, tmp_path: Path) -> None:
        group.launch(PLAIN, "{fd}")
        group.launch(PLAIN, "{fd}")
        group.await_ready()
        group.processes[1].send_signal(signal.SIGSTOP)
        while Path(f"/proc/{group.ranks[1][0]}/stat").read_text().split()[2] != "T":
            pass
        begin = time.monotonic()
        found = take(group, tmp_path)
        assert time.monotonic() - begin < 5
        assert (found[1].state, [bool(e.stacks) for e in found]) == ("T", [True, False])
        assert (tmp_path / "rank-00001.stacks.txt").read_text() == "no stack: state T\n"
        assert culprits(found, set()) == [1]
        assert Path(f"/proc/{group.ranks[1][0]}/stat").read_text().split()[2] == "T"

    def test_a_program_without_our_handler_survives(self, group: Group, tmp_path: Path) -> None:
        group.launch("import threading; print('ready', flush=True); threading.Event().wait()")
        group.await_ready()
        found = take(group, tmp_path)
        assert (found[0].in_collective, found[0].stacks) == (None, "")
        assert group.processes[0].poll() is None

    def test_a_rank_that_is_gone_already(self, group: Group, tmp_path: Path) -> None:
        group.launch(PLAIN, "{fd}")
        group.launch(PLAIN, "{fd}")
        group.await_ready()
        group.processes[0].kill()
        group.processes[0].wait()
        found = take(group, tmp_path)
        assert [(e.state == "gone", bool(e.stacks)) for e in found] == [(True, False), (False, True)]
        assert culprits(found, set()) == [0]

    def test_a_rank_that_cannot_run_its_handler_costs_no_more_than_the_limit(
        self, group: Group, tmp_path: Path
    ) -> None:
        """It blocks the signal: asked, but never answers."""
        blocked = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 7])\n"
        group.launch(blocked + textwrap.dedent(PLAIN).replace("threading.Thread", "0 and threading.Thread"), "{fd}")
        group.await_ready()
        begin = time.monotonic()
        found = take(group, tmp_path, limit_s=0.3)
        assert 0.3 <= time.monotonic() - begin < 3
        assert (found[0].stacks, found[0].in_collective) == ("", None)
