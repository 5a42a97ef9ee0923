"""How much memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken without swapping or killing: the host's MemAvailable and the room in our own cgroup.

    Of a cgroup and those above it the tightest counts (v2: memory.max, v1: memory.limit_in_bytes); file pages that can be
    reclaimed count as room. `root` is where /proc and /sys are looked for.
    """
    room = []
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            room.append(int(line.split()[1]) * 1024)
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            room += _room(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            room += _room(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return max(0, min(room, default=0))


def _room(base: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> Iterator[int]:
    """Room in the cgroup at `path` below `base` and in each one above it that has a limit."""
    folder = base / path.strip("/")
    for place in (folder, *folder.parents):
        if not place.is_relative_to(base):
            return
        try:
            limit = (place / limit_name).read_text().strip()
            usage = int((place / usage_name).read_text())
            stat = dict(line.split(" ", 1) for line in (place / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            yield int(limit) - usage + int(stat.get(reclaimable, "0"))
