"""How far a reader of the kernel's log has come, kept on disk.

It is saved after the events were handed on: after a crash in between they are handed on again, with the same ids.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from keepstep.records.errors import ConfigError, StorageError

MAX_BYTES = 64 << 10


class Position(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last record that was handled.

    `stream`: whose sequence numbers these are: a boot id, or an id of our own where the source has none. `seq`: of the last
    record. `boot_ns`: its time, where records have no numbers. `cursor`: the journal's own.
    """

    stream: str
    seq: int = 0
    boot_ns: int = 0
    cursor: str = ""


def load_position(path: Path) -> Position | None:
    """What was saved, None when nothing was. Raises ConfigError for a file that is no position, StorageError unreadable."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=Position)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path}: not a cursor that keepstep wrote ({error}); name another file, or remove this one to begin anew"
        ) from error


def save_position(path: Path, position: Position) -> None:
    """Replace the file, durably: after a crash it holds the old or the new position. Raises StorageError."""
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(position))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from error
