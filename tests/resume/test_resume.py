"""A job that was killed and continued ends like one that was not: bitwise, on the CPU, with real processes.

Every scenario trains once without interruption and once with SIGKILLs, and compares all state of all ranks, the samples of
every step, and the random numbers drawn.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher.doctor.resumestate import checkpoints_by_step, compare_states, read_state
from tests.resume.lives import Chain, Server

EVERYTHING = ["sched", "scaler", "window", "dropout", "norm", "ema", "critic"]


def check_same(whole: Chain, stopped: Chain, world: int = 1) -> None:
    """State, samples and random numbers of every rank are those of the uninterrupted run."""
    for rank in range(world):
        expected, found = whole.final(rank), stopped.final(rank)
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == [], f"rank {rank}"
        assert stopped.history(rank) == whole.history(rank), f"rank {rank}"


def flat(ids: list[list[int]]) -> list[int]:
    return [index for step in ids for index in step]


# ---- one rank


@pytest.fixture(scope="module")
def everything(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Chain, Chain]:
    """One training with every part, uninterrupted, and the same killed before step 5, in the middle of a window."""
    folder = tmp_path_factory.mktemp("everything")
    whole = Chain(server, folder / "whole", parts=EVERYTHING).live()
    return whole, Chain(server, folder / "killed", parts=EVERYTHING).live(kill_at=5)


def continued(killed: Chain, folder: Path, **changes: Any) -> Chain:
    """A copy of the killed training, continued."""
    shutil.copytree(killed.folder, folder / "copy")
    shutil.copytree(killed.folder.parent / "home", folder / "home")
    chain = Chain(
        killed.server, folder / "copy", **{k: v for k, v in killed.options.items() if k not in ("root", "out")}
    )
    chain.begins = list(killed.begins)
    return chain.live(**changes)


def test_everything_at_once(everything: tuple[Chain, Chain], tmp_path: Path) -> None:
    whole, killed = everything
    chain = continued(killed, tmp_path)
    assert chain.begins == [0, 3]
    check_same(whole, chain)
    restored, saved = chain.record(0, 1)["restored"], whole.record(0, 0)["saved"]
    assert any(key.startswith("grads/") for key in restored), "the checkpoint was not in the middle of a window"
    assert restored == saved["3"], "some part of the state is not of step 3"
    # Nothing in this state stays as it is from one checkpoint to the next, so nothing of another step could hide in it.
    for name in ("model", "optim", "sched", "scaler", "grads", "ema", "critic", "critic_optim", "loader", "rng"):
        assert any(saved["3"][key] != saved["6"].get(key) for key in saved["3"] if key.startswith(f"{name}/")), name


@pytest.mark.parametrize(
    "name",
    [
        "sched",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("model", "optim", "scaler", "grads", "ema")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("critic", "critic_optim", "loader", "rng")),
    ],
)
def test_one_part_that_is_not_loaded_shows(everything: tuple[Chain, Chain], tmp_path: Path, name: str) -> None:
    """What the comparison above rests on: it sees each single part that a resume leaves out."""
    whole, killed = everything
    chain = continued(killed, tmp_path, forget=name)
    assert chain.final() != whole.final()


def test_several_resumes_in_one_epoch(server: Server, tmp_path: Path) -> None:
    whole = Chain(server, tmp_path / "whole", samples=96, steps=11, every=2).live()
    chain = Chain(server, tmp_path / "chain", samples=96, steps=11, every=2)
    chain.live(kill_at=3).live(kill_at=5).live(kill_at=7).live()
    assert chain.begins == [0, 2, 4, 6]
    check_same(whole, chain)
    used = flat(chain.ids([1] * 4))
    assert len(used) == len(set(used)) == 88, "a sample twice within one epoch"


@pytest.mark.parametrize("samples", [24, pytest.param(20, marks=pytest.mark.slow)])
def test_epoch_boundary(server: Server, tmp_path: Path, samples: int) -> None:
    """24 samples are three batches: the checkpoint is at the end of an epoch. 20 are not: a batch spans two epochs."""
    whole = Chain(server, tmp_path / "whole", samples=samples, steps=10).live()
    chain = Chain(server, tmp_path / "chain", samples=samples, steps=10).live(kill_at=4).live(kill_at=7).live()
    assert chain.begins == [0, 3, 6]
    check_same(whole, chain)
    used = flat(chain.ids([1, 1, 1]))
    epochs = [used[begin : begin + samples] for begin in range(0, 80 // samples * samples, samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert epochs[0] != epochs[1], "the order of the first epoch came again"


@pytest.mark.slow
def test_workers_of_the_loader(server: Server, tmp_path: Path) -> None:
    """Batches that worker processes had fetched ahead when the rank was killed are neither lost nor counted."""
    whole = Chain(server, tmp_path / "whole", parts=["workers", "dropout"], samples=80).live()
    chain = Chain(server, tmp_path / "chain", parts=["workers", "dropout"], samples=80).live(kill_at=5).live()
    assert chain.begins == [0, 3]
    check_same(whole, chain)


@pytest.mark.parametrize("term_at", [pytest.param(0, marks=pytest.mark.slow), 5])
def test_sigterm_saves_also_with_workers(server: Server, tmp_path: Path, term_at: int) -> None:
    """The scheduler's notice goes to the rank and its workers, in the first step or later; a checkpoint is made of it."""
    options = {"parts": ["workers", "dropout"], "samples": 80, "steps": 24, "every": 1000}
    whole = Chain(server, tmp_path / "whole", **options).live()
    chain = Chain(server, tmp_path / "chain", **options).live(term_at=term_at).live()
    assert term_at < chain.begins[1] < 24, "no checkpoint was made of the notice"
    assert chain.begins[1] == max(chain.lines(0, 0)) + 1, "a step was done that is not in the checkpoint"
    check_same(whole, chain)


