"""Renewals of a lease against a link by hand, and who takes over a coordinator that shows no life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher import messages as m
from keepstep.launcher.clock import Anchor, boot_id
from keepstep.launcher.coordination.leases import RENEWALS
from keepstep.launcher.node.renewal import SILENCE_SHARE, Renewal, stand_by
from keepstep.records.errors import ChannelError

LIMIT_S = 20.0


class Line:
    """A link whose answers the test gives. `drop` closes it; the test opens it again."""

    def __init__(self) -> None:
        self.connected = True
        self.sent: list[m.Beat] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.forgotten: list[asyncio.Future[Any]] = []
        self.dropped_at: list[float] = []
        self.news = asyncio.Event()
        self.answer: Callable[[m.Beat, asyncio.Future[Any]], None] = lambda _beat, _future: None

    def request(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]:
        message = make(len(self.sent) + 1)
        assert isinstance(message, m.Beat)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent.append(message)
        self.futures.append(future)
        self.answer(message, future)
        self.news.set()
        return future

    def forget(self, future: asyncio.Future[Any]) -> None:
        self.forgotten.append(future)

    def drop(self) -> None:
        self.connected = False
        self.dropped_at.append(time.monotonic())
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def renewing(
    line: Line, lease_s: float = 0.2, several: bool = False
) -> AsyncIterator[tuple[Renewal, list[tuple[int, int]]]]:
    """A renewal that runs. Yields (when, until when) of every extension in CLOCK_MONOTONIC ns."""
    extended: list[tuple[int, int]] = []

    def on_extended(until_ns: int) -> None:
        extended.append((time.monotonic_ns(), until_ns))
        line.news.set()

    renewal = Renewal(line, lease_s, several, lambda: (3, 17, 1234), on_extended)  # type: ignore[arg-type]
    task = asyncio.create_task(renewal.run())
    try:
        yield renewal, extended
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def set_later(delay_s: float, future: asyncio.Future[Any], result: dict[str, Any]) -> None:
    def set_now() -> None:
        if not future.done():
            future.set_result(result)

    asyncio.get_running_loop().call_later(delay_s, set_now)


def later(delay_s: float, **result: Any) -> Callable[[m.Beat, asyncio.Future[Any]], None]:
    return lambda _, future: set_later(delay_s, future, result)


class TestRenewal:
    def test_an_answer_extends_the_lease_from_when_its_beat_was_sent(self) -> None:
        async def main() -> None:
            line = Line()
            line.answer = later(0.05, lease_s=0.4)
            began_ns = time.monotonic_ns()
            async with renewing(line, 0.4) as (_, extended):
                await line.until(lambda: len(extended) >= 1)
                when_ns, until_ns = extended[0]
                sent_ns = until_ns - int(0.4e9)
                assert began_ns <= sent_ns <= when_ns - int(0.05e9)

        asyncio.run(main())

    def test_beats_tell_how_far_the_ranks_are_and_how_long_the_last_answer_took(self) -> None:
        async def main() -> None:
            line = Line()
            line.answer = later(0.02, lease_s=0.2)
            async with renewing(line):
                await line.until(lambda: len(line.sent) >= 3)
            first, later_one = line.sent[0], line.sent[2]
            assert (first.cycle, first.completed, first.at_ns, first.rtt_s) == (3, 17, 1234, 0.0)
            assert 0.02 <= later_one.rtt_s < 1.0

        asyncio.run(main())

    def test_several_renewals_in_the_time_of_a_lease(self) -> None:
        async def main() -> None:
            line = Line()
            line.answer = later(0.0, lease_s=0.5)
            began = time.monotonic()
            async with renewing(line, 0.5):
                await line.until(lambda: len(line.sent) >= 1 + RENEWALS)
            # Never less; how much more depends on what else this machine does.
            assert time.monotonic() - began >= 0.5 * 0.95

        asyncio.run(main())

    def test_the_length_is_the_coordinators_word(self) -> None:
        async def main() -> None:
            line = Line()
            line.answer = later(0.0, lease_s=7.5)
            async with renewing(line) as (renewal, extended):
                await line.until(lambda: len(extended) >= 1)
                assert renewal.lease_s == 7.5
                assert extended[0][1] - extended[0][0] > 7e9

        asyncio.run(main())

    def test_a_refused_beat_extends_nothing(self) -> None:
        async def main() -> None:
            line = Line()
            line.answer = lambda _, future: future.set_exception(ChannelError("no"))
            async with renewing(line) as (_, extended):
                await line.until(lambda: len(line.sent) >= 3)
                assert extended == []

        asyncio.run(main())

    def test_beats_of_a_connection_that_is_gone_are_not_sent_again(self) -> None:
        """Sent again they would renew the lease by a time that is long past."""

        async def main() -> None:
            line = Line()
            async with renewing(line, 0.4):
                await line.until(lambda: len(line.sent) >= 1)
                line.connected = False
                async with asyncio.timeout(LIMIT_S):
                    while line.futures[0] not in line.forgotten:
                        await asyncio.sleep(0.005)
                sent = len(line.sent)
                line.answer = later(0.0, lease_s=0.4)
                line.connected = True
                await line.until(lambda: len(line.sent) > sent)

        asyncio.run(main())

    def test_an_answer_that_comes_after_that_extends_nothing(self) -> None:
        async def main() -> None:
            line = Line()
            async with renewing(line, 0.4) as (_, extended):
                await line.until(lambda: len(line.sent) >= 1)
                line.connected = False
                async with asyncio.timeout(LIMIT_S):
                    while line.futures[0] not in line.forgotten:
                        await asyncio.sleep(0.005)
                line.futures[0].set_result({"lease_s": 60.0})
                await asyncio.sleep(0)
                assert extended == []

        asyncio.run(main())

    @pytest.mark.parametrize(("several", "share"), [(False, 1.0), (True, SILENCE_SHARE)])
    def test_a_connection_on_which_nothing_comes_is_given_up(self, several: bool, share: float) -> None:
        async def main() -> None:
            line = Line()
            began = time.monotonic()
            async with renewing(line, 0.5, several):
                await line.until(lambda: bool(line.dropped_at))
            assert line.dropped_at[0] - began >= share * 0.5
            # What was asked on it is asked anew.
            assert set(line.futures) <= set(line.forgotten)

        asyncio.run(main())

    def test_one_that_answers_slowly_is_kept(self) -> None:
        async def main() -> None:
            line = Line()
            line.answer = later(0.3, lease_s=1.0)
            async with renewing(line, 1.0) as (_, extended):
                await line.until(lambda: len(extended) >= 4)
            assert line.dropped_at == []

        asyncio.run(main())

    def test_the_coordinators_clock_is_read_at_the_middle_of_the_quickest_answer(self) -> None:
        async def main() -> None:
            line = Line()
            ahead_ns = 5 * 10**9

            def answer(_: m.Beat, future: asyncio.Future[Any]) -> None:
                delay_s = 0.2 if len(line.sent) == 1 else 0.0
                set_later(delay_s, future, {"lease_s": 1.5, "now_ns": Anchor.take().now() + ahead_ns})

            line.answer = answer
            async with renewing(line, 1.5) as (renewal, extended):
                await line.until(lambda: len(extended) >= 1)
                first = renewal.clock
                await line.until(lambda: len(extended) >= 2)
                best = renewal.clock
            assert first is not None
            assert best is not None
            assert best.boot_id == boot_id()
            off_ns = [abs(clock.now() - Anchor.take().now() - ahead_ns) for clock in (first, best)]
            # No reading is further off than half of what its answer took.
            assert off_ns[1] < 0.1e9 <= off_ns[0] + 0.05e9
            assert off_ns[0] < 0.3e9

        asyncio.run(main())


class TestStandBy:
    """`take_over` is a list that gets the time of every call."""

    @asynccontextmanager
    async def standing(
        self, run_dir: Path, heard_s: Callable[[], float] = lambda: 0.0, leads: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[list[float]]:
        (run_dir / "journal").mkdir(exist_ok=True)
        taken: list[float] = []
        take = lambda: taken.append(time.monotonic())  # noqa: E731
        task = asyncio.create_task(stand_by(run_dir, 0.2, heard_s, leads, take))
        try:
            yield taken
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    def test_after_its_patience_with_a_file_that_stands_still(self, run_dir: Path) -> None:
        async def main() -> None:
            (run_dir / "journal").mkdir()
            (run_dir / "journal" / "alive").write_text("1 5\n")
            began = time.monotonic()
            async with self.standing(run_dir) as taken:
                await self.until(lambda: bool(taken))
                assert taken[0] - began >= 0.2
                # The one it started has time to come up: it is not started once more at once.
                await asyncio.sleep(0.4)
                assert len(taken) == 1

        asyncio.run(main())

    def test_not_while_the_coordinator_shows_life_in_the_folder(self, run_dir: Path) -> None:
        """It is only this launcher that is cut off."""

        async def main() -> None:
            async with self.standing(run_dir) as taken:
                for count in range(20):
                    (run_dir / "journal" / "alive").write_text(f"1 {count}\n")
                    await asyncio.sleep(0.03)
                assert taken == []
                await self.until(lambda: bool(taken))

        asyncio.run(main())

    def test_not_while_it_answers_this_launcher(self, run_dir: Path) -> None:
        """A folder that cannot be written at the moment is no death."""

        async def main() -> None:
            heard = [time.monotonic()]
            (run_dir / "journal").mkdir()
            (run_dir / "journal" / "alive").write_text("1 5\n")
            async with self.standing(run_dir, lambda: heard[0]) as taken:
                for _ in range(20):
                    heard[0] = time.monotonic()
                    await asyncio.sleep(0.03)
                assert taken == []
                await self.until(lambda: bool(taken))
                assert taken[0] - heard[0] >= 0.2

        asyncio.run(main())

    def test_not_over_its_own(self, run_dir: Path) -> None:
        async def main() -> None:
            (run_dir / "journal").mkdir()
            (run_dir / "journal" / "alive").write_text("1 5\n")
            async with self.standing(run_dir, leads=lambda: True) as taken:
                await asyncio.sleep(0.5)
                assert taken == []

        asyncio.run(main())

    def test_not_where_no_coordinator_has_been_yet(self, run_dir: Path) -> None:
        async def main() -> None:
            async with self.standing(run_dir) as taken:
                await asyncio.sleep(0.5)
                assert taken == []

        asyncio.run(main())
