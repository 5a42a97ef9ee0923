"""The coordinator's book of what memories hold: what it answers, who copies whose, and what it costs at full size."""

from __future__ import annotations

import itertools
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.launcher import messages as m
from keepstep.launcher.coordination import holdings as h
from keepstep.launcher.coordination.holdings import Holdings, partners
from tests.launcher.lives import ONE, THREE, TWO, Lead, halted, hello, shape, training

_ids = itertools.count(1)
MARKER = "manifest.json"


def folder(step: int) -> str:
    return f"run-1-step-{step:08d}-c0000-a0000"


def held(step: int, file: str, copy: bool = False, **facts: Any) -> m.HeldImage:
    return m.HeldImage(folder(step), file, 10, msgspec.Raw(msgspec.json.encode({"step": step, **facts})), copy)


class Book:
    """Holdings over a job with nodes, and everything that was sent or reported."""

    def __init__(self, run_dir: Path, places: dict[str, list[int]], tier: str = "peer", **fields: Any) -> None:
        self.lead = Lead(run_dir, shape(len(places), **fields))
        self.lead.tell(*(hello(node, next_addr=f"10.0.0.{n}") for n, node in enumerate(places)))
        self.lead.tell(*(hello(f"spare-{n}", next_addr="fd00::1") for n in range(fields.get("spares", 0))))
        self.holdings = Holdings(tier)
        self.sent: list[tuple[str, m.CopyImages]] = []
        self.reported: list[m.Note] = []

    def ask(self, node: str, message: Any) -> Any:
        text = self.holdings.answer(
            self.lead.job,
            node,
            message,
            77,
            lambda to, order: self.sent.append((to, order)),  # type: ignore[arg-type]
            lambda _, note: self.reported.append(note),
        )
        assert len(text) < m.MAX_MESSAGE_BYTES
        reply = json.loads(text)
        assert reply["id"] == message.id
        return reply.get("result")

    def note(self, node: str, *added: m.HeldImage, **more: Any) -> None:
        self.ask(node, m.KeepNote(id=next(_ids), address=":7000", added=list(added), **more))

    def sets(self) -> list[dict[str, Any]]:
        return list(self.ask("a", m.GetKept(id=next(_ids)))["sets"])

    def files(self, step: int, after: str = "") -> dict[str, Any]:
        return dict(self.ask("a", m.GetKept(id=next(_ids), checkpoint=folder(step), after=after)))

    def locate(self, step: int, file: str, node: str = "a") -> dict[str, Any]:
        return dict(self.ask(node, m.Locate(id=next(_ids), checkpoint=folder(step), file=file)))


