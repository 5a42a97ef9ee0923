"""Where marks are kept: not in the root that they protect.

Under a launcher that is the coordinator's journal. Without one it is a file in the user's keepstep folder. A root is
known by where it is and by a random id that lies in it: the first finds it after its content was replaced, the second
after it was moved.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Protocol

import msgspec

from keepstep.checkpoint.storage.source import Root
from keepstep.checkpoint.storage.writer import make_folders, replace_file, storage_error
from keepstep.checkpoint.trust.keys import ENV_HOME
from keepstep.checkpoint.trust.rollback import Mark
from keepstep.records.codec import to_pretty_json
from keepstep.records.errors import StorageError

ROOT_KIND, ROOT_NAME = "root", "id"
"""The id is side record `.keepstep/root/id.json`."""
WHOLE_ROOT = "*"
"""Scope of a restore that looks at every run of a root; else the scope is the run's id, which has no such character."""


class MarkStore(Protocol):
    """Keeps the mark of one root and scope. Only rank 0 uses it."""

    def get(self) -> Mark | None:
        """The mark, None before the first. Raises StorageError or ChannelError when it cannot be told."""

    def put(self, mark: Mark) -> None:
        """Keep `mark` instead, durably; it may be an older one. Raises StorageError or ChannelError."""


class RootId(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.root/1`: a random name for a root, given once."""

    schema: str = "keepstep.root/1"
    id: str


class _Places(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.marks/1`, a file for each root id: place of the root -> scope -> mark."""

    schema: str = "keepstep.marks/1"
    root: str
    places: dict[str, dict[str, Mark]]


def root_id(root: Root) -> str:
    """The id of `root`, written there when it has none. Raises StorageError."""
    known = _read_root_id(root)
    if known is not None:
        return known
    fresh = RootId(id=secrets.token_hex(16))
    try:
        root.put_record(ROOT_KIND, ROOT_NAME, to_pretty_json(fresh))
    except StorageError:
        # Another job was first, or nothing can be written here.
        known = _read_root_id(root)
        if known is None:
            raise
        return known
    return _read_root_id(root) or fresh.id


def _read_root_id(root: Root) -> str | None:
    data = root.records(ROOT_KIND).get(ROOT_NAME)
    if data is None:
        return None
    try:
        found = msgspec.json.decode(data, type=RootId).id
    except msgspec.DecodeError as error:
        raise StorageError(
            f"{root.where}: the root's id cannot be read: {error}; delete .keepstep/root/id.json"
        ) from None
    if len(found) != 32 or set(found) - set("0123456789abcdef"):
        raise StorageError(f"{root.where}: the root's id {found[:40]!r} is none; delete .keepstep/root/id.json")
    return found


def marks_folder() -> Path:
    """`$KEEPSTEP_HOME/marks`; KEEPSTEP_HOME is ~/.keepstep unless set."""
    return Path(os.environ.get(ENV_HOME) or Path.home() / ".keepstep") / "marks"


class FileMarks(msgspec.Struct, frozen=True, kw_only=True):
    """Marks in `folder`/<root id>.json.

    `where` is the root's place (absolute path or URL), `scope` a run id or WHOLE_ROOT. Jobs that write to one root at the
    same time may lose one of two marks set in the same moment; the next commit sets it again.
    """

    root: str
    where: str
    scope: str
    folder: Path

    def get(self) -> Mark | None:
        """See MarkStore. The mark of this place; else that of a root with this id that was elsewhere before.

        A root that still lies elsewhere was copied, and not moved: what happens there is no business of this place.
        """
        files = self._read_all()
        for places in files.values():
            if self.where in places.places:
                return places.places[self.where].get(self.scope)
        own = files.get(self.root)
        places_before = own.places if own else {}
        elsewhere = [
            scopes[self.scope]
            for where, scopes in places_before.items()
            if self.scope in scopes and ("://" in where or not Path(where).exists())
        ]
        return max(elsewhere, key=lambda mark: mark.at.created_ns, default=None)

    def put(self, mark: Mark) -> None:
        """See MarkStore."""
        files = self._read_all()
        scopes: dict[str, Mark] = {}
        for other, places in files.items():
            scopes |= places.places.get(self.where, {})
            if other != self.root and self.where in places.places:  # another root lies in this place now
                self._write(msgspec.structs.replace(places, places=_without(places.places, self.where)))
        own = files.get(self.root) or _Places(root=self.root, places={})
        scopes = scopes | {self.scope: mark}
        self._write(msgspec.structs.replace(own, places=own.places | {self.where: scopes}))

    def _read_all(self) -> dict[str, _Places]:
        try:
            paths = sorted(path for path in self.folder.iterdir() if path.suffix == ".json" and path.name[0] != ".")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise storage_error("list", self.folder, error) from error
        found = {}
        for path in paths:
            try:
                places = msgspec.json.decode(path.read_bytes(), type=_Places)
            except OSError as error:
                raise storage_error("read", path, error) from error
            except msgspec.DecodeError as error:
                raise StorageError(
                    f"{path} cannot be read ({error}), so it is not known which checkpoint is the newest; look at it and "
                    "move it away when nothing has to be protected"
                ) from None
            found[places.root] = places
        return found

    def _write(self, places: _Places) -> None:
        make_folders(self.folder, 0o700)
        replace_file(self.folder / f"{places.root}.json", to_pretty_json(places))


def _without(places: dict[str, dict[str, Mark]], where: str) -> dict[str, dict[str, Mark]]:
    return {place: scopes for place, scopes in places.items() if place != where}


def file_marks(root: Root, scope: str) -> FileMarks:
    """The mark of `root` in the user's keepstep folder. A root that takes no id is known by its place alone."""
    where = place_of(root)
    try:
        known = root_id(root)
    except StorageError:
        known = hashlib.sha256(where.encode()).hexdigest()[:32]
    return FileMarks(root=known, where=where, scope=scope, folder=marks_folder())


def look_up_mark(root: Root, scope: str) -> Mark | None:
    """The mark of `root` in the user's keepstep folder, writing nothing. Raises StorageError."""
    known = _read_root_id(root) or ""
    return FileMarks(root=known, where=place_of(root), scope=scope, folder=marks_folder()).get()


def place_of(root: Root) -> str:
    """Where `root` is: its URL, or its path with all links followed."""
    return root.where if "://" in root.where else str(Path(root.where).resolve())
