"""Files of the run folder for people (cycles, incidents, the end), written beside the coordinator: no restart waits for them.

All of them can be made again from the journal. At 16,384 ranks a cycle's record takes a tenth of a second of the process, so it is
written less often than it changes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from keepstep.launcher.coordination.incidents import write_incidents
from keepstep.launcher.coordination.runfolder import cycle_record, has_ended, write_cycle, write_summary
from keepstep.launcher.coordination.state import JobState
from keepstep.launcher.files import write_durable
from keepstep.records.codec import to_pretty_json
from keepstep.records.cycle import Cycle
from keepstep.records.errors import StorageError

RETRY_S = 1.0
REST = 5
"""After cycles were written this many times as long passes before they are written again."""


class CycleFiles:
    """Records of cycles on their way to disk."""

    def __init__(self, run_dir: Path, job: JobState, attribution: bool) -> None:
        """`attribution`: failed cycles get a verdict, and their incidents wait for it."""
        self._run_dir = run_dir
        self._attribution = attribution
        self._job = job
        self._ended: dict[int, Cycle] = {}
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()

    def note_ended(self) -> None:
        """The current cycle has just ended. Taken at once: the next journal record may already open another."""
        c = self._job.cycle
        if c is not None:
            self._ended[c.number] = cycle_record(self._job, ended=True)
            self._changed.set()

    def note_replayed(self) -> None:
        """The same while an old journal is read: only where the file was not brought up to date."""
        c = self._job.cycle
        if c is not None and not has_ended(self._run_dir, c.number):
            self._ended[c.number] = cycle_record(self._job, ended=True)

    def note_changed(self) -> None:
        """The current cycle has changed."""
        self._changed.set()

    def write_replayed(self) -> None:
        """Write what `note_replayed` found, before anything else happens. Raises StorageError."""
        self._write(self._ended)
        self._ended = {}
        self._write_incidents()

    async def keep_written(self) -> None:
        """Write what changes until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            began = loop.time()
            async with self._lock:
                ended, self._ended = self._ended, {}
                views = dict(ended)
                if self._job.phase in ("running", "stopping"):
                    views[self._job.last_cycle] = cycle_record(self._job, ended=False)
                try:
                    await asyncio.to_thread(self._write, views)
                    await asyncio.to_thread(self._write_incidents)
                except (StorageError, OSError) as error:
                    # The journal has it all; should that fail too, this process ends.
                    print(f"coordinator: a cycle's file is not up to date: {error}", file=sys.stderr, flush=True)
                    self._ended = ended | self._ended
                    self._changed.set()
                    await asyncio.sleep(RETRY_S)
            await asyncio.sleep(REST * (loop.time() - began))

    async def end(self) -> None:
        """Before anybody is told to exit: the verdict is durable first. Raises StorageError."""
        async with self._lock:
            await asyncio.to_thread(self.write_end)

    def write_end(self) -> None:
        """The verdict, then all else."""
        assert self._job.verdict is not None
        write_durable(self._run_dir / "verdict.json", to_pretty_json(self._job.verdict))
        ended, self._ended = self._ended, {}
        self._write(ended)
        self._write_incidents()
        write_summary(self._run_dir, self._job)

    async def note_attributed(self) -> None:
        """A verdict has come; after the end of the job nobody else writes it, and lost time is charged to its class."""
        self._changed.set()
        if self._job.phase == "done":
            async with self._lock:
                await asyncio.to_thread(self._write_incidents)
                await asyncio.to_thread(write_summary, self._run_dir, self._job)

    def _write(self, views: dict[int, Cycle]) -> None:
        for record in views.values():
            write_cycle(self._run_dir, record)

    def _write_incidents(self) -> None:
        job = self._job
        write_incidents(self._run_dir, job.run_id, list(job.incidents), dict(job.attributed), wait=self._attribution)
