"""Measurements in whatever table people paste; exporters, diagnostics, bandwidth tests, and the machine around the GPUs."""

from __future__ import annotations

import json
import math

import pytest

from keepstep.catalog.load import shipped
from keepstep.records.event import Event
from keepstep.sources.snapshots import bandwidth, dcgm, machine, prometheus, tables
from keepstep.sources.snapshots.metrics import metric_kind
from tests.sources.snapshot_texts import document, of, parsed

SAME = {"0": [610.0], "1": [612.0], "2": [1009.0]}


def series(events: list[Event], metric: str) -> dict[str, list[float]]:
    (event,) = [e for e in of(events, "straggler.series") if e.attrs["metric"] == metric]
    found: dict[str, list[float]] = event.attrs["values"]
    return found


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("rank compute_ms\n0 610\n1 612\n2 1009\n", "compute_ms"),
        ("rank,compute_ms\n0,610\n1,612\n2,1009\n", "compute_ms"),
        ("| rank | compute_ms |\n|---|---|\n| 0 | 610 |\n| 1 | 612 |\n| 2 | 1009 |\n", "compute_ms"),
        ("rank\tcompute (ms)\n0\t610\n1\t612\n2\t1009\n", "compute"),
        ("rank  compute time (ms)\n0     610\n1     612\n2     1009\n", "compute time"),
        ("rank=0 compute_ms=610\nrank=1 compute_ms=612\nrank=2 compute_ms=1009\n", "compute_ms"),
        ("rank 0: compute 610 ms\nrank 1: compute 612 ms\nrank 2: compute 1009 ms\n", "compute"),
        ("backward:\n  Rank 0: 610ms\n  Rank 1: 612ms\n  Rank 2: 1009ms\n", "backward"),
        ("rank compute_ms: 0:610 1:612 2:1009\n", "compute_ms"),
        (
            "".join(json.dumps({"rank": r, "compute_ms": v}) + "\n" for r, v in ((0, 610), (1, 612), (2, 1009))),
            "compute_ms",
        ),
        ("Rank=0 compute_ms=610 Rank=1 compute_ms=612 Rank=2 compute_ms=1009\n", "compute_ms"),
    ],
)
def test_the_same_measurements_in_many_forms(text: str, metric: str) -> None:
    assert series(parsed(tables.parse, text), metric) == SAME


def test_the_rank_of_the_writer_counts_where_the_line_names_none() -> None:
    text = "".join(f"[rank{r}] step 10 compute_ms={v}\n" for r, v in ((0, 610), (1, 612), (2, 1009)))
    assert series(parsed(tables.parse, text), "compute_ms") == SAME


def test_gpus_of_different_machines_are_told_apart() -> None:
    text = "node gpu gemm_ms\na1 0 10\na1 1 11\na2 0 30\n"
    assert series(parsed(tables.parse, text), "gemm_ms") == {"a1/0": [10], "a1/1": [11], "a2/0": [30]}


def test_who_was_slowest_is_kept_in_order() -> None:
    (event,) = of(
        parsed(tables.parse, "step slowest_rank prep_ms(max/min)\n1 3 56/0.4\n2 6 51/0.3\n"), "straggler.slowest"
    )
    assert event.attrs["slowest"] == ["3", "6"] and event.attrs["values"]["prep_ms max"] == [56, 51]


def test_reports_that_name_a_straggler_in_brackets() -> None:
    text = "".join(
        f"STRAGGLER DETECTION WARNING: some GPUs have worse relative performance. Affected ranks: [{r}]\n"
        for r in (5, 5, 5)
    )
    (event,) = of(parsed(tables.parse, text), "straggler.slowest")
    assert event.attrs["slowest"] == ["5", "5", "5"]


def test_scores_that_are_not_numbers_are_kept_as_such() -> None:
    events = parsed(tables.parse, "Rank=0 Score=nan\nRank=1 Score=0.98\nperf scores: {'perf/min': nan}\n")
    values = series(events, "Score")
    assert math.isnan(values["0"][0]) and values["1"] == [0.98]
    assert of(events, "straggler.no_scores")


