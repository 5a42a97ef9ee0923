"""Index and manifest of a checkpoint of very many ranks: written, signed and committed, then read back by one rank.

The data files do not exist: what grows with the number of ranks is what is said about them. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import msgspec

from keepstep.checkpoint.format.boxes import Mesh, local_box
from keepstep.checkpoint.format.index import Index, parse_index
from keepstep.checkpoint.format.layout import INDEX_NAME, FolderName, rank_file_name
from keepstep.checkpoint.format.plan import LARGE_SHARES, Plan, TensorMeta
from keepstep.checkpoint.restore.verify import check_marker
from keepstep.checkpoint.save.commit import commit, writer_facts
from keepstep.checkpoint.storage.source import Root, open_root
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.trust.keys import signing_key


def peak_mb() -> float:
    """Most memory this process ever had resident (proc_pid_status(5), VmHWM; getrusage counts what was before exec, too)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no VmHWM in /proc/self/status")


def write(root: Root, tensors: int, ranks: int) -> str:
    """What rank 0 does of a save once all ranks have told their file. Returns the folder."""
    metas = {
        f"model/layer.{number:04}": TensorMeta(dtype="BF16", shape=(4 * ranks, 1024), mesh=0, placements=("shard:0",))
        for number in range(tensors)
    }
    index = Index(world=ranks, tensors=metas, aliases={}, values={}, meshes=(Mesh((ranks,)),), split=LARGE_SHARES)
    folder = root.make_folder(FolderName(1, 0, 1, 0, "bench"))
    size = tensors * 4 * 1024 * 2 + 65_536
    blocks = "blake3:" + hashlib.sha256(b"blocks").hexdigest()
    files = [
        FileFact(
            name=rank_file_name(rank, ranks),
            size_bytes=size,
            sha256=hashlib.sha256(b"%d" % rank).hexdigest(),
            blocks=blocks,
        )
        for rank in range(ranks)
    ]
    files.append(root.put_file(folder, INDEX_NAME, [msgspec.json.encode(index)]))
    name = FolderName(1, 0, 1, 0, "bench")
    facts = writer_facts(
        name, world=ranks, parent=None, restored_step=0, restored_from=None, scope=None, life_started_ns=time.time_ns()
    )
    commit(root, folder, files, facts, signing_key())
    return folder


def read(root: Root, folder: str, rank: int, ranks: int) -> int:
    """What one rank does of a restore before it reads tensors: signature, manifest, index, its plan. Returns bytes it needs."""
    found = root.marker(folder)
    assert found is not None
    manifest = check_marker(folder, *found, trusted_key=signing_key().public_key())
    facts = {file.name: file for file in manifest.files}
    opened = root.open(folder, INDEX_NAME)
    try:
        data = bytearray(opened.size_bytes)
        opened.read_into(memoryview(data), 0)
    finally:
        opened.close()
    if hashlib.sha256(data).hexdigest() != facts[INDEX_NAME].sha256:
        raise RuntimeError("the index is not what was written")
    index = parse_index(data, INDEX_NAME, data_bytes=sum(file.size_bytes for file in manifest.files))
    plan = Plan(index.tensors, index.meshes, index.world, index.split)
    needed = 0
    for name, meta in index.tensors.items():
        box = local_box(meta.shape, (ranks,), ("shard:0",), (rank,))
        for need in plan.needs(name, box):
            for writer, piece in need.pieces:
                if rank_file_name(writer, index.world) not in facts:
                    raise RuntimeError(f"no file of rank {writer}")
                needed += min(piece.end, need.end) - max(piece.begin, need.begin)
    return needed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=16_384)
    args = parser.parse_args()
    root = open_root(args.root)
    signing_key()
    before_mb = peak_mb()
    begin = time.perf_counter()
    folder = write(root, args.tensors, args.ranks)
    written = time.perf_counter()
    same = read(root, folder, args.ranks // 2, args.ranks)
    ended = time.perf_counter()
    peak = peak_mb()
    fewer = read(root, folder, 5, args.ranks * 3 // 4)  # another number of ranks: each needs parts of two files
    files = {path.name: path.stat().st_size for path in (args.root / folder).iterdir()}
    assert same == args.tensors * 4 * 1024 * 2
    report = {
        "write_s": written - begin,
        "read_s": ended - written,
        "reshard_read_s": time.perf_counter() - ended,
        "peak_mb": peak,
        "before_mb": before_mb,
        "bytes_needed": same,
        "bytes_needed_resharded": fewer,
        "files": files,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