def test_the_loader_goes_back_with_the_rest(server: Server, tmp_path: Path) -> None:
    """The newest checkpoint is damaged: all of the state, the place in the data too, is that of the one before."""
    whole = Chain(server, tmp_path / "whole", parts=["dropout"], every=2).live()
    chain = Chain(server, tmp_path / "chain", parts=["dropout"], every=2).live(kill_at=5)
    (newest,) = chain.root.glob("*-step-00000004-*/rank-00000-*")
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    chain.live()
    assert chain.begins == [0, 2]
    check_same(whole, chain)


# ---- several ranks


def test_two_ranks_with_ddp(server: Server, tmp_path: Path) -> None:
    options = {"wrap": "ddp", "parts": ["sched", "window", "dropout", "ema"]}
    whole = Chain(server, tmp_path / "whole", **options).live(2)
    chain = Chain(server, tmp_path / "chain", **options).live(2, kill_at=5, kill_rank=1).live(2)
    assert chain.begins == [0, 3]
    check_same(whole, chain, 2)
    for one, two in zip(chain.history(0), chain.history(1), strict=True):
        assert one["mask"] != two["mask"] and one["random"] != two["random"], "both ranks draw the same random numbers"
        assert not set(one["ids"]) & set(two["ids"])


@pytest.mark.slow
def test_everything_on_four_ranks(server: Server, tmp_path: Path) -> None:
    options = {"parts": [*(set(EVERYTHING) - {"norm"}), "workers"], "samples": 80, "wrap": "ddp"}
    whole = Chain(server, tmp_path / "whole", **options).live(4)
    chain = Chain(server, tmp_path / "chain", **options).live(4, kill_at=4, kill_rank=2).live(4, kill_at=8).live(4)
    assert chain.begins == [0, 3, 6]
    check_same(whole, chain, 4)


def test_fsdp(server: Server, tmp_path: Path) -> None:
    options = {"wrap": "fsdp", "parts": ["sched", "dropout"]}
    whole = Chain(server, tmp_path / "whole", **options).live(2)
    chain = Chain(server, tmp_path / "chain", **options).live(2, kill_at=5).live(2)
    assert chain.begins == [0, 3]
    check_same(whole, chain, 2)
    # And so are the shards on disk, as `keepstep doctor resume` reads them.
    one, two = (read_state(c.root, checkpoints_by_step(c.root)[9], tmp_path) for c in (whole, chain))
    assert compare_states(one, two, 9) == [] and len({key.name for key in one if key.name.startswith("model/")}) == 6


# ---- another number of ranks

EXACT: dict[str, Any] = {"exact": True, "steps": 6, "every": 2, "samples": 40}


