"""`keepstep logs`."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.cli import logs as logs_module
from keepstep.cli.logs import MAX_LINE_BYTES, read_lines, tail_offset
from tests.cli.story import FIRST, keepstep, write_run

FIRST_LOG = b"[rank 0] a0\n[rank 2] boom\n[rank 1] a1\n"
SECOND_LOG = b"".join(b"[rank %d] line %d\n" % (n % 4, n) for n in range(40))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "job-1", FIRST)
    (folder / "logs" / "cycle-0000.log").write_bytes(FIRST_LOG)
    (folder / "logs" / "cycle-0001.log").write_bytes(SECOND_LOG)
    (folder / "logs" / "launcher.log").write_text("the launcher\n")
    return folder


def logs(*args: str | Path) -> bytes:
    result = keepstep("logs", *args)
    assert result.exit_code == 0, result.output
    return result.stdout_bytes


class TestWhich:
    def test_the_newest_cycle_whole(self, run_dir: Path) -> None:
        assert logs(run_dir) == SECOND_LOG

    def test_another_cycle(self, run_dir: Path) -> None:
        assert logs(run_dir, "--previous") == logs(run_dir, "--cycle", "0") == FIRST_LOG

    def test_some_ranks(self, run_dir: Path) -> None:
        assert logs(run_dir, "--cycle", "0", "--rank", "2", "--rank", "1") == b"[rank 2] boom\n[rank 1] a1\n"

    def test_a_node(self, run_dir: Path) -> None:
        assert logs(run_dir, "-p", "--node", "b") == b"[rank 2] boom\n"
        assert logs(run_dir, "-p", "--node", "a", "--rank", "1", "--rank", "2") == b"[rank 1] a1\n"

    def test_lines_that_match(self, run_dir: Path) -> None:
        assert logs(run_dir, "--grep", r"line [23]9$") == b"[rank 1] line 29\n[rank 3] line 39\n"

    def test_the_launcher(self, run_dir: Path) -> None:
        assert logs(run_dir, "--launcher") == b"the launcher\n"

    def test_mistakes(self, run_dir: Path) -> None:
        for args, code, text in (
            (["--cycle", "9"], 6, "cycles with one (the newest 8): 0, 1"),
            (["-p", "--cycle", "1"], 2, "contradict"),
            (["--launcher", "--rank", "1"], 2, "one log for the whole run"),
            (["--node", "zz", "-p"], 6, "no node 'zz'; it has a, b"),
            (["--grep", "("], 2, "--grep '('"),
        ):
            result = keepstep("logs", run_dir, *args)
            assert (result.exit_code, text in result.stderr) == (code, True), result.stderr

    def test_no_logs_yet(self, tmp_path: Path) -> None:
        run_dir = write_run(tmp_path / "r", FIRST)
        result = keepstep("logs", run_dir)
        assert (result.exit_code, "no log of a cycle yet" in result.stderr) == (6, True)


class TestTail:
    @pytest.mark.parametrize("count", [0, 1, 5, 40, 99])
    def test_last_lines(self, run_dir: Path, count: int) -> None:
        lines = SECOND_LOG.splitlines(keepends=True)
        assert logs(run_dir, "--tail", str(count)) == b"".join(lines[-count:] if count else [])

    def test_counts_only_wanted_lines(self, run_dir: Path) -> None:
        assert logs(run_dir, "--rank", "0", "--tail", "2") == b"[rank 0] line 32\n[rank 0] line 36\n"

    @settings(max_examples=150, deadline=None)
    @given(
        lines=st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=20),
        newline=st.booleans(),
        count=st.integers(0, 22),
        block=st.integers(1, 30),
        needle=st.sampled_from([b"", b"\x00", b"a"]),
    )
    def test_any_file_any_block(self, lines: list[bytes], newline: bool, count: int, block: int, needle: bytes) -> None:
        data = b"\n".join(lines) + (b"\n" if newline and lines else b"")
        expected = [line for line in (data.removesuffix(b"\n").split(b"\n") if data else []) if needle in line]
        before, logs_module.BLOCK_BYTES = logs_module.BLOCK_BYTES, block
        try:
            file = io.BytesIO(data)
            file.seek(tail_offset(file, count, lambda line: needle in line))
        finally:
            logs_module.BLOCK_BYTES = before
        found = [piece.removesuffix(b"\n") for piece in read_lines(file, lambda line: needle in line, None)]
        assert found == (expected[-count:] if count else [])

    def test_memory_is_bounded_however_long_a_line_is(self, tmp_path: Path) -> None:
        """A file of 60 MB without a newline: pieces of at most a line's limit, found by a process that may not hold it."""
        run_dir = write_run(tmp_path / "r", FIRST)
        with (run_dir / "logs" / "cycle-0000.log").open("wb") as file:
            file.write(b"[rank 1] ")
            for _ in range(60):
                file.write(b"x" * (1 << 20))
            file.write(b"\n[rank 0] end\n")
        program = (
            "import sys; from keepstep.cli.main import main\n"
            "try: main(sys.argv[1:])\n"
            "finally: print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')), file=sys.stderr)"
        )

        def peak_kb(*args: str) -> tuple[int, int]:
            command = [sys.executable, "-c", program, "logs", str(run_dir), *args]
            done = subprocess.run(command, capture_output=True, check=True)
            return int(done.stderr.split()[-1]), len(done.stdout)

        for args, size in ((["--tail", "1"], 13), (["--rank", "1"], (60 << 20) + 10)):
            kb, got = peak_kb(*args)
            assert got == size
            assert kb < 60_000, f"{args}: {kb} kB"