def test_a_table_of_gpus_becomes_samples() -> None:
    text = (
        "# gpu   pwr gtemp mtemp    sm   mem  mclk  pclk\n"
        "# Idx     W     C     C     %     %   MHz   MHz\n"
        "    0   651    64    71   100    44  2619  1965\n"
        "    3   301    58    66   100    21  2619   960\n"
    )
    samples = of(parsed(tables.parse, text), "gpu.sample")
    assert [e.gpu.index for e in samples if e.gpu] == [0, 3]
    assert samples[1].attrs["levels"] == {
        "power": 301, "temperature": 58, "temperature_memory": 66, "utilisation": 100, "clock_sm": 960
    }  # fmt: skip


def test_levels_of_one_gpu_and_of_the_others_in_a_sentence() -> None:
    events = parsed(tables.parse, "gpu 5 clock 1095 MHz, others 1980 MHz; HW slowdown: active\n")
    clocks = {e.gpu.index if e.gpu else None: e.attrs["levels"].get("clock_sm") for e in of(events, "gpu.sample")}
    assert clocks[5] in (1095, None) and 1980 in clocks.values()
    (event,) = of(events, "gpu.hw_slowdown")
    assert event.gpu is not None and event.gpu.index == 5


def test_counters_of_links_with_the_time_between_sweeps() -> None:
    text = "node gpu link recovery\nk7 0 13 0\nk7 0 14 505\n# +21 min\nk7 0 14 508\n"
    totals = [e.attrs for e in of(parsed(tables.parse, text), "counter.total") if e.attrs["port"] == "14"]
    assert [(a["value"], a["sample"], a["elapsed_s"]) for a in totals] == [(505, 0, 0), (508, 1, 1260)]


@pytest.mark.parametrize(
    "text",
    [
        "epoch 3 loss 2.01 lr 0.0003\nepoch 4 loss 1.99 lr 0.0003\n",
        "[rank0] step 5 loss 2.0\n[rank1] step 5 loss 2.0\n",
        "NVRM: Xid (PCI:0002:00:00): 119, pid=1, name=x, Timeout after 6s of waiting for RPC response from GPU1 GSP!\n",
        "host db1 port 5432 timeout 30s\nhost db2 port 5432 timeout 30s\n",
        "rank 0 seed 1\nrank 1 seed 2\n",
        "2031-09-18 22:57:26,549 inference INFO: Total inference time: 0:00:04.019145 (0.0064 s / img per device, on 8 devices)\n"
        "2031-09-18 22:57:32,258 timed_section INFO: EXPOSED: Launching evaluation task took 0.097s\n"
        "2031-09-18 22:58:04,258 timed_section INFO: Evaluating predictions took 31.850s\n"
        "2031-09-18 22:58:05,294 trainer INFO: bbox mAP: 0.15272887376857675, segm mAP: 0.15496564502406363\n",
        "",
    ],
)
def test_lines_of_other_things_give_no_series(text: str) -> None:
    assert not of(tables.parse(document(text), shipped()) or [], "straggler.series")


@pytest.mark.parametrize(
    ("name", "unit", "kind"),
    [
        ("compute_ms", "", "compute"),
        ("all_reduce_ms", "", "wait"),
        ("AllReduce time", "", "wait"),
        ("dataloader_s", "", "host"),
        ("input_wait_ms", "", "host"),
        ("step_time", "", "step"),
        ("gpu_relative_perf", "", "score"),
        ("tokens_per_s", "", "throughput"),
        ("busbw", "GB/s", "bandwidth"),
        ("loss", "", None),
        ("timeout_ms", "", None),
        ("step", "", None),
        ("grad_norm", "", None),
    ],
)
def test_what_a_name_measures(name: str, unit: str, kind: str | None) -> None:
    assert metric_kind(name, unit) == kind


