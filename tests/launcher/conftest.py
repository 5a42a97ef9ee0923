from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launcher.harness import Launch


@pytest.fixture(autouse=True)
def no_launcher_outlives_its_test() -> Iterator[None]:
    """A failed test must not leave a launcher behind for the next one to meet."""
    yield
    for launch in Launch.started:
        launch.process.kill()
        launch.process.wait()
    Launch.started.clear()
