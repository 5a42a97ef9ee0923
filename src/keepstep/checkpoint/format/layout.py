"""Names on disk: checkpoint folders, the files in them, and the side records of a root.

A folder belongs to one save of one cycle of one attempt. Its name carries run, step, cycle and attempt, so a listing
alone says what there is; a suffix (`a0001r1`) keeps a second try of the same save apart from the first.
"""

from __future__ import annotations

import re

import msgspec

from keepstep.records.errors import ConfigError

INDEX_NAME = "index.json"
MARKER_SIGNED = "manifest.sigstore.json"
MARKER_UNSIGNED = "manifest.json"
MARKERS = (MARKER_SIGNED, MARKER_UNSIGNED)
SIDE_FOLDER = ".keepstep"
QUARANTINE_FOLDER = "quarantine"
TOMBSTONE_FOLDER = "tombstones"
IMAGE_SUFFIX = ".safetensors"
PRINTS_SUFFIX = ".prints"
"""In the memory tier a file of this ending lies beside each image: the fingerprints of its blocks, one after the other."""
LATEST_NAME = "latest_checkpointed_iteration.txt"
MAX_MANIFEST_BYTES = 64 << 20

_UPLOADED = ".object"
_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_FOLDER = re.compile(
    r"(?P<run>[A-Za-z0-9_][A-Za-z0-9._-]{0,127})-step-(?P<step>[0-9]{8,18})-c(?P<cycle>[0-9]{4,9})"
    r"-(?P<attempt>a(?P<number>[0-9]{4,9})(?:r(?P<retry>[0-9]{1,6}))?)"
)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class FolderName(msgspec.Struct, frozen=True, order=True):
    """What the name of a checkpoint folder says. Ordered newest last: by step, then cycle, attempt, try."""

    step: int
    cycle: int
    attempt: int
    retry: int
    run_id: str

    @property
    def text(self) -> str:
        """The folder's name, e.g. `job7-step-00001200-c0003-a0001`."""
        suffix = f"r{self.retry}" if self.retry else ""
        return f"{self.run_id}-step-{self.step:08d}-c{self.cycle:04d}-a{self.attempt:04d}{suffix}"


def check_run_id(run_id: str) -> str:
    """Return `run_id` when it can be part of a folder name. Raises ConfigError otherwise."""
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run id {run_id!r} cannot name a checkpoint folder; use 1 to 128 of A-Z a-z 0-9 . _ -")
    return run_id


def parse_folder_name(name: str) -> FolderName | None:
    """What folder `name` says, or None when it is not a checkpoint folder of ours."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    parsed = FolderName(
        step=int(match["step"]),
        cycle=int(match["cycle"]),
        attempt=int(match["number"]),
        retry=int(match["retry"] or 0),
        run_id=match["run"],
    )
    # Only the one canonical spelling of each name counts: two folders can never mean the same save.
    return parsed if parsed.text == name else None


def upload_note_name(folder: str) -> str:
    """Name of the tier note that says when a checkpoint on disk was complete in the object store as well."""
    return folder + _UPLOADED


def noted_checkpoint(note: str) -> str:
    """The checkpoint folder that the tier note named `note` is about."""
    return note.removesuffix(_UPLOADED)


def rank_file_name(rank: int, world_size: int) -> str:
    """Name of the file that rank `rank` of `world_size` writes."""
    return f"rank-{rank:05d}-of-{world_size:05d}{IMAGE_SUFFIX}"


def is_plain_file_name(name: str) -> bool:
    """True when `name` stays inside its folder: no separator, no leading dot, nothing but plain characters."""
    return _FILE.fullmatch(name) is not None