def test_what_a_sentence_says_of_limits_and_of_all_ranks() -> None:
    (event,) = of(
        parsed(tables.parse, "power limit 400 W (default 700 W) on every GPU of row C\n"), "gpu.power_limit_low"
    )
    assert event.attrs["value"] == 400
    text = "rank times: step time 1.00 s -> 1.38 s since 13:00 on all ranks\n"
    (event,) = of(parsed(tables.parse, text), "straggler.all_slow_said")
    assert event.attrs["ratio"] == 1.38
    for other in (text.replace("1.38", "1.02"), text.replace("all ranks", "rank 3"), "rank 0 up at 13:00 18:00\n"):
        assert not of(tables.parse(document(other), shipped()) or [], "straggler.all_slow_said")


def test_extremes_of_reports_name_the_slowest_rank() -> None:
    one_line = "^^^^ Rank: 0 | MnRtt/Rnk: 812.10ms/17 | MxRtt/Rnk: 1411.88ms/45 | MnETpt/Rnk: 80.0TF/9 | MxETpt/Rnk: 90.0TF/2\n"
    (event,) = of(parsed(tables.parse, one_line * 3), "straggler.slowest")
    assert event.attrs["slowest"] == ["45", "45", "45"]
    apart = "\t Train MinThroughput/Rank: 88.10TF/19\n\t Train MaxThroughput/Rank: 129.50TF/2\n"
    (event,) = of(parsed(tables.parse, "rank\n" + apart * 3), "straggler.slowest")
    assert event.attrs["slowest"] == ["19", "19", "19"]
    even = "\t Train MinThroughput/Rank: 129.00TF/19\n\t Train MaxThroughput/Rank: 129.50TF/2\n"
    assert tables.parse(document("rank\n" + even * 3), shipped()) is None


SCRAPE = 'DCGM_FI_DEV_{}{{gpu="{}",UUID="GPU-{}{}",pci_bus_id="00000000:0{}:00.0",Hostname="s9"}} {} {}\n'


def test_exporter_gauges_are_levels_of_one_gpu() -> None:
    text = "".join(
        SCRAPE.format(n, 2, 2, 2, 2, v, 1800000000000)
        for n, v in (("GPU_TEMP", 61), ("ROW_REMAP_FAILURE", 1), ("ECC_DBE_VOL_TOTAL", 0))
    )
    events = parsed(prometheus.parse, text)
    (sample,) = of(events, "gpu.sample")
    assert sample.node == "s9" and sample.gpu is not None and (sample.gpu.index, sample.gpu.pci) == (2, "0000:02:00.0")
    assert sample.time_ns == 1_800_000_000 * 10**9 and sample.attrs["levels"]["temperature"] == 61
    assert of(events, "gpu.remap_failed")


@pytest.mark.parametrize(("code", "signature"), [(79, "gpu.xid_gauge"), (31, "gpu.xid_gauge_application"), (0, None)])
def test_the_xid_gauge_is_never_an_event(code: int, signature: str | None) -> None:
    events = parsed(prometheus.parse, SCRAPE.format("XID_ERRORS", 1, 1, 1, 1, code, 1800000000000))
    assert {e.signature for e in events} - {"gpu.sample"} == ({signature} if signature else set())
    assert all(shipped()[e.signature].role in ("context", "noise") for e in events)


def test_two_scrapes_are_two_samples_and_blanks_are_no_levels() -> None:
    text = "".join(
        SCRAPE.format("ECC_SBE_VOL_TOTAL", 4, 4, 4, 4, v, t) for v, t in ((10, 1800000000000), (900, 1800000060000))
    )
    samples = of(
        parsed(prometheus.parse, text + SCRAPE.format("GPU_TEMP", 4, 4, 4, 4, 2147483632, 1800000060000)), "gpu.sample"
    )
    assert [(e.attrs["sample"], e.attrs["levels"]) for e in samples] == [
        (0, {"ecc_corrected_volatile": 10}),
        (1, {"ecc_corrected_volatile": 900}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL gpu0: rate 17902/s (job running) ; rate 0/s (idle)\n",
        'rate(DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{gpu="0"}[5m]) 17902\n',
    ],
)
def test_rates_that_somebody_worked_out(text: str) -> None:
    first = of(parsed(prometheus.parse, text), "counter.total")[0]
    assert first.attrs["counter"] == "ecc_corrected" and first.attrs["rate"] is True and first.attrs["value"] == 17902
    assert first.gpu is not None and first.gpu.index == 0


