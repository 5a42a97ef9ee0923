"""One sample of one GPU: its levels under the names of `fields`, and the lines that told them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keepstep.catalog.coded import pci_address
from keepstep.records.event import Gpu
from keepstep.sources.documents import Line
from keepstep.sources.snapshots.fields import REASONS, Field
from keepstep.sources.snapshots.making import number, yes_no

Level = float | bool | str

_GONE = ("err!", "gpu is lost", "[gpu is lost]", "unknown error", "[unknown error]", "fallen off the bus")
"""What nvidia-smi prints in place of a value when the GPU does not answer."""
_BLANKS = frozenset({2147483632, 2147483633, 2147483634, 9223372036854775792, 9223372036854775794})
"""DCGM_INT32_BLANK, DCGM_INT64_BLANK and their kin: not measured, not supported. They are no levels."""

RECOVERY = {
    "none": "none",
    "reset": "reset",
    "gpu reset": "reset",
    "reboot": "reboot",
    "node reboot": "reboot",
    "system reboot": "reboot",
    "drain p2p": "drain_p2p",
    "drain and reset": "drain_and_reset",
    "gpu_reset": "reset",
    "node_reboot": "reboot",
    "drain_p2p": "drain_p2p",
    "drain_and_reset": "drain_and_reset",
    "bus_reset": "reset",
    "system_reboot": "reboot",
    "recover_imex_domain": "drain_p2p",
    "0": "none",
    "1": "reset",
    "2": "reboot",
    "3": "drain_p2p",
    "4": "drain_and_reset",
}
"""Words and numbers of "GPU Recovery Action" -> what they ask for (nvmlDeviceGpuRecoveryAction_t)."""


class GpuSample(NamedTuple):
    """`levels`: as in `fields`, only those that were told. `lines`: where each stood. `number`: of the sample, 0 the first."""

    gpu: Gpu | None
    levels: Mapping[str, Level]
    lines: Mapping[str, Line | None]
    node: str | None = None
    time_ns: int | None = None
    number: int = 0
    lost: Line | None = None
    """The line in which the GPU did not answer."""


class Building:
    """A sample while it is being read."""

    def __init__(self, number: int = 0) -> None:
        self.levels: dict[str, Level] = {}
        self.lines: dict[str, Line | None] = {}
        self.identity: dict[str, str] = {}
        self.number = number
        self.lost: Line | None = None
        self.node: str | None = None
        self.time_ns: int | None = None

    def set(self, field: Field, text: str, line: Line | None) -> None:
        """Take what a tool printed for a field. Text that is no value of the field's kind is left out."""
        if text.strip().lower().startswith(_GONE) and self.lost is None:
            self.lost = line
            return
        level = level_of(field, text)
        if level is None:
            return
        if field.kind == "reasons":
            for bit, reason in REASONS.items():
                self.levels[f"reason_{reason}"] = bool(int(float(level)) & bit)
                self.lines[f"reason_{reason}"] = line
            return
        if field.name.startswith("sram_un") and field.name in self.levels:
            # Two kinds of SRAM errors are printed apart by newer drivers; they are one level here.
            level = float(level) + float(self.levels[field.name])
        self.levels[field.name] = level
        self.lines[field.name] = line

    def finish(self, index: int | None = None) -> GpuSample | None:
        """The sample, None when nothing was told. `index`: of the GPU, where the document itself does not say."""
        told = self.identity.get("index", "")
        index = int(told) if told.isdigit() and len(told) < 5 else index
        gpu = named(index, self.identity)
        if not self.levels and self.lost is None:
            return None
        return GpuSample(gpu, self.levels, self.lines, self.node, self.time_ns, self.number, self.lost)


def named(index: int | None, identity: Mapping[str, str]) -> Gpu | None:
    """The GPU that columns or labels name."""
    pci = identity.get("pci")
    serial = identity.get("serial")
    gpu = Gpu(
        index=index,
        uuid=identity.get("uuid") or None,
        pci=pci_address(pci) if pci and ":" in pci else None,
        serial=serial if serial and serial.isdigit() else None,
    )
    return gpu if gpu != Gpu() else None


def level_of(field: Field, text: str) -> Level | None:
    """The value of a text for a field; None where the tool told none."""
    if field.kind in {"number", "reasons"}:
        value = number(text)
        return None if value is None or value in _BLANKS or math.isnan(value) else value
    if field.kind == "flag":
        flag = yes_no(text)
        if flag is None and (value := number(text)) is not None and value not in _BLANKS:
            return value > 0
        return flag
    word = " ".join(text.split())
    if field.name == "recovery":
        return RECOVERY.get(word.removesuffix(".0").lower())
    return word if word and word.lower() not in {"n/a", "[n/a]", "unknown"} else None


def thinned(samples: Sequence[GpuSample], most: int) -> list[GpuSample]:
    """At most `most` samples of each GPU, evenly over time, the first and the last among them."""
    by_gpu: dict[tuple[str | None, Gpu | None], list[GpuSample]] = {}
    for sample in samples:
        by_gpu.setdefault((sample.node, sample.gpu), []).append(sample)
    kept = []
    for own in by_gpu.values():
        if len(own) <= most:
            kept += own
            continue
        kept += [own[round(i * (len(own) - 1) / (most - 1))] for i in range(most)]
    return kept
