"""How long epochs and steps took, as training loops print it."""

from __future__ import annotations

import pytest

from keepstep.catalog.load import shipped
from keepstep.sources.snapshots import pace
from tests.sources.snapshot_texts import document, parsed

KERAS = "\n".join(
    f"Epoch {i}/4\n1251/1251 - {s}s - 113ms/step - loss: 5.91" for i, s in enumerate((1980, 141, 139, 140), 1)
)


@pytest.mark.parametrize(
    ("text", "unit", "seconds"),
    [
        (KERAS, "epoch", [1980, 141, 139, 140]),
        (
            "\n".join(f"epoch {i} | 10 it | time {s}s | data_time 1.0s" for i, s in enumerate((9, 2, 2, 2))),
            "epoch",
            [9, 2, 2, 2],
        ),
        ("\n".join(f"step {i} loss 1.0 step_time {s}s" for i, s in enumerate((9, 2, 2, 2))), "step", [9, 2, 2, 2]),
        (
            "\n".join(
                f" iteration {i}/ 500 | elapsed time per iteration (ms): {s}.0 | lm loss: 1.7"
                for i, s in enumerate((9000, 2000, 2000, 2000), 1)
            ),
            "step",
            [9, 2, 2, 2],
        ),
    ],
)
def test_a_series_is_read(text: str, unit: str, seconds: list[float]) -> None:
    (event,) = parsed(pace.parse, text)
    assert (event.attrs["unit"], event.attrs["seconds"]) == (unit, seconds)


@pytest.mark.parametrize("text", ["", "epoch 1 time 3s", "step 1\nstep 2\nstep 3\nstep 4", "time 1s\n" * 9])
def test_too_few_or_no_durations_are_no_series(text: str) -> None:
    assert pace.parse(document(text), shipped()) is None


def test_the_share_of_the_data_and_compiling_are_of_the_first() -> None:
    text = "\n".join(
        f"step {i} time {s}s data_time 1.0s" + " (torch.compile)" * (i == 0) for i, s in enumerate((4, 2, 2, 2))
    )
    (event,) = parsed(pace.parse, text)
    assert (event.attrs["data_share"], event.attrs["compiles"]) == (0.25, True)
