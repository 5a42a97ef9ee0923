"""GPUs as nvidia-smi prints them: whole listings, excerpts, tables and CSV give the same levels and the same faults."""

from __future__ import annotations

import pytest

from keepstep.catalog.load import shipped
from keepstep.records.event import Event
from keepstep.sources.snapshots import smi_csv, smi_full, smi_table
from tests.sources.snapshot_texts import FULL, OLD_TABLE, TABLE, document, of, parsed


def levels(event: Event) -> dict[str, object]:
    found = event.attrs["levels"]
    assert isinstance(found, dict)
    return found


def faults(events: list[Event]) -> set[str]:
    return {e.signature for e in events} - {"gpu.sample", "gpu.process", "driver.version"}


def test_a_full_listing_tells_the_levels_of_every_gpu() -> None:
    good, bad = of(parsed(smi_full.parse, FULL), "gpu.sample")
    assert good.gpu is not None and good.gpu.pci == "0000:18:00.0"
    assert good.gpu.uuid == "GPU-18181818-0000-1111-2222-333333333333" and good.gpu.serial == "1650124000001"
    told = levels(good)
    assert told["pcie_gen"] == 5 and told["pcie_width_max"] == 16 and told["pcie_replays"] == 3
    assert told["utilisation"] == 99 and told["pstate"] == "P0" and told["clock_sm"] == 1980
    assert told["temperature"] == 61 and told["temperature_margin"] == 25
    assert told["reason_sw_power_cap"] is True and told["reason_hw_thermal"] is False
    assert told["remapped_uncorrected"] == 2 and told["remap_pending"] is False
    assert told["dram_corrected_volatile"] == 4 and told["dram_uncorrected_aggregate"] == 2
    assert told["recovery"] == "none" and told["fabric_state"] == "Completed"
    # The module's own power readings carry the same labels; they are not the GPU's.
    assert told["power"] == 690.1 and told["power_limit"] == 700
    assert levels(bad)["sram_uncorrected_volatile"] == 3


def test_a_healthy_gpu_gives_no_fault_and_a_sick_one_each_of_its_own() -> None:
    events = parsed(smi_full.parse, FULL)
    assert faults([e for e in events if e.gpu and e.gpu.pci == "0000:18:00.0"]) == {
        "gpu.remap_settled",
        "gpu.recovery.none",
    }
    assert faults([e for e in events if e.gpu and e.gpu.pci == "0000:2a:00.0"]) == {
        "gpu.remap_failed",
        "gpu.remap_pending",
        "gpu.sram_threshold",
        "gpu.banks_used_up",
        "gpu.ecc_uncorrected",
        "gpu.recovery.drain_and_reset",
        "gpu.pcie_degraded",
        "gpu.hw_thermal",
        "gpu.fabric_incomplete",
    }


def test_driver_time_and_processes_come_with_a_listing() -> None:
    events = parsed(smi_full.parse, FULL)
    (driver,) = of(events, "driver.version")
    assert driver.attrs == {"version": "570.124.06", "branch": 570}
    (process,) = of(events, "gpu.process")
    assert process.attrs["pid"] == 4411 and process.attrs["used_mib"] == 70000
    assert process.gpu is not None and process.gpu.pci == "0000:18:00.0"
    assert all(e.time_ns == 1_941_448_333 * 10**9 for e in of(events, "gpu.sample"))


def test_a_fault_names_the_line_that_tells_it() -> None:
    (event,) = of(parsed(smi_full.parse, FULL), "gpu.remap_failed")
    assert event.evidence.text.strip() == "Remapping Failure Occurred        : Yes"
    assert FULL.splitlines()[event.evidence.line - 1] == event.evidence.text


