"""Read a folder of flight-recorder dumps several times over, each time as other ranks: the summaries of a job as large as wanted.

Arguments: folder, processes, how often. Prints the seconds that reading took, and how many summaries there were.
"""

from __future__ import annotations

import json
import sys
import time

from keepstep.sources.flightrecorder.files import find_dumps
from keepstep.sources.flightrecorder.reading import read_snapshot


def main() -> None:
    folder, jobs, times = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    found = find_dumps([folder]).sources
    many = [source._replace(rank=n * len(found) + i) for n in range(times) for i, source in enumerate(found)]
    begin = time.perf_counter()
    snapshot = read_snapshot(many, jobs=jobs)
    print(json.dumps({"seconds": time.perf_counter() - begin, "ranks": len(snapshot.ranks)}))


if __name__ == "__main__":
    main()
