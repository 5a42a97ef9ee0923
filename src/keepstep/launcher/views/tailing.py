"""Reading a run's journal while its coordinator writes on: no lock, no write, nothing read twice."""

from __future__ import annotations

from pathlib import Path

from keepstep.launcher.coordination.journal import Record, epoch_path, epochs, parse_line


class JournalTail:
    """A place in a journal. `poll` gives what became whole since the last call.

    Together its answers are what `journal.read_records` gives. One thing cannot be taken back: a record of a coordinator that was
    superseded before its successor read it. It may have been given already; it never had an effect.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._epoch: int | None = None
        self._offset = 0
        self._seq = 0
        self._given = 0

    def poll(self) -> list[tuple[int, Record]]:
        """New records as (epoch, record), oldest first; empty when there is nothing new or no journal yet."""
        found: list[tuple[int, Record]] = []
        while True:
            # Looked for before reading: what was written before the next epoch began is then in this read.
            follower = self._follower()
            if self._epoch is not None:
                found += [(self._epoch, r) for r in self._read(follower[1].get("read") if follower else None)]
            if follower is None:
                return found
            self._epoch, self._offset, self._seq = follower[0], 0, 0

    def _follower(self) -> tuple[int, Record] | None:
        """The next epoch that has a first record, and that record. One without has nothing that counts."""
        for epoch in epochs(self._run_dir):
            if self._epoch is None or epoch > self._epoch:
                opening = self._opening(epoch)
                if opening is not None:
                    return epoch, opening
        return None

    def _opening(self, epoch: int) -> Record | None:
        """First record of an epoch, None while it is not whole."""
        with epoch_path(self._run_dir, epoch).open("rb") as file:
            line = file.readline()
        return parse_line(line, 0) if line.endswith(b"\n") else None

    def _read(self, limit: int | None) -> list[Record]:
        """Whole appends since the last read; `limit`: records of the run that count, with those given already."""
        assert self._epoch is not None
        whole: list[Record] = []
        group: list[Record] = []
        offset, seq = self._offset, self._seq
        with epoch_path(self._run_dir, self._epoch).open("rb") as file:
            file.seek(offset)
            for line in file:
                # A bad line is no end for ever: on a network file system it may be one that is still arriving.
                record = parse_line(line, seq) if line.endswith(b"\n") else None
                if record is None:
                    break
                offset, seq = offset + len(line), seq + 1
                group.append(record)
                if not record.pop("more", False):
                    whole += group
                    group = []
                    self._offset, self._seq = offset, seq
        if limit is not None:
            whole = whole[: max(0, limit - self._given)]
            self._given = min(self._given, limit)
        self._given += len(whole)
        return whole
