"""The run folder's files: the lead of a run, durable replacement, folders that cannot be used, the place of sockets."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.launcher.files import (
    LONGEST_SOCKET,
    RunLock,
    RunLockedError,
    keepstep_home,
    make_run_dir,
    socket_dir,
    write_atomic,
    write_durable,
)
from keepstep.records.errors import StorageError

HOLD = (
    "import sys; from pathlib import Path; from keepstep.launcher.files import RunLock;"
    "lock = RunLock.acquire(Path(sys.argv[1]), 'n1'); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another launcher that leads the run in tmp_path."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


class TestRunLock:
    def test_the_second_learns_who_has_it(self, holder: subprocess.Popen[str], tmp_path: Path) -> None:
        with pytest.raises(RunLockedError) as caught:
            RunLock.acquire(tmp_path, "n2")
        text = str(caught.value)
        assert f"run {tmp_path.name!r} is already running: host {socket.gethostname()}, pid {holder.pid}" in text
        assert "use another --rdzv-id or --run-dir" in text

    def test_a_refused_try_takes_nothing_away(self, holder: subprocess.Popen[str], tmp_path: Path) -> None:
        before = (tmp_path / "lead.lock").read_bytes()
        for _ in range(3):
            with pytest.raises(RunLockedError):
                RunLock.acquire(tmp_path, "n2")
        assert (tmp_path / "lead.lock").read_bytes() == before

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
    def test_however_its_holder_dies_it_is_free(
        self, how: signal.Signals, holder: subprocess.Popen[str], tmp_path: Path
    ) -> None:
        holder.send_signal(how)
        holder.wait()
        RunLock.acquire(tmp_path, "n2").release()

    def test_a_program_started_by_the_holder_does_not_keep_it(self, tmp_path: Path) -> None:
        lock = RunLock.acquire(tmp_path, "n1")
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        lock.release()
        RunLock.acquire(tmp_path, "n2").release()
        child.kill()
        child.communicate()

    def test_the_next_holder_is_the_one_that_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "lead.lock").write_text("a much longer text of an earlier holder than the one that follows" * 9)
        lock = RunLock.acquire(tmp_path, "n1")
        with pytest.raises(RunLockedError, match=f"pid {os.getpid()} "):
            RunLock.acquire(tmp_path, "n2")
        lock.release()


class TestWriting:
    @pytest.mark.parametrize("write", [write_durable, write_atomic])
    def test_a_reader_never_sees_a_part(self, write: object, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        contents = [bytes([n]) * 50_000 for n in range(40)]
        assert callable(write)
        write(path, contents[0])
        done = threading.Event()

        def replace() -> None:
            for content in contents:
                write(path, content)
            done.set()

        thread = threading.Thread(target=replace)
        thread.start()
        while not done.is_set():
            seen = path.read_bytes()
            assert len(seen) == 50_000
            assert seen == seen[:1] * 50_000
        thread.join()
        assert path.read_bytes() == contents[-1]
        assert os.listdir(tmp_path) == ["record.json"]

    def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        code = (
            "import sys; from pathlib import Path; from keepstep.launcher.files import write_durable\n"
            "print('ready', flush=True); n = 0\n"
            "while True:\n    n += 1; write_durable(Path(sys.argv[1]), b'%d' % (n % 10) * 300_000)"
        )
        for _ in range(3):
            path.unlink(missing_ok=True)
            process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.readline()
            while not path.exists():
                os.sched_yield()
            process.kill()
            process.communicate()
            content = path.read_bytes()
            assert content == content[:1] * 300_000

    def test_mode_and_overwriting(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_text("old and longer")
        write_durable(path, b"new")
        assert path.read_bytes() == b"new"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        write_durable(path, b"open", mode=0o644)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644

    def test_a_missing_folder_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "no" / "x.json"
        with pytest.raises(StorageError, match=f"{path}: cannot write: No such file or directory"):
            write_durable(path, b"")

    def test_a_failed_write_leaves_nothing_behind(self, tmp_path: Path) -> None:
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "inside").touch()
        with pytest.raises(StorageError, match=f"{tmp_path}/x: cannot write: (Is a directory|File exists)"):
            write_durable(tmp_path / "x", b"new")
        with pytest.raises(OSError, match="directory"):
            write_atomic(tmp_path / "x", b"new")
        assert os.listdir(tmp_path) == ["x"]


class TestRunDir:
    def test_its_parts_are_for_this_user_only(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "a" / "b"
        make_run_dir(run_dir)
        make_run_dir(run_dir)
        assert {p.name for p in run_dir.iterdir()} == {"journal", "cycles", "logs", "evidence", "incidents", "nodes"}
        assert {stat.S_IMODE(p.stat().st_mode) for p in [run_dir, *run_dir.iterdir()]} == {0o700}

    def test_a_file_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "run").touch()
        with pytest.raises(StorageError, match=r"run: the run folder cannot be written: File exists; choose another"):
            make_run_dir(tmp_path / "run")

    def test_a_file_on_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StorageError, match=r"Not a directory; choose another with --run-dir, or set KEEPSTEP_HOME"):
            make_run_dir(tmp_path / "file" / "run")

    def test_a_folder_that_takes_no_files(self) -> None:
        with pytest.raises(StorageError, match=r"^/proc/run: the run folder cannot be written: "):
            make_run_dir(Path("/proc/run"))

    def test_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KEEPSTEP_HOME", "/somewhere")
        assert keepstep_home() == Path("/somewhere")
        monkeypatch.setenv("KEEPSTEP_HOME", "")
        monkeypatch.setenv("HOME", "/home/u")
        assert keepstep_home() == Path("/home/u/.keepstep")


class TestSocketDir:
    @pytest.fixture
    def runtime(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """A short XDG_RUNTIME_DIR."""
        folder = Path(tempfile.mkdtemp(prefix="ks", dir="/tmp"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder
        shutil.rmtree(folder)

    def test_every_launcher_of_a_run_finds_the_same_and_others_do_not(self, runtime: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "a")
        first = socket_dir(tmp_path / "a")
        assert socket_dir(tmp_path / "a" / ".." / "a") == socket_dir(tmp_path / "link") == first
        assert socket_dir(tmp_path / "b") != first

    def test_only_this_user_gets_in(self, runtime: Path, tmp_path: Path) -> None:
        umask = os.umask(0)
        try:
            folder = socket_dir(tmp_path)
        finally:
            os.umask(umask)
        assert folder.is_relative_to(runtime)
        assert {stat.S_IMODE(p.stat().st_mode) for p in (folder, folder.parent)} == {0o700}

    @pytest.mark.parametrize("which", ["folder", "parent"])
    def test_one_that_is_open_to_others_is_refused(self, which: str, runtime: Path, tmp_path: Path) -> None:
        folder = socket_dir(tmp_path)
        wrong = folder if which == "folder" else folder.parent
        wrong.chmod(0o755)
        with pytest.raises(
            StorageError, match=f"{wrong}: belongs to uid {os.getuid()} or is open to others; remove it"
        ):
            socket_dir(tmp_path)

    def test_a_link_to_elsewhere_is_refused(self, runtime: Path, tmp_path: Path) -> None:
        folder = socket_dir(tmp_path)
        folder.rmdir()
        folder.symlink_to(tmp_path)
        with pytest.raises(StorageError, match="is open to others"):
            socket_dir(tmp_path)

    @pytest.mark.parametrize("length", range(40, 75))
    def test_sockets_can_be_bound_whatever_the_length_of_the_runtime_folder(
        self, length: int, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        long = runtime / ("x" * (length - len(str(runtime)) - 1))
        long.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
        folder = socket_dir(tmp_path)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(folder / LONGEST_SOCKET))
        (folder / LONGEST_SOCKET).unlink()
        if not folder.is_relative_to(long):
            folder.rmdir()

    @pytest.mark.parametrize("value", ["", "/no/such/folder"])
    def test_without_a_runtime_folder_it_is_below_tmp(
        self, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        folder = socket_dir(tmp_path)
        assert folder.parent == Path(f"/tmp/keepstep-{os.getuid()}")
        folder.rmdir()
