"""Learn src/keepstep/catalog/data/words.csv from cases: `python bench/_words.py FILE... > words.csv`.

How good it is goes to stderr: each file's cases judged by a table learned from the other files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from keepstep.catalog.words import LEAN_CLASSES, as_csv, lean_of, learn, words_of
from keepstep.records.verdict import FaultClass

Case = tuple[set[str], FaultClass]


def cases_of(path: Path) -> list[Case]:
    """Words and class of the cases of a file."""
    cases = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [(words_of(str(c["input"])), c["expected"]["class"]) for c in cases]


def main() -> None:
    files = {Path(name): cases_of(Path(name)) for name in sys.argv[1:]}
    bins: dict[int, list[bool]] = {}
    for path, held in files.items():
        table = learn([case for other, cases in files.items() if other != path for case in cases])
        known = [(words, name) for words, name in held if name in LEAN_CLASSES]
        right = 0
        for words, name in known:
            lean = lean_of(words, table)
            is_right = lean is not None and lean.fault_class == name
            right += is_right
            bins.setdefault(min(8, int(lean.margin) if lean else 0), []).append(is_right)
        print(f"{path.name}: {right} of {len(known)} right", file=sys.stderr)
    for margin, found in sorted(bins.items()):
        print(f"margin {margin}: {sum(found)} of {len(found)} right", file=sys.stderr)
    everything = [case for cases in files.values() for case in cases]
    source = f"naive Bayes over {len(everything)} cases (bench/_words.py); natural log-odds against all texts"
    sys.stdout.write(as_csv(learn(everything), source))


if __name__ == "__main__":
    main()