@pytest.fixture(scope="module")
def exact(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """An uninterrupted training without rounding: the number of ranks does not show in its result."""
    return Chain(server, tmp_path_factory.mktemp("exact") / "whole", **EXACT).live()


@pytest.mark.parametrize("worlds", [[2, 1], pytest.param([1, 2], marks=pytest.mark.slow)])
def test_another_number_of_ranks(exact: Chain, server: Server, tmp_path: Path, worlds: list[int]) -> None:
    check_worlds(exact, server, tmp_path, worlds)


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [[4, 2], [2, 4], [4, 2, 4], [1, 4, 1]])
def test_four_ranks_to_two_and_back(exact: Chain, server: Server, tmp_path: Path, worlds: list[int]) -> None:
    check_worlds(exact, server, tmp_path, worlds)


def check_worlds(exact: Chain, server: Server, folder: Path, worlds: list[int]) -> None:
    chain = Chain(server, folder / "chain", **EXACT, rng_on_reshard="reseed")
    for number, world in enumerate(worlds[:-1]):
        chain.live(world, kill_at=2 * number + 3)
    chain.live(worlds[-1])
    assert "random state" in chain.log and "reseed" in chain.log, "a changed random state was not said aloud"
    assert chain.begins == [2 * number for number in range(len(worlds))]
    assert chain.ids(worlds) == exact.ids([1]), "the stream of samples has a gap, a repetition or another order"
    expected = exact.final()
    for rank in range(worlds[-1]):
        found = chain.final(rank)
        assert [k for k in expected if not k.startswith("rng/") and found[k] != expected[k]] == []
    last = [chain.lines(rank, len(worlds) - 1) for rank in range(worlds[-1])]
    assert len({line["mask"] for lines in last for line in lines.values()}) == sum(map(len, last)), "masks repeat"


@pytest.mark.slow
def test_new_random_state_follows_from_the_checkpoint(server: Server, tmp_path: Path) -> None:
    first = Chain(server, tmp_path / "first", **EXACT, rng_on_reshard="reseed").live(1, kill_at=3)
    shutil.copytree(first.folder, tmp_path / "second")
    second = Chain(server, tmp_path / "second", **EXACT, rng_on_reshard="reseed")
    second.begins = list(first.begins)
    first.live(2)
    second.live(2)
    assert [first.history(rank) for rank in (0, 1)] == [second.history(rank) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("parts", "reseed", "named"),
    [pytest.param([], "", "rng_on_reshard", marks=pytest.mark.slow), (["window"], "reseed", "grads")],
)
def test_state_of_single_ranks_is_never_dropped(
    server: Server, tmp_path: Path, parts: list[str], reseed: str, named: str
) -> None:
    """By default random state cannot be carried over to other ranks, nor can an entry that has no `repartition`."""
    options = {"steps": 6, "parts": parts, "rng_on_reshard": reseed}
    chain = Chain(server, tmp_path / "chain", **options).live(2, kill_at=5)
    assert chain.statuses(1) == [42]
    assert named in chain.log and "2 ranks" in chain.log
    chain.live(2)  # and nothing was quarantined or lost by the refusal
    assert chain.begins == [0, 3]


@pytest.mark.slow
def test_a_replicated_place_needs_no_repartition(exact: Chain, server: Server, tmp_path: Path) -> None:
    options = {**EXACT, "loader_name": "data", "rng_on_reshard": "reseed"}
    chain = Chain(server, tmp_path / "chain", **options).live(2, kill_at=3).live(1)
    assert chain.begins == [0, 2] and chain.ids([2, 1]) == exact.ids([1])


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [[4, 2], [2, 4], [2, 1]])
def test_fsdp_on_another_number_of_ranks(server: Server, tmp_path: Path, worlds: list[int]) -> None:
    """Shards are cut anew: what is restored is what was saved, tensor by tensor, and training goes on."""
    options: dict[str, Any] = {"wrap": "fsdp", "steps": 6, "rng_on_reshard": "reseed"}
    whole = Chain(server, tmp_path / "whole", **options).live(worlds[0])
    chain = Chain(server, tmp_path / "chain", **options).live(worlds[0], kill_at=5).live(worlds[1])
    assert chain.begins == [0, 3]
    saved = whole.record(0, 0)["saved"]["3"]
    for rank in range(worlds[1]):
        restored = chain.record(rank, 1)["restored"]
        assert [k for k in saved if not k.startswith("rng/") and restored[k] != saved[k]] == []
    assert chain.ids(worlds) == whole.ids(worlds[:1])