@pytest.mark.parametrize(
    ("text", "title", "signature", "index"),
    [
        (
            "    GPU Recovery Action                   : Reset\n",
            "nvidia-smi -q -i 1 | grep Recovery",
            "gpu.recovery.reset",
            1,
        ),
        ("GPU Recovery Action: Node Reboot\n", "", "gpu.recovery.reboot", None),
        ("Remapping Failure Occurred : Yes\n", "nvidia-smi -q -d ROW_REMAPPER --id=3", "gpu.remap_failed", 3),
        (
            "  Uncorrectable Error : 1\n  Pending : Yes\n  Remapping Failure Occurred : No\n",
            "",
            "gpu.remap_pending",
            None,
        ),
        ("Remapped Rows\nCorrectable Error : 0\nPending : Yes\n", "", "gpu.remap_pending", None),
        ("            HW Thermal Slowdown           : Active\n", "", "gpu.hw_thermal", None),
        ("HW Power Brake Slowdown : Active\n", "", "gpu.power_brake", None),
        ("    Retired Pages\n        Pending Page Blacklist : Yes\n", "", "gpu.retired_pending", None),
        (
            "    Fabric\n        State : Completed\n        Status : Insufficient Resources\n",
            "",
            "gpu.fabric_incomplete",
            None,
        ),
        ("    GPU Reset Status\n        Reset Required : Yes\n", "", "gpu.recovery.reset", None),
    ],
)
def test_excerpts_are_understood_without_their_surroundings(
    text: str, title: str, signature: str, index: int | None
) -> None:
    (event,) = of(parsed(smi_full.parse, text, title), signature)
    assert (event.gpu.index if event.gpu else None) == index


@pytest.mark.parametrize(
    "text",
    [
        "    MIG Mode\n        Current : Enabled\n        Pending : Enabled\n",
        "Remapping Failure Occurred : No\nPending : No\n",
        "    ECC Mode\n        Current : Enabled\n        Pending : Disabled\n",
        "    HW Slowdown : Not Active\n        HW Thermal Slowdown : Not Active\n",
        "    GPU Recovery Action : N/A\n",
        "    SW Power Cap : Active\n",
    ],
)
def test_what_looks_alike_is_no_fault(text: str) -> None:
    events = smi_full.parse(document(text), shipped()) or []
    assert faults(events) <= {"gpu.remap_settled"}


def test_the_same_label_of_several_gpus_counts_them_in_order() -> None:
    text = "".join(f"        Remapping Failure Occurred        : {w}\n" for w in ("No", "No", "Yes", "No"))
    (event,) = of(parsed(smi_full.parse, text), "gpu.remap_failed")
    assert event.gpu is not None and event.gpu.index == 2


def test_a_later_sample_without_a_latched_state_says_that_it_was_repaired() -> None:
    gpu = "GPU 00000000:18:00.0\n    Remapped Rows\n        Pending : {}\n"
    (event,) = of(parsed(smi_full.parse, gpu.format("Yes") + gpu.format("No")), "gpu.remap_pending")
    assert event.stale == "cleared"
    (event,) = of(parsed(smi_full.parse, gpu.format("No") + gpu.format("Yes")), "gpu.remap_pending")
    assert event.stale is None


def test_the_table_tells_levels_processes_and_gpus_that_do_not_answer() -> None:
    events = parsed(smi_table.parse, TABLE)
    first, second = of(events, "gpu.sample")[:2]
    assert first.gpu is not None and (first.gpu.index, first.gpu.pci) == (0, "0000:1b:00.0")
    assert levels(first)["utilisation"] == 100 and levels(first)["memory_used_mib"] == 70123
    assert levels(first)["power_limit"] == 700 and levels(first)["product"] == "NVIDIA H100 80GB HBM3"
    assert levels(second)["ecc_uncorrected_volatile"] == 3
    (lost,) = of(events, "gpu.lost")
    assert lost.gpu is not None and lost.gpu.index == 2
    (uncorrected,) = of(events, "gpu.ecc_uncorrected")
    assert uncorrected.gpu is not None and uncorrected.gpu.index == 1
    (process,) = of(events, "gpu.process")
    assert process.attrs == {"pid": 4411, "used_mib": 70000}
    assert of(events, "driver.version")[0].attrs["branch"] == 560


def test_tables_of_older_drivers_are_read_too() -> None:
    (sample,) = of(parsed(smi_table.parse, OLD_TABLE), "gpu.sample")
    assert levels(sample)["utilisation"] == 97 and levels(sample)["temperature"] == 41