class TestBytes:
    def test_what_is_not_utf8_is_passed_on_as_it_is(self, run_dir: Path) -> None:
        raw = b"[rank 0] \xff\xfe \x1b[31mred\x1b[0m \r 50%\r\n"
        (run_dir / "logs" / "cycle-0001.log").write_bytes(raw)
        assert logs(run_dir) == raw

    def test_on_a_terminal_control_characters_are_shown(self, run_dir: Path) -> None:
        (run_dir / "logs" / "cycle-0001.log").write_bytes(
            b"[rank 0] \xff\x1b]0;t\x07\xc2\x9b2J\rx\t\xe2\x80\xae\xc3\xa9\r\n"
        )
        controller, terminal = pty.openpty()
        command = [sys.executable, "-m", "keepstep.cli.main", "logs", str(run_dir)]
        subprocess.run(command, stdout=terminal, stdin=subprocess.DEVNULL, check=True)
        os.close(terminal)
        shown = os.read(controller, 4096).decode()
        os.close(controller)
        assert shown == "[rank 0] \ufffd^[]0;t^G<U+009B>2J^Mx\t<U+202E>é\r\n"

    def test_a_last_line_without_an_end(self, run_dir: Path) -> None:
        (run_dir / "logs" / "cycle-0001.log").write_bytes(b"[rank 0] a\n[rank 1] half")
        assert logs(run_dir, "--rank", "1") == b"[rank 1] half\n"

    def test_pieces_of_a_long_line_share_its_fate(self) -> None:
        data = b"[rank 1] " + b"y" * MAX_LINE_BYTES + b"\n[rank 0] b\n"
        found = list(read_lines(io.BytesIO(data), lambda line: line.startswith(b"[rank 1]"), None))
        assert b"".join(found) == data.removesuffix(b"[rank 0] b\n")
        assert max(map(len, found)) <= MAX_LINE_BYTES


class TestFollow:
    def test_into_the_next_cycle_until_the_launcher_is_gone(
        self, run_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (run_dir / "logs" / "cycle-0001.log").unlink()
        first = run_dir / "logs" / "cycle-0000.log"
        first.write_bytes(b"[rank 0] 1\n")
        lock = (run_dir / "lead.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "keepstep.cli.main", "logs", str(run_dir), "-f"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        guard = threading.Timer(60, process.kill)
        guard.start()
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"[rank 0] 1\n"
            with first.open("ab", buffering=0) as file:
                file.write(b"[rank 0] 2 in two")
                file.write(b" parts\n")
            assert process.stdout.readline() == b"[rank 0] 2 in two parts\n"
            with first.open("ab", buffering=0) as file:
                file.write(b"[rank 0] last\n")
            (run_dir / "logs" / "cycle-0001.log").write_bytes(b"[rank 0] next\n")
            assert [process.stdout.readline() for _ in range(2)] == [b"[rank 0] last\n", b"[rank 0] next\n"]
            lock.close()
            assert process.stdout.read() == b""
            assert process.wait(30) == 0
        finally:
            guard.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
            lock.close()