def test_node_exporter_counters_of_ports() -> None:
    (event,) = parsed(
        prometheus.parse,
        'node_infiniband_link_downed_total{device="mlx5_2",instance="w12:9100",port="1"} 4 1790000000000\n',
    )
    assert (event.nic, event.node, event.attrs["counter"], event.attrs["port"]) == ("mlx5_2", "w12", "link_downed", "1")


HEALTH = """
| Health Monitor Report                                                                |
| Overall Health            | Warning                                                  |
| GPU                       |                                                          |
| -> 4                      | Warning                                                  |
|    -> Errors              |                                                          |
|       -> PCIe system      | Warning                                                  |
|                           | Detected more than 8 PCIe replays per minute for GPU 4 : |
"""


def test_health_reports_as_table_and_as_json() -> None:
    (event,) = parsed(dcgm.parse, HEALTH, "dcgmi health -c")
    assert event.signature == "dcgm.health_pcie" and event.gpu is not None and event.gpu.index == 4
    assert "8 PCIe replays" in event.attrs["message"]
    body = {
        "body": {
            "GPU": {
                "children": {
                    "4": {
                        "children": {
                            "Memory system": {
                                "children": {"Errors": {"value": "row remap failure"}},
                                "value": "Failure",
                            }
                        },
                        "value": "Failure",
                    }
                }
            },
            "Overall Health": {"value": "Failure"},
        },
        "header": ["Health Monitor Report"],
    }
    events = parsed(dcgm.parse, json.dumps(body), "dcgmi health -c -j")
    assert [(e.signature, e.gpu.index if e.gpu else None) for e in events if e.attrs["test"] == "Memory system"] == [
        ("dcgm.health_failure", 4)
    ]
    old = (
        "| Health Monitor Report |\n| Overall Health | Warning |\n| GPU ID: 2 | Warning |\n"
        "|  | Thermal system: Warning - Detected thermal violation |\n"
    )
    assert [e.signature for e in parsed(dcgm.parse, old)] == ["dcgm.health_warning"]


@pytest.mark.parametrize(
    ("row", "signature", "gpus"),
    [
        ("| Memory                    | Fail - GPU: 3                                  |", "dcgm.diag_failed", [3]),
        ("| Targeted Stress           | Fail - GPUs: 1, 6                              |", "dcgm.diag_failed", [1, 6]),
        ("| Persistence Mode          | Fail                                           |", "dcgm.diag_setup", [None]),
        ("| PCIe                      | Skip - All                                     |", None, []),
    ],
)
def test_diagnostics_tell_hardware_from_setup(row: str, signature: str | None, gpus: list[int | None]) -> None:
    text = (
        f"| Diagnostic                | Result                                         |\n| Denylist | Pass |\n{row}\n"
    )
    events = [e for e in parsed(dcgm.parse, text, "dcgmi diag -r 3") if e.signature != "dcgm.diag_passed"]
    assert [e.signature for e in events] == [signature] * len(gpus)
    assert [e.gpu.index if e.gpu else None for e in events] == gpus


def test_diagnostics_as_json_and_in_one_line() -> None:
    old = {
        "DCGM GPU Diagnostic": {
            "test_categories": [
                {
                    "category": "Hardware",
                    "tests": [
                        {
                            "name": "Memory",
                            "results": [
                                {"gpu_ids": "5", "status": "Fail", "warnings": [{"warning": "pattern mismatch"}]}
                            ],
                        }
                    ],
                }
            ]
        }
    }
    (event,) = parsed(dcgm.parse, json.dumps(old))
    assert event.signature == "dcgm.diag_failed" and event.gpu is not None and event.gpu.index == 5
    new = {
        "category": "Hardware",
        "dcgm": 1,
        "tests": [{"name": "memory", "results": [{"entity_group": "GPU", "entity_id": 0, "status": "Pass"}]}],
    }
    assert [e.signature for e in parsed(dcgm.parse, json.dumps(new), "dcgmi diag -j")] == ["dcgm.diag_passed"]
    assert [e.signature for e in parsed(dcgm.parse, "reboots: 3 ; dcgmi diag -r 3: Pass ; pending: No\n")] == [
        "dcgm.diag_passed"
    ]