LINK = "index, pcie.link.gen.current, pcie.link.gen.max, pcie.link.width.current, pcie.link.width.max, utilization.gpu [%], pstate"


@pytest.mark.parametrize(
    ("row", "signature"),
    [
        ("0, 1, 5, 16, 16, 0 %, P8", "gpu.pcie_idle"),
        ("0, 1, 4, 16, 16, 3 %, P5", "gpu.pcie_idle"),
        ("0, 2, 5, 16, 16, 97 %, P1", "gpu.pcie_degraded"),
        ("0, 5, 5, 8, 16, 100 %, P0", "gpu.pcie_degraded"),
        ("0, 3, 5, 16, 16, [N/A], P2", "gpu.pcie_degraded"),
        ("0, 3, 5, 16, 16, [N/A], [N/A]", "gpu.pcie_unclear"),
        ("0, 5, 5, 16, 16, 100 %, P0", None),
    ],
)
def test_a_slow_link_counts_only_under_load(row: str, signature: str | None) -> None:
    assert faults(parsed(smi_csv.parse, f"{LINK}\n{row}\n")) == ({signature} if signature else set())


def test_rows_without_header_take_their_columns_from_the_command() -> None:
    title = "nvidia-smi --query-gpu=index,remapped_rows.pending,remapped_rows.failure --format=csv,noheader"
    events = parsed(smi_csv.parse, "0, No, No\n1, No, Yes\n", title)
    assert [e.gpu.index for e in of(events, "gpu.remap_failed") if e.gpu] == [1]


def test_the_same_gpu_again_is_its_next_sample_and_comments_part_samples() -> None:
    text = "index, utilization.gpu [%]\n0, 3 %\n1, 4 %\n# 20 s later\n0, 97 %\n1, 98 %\n"
    samples = of(parsed(smi_csv.parse, text), "gpu.sample")
    assert sorted((e.gpu.index, e.attrs["sample"]) for e in samples if e.gpu) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_long_recording_is_thinned_and_its_faults_are_kept() -> None:
    text = "timestamp, index, utilization.gpu [%], remapped_rows.failure\n" + "".join(
        f"2031/07/10 10:{i // 60:02d}:{i % 60:02d}.000, 0, 99 %, {'Yes' if i == 777 else 'No'}\n" for i in range(1800)
    )
    events = parsed(smi_csv.parse, text)
    samples = of(events, "gpu.sample")
    assert len(samples) <= 20 and samples[0].time_ns is not None and samples[-1].time_ns is not None
    assert samples[-1].time_ns - samples[0].time_ns == 1799 * 10**9
    assert len(of(events, "gpu.remap_failed")) == 1


def test_processes_of_a_query_hold_memory() -> None:
    title = "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader"
    (event,) = parsed(smi_csv.parse, "GPU-0a0a0a0a-1111-2222-3333-444444444444, 3307, 39102 MiB\n", title)
    assert event.attrs == {"pid": 3307, "used_mib": 39102}
    assert event.gpu is not None and event.gpu.uuid == "GPU-0a0a0a0a-1111-2222-3333-444444444444"


@pytest.mark.parametrize(
    ("cell", "gone"),
    [("[GPU is lost]", True), ("[Unknown Error]", True), ("ERR!", True), ("[N/A]", False), ("P0", False)],
)
def test_cells_that_say_that_the_gpu_is_gone(cell: str, gone: bool) -> None:
    events = parsed(smi_csv.parse, f"index, pstate, utilization.gpu [%]\n0, {cell}, 5 %\n")
    assert bool(of(events, "gpu.lost")) is gone


@pytest.mark.parametrize(
    "text", ["name, age\nanna, 3\n", "hello, world\n1, 2\n", "index, value\n1, 2\n", "index, name\n1, b\n", "", "\n\n"]
)
def test_other_csv_is_not_taken(text: str) -> None:
    assert smi_csv.parse(document(text), shipped()) is None
    assert smi_full.parse(document(text), shipped()) is None
    assert smi_table.parse(document(text), shipped()) is None
