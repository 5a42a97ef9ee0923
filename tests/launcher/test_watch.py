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

from keepstep.launcher.node.watch import (
    KNOWN_SECTIONS_MIN_S,
    LEARN_STEPS,
    LEARN_WINDOW,
    LEARNED_MIN_S,
    SAFETY_FACTOR,
    SPREAD_FACTOR,
    HangLimits,
    PageLook,
    RankPages,
)
from keepstep.records import page as layout
from keepstep.records.frames import ENV_PAGE_FD
from keepstep.trainer.page import LEASE_LOOK_S, make_steps, open_page

S = 1_000_000_000


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
        before = time.monotonic_ns()
        pages.request_stop()
        asked = writer.words[layout.W_STOP_REQUEST]
        assert before <= asked <= time.monotonic_ns()
        pages.request_stop()
        assert writer.words[layout.W_STOP_REQUEST] == asked

    def test_a_heartbeat_is_progress_without_steps(self, pages: RankPages, writer: Writer) -> None:
        assert not pages.look().trains
        writer.words[layout.W_PHASE] = layout.PHASE_INIT
        writer.words[layout.W_HEARTBEAT_NS] = now = time.monotonic_ns()
        look = pages.look()
        assert (look.trains, look.has_steps, look.progress_ns) == (True, False, now)
        writer.words[layout.W_PHASE] = layout.PHASE_TRAIN  # as at the first step
        assert not pages.look().trains

    def test_leaving_a_section_is_progress_and_begins_the_time_outside(self, pages: RankPages, writer: Writer) -> None:
        assert pages.look().left_ns == 0
        with writer.section("outer"):
            with writer.section("inner"):
                pass
            left = time.monotonic_ns()
            assert pages.look().left_ns == 0
        look = pages.look()
        assert left <= look.left_ns <= look.progress_ns <= time.monotonic_ns()
        with writer.section("outer"):
            assert pages.look().left_ns == 0
            assert [name for name, _ in pages.look().sections] == ["outer"]

    def test_time_in_sections_by_name(self, pages: RankPages, writer: Writer) -> None:
        before = time.monotonic_ns()
        for _ in range(3):
            with writer.section("data"), writer.section("fetch"):
                pass
        spent = pages.look().section_sums_ns
        assert 0 < spent["fetch"] < spent["data"] <= time.monotonic_ns() - before

    def test_as_many_names_as_the_page_holds(self, pages: RankPages, writer: Writer) -> None:
        names = [f"section-{n}" for n in range(layout.MAX_SECTION_NAMES)]
        for name in names:
            with writer.section(name):
                assert [open_name for open_name, _ in pages.look().sections] == [name]
        assert list(pages.look().section_sums_ns) == names
        with pytest.raises(ValueError, match="'one more': more than 64 section names"):
            writer.section("one more")

    def test_a_step_waits_while_the_lease_has_run_out(
        self, pages: RankPages, writer: Writer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pages.set_lease(time.monotonic_ns() + 3600 * S)
        with writer.step(0):
            pass
        pages.set_lease(1)
        begun = threading.Event()

        def train() -> None:
            with writer.step(1):
                begun.set()

        thread = threading.Thread(target=train)
        thread.start()
        assert not begun.wait(5 * LEASE_LOOK_S)
        assert pages.look().completed == 1 and not pages.look().in_step
        pages.set_lease(2)  # moved, but still in the past
        assert not begun.wait(5 * LEASE_LOOK_S)
        pages.set_lease(time.monotonic_ns() + 3600 * S)
        assert begun.wait(10)
        thread.join(10)
        assert pages.look().completed == 2
        assert "lease ran out" in capsys.readouterr().err

    def test_imports_are_progress_and_keep_their_order(self, pages: RankPages) -> None:
        before = pages.look().progress_ns
        names = b"torch\ntorch.nn\n"
        os.pwrite(pages.imports_fd, len(names).to_bytes(8, "little") + names, 0)
        look = pages.look()
        assert pages.imported_names() == ["torch", "torch.nn"]
        assert look.progress_ns > before
        assert pages.look().progress_ns == look.progress_ns


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
        assert limits.limit_s(make_look()) > 800
        for _ in range(LEARN_WINDOW):
            limits.learn(50.0)
        assert limits.limit_s(make_look()) == 400

    def test_auto_allows_for_the_spread_of_the_samples(self, make_look: MakeLook) -> None:
        limits = learned(50.0)
        for _ in range(LEARN_STEPS):
            limits.learn(150.0)
        assert limits.limit_s(make_look()) == pytest.approx(150 * SAFETY_FACTOR + 50 * SPREAD_FACTOR)

    def test_the_floor_can_be_lower_and_long_gaps_go_before_it(self, make_look: MakeLook) -> None:
        limits = HangLimits("auto", 600.0, {}, floor_s=80.0)
        for _ in range(LEARN_STEPS):
            limits.learn(1.0)
        assert limits.limit_s(make_look()) == 80.0
        limits.learn(30.0)
        assert limits.limit_s(make_look()) > 30.0 * SAFETY_FACTOR

    def test_a_floor_can_be_raised_after_a_learned_limit_was_wrong(self, make_look: MakeLook) -> None:
        limits = HangLimits("auto", 600, {}, patience=2)
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


class TestSectionLimits:
    @pytest.mark.parametrize("name", [*KNOWN_SECTIONS_MIN_S, "first_step"])
    def test_known_names_have_limits_from_the_beginning(self, name: str, make_look: MakeLook) -> None:
        limits = learned(1.0)
        floor = KNOWN_SECTIONS_MIN_S.get(name, limits.start_s)
        look = make_look(sections=[(name, 1000 * S)])
        assert limits.section_limit_s(name) == floor >= 600
        assert limits.deadline_ns(look)[0] == (1000 + floor) * S, "no progress is needed inside it"
        assert limits.section_limit_s("data") is None

    def test_a_section_seen_often_enough_gets_a_limit(self, make_look: MakeLook) -> None:
        limits = learned(1.0)
        for _ in range(LEARN_STEPS - 1):
            limits.learn_section("export", 100.0)
        assert limits.section_limit_s("export") is None
        limits.learn_section("export", 100.0)
        assert limits.section_limit_s("export") == 100 * SAFETY_FACTOR
        deadline, why = limits.deadline_ns(make_look(sections=[("export", 990 * S)]))
        assert (deadline, why) == ((990 + 800) * S, "section 'export' open for 800 s")

    def test_short_sections_have_the_same_floor_as_steps(self) -> None:
        limits = learned(1.0)
        for _ in range(LEARN_STEPS):
            limits.learn_section("data", 0.01)
        assert limits.section_limit_s("data") == LEARNED_MIN_S

    def test_one_slow_save_is_forgotten(self) -> None:
        limits = learned(1.0)
        limits.learn_section("checkpoint", 5000.0)
        for _ in range(LEARN_WINDOW - 1):
            limits.learn_section("checkpoint", 10.0)
        inflated = limits.section_limit_s("checkpoint")
        limits.learn_section("checkpoint", 10.0)
        assert inflated is not None and inflated > 5000 * SAFETY_FACTOR
        assert limits.section_limit_s("checkpoint") == KNOWN_SECTIONS_MIN_S["checkpoint"]

    def test_a_given_limit_goes_before_the_known_and_the_learned(self, make_look: MakeLook) -> None:
        limits = HangLimits("auto", 600, {"checkpoint": 20})
        for _ in range(LEARN_STEPS):
            limits.learn_section("checkpoint", 100.0)
        assert limits.deadline_ns(make_look(sections=[("checkpoint", 995 * S)]))[0] == 1015 * S

    @pytest.mark.parametrize("setting", ["off", "30"])
    def test_nothing_is_learned_unless_auto(self, setting: str) -> None:
        limits = HangLimits(setting, 600, {})
        for _ in range(LEARN_STEPS):
            limits.learn_section("checkpoint", 1.0)
        assert limits.section_limit_s("checkpoint") is None

    def test_patience_multiplies_the_floors(self) -> None:
        limits = HangLimits("auto", 600, {}, patience=4)
        assert limits.section_limit_s("evaluation") == 4 * KNOWN_SECTIONS_MIN_S["evaluation"]

    def test_a_hang_in_a_short_section_inside_a_long_one_is_not_covered_by_it(self, make_look: MakeLook) -> None:
        limits = HangLimits("auto", 600, {"data": 15})
        look = make_look(sections=[("evaluation", 900 * S), ("data", 1000 * S)])
        assert limits.deadline_ns(look) == (1015 * S, "section 'data' open for 15 s")

    def test_learning_from_looks(self, pages: RankPages, writer: Writer) -> None:
        limits = HangLimits("auto", 600, {})
        looks = [pages.look()]
        writer.words[layout.W_PHASE] = layout.PHASE_TRAIN
        for number in range(LEARN_STEPS + 1):
            with writer.step(number), writer.section("data"):
                pass
            looks.append(pages.look())
            limits.learn_from(looks[-2], looks[-1])
        assert limits.section_limit_s("data") == LEARNED_MIN_S
        assert limits.limit_s(looks[-1]) == LEARNED_MIN_S

    def test_a_long_section_does_not_stretch_the_limit_between_steps(self, make_look: MakeLook) -> None:
        limits = learned(100.0)
        inside = make_look(sections=[("evaluation", 1000 * S)])
        after = make_look(progress_ns=2000 * S, section_sums_ns={"evaluation": 1000 * S})
        limits.learn_from(inside, after)
        assert limits.limit_s(make_look()) == 100 * SAFETY_FACTOR
        limits.learn_from(make_look(), make_look(progress_ns=1500 * S))
        assert limits.limit_s(make_look()) > 500 * SAFETY_FACTOR

    def test_heartbeats_teach_the_limit_too(self, make_look: MakeLook) -> None:
        beating = {"completed_ns": 0, "phase": "init", "heartbeat_ns": 1}
        limits = HangLimits("auto", 600, {})
        for second in range(LEARN_STEPS):
            limits.learn_from(
                make_look(progress_ns=second * 100 * S, **beating),
                make_look(progress_ns=(second + 1) * 100 * S, **beating),
            )
        assert limits.limit_s(make_look(**beating)) == 100 * SAFETY_FACTOR
        assert limits.limit_s(make_look(completed_ns=0, phase="init")) == 600
        assert limits.limit_s(make_look(completed_ns=0, phase="train", heartbeat_ns=1)) == 600, "in its first step"

    @pytest.mark.parametrize("setting", ["off", "auto", "900"])
    def test_time_outside_all_sections(self, setting: str, make_look: MakeLook) -> None:
        limits = HangLimits(setting, 600, {}, out_of_section_s=10)
        outside = make_look(left_ns=995 * S)
        assert limits.deadline_ns(outside) == (1005 * S, "in no section for 10 s")
        for other in (
            make_look(),
            make_look(left_ns=995 * S, phase="close"),
            make_look(left_ns=995 * S, finished=True),
        ):
            assert limits.deadline_ns(other)[1] != "in no section for 10 s"

    @given(
        actions=st.lists(st.sampled_from(["open a", "open b", "open c", "close", "step"]), min_size=1, max_size=30),
        limits_s=st.dictionaries(st.sampled_from("abc"), st.integers(1, 500)),
        outside_s=st.none() | st.integers(1, 500),
        setting=st.sampled_from(["off", "auto", "100"]),
    )
    @settings(max_examples=60, deadline=None)
    def test_however_sections_are_nested_the_earliest_of_all_limits_holds(
        self, actions: list[str], limits_s: dict[str, float], outside_s: float | None, setting: str
    ) -> None:
        pages = RankPages(0, 0)
        try:
            with pytest.MonkeyPatch.context() as patch:
                writer = Writer(pages, patch)
                writer.words[layout.W_PHASE] = layout.PHASE_TRAIN
                limits = HangLimits(setting, 700, dict(limits_s), out_of_section_s=outside_s)
                opened: list[tuple[str, Any, int]] = []
                left = 0
                for number, action in enumerate(actions):
                    if action == "step":
                        with writer.step(number):
                            pass
                    elif action != "close":
                        section = writer.section(action[-1])
                        section.__enter__()
                        opened.append((action[-1], section, time.monotonic_ns()))
                    elif opened:
                        opened.pop()[1].__exit__(None, None, None)
                        left = time.monotonic_ns()
                deadline, why = limits.deadline_ns(pages.look())
                now = time.monotonic_ns()
                seen = opened[: layout.MAX_SECTION_DEPTH]
                own = [limits_s[name] for name, _, _ in seen if name in limits_s]
                general = {"off": float("inf"), "100": 100.0, "auto": max([700.0, *own])}[setting]
                expected = [now + general * S, *(at + limits_s[name] * S for name, _, at in seen if name in limits_s)]
                if outside_s is not None and left and not opened:
                    expected.append(left + outside_s * S)
                # The page's own clock reads lie a little before the test's.
                assert deadline == float("inf") or min(expected) - 0.5 * S <= deadline <= min(expected)
                assert (deadline == float("inf")) == (min(expected) == float("inf"))
                assert why
        finally:
            pages.close()