class TestListing:
    def test_sets_are_summed_newest_first(self, tmp_path: Path) -> None:
        book = Book(tmp_path, TWO)
        assert book.sets() == []
        book.note("a", held(5, "r0", run="x", rank=0), held(5, "r1", run="x", rank=1), held(10, "r0"))
        book.note("b", held(5, "r0", run="x", rank=0, copy=True), held(5, "r2", run="x", rank=2))
        five = {"checkpoint": folder(5), "files": 3, "size_bytes": 30, "copied": 1, "facts": {"step": 5, "run": "x"}}
        ten = {"checkpoint": folder(10), "files": 1, "size_bytes": 10, "copied": 0, "facts": {"step": 10}}
        assert book.sets() == [ten, five]
        assert [(f["file"], f["nodes"], f["facts"]["rank"]) for f in book.files(5)["files"]] == [
            ("r0", ["a", "b"], 0),
            ("r1", ["a"], 1),
            ("r2", ["b"], 2),
        ]
        assert book.files(7)["files"] == []
        book.note("a", removed=[(folder(10), "r0"), (folder(99), "never")])
        assert [s["checkpoint"] for s in book.sets()] == [folder(5)]
        book.holdings.forget("a")
        assert [(f["file"], f["nodes"]) for f in book.files(5)["files"]] == [("r0", ["b"]), ("r2", ["b"])]
        book.holdings.forget("a")
        book.holdings.forget("b")
        assert book.sets() == []

    def test_a_whole_note_replaces_what_was_known(self, tmp_path: Path) -> None:
        book = Book(tmp_path, ONE)
        book.note("a", held(5, "r0"), held(5, "r1"))
        book.note("a", held(10, "r0"), whole=True)
        assert [(s["checkpoint"], s["files"]) for s in book.sets()] == [(folder(10), 1)]

    def test_those_who_have_not_told_yet_are_counted(self, tmp_path: Path) -> None:
        book = Book(tmp_path, TWO)

        def untold() -> int:
            return int(book.ask("a", m.GetKept(id=next(_ids)))["untold"])

        assert untold() == 2
        book.note("a", held(5, "r0"))
        assert untold() == 2, "news are not everything"
        book.note("a", whole=True)
        assert untold() == 1
        assert book.locate(5, "r2")["untold"] == 1
        book.note("b", held(5, "r2"), whole=True)
        assert untold() == 0
        assert book.locate(5, "nothing") == {"holders": [], "untold": 0}
        book.lead.tell(("b", None))
        assert untold() == 0
        book.lead.tell(hello("b", pid=101))
        assert untold() == 1, "another launcher under that name"

    def test_only_the_newest_sets_are_shown(self, tmp_path: Path) -> None:
        book = Book(tmp_path, ONE)
        book.note("a", *(held(step, "r0") for step in range(h.SHOWN_SETS + 5)))
        assert [s["checkpoint"] for s in book.sets()] == [folder(s) for s in range(h.SHOWN_SETS + 4, 4, -1)]

    def test_pages_fit_and_cover_everything(self, tmp_path: Path) -> None:
        book = Book(tmp_path, ONE)
        names = [f"r{n:05d}" for n in range(2000)]
        for begin in range(0, 2000, 200):
            book.note("a", *(held(5, name, pad="x" * 1900) for name in names[begin : begin + 200]))
        found: list[str] = []
        pages = 0
        more = True
        while more:
            page = book.files(5, found[-1] if found else "")
            found += [f["file"] for f in page["files"]]
            more, pages = page["more"], pages + 1
        assert found == names
        assert pages > 4

    def test_a_node_tells_so_much_and_no_more(self, tmp_path: Path) -> None:
        book = Book(tmp_path, ONE)
        for step in range(1, 20):
            book.note("a", *(held(step, f"r{n}") for n in range(250)))
        assert sum(s["files"] for s in book.sets()) <= h.MAX_IMAGES


class TestLocating:
    def test_holders_with_addresses_and_never_the_one_that_asks(self, tmp_path: Path) -> None:
        book = Book(tmp_path, THREE)
        book.note("b", held(5, "r2"))
        book.note("c", held(5, "r2", copy=True))
        found = book.locate(5, "r2")
        assert sorted(found["holders"]) == [["b", "10.0.0.1:7000"], ["c", "10.0.0.2:7000"]]
        assert (found["size_bytes"], found["facts"]) == (10, {"step": 5})
        assert [n for n, _ in book.locate(5, "r2", node="b")["holders"]] == ["c"]
        assert book.locate(5, "nothing")["holders"] == []
        assert book.locate(99, "nothing")["holders"] == []

    def test_a_node_that_was_given_up_holds_nothing(self, tmp_path: Path) -> None:
        book = Book(tmp_path, TWO)
        book.note("b", held(5, "r2"))
        book.lead.tell(("b", None))
        assert book.locate(5, "r2")["holders"] == []

    def test_addresses_of_one_host_and_of_ipv6(self, tmp_path: Path) -> None:
        book = Book(tmp_path, ONE, spares=1)
        book.ask("spare-0", m.KeepNote(id=next(_ids), address=":7", added=[held(5, "a")]))
        book.ask("a", m.KeepNote(id=next(_ids), address="unix:/run/x", added=[held(5, "b")]))
        assert book.locate(5, "a")["holders"] == [["spare-0", "[fd00::1]:7"]]
        assert book.locate(5, "b", node="spare-0")["holders"] == [["a", "unix:/run/x"]]


