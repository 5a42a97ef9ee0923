"""Progress pages written by the trainer's own code on the same memory, and the deadlines that follow from them."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.launcher.watch import LEARN_STEPS, LEARNED_MIN_S, SAFETY_FACTOR, HangLimits, PageLook, RankPages
from keepstep.records import page as layout
from keepstep.records.frames import ENV_PAGE_FD
from keepstep.trainer.page import make_steps, open_page


class Writer:
    """A rank: it maps the page by descriptor as `ks.init` does, and writes it with make_steps."""

    def __init__(self, pages: RankPages, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENV_PAGE_FD, str(pages.page_fd))
        self.words, self.supervised = open_page()
        self.step, self.section = make_steps(self.words, lambda _: sys.maxsize, lambda **_: None)


@pytest.fixture
def pages() -> Iterator[RankPages]:
    pages = RankPages(rank=3, cycle=7)
    yield pages
    pages.close()


@pytest.fixture
def writer(pages: RankPages, monkeypatch: pytest.MonkeyPatch) -> Writer:
    return Writer(pages, monkeypatch)


class TestLook:
    def test_a_fresh_page(self, pages: RankPages) -> None:
        look = pages.look()
        assert (look.rank, look.cycle, look.completed, look.sections, look.phase) == (3, 7, 0, [], "starting")
        assert (look.has_steps, look.in_step, look.torn, look.finished) == (False, False, False, False)
        assert look.progress_ns == look.spawned_ns <= time.monotonic_ns()

    def test_the_trainer_recognises_it(self, writer: Writer) -> None:
        assert writer.supervised

    def test_steps(self, pages: RankPages, writer: Writer) -> None:
        before = time.monotonic_ns()
        with writer.step(41):
            inside = pages.look()
        after = pages.look()
        assert (inside.step, inside.in_step, inside.completed, inside.has_steps) == (41, True, 0, False)
        assert (after.step, after.in_step, after.completed, after.has_steps) == (42, False, 42, True)
        assert before <= inside.progress_ns <= after.completed_ns == after.progress_ns <= time.monotonic_ns()

    def test_a_step_that_raises_is_not_complete(self, pages: RankPages, writer: Writer) -> None:
        with writer.step(0):
            pass
        with pytest.raises(ValueError, match="x"), writer.step(1):
            raise ValueError("x")
        look = pages.look()
        assert (look.completed, look.step, look.in_step) == (1, 1, True)

    def test_nested_sections_outermost_first(self, pages: RankPages, writer: Writer) -> None:
        with writer.step(0), writer.section("data"), writer.section("fetch"):
            both = pages.look().sections
        assert [name for name, _ in both] == ["data", "fetch"]
        assert both[0][1] <= both[1][1]
        assert pages.look().sections == []

    def test_an_exception_closes_its_sections(self, pages: RankPages, writer: Writer) -> None:
        with pytest.raises(ValueError, match="x"), writer.section("outer"):
            with pytest.raises(KeyError), writer.section("inner"):
                raise KeyError
            assert [name for name, _ in pages.look().sections] == ["outer"]
            raise ValueError("x")
        assert pages.look().sections == []

    def test_the_same_section_within_itself(self, pages: RankPages, writer: Writer) -> None:
        with writer.section("s"), writer.section("s"):
            assert [name for name, _ in pages.look().sections] == ["s", "s"]

    def test_deeper_than_the_page_holds(self, pages: RankPages, writer: Writer) -> None:
        deep = [writer.section(f"s{n}") for n in range(layout.MAX_SECTION_DEPTH + 3)]
        for section in deep:
            section.__enter__()
        names = [name for name, _ in pages.look().sections]
        assert names == [f"s{n}" for n in range(layout.MAX_SECTION_DEPTH)]
        for section in reversed(deep):
            section.__exit__(None, None, None)
        assert pages.look().sections == []

    def test_names_are_cut_to_what_the_page_holds(self, pages: RankPages, writer: Writer) -> None:
        name = "ü" * 30
        with writer.section(name):
            assert pages.look().sections[0][0] == "ü" * (layout.NAME_BYTES // 2)

    def test_progress_never_goes_back_when_sections_close(self, pages: RankPages, writer: Writer) -> None:
        seen = []
        outer, inner = writer.section("outer"), writer.section("inner")
        with writer.step(0):
            with outer:
                with inner:
                    seen.append(pages.look().progress_ns)
                seen.append(pages.look().progress_ns)
            seen.append(pages.look().progress_ns)
        seen.append(pages.look().progress_ns)
        assert seen == sorted(seen)

    @given(st.lists(st.sampled_from(["step", "open a", "open b", "close"]), max_size=25))
    @settings(max_examples=60, deadline=None)
    def test_any_order_of_steps_and_sections(self, actions: list[str]) -> None:
        pages = RankPages(0, 0)
        try:
            with pytest.MonkeyPatch.context() as patch:
                writer = Writer(pages, patch)
                opened: list[tuple[str, Any]] = []
                completed, progress = 0, 0
                for action in actions:
                    if action == "step":
                        with writer.step(completed):
                            pass
                        completed += 1
                    elif action.startswith("open"):
                        opened.append((action[5:], writer.section(action[5:])))
                        opened[-1][1].__enter__()
                    elif opened:
                        opened.pop()[1].__exit__(None, None, None)
                    look = pages.look()
                    assert [name for name, _ in look.sections] == [n for n, _ in opened][: layout.MAX_SECTION_DEPTH]
                    assert look.completed == completed
                    assert look.progress_ns >= max([progress, *(entered for _, entered in look.sections)])
                    progress = look.progress_ns
        finally:
            pages.close()

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=80, deadline=None)
    def test_a_page_full_of_anything_can_be_read(self, seed: int) -> None:
        rng = random.Random(seed)
        words = [
            rng.choice([0, 1, rng.randrange(64), rng.getrandbits(64), 2**64 - 1]) for _ in range(layout.PAGE_WORDS)
        ]
        content = b"".join(word.to_bytes(8, sys.byteorder) for word in words)
        pages = RankPages(0, 0)
        try:
            os.pwrite(pages.page_fd, content, 0)
            look = pages.look()
            assert not look.torn
            assert len(look.sections) <= layout.MAX_SECTION_DEPTH
            HangLimits("auto", 5, {"x": 1}).deadline_ns(look)
        finally:
            pages.close()

    def test_looks_at_a_page_that_never_rests(self, pages: RankPages, writer: Writer) -> None:
        """Every word of a torn look is one that was written, and none goes back."""
        done = threading.Event()

        def train() -> None:
            number = 0
            while not done.is_set():
                with writer.step(number), writer.section("data"):
                    pass
                number += 1

        thread = threading.Thread(target=train)
        thread.start()
        try:
            completed = 0
            for _ in range(2000):
                look = pages.look()
                assert look.completed >= completed
                assert {name for name, _ in look.sections} <= {"data"}
                completed = look.completed
        finally:
            done.set()
            thread.join(10)
        assert pages.look().torn is False

    def test_a_stop_request_reaches_the_rank(self, pages: RankPages, writer: Writer) -> None:
        assert writer.words[layout.W_STOP_REQUEST] == 0
        pages.request_stop()
        assert writer.words[layout.W_STOP_REQUEST] == 1

    def test_imports_are_progress_and_keep_their_order(self, pages: RankPages) -> None:
        before = pages.look().progress_ns
        names = b"torch\ntorch.nn\n"
        os.pwrite(pages.imports_fd, len(names).to_bytes(8, "little") + names, 0)
        look = pages.look()
        assert pages.imported_names() == ["torch", "torch.nn"]
        assert look.progress_ns > before
        assert pages.look().progress_ns == look.progress_ns


S = 1_000_000_000
MakeLook = Callable[..., PageLook]


@pytest.fixture
def make_look(pages: RankPages) -> MakeLook:
    """A look at a rank that trains, last seen to move at second 1000."""
    fresh = pages.look()

    def make(**fields: Any) -> PageLook:
        usual: dict[str, Any] = {"progress_ns": 1000 * S, "phase": "train", "completed_ns": 1, "sections": []}
        return msgspec.structs.replace(fresh, **{**usual, **fields})

    return make


def learned(gap_s: float, count: int = LEARN_STEPS) -> HangLimits:
    limits = HangLimits("auto", 600, {})
    for _ in range(count):
        limits.learn(gap_s)
    return limits


class TestLimits:
    @pytest.mark.parametrize("text", ["30", "0.5", "1e2"])
    def test_a_fixed_limit_holds_in_every_state(self, text: str, make_look: MakeLook) -> None:
        limits = HangLimits(text, 600, {})
        for _ in range(50):
            limits.learn(400.0)
        for look in (make_look(), make_look(completed_ns=0), make_look(phase="restore")):
            assert limits.deadline_ns(look)[0] == (1000 + float(text)) * S

    def test_off(self, make_look: MakeLook) -> None:
        assert HangLimits("off", 600, {}).deadline_ns(make_look())[0] == float("inf")

    def test_off_still_has_the_limits_of_sections(self, make_look: MakeLook) -> None:
        limits = HangLimits("off", 600, {"data": 5})
        deadline, why = limits.deadline_ns(make_look(sections=[("data", 990 * S)]))
        assert (deadline, why) == (995 * S, "section 'data' open for 5 s")

    def test_auto_is_patient_until_it_has_learned(self, make_look: MakeLook) -> None:
        assert learned(100.0, LEARN_STEPS - 1).limit_s(make_look()) == 600
        assert learned(100.0).limit_s(make_look()) == 100.0 * SAFETY_FACTOR

    @pytest.mark.parametrize(
        "state", [{"completed_ns": 0}, {"phase": "restore"}, {"phase": "close"}, {"phase": "init"}]
    )
    def test_auto_is_patient_outside_training(self, state: dict[str, Any], make_look: MakeLook) -> None:
        assert learned(10.0).limit_s(make_look(**state)) == 600

    def test_auto_never_falls_below_its_floor(self, make_look: MakeLook) -> None:
        assert learned(0.001).limit_s(make_look()) == LEARNED_MIN_S

    def test_auto_keeps_to_the_slowest_of_the_last_samples(self, make_look: MakeLook) -> None:
        limits = learned(1.0)
        limits.learn(100.0)
        assert limits.limit_s(make_look()) == 800
        for _ in range(200):
            limits.learn(50.0)
        assert limits.limit_s(make_look()) == 400

    def test_a_floor_can_be_raised_after_a_learned_limit_was_wrong(self, make_look: MakeLook) -> None:
        limits = HangLimits("auto", 600, {}, learned_min_s=2 * LEARNED_MIN_S)
        for _ in range(LEARN_STEPS):
            limits.learn(1.0)
        assert limits.limit_s(make_look()) == 2 * LEARNED_MIN_S

    def test_the_reason_names_the_limit(self, make_look: MakeLook) -> None:
        assert HangLimits("30", 600, {}).deadline_ns(make_look())[1] == "no progress for 30 s"

    def test_each_open_section_counts_not_only_the_innermost(self, make_look: MakeLook) -> None:
        limits = HangLimits("off", 600, {"outer": 20, "inner": 15})
        look = make_look(sections=[("outer", 990 * S), ("middle", 991 * S), ("inner", 1000 * S)])
        assert limits.deadline_ns(look) == (1010 * S, "section 'outer' open for 20 s")
        look = make_look(sections=[("outer", 999 * S), ("inner", 1000 * S)])
        assert limits.deadline_ns(look) == (1015 * S, "section 'inner' open for 15 s")

    def test_a_name_longer_than_the_page_holds_still_has_its_limit(
        self, pages: RankPages, writer: Writer, make_look: MakeLook
    ) -> None:
        name = "forward-and-backward-of-the-whole-modél"
        limits = HangLimits("off", 600, {name: 3})
        with writer.section(name):
            look = pages.look()
        deadline, _ = limits.deadline_ns(look)
        assert deadline == look.sections[0][1] + 3 * S

    @given(
        st.lists(st.tuples(st.sampled_from("abcd"), st.integers(900, 1000)), max_size=8),
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 200)),
        st.sampled_from(["off", "50", "7"]),
    )
    def test_the_deadline_is_the_earliest_of_all_limits_that_apply(
        self, opened: list[tuple[str, int]], limits_s: dict[str, int], setting: str
    ) -> None:
        pages = RankPages(0, 0)
        try:
            look = msgspec.structs.replace(
                pages.look(),
                progress_ns=1000 * S,
                sections=[(name, at * S) for name, at in sorted(opened, key=lambda o: o[1])],
            )
        finally:
            pages.close()
        deadline, why = HangLimits(setting, 600, dict(limits_s)).deadline_ns(look)
        possible: list[float] = [(at + limits_s[name]) * S for name, at in opened if name in limits_s]
        possible += [(1000 + float(setting)) * S] if setting != "off" else []
        assert deadline == min(possible, default=float("inf"))
        assert why
