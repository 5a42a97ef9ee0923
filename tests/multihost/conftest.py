from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launcher.harness import Launch
from tests.multihost.hosts import Net, network, remove_stale, script, why_not

MakeNet = Callable[[int], Net]


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    """Skips where hosts cannot be made, saying why."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    remove_stale()


@pytest.fixture
def make_net(hosts_possible: None, tmp_path: Path) -> Iterator[MakeNet]:
    """Makes hosts; they and every launcher are gone after the test, also when it failed."""
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(network(tmp_path, count))
    for launch in Launch.started:
        launch.process.kill()
        launch.process.wait()
    Launch.started.clear()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """"STEP SHA256" of the weights at the end of an uninterrupted run with so many ranks, on one host."""
    known: dict[int, str] = {}

    def of(world: int) -> str:
        if world not in known:
            folder = tmp_path_factory.mktemp("reference")
            (folder / "gate").touch()
            launch = Launch(
                folder, script(), "--nproc-per-node", str(world), "script.py", GATE=str(folder / "gate"), OMP_NUM_THREADS="1"
            )
            code = launch.finish()
            Launch.started.remove(launch)
            assert code == 0, launch.output
            assert len(launch.cycles) == 1, "the reference must not have been interrupted"
            found = set(re.findall(r"end (\d+ [0-9a-f]{64})", launch.output))
            assert len(found) == 1, launch.output
            known[world] = found.pop()
        return known[world]

    return of