class TestCopies:
    def test_the_partner_is_told_the_newest_set_of_a_node(self, tmp_path: Path) -> None:
        book = Book(tmp_path, TWO)
        book.note("a", held(5, "r0"), held(5, "r1"))
        ((to, order),) = book.sent
        assert (to, order.node, order.address) == ("b", "a", "10.0.0.0:7000")
        assert [(i.checkpoint, i.file) for i in order.images] == [(folder(5), "r0"), (folder(5), "r1")]
        book.sent.clear()
        book.note("b", held(5, "r0", copy=True))
        assert book.sent == [], "a copy is not copied"
        book.note("a", held(10, "r0"))
        assert [(to, [i.checkpoint for i in o.images]) for to, o in book.sent] == [("b", [folder(10)])]
        book.sent.clear()
        book.note("a", removed=[(folder(5), "r1")])
        assert book.sent == []
        # One that comes back may have missed it.
        book.note("b", held(5, "r0", copy=True), whole=True)
        assert [(to, o.node, len(o.images)) for to, o in book.sent] == [("b", "a", 1)]

    @pytest.mark.parametrize("tier", ["node", "off"])
    def test_nobody_copies_without_the_tier(self, tier: str, tmp_path: Path) -> None:
        book = Book(tmp_path, TWO, tier=tier)
        book.note("a", held(5, "r0"), held(5, MARKER))
        book.note("b", held(5, "r0", copy=True), held(5, MARKER, copy=True), whole=True)
        assert (book.sent, book.reported) == ([], [])

    def test_a_single_node_is_copied_by_its_spare(self, tmp_path: Path) -> None:
        book = Book(tmp_path, ONE, spares=1)
        book.note("a", held(5, "r0"))
        assert [to for to, _ in book.sent] == ["spare-0"]

    def test_reached_is_said_once_when_every_file_is_in_two_memories_and_the_marker_too(self, tmp_path: Path) -> None:
        book = Book(tmp_path, TWO)
        book.note("a", held(5, "r0"))
        book.note("b", held(5, "r2"), held(5, "r0", copy=True))
        book.note("a", held(5, "r2", copy=True))
        assert book.reported == [], "there is no marker yet"
        book.note("a", held(5, MARKER))
        assert book.reported == []
        book.note("b", held(5, MARKER, copy=True))
        (note,) = book.reported
        assert (note.kind, note.attrs) == (
            "tier_reached",
            {"checkpoint": folder(5), "step": 5, "tier": "peer", "files": 3},
        )
        book.note("b", held(5, MARKER, copy=True))
        assert len(book.reported) == 1
        # The next coordinator hears all of it again, and knows from the journal that it was said.
        book.lead.take(("a", note))
        book.holdings = Holdings("peer")
        book.note("a", held(5, "r0"), held(5, MARKER), whole=True)
        book.note("b", held(5, "r0", copy=True), held(5, MARKER, copy=True), whole=True)
        assert len(book.reported) == 1

    def test_pairs_follow_the_cycle(self, tmp_path: Path) -> None:
        book = Book(tmp_path, TWO, spares=1)
        assert book.holdings.pairs(book.lead.job) == {"a": "b", "b": "a"}
        book.lead.tell(*training(0, 2, TWO), ("b", None), *halted(0, {"a": [0, 1]}))
        assert set(book.holdings.pairs(book.lead.job)) == {"a", "spare-0"}


class TestPartners:
    def test_without_topology_the_next_host(self) -> None:
        nodes: dict[str, list[str]] = {f"n{k}": [] for k in range(1, 5)}
        assert partners(nodes, {n: n for n in nodes}) == {"n1": "n2", "n2": "n3", "n3": "n4", "n4": "n1"}

    def test_one_node_has_none(self) -> None:
        assert partners({"n1": []}, {"n1": "h"}) == {}

    def test_launchers_of_one_host_copy_each_other_when_there_is_no_other(self) -> None:
        assert partners({"a": [], "b": []}, {"a": "h", "b": "h"}) == {"a": "b", "b": "a"}

    @given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.randoms())
    def test_everybody_copies_one_and_leaves_its_domain_where_that_can_be(self, sizes: list[int], rng: Any) -> None:
        domains = {f"n{g}-{k}": ["fabric", f"leaf-{g}"] for g, size in enumerate(sizes) for k in range(size)}
        names = list(domains)
        rng.shuffle(names)
        found = partners({n: domains[n] for n in names}, {n: n for n in names})
        if len(names) == 1:
            assert found == {}
            return
        assert sorted(found.values()) == sorted(names)
        assert all(n != copier for n, copier in found.items())
        inside = sum(domains[n] == domains[copier] for n, copier in found.items())
        if max(sizes) * 2 <= len(names):
            assert inside == 0


