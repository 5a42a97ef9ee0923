"""ResumableSampler: every sample once an epoch, whatever the number of ranks and however often it is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from keepstep.records.errors import ConfigError, RefuseToStartError
from keepstep.trainer.loader import ResumableSampler, make_order, mix


def take(samplers: list[ResumableSampler], count: int) -> list[list[list[int]]]:
    """`count` global batches: for each, the indices of every rank."""
    batches: list[list[list[int]]] = []
    while len(batches) < count:
        streams = [sampler.deliver(sampler) for sampler in samplers]
        for together in zip(*streams, strict=True):
            batches.append([list(batch) for batch in together])
            if len(batches) == count:
                break
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
    return batches


def ranks(world: int, batch: int, samples: int = 47, **options: Any) -> list[ResumableSampler]:
    return [ResumableSampler(samples, batch, rank=r, world_size=world, **options) for r in range(world)]


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 700), key=st.integers(0, (1 << 64) - 1))
def test_an_order_holds_every_sample_once(samples: int, key: int) -> None:
    order = make_order(samples, key)
    assert sorted(order(place) for place in range(samples)) == list(range(samples))


def test_orders_are_even() -> None:
    # Chi-square of where each of 10 samples lands over 3000 orders: 9 degrees of freedom, 40 is beyond one in 100,000.
    trials, samples = 3000, 10
    landed = [Counter[int]() for _ in range(samples)]
    for number in range(trials):
        order = make_order(samples, mix(number, 0))
        for place in range(samples):
            landed[place][order(place)] += 1
    expected = trials / samples
    assert all(sum((row[s] - expected) ** 2 for s in range(samples)) / expected < 40 for row in landed)


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(24, 90),
    lives=st.lists(
        st.tuples(st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]), st.integers(0, 9)), min_size=1, max_size=5
    ),
    seed=st.integers(0, 9),
)
def test_any_chain_of_lives_uses_the_stream_of_one_life(
    samples: int, lives: list[tuple[tuple[int, int], int]], seed: int
) -> None:
    """World sizes change from life to life at one global batch: the ledger is that of an uninterrupted single rank."""
    ledger: list[int] = []
    states: list[dict[str, Any]] | None = None
    for (world, batch), count in lives:
        samplers = ranks(world, batch, samples, seed=seed)
        for rank, sampler in enumerate(samplers):
            if states is not None:
                sampler.load_state_dict(sampler.repartition(states, rank, world))
        ledger += [index for together in take(samplers, count) for batch_ids in together for index in batch_ids]
        states = [sampler.state_dict() for sampler in samplers]
    whole = take(ranks(1, 8, samples, seed=seed), sum(count for _, count in lives))
    assert ledger == [index for (batch_ids,) in whole for index in batch_ids]
    for begin in range(0, len(ledger) - samples + 1, samples):
        assert sorted(ledger[begin : begin + samples]) == list(range(samples)), (
            "an epoch has a sample twice or not at all"
        )


def test_drop_leaves_out_the_rest_and_begins_the_next_epoch() -> None:
    (sampler,) = ranks(1, 10, 47, at_end="drop")
    used = [index for batch in sampler.deliver(sampler) for index in batch]
    assert len(used) == len(set(used)) == 40
    assert (sampler.epoch, sampler.consumed, len(sampler)) == (1, 0, 4)
    assert sampler.state_dict()["epoch"] == 1


def test_a_place_where_more_ranks_have_no_batch_left_is_the_next_epoch() -> None:
    two, four = ranks(2, 5, 47, at_end="drop"), ranks(4, 5, 47, at_end="drop")
    take(two, 3)  # 17 samples are left: one batch of 10, none of 20
    four[0].load_state_dict(two[0].state_dict())
    assert (four[0].epoch, four[0].consumed) == (1, 0)


def test_without_shuffle_it_counts_on() -> None:
    (sampler,) = ranks(1, 3, 4, shuffle=False)
    assert take([sampler], 3) == [[[0, 1, 2]], [[3, 0, 1]], [[2, 3, 0]]]


def test_epochs_and_seeds_differ() -> None:
    first, other = ranks(1, 47), ranks(1, 47, seed=1)
    one, two = take(first, 2)
    assert one != two and take(other, 1) != [one]


COUNTED: Any = torch.arange(40)


class Noisy(Dataset[torch.Tensor]):
    """Augments at random, from the seed that comes with the sample."""

    def __getitem__(self, at: tuple[int, int]) -> torch.Tensor:
        index, seed = at
        return torch.cat([torch.tensor([float(index)]), torch.rand(2, generator=torch.Generator().manual_seed(seed))])

    def __len__(self) -> int:
        return 40


def test_workers_prefetch_without_being_counted_and_augment_alike_after_a_restart() -> None:
    def loader(sampler: ResumableSampler) -> DataLoader[torch.Tensor]:
        return DataLoader(Noisy(), batch_sampler=sampler, num_workers=2, prefetch_factor=4)

    whole, stopped, resumed = (ResumableSampler(40, 4, seeded=True, rank=0, world_size=1) for _ in range(3))
    expected = list(whole.deliver(loader(whole)))
    parts = []
    stream = stopped.deliver(loader(stopped))
    for batch in stream:
        parts.append(batch)
        if len(parts) == 3:
            break
    stream.close()  # type: ignore[attr-defined]
    assert stopped.consumed == 12, "what the workers fetched ahead was counted"
    resumed.load_state_dict(stopped.state_dict())
    parts += list(resumed.deliver(loader(resumed)))
    assert torch.equal(torch.stack(parts), torch.stack(expected))


def test_beginning_to_iterate_leaves_the_random_state_alone() -> None:
    (sampler,) = ranks(1, 4, 40)
    loader: Any = DataLoader(COUNTED, batch_sampler=sampler)
    before = torch.get_rng_state()
    for _ in sampler.deliver(loader):
        assert torch.equal(torch.get_rng_state(), before)


def test_a_loop_that_counts_nothing_is_refused() -> None:
    (sampler,) = ranks(1, 4, 40)
    loader: Any = DataLoader(COUNTED, batch_sampler=sampler)
    with pytest.raises(ConfigError, match="deliver"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="batch_sampler"):
        next(sampler.deliver(DataLoader(COUNTED, batch_size=4)))
    with pytest.raises(ConfigError, match="in_order"):
        next(sampler.deliver(DataLoader(COUNTED, batch_sampler=sampler, num_workers=1, in_order=False)))


WORKER = """
import sys
from keepstep.trainer.loader import outlive_sigterm
outlive_sigterm()
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def test_a_worker_outlives_everybodys_sigterm_but_its_parents() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        for word in ("ready", "alive"):
            worker.stdin.write(f"{word}\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == f"{word}\n"
            subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"samples": 0}, "samples=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"rank": 2}, "rank=2"),
        ({"at_end": "pad"}, "at_end='pad'"),
        ({"samples": 7}, "more than the 7"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ResumableSampler(**{"samples": 40, "batch_size": 4, "rank": 0, "world_size": 2, **arguments})


def test_a_place_in_another_stream_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    (saved,), (longer,) = ranks(1, 4, 40, seed=1), ranks(1, 4, 41, seed=2)
    with pytest.raises(RefuseToStartError):
        longer.load_state_dict(saved.state_dict())
    said = capsys.readouterr().err
    assert "samples is 41 here and 40 in the checkpoint" in said and "seed is 2 here" in said


def test_ranks_at_different_places_are_not_joined() -> None:
    two = ranks(2, 4, 40)
    take(two[:1], 1)
    with pytest.raises(RefuseToStartError) as refused:
        two[0].repartition([sampler.state_dict() for sampler in two], 0, 1)
    assert "rank 1 was at" in refused.value.message
