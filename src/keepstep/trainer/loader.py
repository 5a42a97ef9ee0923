"""`ks.ResumableSampler`: which samples a rank uses, in an order that any number of ranks continues exactly.

All ranks together walk through one endless stream of samples: every epoch each sample once, shuffled. The only state is how
far they came. Place i of an epoch is computed by a keyed permutation, so nothing is kept in memory, and going on at place
1,000,000,000 costs what place 0 costs.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

from keepstep.records.errors import ConfigError, RefuseToStartError

AtEnd = Literal["wrap", "drop"]
T = TypeVar("T")
ORDER = "keepstep-feistel-1"
"""Name of the order below. Another order gets another name, so that a saved place is never read in the wrong one."""
_MASK = (1 << 64) - 1
_ROUNDS = 4


def mix(*numbers: int) -> int:
    """A 64-bit hash of `numbers`: the finalizer of SplitMix64 (Steele, Lea, Flood: OOPSLA 2014), once a number."""
    value = 0
    for number in numbers:
        value = (value + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


def make_order(samples: int, key: int) -> Callable[[int], int]:
    """A permutation of 0 .. samples-1 chosen by `key`: the function from a place to the sample there.

    A Feistel network over a grid of about sqrt(samples) squared, with cycle walking for the cells that are no sample (Black
    and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). It shuffles; it hides nothing.
    """
    wide = math.isqrt(max(samples - 1, 0)) + 1
    high = -(-samples // wide)
    keys = [(mix(key, 2 * n), mix(key, 2 * n + 1)) for n in range(_ROUNDS)]

    def place_to_sample(place: int) -> int:
        while True:
            left, right = divmod(place, high)
            for key_left, key_right in keys:
                left = (left + mix(key_left + right)) % wide
                right = (right + mix(key_right + left)) % high
            place = left * high + right
            if place < samples:
                return place

    return place_to_sample


def outlive_sigterm(worker_id: int = 0) -> None:
    """`worker_init_fn` for a DataLoader: its workers outlive a SIGTERM from anybody but the process they work for.

    A scheduler sends its notice to every process of the job. torch's workers end at once, and the training fails at the next
    batch, before it came to its last save. With this they go on until the training, which alone knows when it is done, ends
    them. Linux only; begins a thread in the worker.
    """

    def wait() -> None:
        while True:
            received = signal.sigwaitinfo({signal.SIGTERM})
            if received.si_pid == parent or os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)

    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads begun from here on inherit it
    threading.Thread(target=wait, daemon=True, name="keepstep-sigterm").start()


class ResumableSampler:
    """A `batch_sampler` for torch's DataLoader whose place in the data is part of a checkpoint.

        sampler = ks.ResumableSampler(len(dataset), batch_size=32, seed=1)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        ckpt = ks.Checkpointer(root, state={"model": model, "loader": sampler})
        ckpt.restore()
        for epoch in range(sampler.epoch, epochs):
            for batch in sampler.deliver(loader):
                ...

    `deliver` counts what the training received; what worker processes fetched ahead is fetched again after a restart. The
    state is the same on all ranks, so a job with another number of ranks goes on with exactly the samples that come next.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        at_end: AtEnd = "wrap",
        seeded: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """`batch_size`: samples a rank and batch. `rank`, `world_size`: place among the data-parallel replicas (default: RANK and
        WORLD_SIZE of the environment).

        `at_end`: "wrap" fills the last batch of an epoch from the next one, so that each epoch uses every sample exactly once;
        "drop" leaves out what does not fill a batch on every rank (how much depends on the number of ranks). With `seeded` the
        dataset is asked for pairs (index, seed): a seed of that sample in that epoch, for random augmentation that is the same
        however often the job was restarted. Raises ConfigError.
        """
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        for name, value in (("samples", samples), ("batch_size", batch_size), ("world_size", self.world_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"ResumableSampler: {name}={value!r} is not a whole number above 0")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"ResumableSampler: rank={self.rank} is not one of {self.world_size} ranks")
        if at_end not in ("wrap", "drop"):
            raise ConfigError(f"ResumableSampler: at_end={at_end!r}; use 'wrap' or 'drop'")
        self.global_batch = batch_size * self.world_size
        if self.global_batch > samples:
            raise ConfigError(
                f"ResumableSampler: {batch_size} samples on each of {self.world_size} ranks are more than the {samples} there are; "
                "use a smaller batch_size"
            )
        self.samples, self.batch_size, self.seed, self.shuffle = samples, batch_size, seed, shuffle
        self.at_end, self.seeded = at_end, seeded
        self.epoch = self.consumed = 0
        """Epoch, and how many of its samples all ranks together have received."""
        self._delivering = False

    # ---- the stream

    def __len__(self) -> int:
        """Batches that are left of this epoch."""
        left = self.samples - self.consumed
        return left // self.global_batch if self.at_end == "drop" else -(-left // self.global_batch)

    def __iter__(self) -> Iterator[list[Any]]:
        """This rank's batches of sample indices, from the place reached to the end of the epoch; changes no state.

        Raises ConfigError outside `deliver`: nobody would count what is used, and a restart would begin the epoch anew.
        """
        if not self._delivering:
            raise ConfigError(
                "ResumableSampler: iterate with `for batch in sampler.deliver(loader)`; `for batch in loader` counts nothing"
            )
        return self._batches(self.epoch, self.consumed, len(self))

    def _batches(self, epoch: int, consumed: int, count: int) -> Iterator[list[Any]]:
        orders: dict[int, Callable[[int], int]] = {}
        for number in range(count):
            begin = consumed + number * self.global_batch + self.rank * self.batch_size
            batch: list[Any] = []
            for place in range(begin, begin + self.batch_size):
                ahead, inside = divmod(place, self.samples)
                of_epoch = epoch + ahead
                if of_epoch not in orders:
                    orders[of_epoch] = make_order(self.samples, mix(self.seed, of_epoch))
                index = orders[of_epoch](inside) if self.shuffle else inside
                batch.append((index, mix(self.seed, of_epoch, index) >> 1) if self.seeded else index)
            yield batch

    def deliver(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches of `batches` (a DataLoader over this sampler, or the sampler itself) to the epoch's end, each one counted.

        The count moves before a batch is handed over, so a checkpoint after a step includes that step's batch. Beginning to
        iterate takes nothing from the process's random state (a DataLoader by itself draws the seed of its workers from it,
        and a restart in the middle of an epoch would draw once more). Raises ConfigError for a DataLoader that was not given
        this sampler, or that hands batches over out of order.
        """
        if getattr(batches, "batch_sampler", self) is not self:
            raise ConfigError(
                "ResumableSampler: give it to the DataLoader as batch_sampler=sampler, and no other sampler"
            )
        if getattr(batches, "in_order", True) is False:
            raise ConfigError(
                "ResumableSampler: a DataLoader with in_order=False hands batches over in an order nobody knows"
            )
        self._delivering = True
        try:
            for batch in self._begin(batches):
                self._advance()
                yield batch
        finally:
            self._delivering = False

    def _begin(self, batches: Iterable[T]) -> Iterator[T]:
        torch = sys.modules.get("torch")
        if torch is None:
            return iter(batches)
        before = torch.default_generator.get_state()
        # What the loader draws is the seed of its workers: another one at each place, the same whenever it is reached.
        torch.default_generator.manual_seed(mix(self.seed, self.epoch, self.consumed) >> 1)
        try:
            return iter(batches)
        finally:
            torch.default_generator.set_state(before)

    def _advance(self) -> None:
        self.consumed += self.global_batch
        if self.at_end == "wrap" and self.consumed >= self.samples:
            self.epoch, self.consumed = self.epoch + 1, self.consumed - self.samples
        elif self.at_end == "drop" and self.consumed + self.global_batch > self.samples:
            self.epoch, self.consumed = self.epoch + 1, 0

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, and what the stream depends on. The same on every rank."""
        return {
            "order": ORDER,
            "samples": self.samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "consumed": self.consumed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place. Raises RefuseToStartError when it is a place in another stream."""
        mine = self.state_dict()
        other = [
            f"{name} is {mine[name]!r} here and {state.get(name)!r} in the checkpoint"
            for name in ("order", "samples", "seed", "shuffle")
            if state.get(name) != mine[name]
        ]
        if other:
            raise RefuseToStartError(
                f"ResumableSampler: {'; '.join(other)}: the saved place is one in another order of the data. "
                "Give the same values, or start fresh"
            )
        self.epoch, self.consumed = int(state["epoch"]), int(state["consumed"])
        if self.at_end == "drop" and self.consumed + self.global_batch > self.samples:
            self.epoch, self.consumed = self.epoch + 1, 0  # what is left fills no batch of this many ranks

    def repartition(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """The state this rank loads when `states` are those of another number of ranks: the one place they all share.

        Raises RefuseToStartError when they do not: then ranks did not use one stream together.
        """
        for number, state in enumerate(states):
            if state != states[0]:
                raise RefuseToStartError(
                    f"ResumableSampler: rank {number} was at {state}, rank 0 at {states[0]}; ranks that are not at one "
                    f"place cannot be joined into {world} ranks. Start with {len(states)} ranks, or start fresh"
                )
        return states[0]