class TestAnyHistory:
    @given(
        st.lists(
            st.tuples(
                st.sampled_from("abc"),
                st.sampled_from(["add", "remove", "whole", "forget"]),
                st.integers(1, 3),
                st.sampled_from(["x", "y", MARKER]),
            ),
            max_size=40,
        )
    )
    def test_sums_are_what_counting_gives(self, history: list[tuple[str, str, int, str]]) -> None:
        book = Holdings("node")
        known: dict[str, set[tuple[str, str]]] = {n: set() for n in "abc"}
        for node, what, step, file in history:
            key = (folder(step), file)
            if what == "forget":
                book.forget(node)
                known[node] = set()
                continue
            added = [held(step, file)] if what != "remove" else []
            removed = [key] if what == "remove" else []
            book._note(node, m.KeepNote(id=1, added=added, removed=removed, whole=what == "whole"))
            known[node] = (set() if what == "whole" else known[node]) - set(removed)
            known[node] |= {key} if added else set()
        for raw in book.newest():
            one = json.loads(bytes(raw))
            counts = [sum((one["checkpoint"], f) in known[n] for n in known) for f in ("x", "y", MARKER)]
            assert one["files"] == sum(c > 0 for c in counts)
            assert one["copied"] == sum(c > 1 for c in counts)
            assert one["size_bytes"] == 10 * one["files"]
        assert len(book.newest()) == len({c for keys in known.values() for c, _ in keys})


def fill(book: Book, places: dict[str, list[int]]) -> list[float]:
    """Two checkpoints in full, each with a copy of every file; returns how long the notes took, in seconds."""
    copier = book.holdings.pairs(book.lead.job)
    took = []
    for step, copy, node in itertools.product((100, 200), (False, True), places):
        names = [f"rank-{rank:05d}-of-16384.safetensors" for rank in places[node]]
        files = [held(step, name, copy, cycle=3, fingerprint="xxh3_128-16m:" + "0" * 32) for name in names]
        began = time.perf_counter()
        book.note(copier[node] if copy else node, *files)
        took.append(time.perf_counter() - began)
        book.sent.clear()
    return took


@pytest.mark.slow
def test_two_thousand_nodes(tmp_path: Path) -> None:
    """2,048 nodes of 8 ranks, two checkpoints and their copies: memory, time of a note, and of the answers."""
    places = {f"n{n}": list(range(8 * n, 8 * n + 8)) for n in range(2048)}
    book = Book(tmp_path, places)
    took = fill(book, places)
    assert [(s["files"], s["copied"]) for s in book.sets()] == [(16384, 16384)] * 2
    book.note("n0", held(100, "one more"))
    began = time.process_time()
    book.sets()
    summed_s = time.process_time() - began
    pages, after, more = 0, "", True
    began = time.perf_counter()
    while more:
        page = book.files(100, after)
        pages, after, more = pages + 1, page["files"][-1]["file"], page["more"]
    paged_s = time.perf_counter() - began
    book.holdings = Holdings("peer")
    tracemalloc.start()
    fill(book, places)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"holdings of 2,048 nodes: {size / 1e6:.1f} MB for 65,536 images; a note of 8 files {1e6 * sum(took) / len(took):.0f} us, "
        f"the longest {1e3 * max(took):.1f} ms; sums after a change {summed_s * 1e3:.2f} ms; {pages} pages {paged_s * 1e3:.0f} ms"
    )
    assert size < 150e6
    assert summed_s < 0.05
