"""`keepstep top` and `keepstep inject`; the commands' way to a coordinator."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from websockets.sync.server import ServerConnection, unix_serve

from keepstep.cli import top as top_module
from keepstep.cli.inject import parse_now
from keepstep.cli.top import Watch, headline
from keepstep.goodput import summarise
from keepstep.launcher import messages as m
from keepstep.launcher.coordination.journal import Journal, read_marks
from keepstep.launcher.files import socket_dir
from keepstep.launcher.views.operator import RefusedByCoordinatorError, UnreachableError, send_operator
from keepstep.launcher.views.view import job_view
from keepstep.records.codec import to_json
from keepstep.records.inject import Injection
from tests.cli.story import END, FAULT, FIRST, SECOND, keepstep, write_run


@contextlib.contextmanager
def leading(run_dir: Path) -> Iterator[None]:
    with (run_dir / "lead.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def coordinator(run_dir: Path, *answers: m.Challenge | m.Reply) -> Iterator[list[m.Operator]]:
    """A real WebSocket server where a coordinator of this run listens; gives what it was sent."""
    got: list[m.Operator] = []

    def serve(connection: ServerConnection) -> None:
        assert connection.request is not None and connection.request.path == "/operator"
        for answer in answers:
            if isinstance(answer, m.Reply):
                got.append(msgspec.json.decode(connection.recv(timeout=10), type=m.Operator))
            connection.send(to_json(answer).decode())

    path = socket_dir(run_dir) / "coordinator.sock"
    path.unlink(missing_ok=True)
    with unix_serve(serve, str(path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield got
        finally:
            server.shutdown()
            thread.join(10)
            path.unlink()
            path.parent.rmdir()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    run_dir = write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND])
    with leading(run_dir):
        yield run_dir


class TestTop:
    def test_one_look_without_a_terminal(self, running: Path) -> None:
        record = json.loads(keepstep("top", running).stdout)
        assert record["schema"] == "keepstep.top/1"
        assert (record["job"]["state"], record["job"]["phase"], record["job"]["step"]) == ("running", "training", 12)
        assert record["steps_per_s"] == pytest.approx(2.0)  # 4 at 23 s, 12 at 27 s
        assert [n["role"] for n in record["nodes"]] == ["active", "lost", "active"]

    def test_table(self, running: Path) -> None:
        text = keepstep("top", running, "-o", "table").stdout
        assert text.startswith(
            "run job-1 · running, training · attempt 0, cycle 1\nstep 12 · 2 steps/s (last step seen "
        )
        assert "nodes: 2 active, 1 lost · ranks: 4 · restarts: 1 (1 counted)" in text
        assert "\x1b" not in text

    def test_of_an_ended_run(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND, *END])
        watch = Watch(run_dir)
        watch.update()
        assert watch.ettr == summarise("job-1", 0, read_marks(run_dir), []).ettr
        first, second, _ = headline(watch, job_view(run_dir, time.time_ns(), watch.state))
        assert first.startswith("run job-1 · succeeded · finished")
        assert second.endswith("ran 32.0 s")

    def test_it_follows_the_journal(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "job-1")
        journal = Journal.claim(run_dir)
        watch = Watch(run_dir)
        watch.update()
        assert watch.snapshot()["job"]["step"] is None
        for part, step in ((FIRST, 11), (FAULT, 11), (SECOND, 12), (END, 13)):
            journal.append(part)
            watch.update()
            assert watch.state.step == step
        journal.close()
        assert [e.kind for e in watch.events][-2:] == ["job.ended", "job.verdict"]

    @pytest.mark.parametrize("key", [b"q", b"\x03"])
    def test_the_live_screen_and_leaving_it(self, running: Path, key: bytes) -> None:
        controller, terminal = pty.openpty()
        before = subprocess.run(["stty", "-a"], stdin=terminal, capture_output=True, check=True).stdout
        command = [sys.executable, "-m", "keepstep.cli.main", "top", str(running), "--interval", "0.1"]
        process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
            preexec_fn=lambda: fcntl.ioctl(0, 0x540E, 0),  # the controlling terminal, so that ^C is a signal
        )  # fmt: skip
        seen = b""
        deadline = time.monotonic() + 60
        while b"restarts: 1" not in seen and time.monotonic() < deadline:
            if select.select([controller], [], [], 1.0)[0]:
                seen += os.read(controller, 65536)
        os.write(controller, key)
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([controller], [], [], 0.05)[0]:
                seen += os.read(controller, 65536)
        assert process.wait(1) == 0, seen.decode()
        assert b"\x1b[?1049h" in seen  # the alternate screen
        after = subprocess.run(["stty", "-a"], stdin=terminal, capture_output=True, check=True).stdout
        assert after == before
        os.close(controller)
        os.close(terminal)


class TestInject:
    def test_the_command_reaches_the_coordinator(self, running: Path) -> None:
        answers = (m.Challenge(epoch=1, nonce="n"), m.Reply(epoch=1, id=1, result={"cycle": 1, "id": "A-7"}))
        with coordinator(running, *answers) as got:
            result = keepstep("inject", "kill@rank=3", running, "--yes", "--reason", "drill")
        assert result.exit_code == 0, result.output
        (message,) = got
        assert (message.what, message.run_id, message.spec) == ("inject", "job-1", "kill@rank=3,seconds=0")
        assert message.reason.endswith(": drill")
        record = json.loads(result.stdout)
        assert (record["id"], record["undo"], record["result"]["cycle"]) == ("A-7", None, 1)

    def test_a_table_says_what_was_done(self, running: Path) -> None:
        with coordinator(running, m.Reply(epoch=1, id=1, result={})):
            text = keepstep("inject", "partition@rank=1,seconds=3", running, "-y", "-o", "table").stdout
        assert "injected partition at rank 1 in cycle 1 of run 'job-1'" in text
        assert "undo: none needed" in text

    def test_dry_run_and_asking(self, running: Path) -> None:
        with coordinator(running) as got:
            dry = keepstep("inject", "kill@rank=0", running, "--dry-run")
            asked = keepstep("inject", "kill@rank=0", running)
        assert (dry.exit_code, json.loads(dry.stdout)["dry_run"]) == (0, True)
        assert (asked.exit_code, "give --yes" in asked.stderr) == (2, True)
        assert got == []

    def test_refused(self, running: Path) -> None:
        with coordinator(running, m.Reply(epoch=1, id=1, ok=False, error="the job is stopping")):
            result = keepstep("inject", "kill@rank=0", running, "-y")
        assert (result.exit_code, "the job is stopping" in result.stderr) == (1, True)

    def test_a_bad_spec_is_found_before_anything_is_sent(self, running: Path) -> None:
        for spec, text in (
            ("explode", "unknown kind 'explode'"),
            ("raise@rank=1", "cannot be caused from outside a rank"),
            ("kill@step=3", "leave out step"),
            ("kill@seconds=3", "leave out seconds"),
            ("kill@cycle=3", "leave out cycle"),
            ("kill@rank=x", "rank='x' is not a int"),
        ):
            result = keepstep("inject", spec, running, "-y")
            assert (result.exit_code, text in result.stderr) == (2, True), result.stderr

    def test_a_kind_alone_is_enough(self) -> None:
        assert parse_now("preempt") == ("preempt@seconds=0", Injection(kind="preempt", seconds=0.0))
        assert parse_now("partition@node=b")[1] == Injection(kind="partition", node="b", after=0.0)

    def test_of_a_job_that_is_not_running(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "job-1", FIRST)
        result = keepstep("inject", "kill@rank=0", run_dir, "-y")
        assert (result.exit_code, "is not running (lost)" in result.stderr) == (4, True)

    def test_a_coordinator_that_is_away(self, running: Path) -> None:
        result = keepstep("inject", "kill@rank=0", running, "-y")
        assert (result.exit_code, "does not answer" in result.stderr) == (4, True)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((), UnreachableError),
        ((m.Challenge(epoch=1, nonce="n"),), UnreachableError),
        ((m.Reply(epoch=1, id=1, ok=False, error="no"),), RefusedByCoordinatorError),
    ],
)
def test_what_comes_back_when_it_goes_wrong(running: Path, answers: Any, error: type[Exception]) -> None:
    with coordinator(running, *answers), pytest.raises(error):
        send_operator(running, m.Operator(id=1, what="status", run_id="job-1"), answer_s=0.2)


def test_accounting_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An account that takes half a second is made every five seconds at most."""
    now_s, calls_s = [100.0], []

    def slow_account(*_args: Any, **_kwargs: Any) -> Any:
        calls_s.append(now_s[0])
        now_s[0] += 0.5
        return SimpleNamespace(ettr=0.5)

    monkeypatch.setattr(top_module, "partition", slow_account)
    monkeypatch.setattr(top_module, "time", SimpleNamespace(monotonic=lambda: now_s[0], time_ns=time.time_ns))
    watch = Watch(write_run(tmp_path / "job-1", FIRST))
    for _ in range(60):
        watch.update()
        now_s[0] += 1.0
    assert watch.ettr == 0.5
    assert 8 <= len(calls_s) <= 12
    assert min(b - a for a, b in itertools.pairwise(calls_s)) >= 5.0
