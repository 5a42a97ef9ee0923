"""Run as a process: walks through what a save or a restore does to the disk, and ends it at every single call in turn.

Usage: crash_walk.py WHAT FOLDER [POINTS]. WHAT is

    save        a second checkpoint beside a committed one
    first       the first restore and the first checkpoint in a root
    quarantine  a restore that finds the newest of two checkpoints damaged

For each call K that changes or syncs something under FOLDER a process forked from this one is killed there, and another one
restores. There are four ways to go:

    before  SIGKILL before the call, or with a write half done
    after   SIGKILL right after it, before its result is seen
    data    as before, and what was written to files without an fsync is lost: such files are empty
    names   as before, and what was made in folders without an fsync of the folder is gone again

The last two are what a power cut may leave of the page cache; they are tried where there is something to lose. With POINTS only
that many calls, evenly spread, are taken, each one way. Prints JSON: the calls, and for each end [number of the call, from 1;
way; step restored].
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from tests.checkpoint.support import FakeRun, Loader, checkpointer, flip_bit

from keepstep.checkpoint.storage import targets
from keepstep.trainer.channel import MemoryChannel
from keepstep.trainer.checkpointer import Checkpointer

Way = Literal["before", "after", "data", "names"]
BY_PATH = ("mkdir", "unlink", "rmdir", "rename", "replace", "link", "symlink", "truncate")
BY_FD = ("write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "ftruncate", "posix_fallocate")


class Tracer:
    """Counts calls of this process that change or sync what lies under `folder`, and ends the process at one of them."""

    def __init__(self, folder: Path, end_at: int, way: Way) -> None:
        """`end_at` 0: never."""
        self.calls: list[str] = []
        self.ways: list[list[Way]] = []
        """Ways to go at each call."""
        self._folder = str(folder)
        self._end_at, self._way = end_at, way
        self._unsynced: set[str] = set()  # files with data that is only in the page cache
        self._unnamed: dict[str, Literal["file", "folder"]] = {}  # made, and the folder not synced since

    def install(self) -> None:
        """From here on every call is seen."""
        for name in BY_PATH:
            self._wrap(os, name, lambda path, *_args, **_kw: os.fspath(path))
        for name in BY_FD:
            self._wrap(os, name, lambda fd, *_args, **_kw: path_of(fd))
        for name in ("reserve", "begin_write_back"):  # fallocate and sync_file_range
            self._wrap(targets, name, lambda fd, *_args: path_of(fd))
        self._wrap(os, "open", lambda path, flags, *_args, **_kw: os.fspath(path) if flags & os.O_CREAT else "")

    def _wrap(self, module: Any, name: str, place: Callable[..., Any]) -> None:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            path = str(place(*args, **kwargs))
            if path != self._folder and not path.startswith(f"{self._folder}/"):
                return real(*args, **kwargs)
            self.calls.append(f"{name} {path.removeprefix(self._folder).lstrip('/')}")
            ways: list[Way] = ["before", "after"]
            self.ways.append(ways + ["data"] * bool(self._unsynced) + ["names"] * bool(self._unnamed))
            here = len(self.calls) == self._end_at
            if here and self._way == "before" and name == "write":
                real(args[0], memoryview(args[1])[: len(args[1]) // 2])
            if here and self._way != "after":
                self._end()
            new = not os.path.lexists(path)
            try:
                result = real(*args, **kwargs)
            finally:
                if here:
                    self._end()
            self._note(name, path, args, new)
            return result

        setattr(module, name, call)

    def _note(self, name: str, path: str, args: tuple[Any, ...], new: bool) -> None:
        """What of this call a power cut could still take back. `new`: there was nothing at `path` before."""
        if name in ("fsync", "fdatasync"):
            self._unsynced.discard(path)
            self._unnamed = {made: kind for made, kind in self._unnamed.items() if str(Path(made).parent) != path}
        elif name == "mkdir":
            self._unnamed[path] = "folder"
        elif name == "open" and new:
            self._unnamed[path] = "file"
        elif name == "link":
            self._unnamed[os.fspath(args[1])] = "file"
        elif name in ("rename", "replace"):
            if path in self._unsynced:
                self._unsynced.add(os.fspath(args[1]))
            self._unnamed.pop(path, None)
            # The new name may be there without its folder's fsync; that it is lost is the state before this call.
        elif name in ("write", "pwrite", "writev", "pwritev", "ftruncate", "truncate"):
            self._unsynced.add(path)

    def _end(self) -> None:
        if self._way == "data":
            for path in self._unsynced:
                if os.path.lexists(path):
                    os.close(REAL_OPEN(path, os.O_WRONLY | os.O_TRUNC))
        if self._way == "names":
            for path, kind in self._unnamed.items():
                if kind == "folder":
                    shutil.rmtree(path, ignore_errors=True)
                elif os.path.lexists(path):
                    REAL_UNLINK(path)
        os.kill(os.getpid(), signal.SIGKILL)


REAL_OPEN, REAL_UNLINK = os.open, os.unlink


def path_of(fd: int) -> str:
    """What descriptor `fd` is open on."""
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return ""


def life(root: Path, cycle: int) -> tuple[Checkpointer, int]:
    """A training that has restored; what it restored is whole and of the step it claims."""
    ckpt = checkpointer(
        root, {"w": torch.full((1000,), -1.0), "n": 0, "loader": Loader(0)}, FakeRun(MemoryChannel(), cycle=cycle)
    )
    step = ckpt.restore()
    if step:
        assert ckpt.state["n"] == step and set(ckpt.state["w"].tolist()) == {float(step)}
    return ckpt, step


def save(ckpt: Checkpointer, step: int) -> None:
    """Commit `step`."""
    ckpt.state["w"], ckpt.state["n"] = torch.full((1000,), float(step)), step
    assert ckpt.save(step)
    ckpt.close()
    assert ckpt.last_committed_step == step


def forked(work: Callable[[], int]) -> int:
    """Exit status of a process forked from this one that calls `work`; negative: the signal that ended it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 120
        try:
            status = work()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Walk:
    """One walk. `folder` holds root and home while a point is tried, `template` what they are at its begin."""

    def __init__(self, what: str, folder: Path) -> None:
        self.what = what
        self.folder, self.template = folder / "disk", folder / "template"
        self.root = self.folder / "root"
        os.environ["KEEPSTEP_HOME"] = str(self.folder / "home")

    def prepare(self) -> None:
        """Make what the walk begins with."""
        self.folder.mkdir(parents=True)
        steps = {"save": [1], "first": [], "quarantine": [1, 2]}[self.what]
        for cycle, step in enumerate(steps):
            assert forked(functools.partial(self.one_save, cycle, step)) == 0
        if self.what == "first":
            self.root.mkdir()
        if self.what == "quarantine":
            (newest,) = self.root.glob("*-step-00000002-*/rank-*")
            flip_bit(newest, -1)
        shutil.copytree(self.folder, self.template)

    def one_save(self, cycle: int, step: int) -> int:
        """A life that commits `step`."""
        save(life(self.root, cycle)[0], step)
        return 0

    def run(self, tracer: Tracer) -> None:
        """What is ended at every call."""
        if self.what != "save":
            tracer.install()
        ckpt, step = life(self.root, 5)
        if self.what == "quarantine":
            assert step == 1
            return
        if self.what == "save":
            tracer.install()
        save(ckpt, step + 1)

    def calls(self) -> tuple[list[str], list[list[Way]]]:
        """The calls of a run that nothing ends, and the ways to end at each. What it imports is imported here, once for all."""
        record, modules = self.folder.parent / "calls", self.folder.parent / "modules"

        def work() -> int:
            tracer = Tracer(self.folder, 0, "before")
            self.run(tracer)
            record.write_text(json.dumps([tracer.calls, tracer.ways]))
            modules.write_text("\n".join(sys.modules))
            return 0

        assert forked(work) == 0
        for name in modules.read_text().splitlines():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        calls, ways = json.loads(record.read_text())
        return calls, ways

    def point(self, number: int, way: Way) -> int:
        """End a run at call `number`; the step that is restored then."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.template, self.folder)

        def work() -> int:
            self.run(Tracer(self.folder, number, way))
            return 0

        assert forked(work) == -signal.SIGKILL, f"not ended at call {number}"
        return forked(lambda: life(self.root, 6)[1])


def main() -> int:
    """Walk, and print what was found."""
    torch.set_num_threads(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    walk = Walk(what, folder)
    walk.prepare()
    calls, ways = walk.calls()
    points = [(number, way) for number in range(1, len(calls) + 1) for way in ways[number - 1]]
    if len(sys.argv) > 3:
        wanted = int(sys.argv[3])
        numbers = sorted({1 + at * (len(calls) - 1) // (wanted - 1) for at in range(wanted)})
        points = [(number, ways[number - 1][place % len(ways[number - 1])]) for place, number in enumerate(numbers)]
    ends = [(number, way, walk.point(number, way)) for number, way in points]
    print(json.dumps({"calls": calls, "ends": ends}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
