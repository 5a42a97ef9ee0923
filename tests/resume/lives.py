"""Lives of the training as real processes: a server that has torch loaded forks the ranks of each life.

Run as a program it reads one JSON line a life from standard input and answers each with the ranks' exit statuses.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

LIFE_LIMIT_S = 60
REPOSITORY = Path(__file__).parents[2]


class Server:
    """The test's end of the server."""

    def __init__(self) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "TORCHELASTIC_", "PET_"))}
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.resume.lives"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**clean, "PYTHONPATH": path},
        )

    def live(self, world: int, cycle: int, options: dict[str, Any], log: Path, env: dict[str, str]) -> list[int]:
        """One life of `world` ranks to its end; exit statuses by rank (a negative one is a signal)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"world": world, "cycle": cycle, "options": options, "log": str(log), "env": env}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server of the ranks died"
        statuses: list[int] = json.loads(answer)
        return statuses

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


class Chain:
    """Lives that continue one another in one folder, and what their ranks wrote."""

    def __init__(self, server: Server, folder: Path, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.server, self.folder = server, folder
        self.root = folder / "root"
        self.options = {"root": str(self.root), "out": str(folder), **options}
        self.begins: list[int] = []

    def live(self, world: int = 1, **changes: Any) -> Chain:
        """The next life, which must end well, or by its own kill if it has one."""
        statuses = self.statuses(world, **changes)
        if changes.get("kill_at") is None:
            assert not any(statuses), f"{statuses}\n{self.log}"
        else:  # the others are killed too, or notice before that their peer is gone
            assert all(statuses) and statuses[changes.get("kill_rank", 0)] == -signal.SIGKILL, f"{statuses}\n{self.log}"
        self.begins.append(self.record(0, len(self.begins))["begin"])
        return self

    def statuses(self, world: int = 1, **changes: Any) -> list[int]:
        """The next life, however it ends: exit statuses by rank."""
        env = {"KEEPSTEP_HOME": str(self.folder.parent / "home")}
        return self.server.live(world, len(self.begins), {**self.options, **changes}, self.folder / "log", env)

    @property
    def log(self) -> str:
        """Output of the last life."""
        return (self.folder / "log").read_text()

    def record(self, rank: int, cycle: int) -> dict[str, Any]:
        """What one rank wrote about its state."""
        found: dict[str, Any] = json.loads((self.folder / f"state-r{rank}-c{cycle}.json").read_text())
        return found

    def final(self, rank: int = 0) -> dict[str, str]:
        """Digests of all state of `rank` at the end of the last life."""
        digests: dict[str, str] = self.record(rank, len(self.begins) - 1)["final"]
        return digests

    def lines(self, rank: int, cycle: int) -> dict[int, dict[str, Any]]:
        """Ledger of one rank in one life, by step."""
        text = (self.folder / f"ledger-r{rank}-c{cycle}.jsonl").read_text()
        return {line["step"]: line for line in map(json.loads, text.splitlines())}

    def history(self, rank: int = 0) -> list[dict[str, Any]]:
        """The steps that led to the final state: of each step the last life that executed it."""
        steps: dict[int, dict[str, Any]] = {}
        for cycle, begin in enumerate(self.begins):
            if (self.folder / f"ledger-r{rank}-c{cycle}.jsonl").exists():
                steps = {s: line for s, line in steps.items() if s < begin} | self.lines(rank, cycle)
        return [steps[step] for step in sorted(steps)]

    def ids(self, worlds: list[int]) -> list[list[int]]:
        """Samples of each step over all ranks, in order; `worlds`: the number of ranks of each life."""
        per_step: dict[int, list[int]] = {}
        for cycle, (begin, world) in enumerate(zip(self.begins, worlds, strict=True)):
            per_step = {step: ids for step, ids in per_step.items() if step < begin}
            for rank in range(world):
                for step, line in self.lines(rank, cycle).items():
                    per_step.setdefault(step, []).extend(line["ids"])
        return [per_step[step] for step in sorted(per_step)]


# ---- the server


def main() -> None:
    """Serve lives until standard input ends."""
    import numpy  # noqa: F401
    import torch._dynamo  # optimizers import it at their first step
    import torch.distributed.fsdp  # noqa: F401
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: F401

    import keepstep.checkpoint.torch.state  # noqa: F401
    import tests.resume.training  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(live(**request)), flush=True)
    os._exit(0)  # taking torch down takes a second


def live(world: int, cycle: int, options: dict[str, Any], log: str, env: dict[str, str]) -> list[int]:
    """Fork a store and the ranks; when one rank fails the others are killed, as a launcher would."""
    reader, writer = os.pipe()
    store = os.fork()
    if store == 0:
        host_store(world, writer)
    os.close(writer)
    port = os.read(reader, 16).decode()
    os.close(reader)
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    base |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(cycle), **env}
    Path(log).write_bytes(b"")
    ranks: dict[int, int] = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            be_rank({**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}, options, log)
        ranks[pid] = rank
    statuses: dict[int, int] = {}
    while len(statuses) < world:
        pid, status = os.wait()
        if pid not in ranks:
            continue
        statuses[ranks[pid]] = os.waitstatus_to_exitcode(status)
        end_group(pid)  # workers of a loader outlive a killed rank for seconds
        if status:
            for other in ranks:
                end_group(other)
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return [statuses[rank] for rank in range(world)]


def end_group(pid: int) -> None:
    """SIGKILL the process group that `pid` leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def host_store(world: int, writer: int) -> None:
    """The store of one life, on a port the kernel chooses; never returns."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    signal.alarm(LIFE_LIMIT_S)
    while True:
        signal.pause()


def be_rank(env: dict[str, str], options: dict[str, Any], log: str) -> None:
    """Run the training, or the script that `options` name, as one rank; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.alarm(LIFE_LIMIT_S)  # a rank that hangs fails its test
        fd = os.open(log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(fd, stream)
        os.environ.update(env)
        if "script" in options:
            sys.argv = [options["script"], *options["args"]]
            runpy.run_path(options["script"], run_name="__main__")
        else:
            from tests.resume.training import Options, train

            train(msgspec.convert(options, Options))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