NCCL = (
    "# nThread 1 nGpus 1\n#  Rank  0 Group 0 Pid 1 on  {} device  0 [0x42] NVIDIA H100\n"
    "  1073741824     268435456     float     sum      -1    5000  200.1  375.0  {}  5001  200.0  374.0      0\n"
    "# Avg bus bandwidth    : {}\n"
)


def test_nccl_tests_give_the_best_bandwidth_of_their_machines() -> None:
    (event,) = parsed(bandwidth.parse, NCCL.format("kz11", 0, 190.2))
    assert event.signature == "bandwidth.result" and event.attrs["gbs"] == 375 and event.node == "kz11"


def test_wrong_results_are_a_fault_at_once() -> None:
    assert of(parsed(bandwidth.parse, NCCL.format("kz11", 12, 190.2)), "collective.wrong_result")
    assert not of(parsed(bandwidth.parse, NCCL.format("kz11", 0, 190.2)), "collective.wrong_result")


def test_matrices_of_bandwidth_tests() -> None:
    text = (
        "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)\n"
        "           0         1         2\n 0     55.31     55.28     13.02\n\nSUM x 1\n"
    )
    (event,) = parsed(bandwidth.parse, text)
    assert event.attrs["rows"] == [[55.31, 55.28, 13.02]]


@pytest.mark.parametrize(
    ("text", "title", "signature"),
    [
        ("version:        525.60.13\n", "modinfo nvidia | grep ^version", "driver.version"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.54.03  Release Build\n", "", "driver.version"),
        ("ls: cannot access '/proc/3307719': No such file or directory\n", "", "process.absent"),
        ("  PID   PPID   PGID COMMAND\n81344      1  81220 VLLM::EngineCore\n", "", "process.orphan"),
        ("3308140       1 S    86011 pt_data_worker\n", "ps -eo pid,ppid,stat,etimes,comm", "process.orphan"),
        ("cpu-bind=NONE - gen-11, task  3  3 [40121]: mask 0xffff...ffff\n", "", "cpu.unbound"),
        ('  The governor "powersave" may decide which speed to use\n', "", "cpu.governor_saving"),
    ],
)
def test_the_machine_around_the_gpus(text: str, title: str, signature: str) -> None:
    assert [e.signature for e in parsed(machine.parse, text, title)] == [signature]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("version: 1.2.3\n", "helm list"),
        ("version:        525.60.13\n", "cat package.yaml"),
        ("  PID   PPID COMMAND\n81344   4000 python\n", ""),
        ("cpu-bind=MASK - gen-11, task  0  0 [40121]: mask 0xff set\n", ""),
        ("+ srun -l --mpi=pmi2 --cpu-bind=none -N4 --ntasks=32 ./run_and_time.sh\n", ""),
        ('  The governor "performance" may decide which speed to use\n', ""),
    ],
)
def test_a_machine_in_order_gives_nothing(text: str, title: str) -> None:
    assert machine.parse(document(text, title), shipped()) is None


@pytest.mark.parametrize(
    ("masks", "shared"), [(("0x1", "0x1", "0x1"), True), (("0x1", "0x2", "0x4"), False), (("0xffff", "0xffff"), False)]
)
def test_ranks_that_share_one_processor(masks: tuple[str, ...], shared: bool) -> None:
    text = "".join(f"cpu-bind=MASK - gx-2, task  {i}  {i} [88{i}]: mask {m} set\n" for i, m in enumerate(masks))
    events = machine.parse(document(text), shipped()) or []
    assert bool(of(events, "cpu.shared")) is shared
