"""Storage for scripts that call torch.distributed.checkpoint (DCP) themselves: what it saves becomes a checkpoint of ours.

    dcp.save(state, storage_writer=Writer(root))
    dcp.load(state, storage_reader=Reader(root))

DCP plans and talks between ranks, through the process group the script gives it. Each rank writes one image with block digests,
the coordinator of that group commits; nothing is pickled on disk, and everything that is loaded was verified first. When a save
fails on any rank it fails on all, and no marker is written. What a failed load falls back to is the script's decision.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from keepstep.checkpoint.format.boxes import Box
from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.checkpoint.format.layout import FolderName, check_run_id, parse_folder_name
from keepstep.checkpoint.restore.contents import Contents, choose, open_contents
from keepstep.checkpoint.restore.reader import allocate
from keepstep.checkpoint.restore.vote import Life
from keepstep.checkpoint.save.writerthread import ThreadWriter
from keepstep.checkpoint.storage.source import StoreOptions, open_root
from keepstep.checkpoint.torch.chunks import Image, commit_all, describe_items, put_rank_image
from keepstep.checkpoint.torch.flat import Flat, as_tensor, flatten, read_boxes, read_value
from keepstep.checkpoint.trust.policy import (
    TrustOptions,
    load_policy,
    load_signer,
    merge_options,
    options_from_environment,
)
from keepstep.records import frames
from keepstep.records.errors import ConfigError, VerificationError

_BATCH_BYTES = 64 << 20
"""A load holds about this much beside the state it fills, or one tensor."""
_CACHED_PLAN = "the planner hands out the plan of an earlier save (enable_plan_caching); give one without plan caching"
_LAST_NUMBER = re.compile(r"([0-9]{1,18})/?$")


class _Line(msgspec.Struct):
    """Where this process stands in a root: what it restored, and the manifest the next one names as its parent."""

    life: Life | None = None
    parent: str | None = None


_lines: dict[str, _Line] = {}
_lock = threading.Lock()


def _line(where: str) -> _Line:
    with _lock:
        return _lines.setdefault(where, _Line())


class Writer(StorageWriter):
    """Saves to a checkpoint root of ours. Keep one for all saves: its staging memory is used again.

    The step of a save is `step`, else the number at the end of the `checkpoint_id` given to dcp.save, else one more than
    the newest of this run. Values that are no tensors must be plain (numbers, text, bytes, lists, tuples, dicts, arrays);
    others fail the save, naming the key.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        step: int | None = None,
        run_id: str | None = None,
        trust: TrustOptions | None = None,
        store: StoreOptions | None = None,
        timeout_s: float = 3600.0,
        may_commit: Callable[[], None] | None = None,
    ) -> None:
        """`run_id`: default KEEPSTEP_RUN_ID, TORCHELASTIC_RUN_ID or "local". `trust` goes before the environment: what signs,
        or `TrustOptions(unsigned=True)`. `timeout_s` bounds the write of one rank.

        `may_commit` is called right before the marker is written and raises StorageError when it must not be. Raises
        ConfigError for a bad root or run id.
        """
        super().__init__()
        self._place = str(root)
        self._store = store
        self._step = step
        self._trust = merge_options(trust or TrustOptions(), options_from_environment())
        self._timeout_s = timeout_s
        self._may_commit = may_commit
        env = os.environ
        self._run_id = check_run_id(run_id or env.get(frames.ENV_RUN_ID) or env.get("TORCHELASTIC_RUN_ID") or "local")
        self._attempt = int(env.get(frames.ENV_ATTEMPT, "0"))
        self._cycle = int(env.get(frames.ENV_CYCLE) or env.get("TORCHELASTIC_RESTART_COUNT") or "0")
        self._named: int | None = None
        self._claimed: tuple[FolderName, str] | None = None
        self._line: _Line | None = None
        self._image: Image | None = None
        self.root = open_root(root, store)
        self.checkpoint: str | None = None
        """Folder of the newest checkpoint committed by this object; on the coordinator only."""

    def __getstate__(self) -> dict[str, Any]:
        """For a save in another process: no memory, but where this process stands in the root."""
        state = self.__dict__ | {"_image": None, "_line": _line(self.root.where)}
        del state["root"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.root = open_root(self._place, self._store)
        if self._line is not None:
            with _lock:
                _lines.setdefault(self.root.where, self._line)

    # ---- called by DCP

    def reset(self, checkpoint_id: Any = None) -> None:
        """A new save begins. Raises ConfigError when `checkpoint_id` does not end in a number."""
        self._named = None
        if checkpoint_id is not None:
            match = _LAST_NUMBER.search(str(checkpoint_id))
            if match is None:
                raise ConfigError(f"checkpoint_id {str(checkpoint_id)!r} does not end in the number of the step")
            self._named = int(match[1])

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageWriter. Raises ConfigError for a save without collectives: nobody could commit for all ranks."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False: a checkpoint is committed once for all ranks; leave it at True")
        if is_coordinator:
            load_signer(self._trust)  # a key that cannot be read fails the save before anything is written

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See StorageWriter."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See StorageWriter: claim a folder. Raises StorageError."""
        name = FolderName(self._next_step(), self._cycle, self._attempt, 0, self._run_id)
        folder = self.root.make_folder(name)
        self._claimed = (name, folder)
        return [
            dataclasses.replace(plan, storage_data={"folder": folder, "rank": rank, "world": len(plans)})
            for rank, plan in enumerate(plans)
        ]

    def _next_step(self) -> int:
        chosen = self._step if self._step is not None else self._named
        if chosen is not None:
            return chosen
        names = [parse_folder_name(folder) for folder in self.root.folders()]
        return max((name.step + 1 for name in names if name is not None and name.run_id == self._run_id), default=1)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See StorageWriter: write this rank's image. Raises ConfigError naming what cannot be saved, StorageError."""
        place = plan.storage_data
        # The coordinator knows better; on another rank the file of the earlier save is in the way, and finish() looks too.
        if not isinstance(place, dict) or (self._claimed is not None and place["folder"] != self._claimed[1]):
            raise ConfigError(_CACHED_PLAN)
        items = describe_items(plan, planner)
        self._image = self._image or Image()
        fact = put_rank_image(
            self.root,
            place["folder"],
            place["rank"],
            place["world"],
            items,
            self._image,
            ThreadWriter(),
            self._timeout_s,
        )
        results = [WriteResult(item.index, item.size_bytes, item.told()) for item in items]
        results.append(
            WriteResult(
                MetadataIndex("rank/file"),
                fact.size_bytes,
                {"folder": place["folder"], "fact": msgspec.to_builtins(fact)},
            )
        )
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See StorageWriter: index and marker, on the coordinator. Raises StorageError; then nothing is committed."""
        assert self._claimed is not None
        (name, folder), line = self._claimed, _line(self.root.where)
        told = [[result.storage_data for result in of_rank] for of_rank in results]
        if any(item.get("folder", folder) != folder for of_rank in told for item in of_rank):
            raise ConfigError(_CACHED_PLAN)
        manifest = commit_all(
            self.root,
            folder,
            name,
            told,
            life=line.life,
            parent=line.parent,
            signer=load_signer(self._trust),
            may_publish=self._may_commit or (lambda: None),
        )
        line.parent, self.checkpoint = manifest.digest, folder
        metadata.storage_data = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: it is given as storage_writer, never chosen by the look of an id."""
        return False


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Reader(StorageReader):
    """Loads from a checkpoint root of ours, whoever wrote it: Writer, Checkpointer or `keepstep ckpt import`.

    Without a step the newest committed checkpoint that can be trusted is taken. Of each file only the blocks are read in
    which something is wanted, and each is verified in memory before it is used.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        step: int | None = None,
        run_id: str | None = None,
        trust: TrustOptions | None = None,
        store: StoreOptions | None = None,
    ) -> None:
        """`run_id`: only checkpoints of that run. `trust` goes before the environment: who is trusted, or
        `TrustOptions(unsigned=True)` to accept what is not signed. Raises ConfigError.
        """
        super().__init__()
        self.root = open_root(root, store)
        self._step = step
        self._named: int | None = None
        self._run_id = None if run_id is None else check_run_id(run_id)
        self._trust = merge_options(trust or TrustOptions(), options_from_environment())
        self._contents: Contents | None = None
        self._flat: Flat | None = None
        self.checkpoint: str | None = None
        """Folder that was read last."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """A new load begins. Raises ConfigError when `checkpoint_id` does not end in the number of a step."""
        self._close()
        self._named = None
        if checkpoint_id is not None:
            match = _LAST_NUMBER.search(str(checkpoint_id))
            if match is None:
                raise ConfigError(f"checkpoint_id {str(checkpoint_id)!r} does not end in the number of the step")
            self._named = int(match[1])

    def _close(self) -> None:
        if self._contents is not None:
            self._contents.close()
        self._contents = self._flat = None

    def _open(self) -> tuple[Contents, Flat]:
        if self._contents is None or self._flat is None:
            raise VerificationError("read_metadata() comes first")
        return self._contents, self._flat

    def read_metadata(self) -> Metadata:  # no fallback to metadata of one rank: there is none
        """See StorageReader: choose a checkpoint, check its signature, and tell DCP what is in it.

        Raises ConfigError when there is none, VerificationError, StorageError.
        """
        self._close()
        step = self._step if self._step is not None else self._named
        policy = load_policy(self._trust)
        folder = choose(self.root, policy, step=step, run_id=self._run_id)
        contents = open_contents(self.root, folder, policy)
        self._contents, self.checkpoint = contents, folder
        self._flat = flat = flatten(contents)
        return Metadata(
            state_dict_metadata={key: _metadata(leaf) for key, leaf in flat.leaves.items()},
            planner_data=flat.paths,
            storage_data={},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See StorageReader."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See StorageReader."""
        contents, _ = self._open()
        return dataclasses.replace(
            plan, storage_data={"checkpoint": contents.folder, "digest": contents.manifest.digest}
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See StorageReader. Raises VerificationError when ranks chose different checkpoints."""
        chosen = {(plan.storage_data["checkpoint"], plan.storage_data["digest"]) for plan in plans}
        if len(chosen) > 1:
            names = ", ".join(sorted(name for name, _ in chosen))
            raise VerificationError(
                f"ranks found different checkpoints ({names}): one was committed meanwhile; give a step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See StorageReader. Raises VerificationError naming file and bytes, StorageError; tensors filled before keep that."""
        contents, flat = self._open()
        tensors = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _in_memory(read_value(contents, flat, item.storage_index.fqn)))
            else:
                tensors.append(item)
        room = _Room()
        for batch in _batches(tensors, contents, flat):
            buffers = read_boxes(contents, {name: box for name, (box, _) in batch.items()}, room)
            for name, (box, item) in batch.items():
                _fill(item, planner, as_tensor(buffers[name], contents.index.tensors[name].dtype, box.sizes))
        self._note(contents)
        self._close()
        return _done(None)

    def _note(self, contents: Contents) -> None:
        """From here on this process continues the line of what it loaded."""
        line = _line(self.root.where)
        started_ns = max(time.time_ns(), contents.facts.created_ns + 1)
        line.life = Life(
            restored_step=contents.facts.step,
            started_ns=started_ns,
            checkpoint=contents.folder,
            parent=contents.manifest.digest,
            scope=self._run_id,
        )
        line.parent = contents.manifest.digest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: it is given as storage_reader, never chosen by the look of an id."""
        return False


def _metadata(leaf: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    """A leaf as DCP knows it. A tensor is one chunk to it: any box of it can be read, however it was written."""
    if not isinstance(leaf, torch.Tensor):
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(torch.Size([0] * leaf.dim()), leaf.shape)
    return TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), leaf.shape, [whole])


def _in_memory(value: Any) -> io.BytesIO:
    """What DCP's planners take: a value pickled, by us and in this moment, from verified plain data."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


class _Room:
    """Memory for one batch after the other: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._held = memoryview(b"")

    def __call__(self, size_bytes: int) -> memoryview:
        if len(self._held) < size_bytes:
            self._held = allocate(size_bytes)
        return self._held[:size_bytes]


def _batches(items: list[ReadItem], contents: Contents, flat: Flat) -> Iterator[dict[str, tuple[Box, ReadItem]]]:
    """`items` in groups of bounded size, each tensor at most once in a group."""
    batch: dict[str, tuple[Box, ReadItem]] = {}
    room = _BATCH_BYTES
    for item in items:
        name = flat.tensors[item.storage_index.fqn]
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        size = box.elements * ITEM_BYTES[contents.index.tensors[name].dtype]
        if batch and (name in batch or size > room):
            yield batch
            batch, room = {}, _BATCH_BYTES
        batch[name] = (box, item)
        room -= size
    if batch:
        yield batch


def _fill(item: ReadItem, planner: LoadPlanner, tensor: torch.Tensor) -> None:
    target = planner.resolve_tensor(item).detach()
    if target.shape != tensor.shape:
        raise VerificationError(
            f"{item.storage_index.fqn!r}: {list(tensor.shape)} was read for a place of {list(target.shape)}"
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)
