"""Slow ranks, GPUs beside their peers, and links whose counters rise: who is blamed, and when nobody is."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.attribution.rules.gpu_levels import gpu_levels
from keepstep.attribution.rules.links import common_low, gpu_means, links, split_pair
from keepstep.attribution.rules.peers import always, outliers, rotates, standings
from keepstep.attribution.rules.stragglers import stragglers
from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.records.event import Event, Gpu
from keepstep.records.verdict import NODE_ACTIONS
from tests.attribution.shipped_events import made, named, sample, series, total


def slow(event: Event) -> list[Event]:
    return stragglers([event], shipped())


# --- series ----------------------------------------------------------------------------------------------------------------------


def ranks(*rows: list[float]) -> dict[str, list[float]]:
    return {str(i): list(row) for i, row in enumerate(rows)}


GOOD = [600.0, 604.0, 598.0, 602.0]


def test_the_same_one_slow_all_the_time_is_named() -> None:
    (event,) = slow(series(ranks(GOOD, GOOD, [900.0, 910.0, 905.0, 899.0], GOOD)))
    assert (event.signature, event.rank) == ("derived.straggler.constant", 2)
    found = attribute([series(ranks(GOOD, GOOD, [900.0, 910.0, 905.0, 899.0], GOOD))], shipped())
    assert (found.fault_class, found.action, found.entity.rank) == ("hardware", "drain_at_checkpoint", 2)


def test_one_sample_is_only_a_hint() -> None:
    event = series(ranks([600.0], [601.0], [700.0], [602.0]))
    assert named(slow(event)) == ["derived.straggler.once"]
    assert attribute([event], shipped()).action == "ask_human"


def test_who_reports_work_that_peers_do_not_is_no_peer_of_theirs() -> None:
    # Rank 0 alone evaluates, and prints how long each part of that took under the name that all print once.
    alone = ranks([0.21, *[1.5, 1.6, 0.7] * 4], [0.21], [0.20], [0.20], [0.21])
    assert slow(series(alone)) == []
    # A slow one may well have fewer samples than its peers.
    late = ranks(GOOD * 4, GOOD * 4, [900.0, 910.0, 905.0, 899.0], GOOD * 4)
    assert [(e.signature, e.rank) for e in slow(series(late))] == [("derived.straggler.constant", 2)]


def test_a_slowest_one_that_changes_has_no_place_and_nobody_is_taken_out() -> None:
    rows = [[600.0] * 8 for _ in range(8)]
    for step in range(8):
        rows[(step * 3) % 8][step] = 1900.0
    event = series(ranks(*rows))
    (found,) = slow(event)
    assert found.signature == "derived.straggler.rotating" and found.rank is None and found.node is None
    assert attribute([event], shipped()).action == "ask_human"


def test_reports_of_who_was_slowest() -> None:
    def report(*names: str) -> list[str]:
        return named(slow(made("straggler.slowest", None, attrs={"slowest": list(names), "values": {}})))

    assert report("45", "45", "45", "3") == ["derived.straggler.constant"]
    assert report("3", "6", "1", "7") == ["derived.straggler.rotating"]
    assert report("3", "3") == [] and report("3", "4", "3", "4") == [] and report("GPU", "GPU", "GPU") == []


def test_who_waits_least_is_the_one_that_is_waited_for() -> None:
    (event,) = slow(series(ranks([400.0], [402.0], [3.0], [401.0]), "wait"))
    assert (event.signature, event.rank) == ("derived.straggler.waits_least", 2)
    (event,) = slow(series(ranks([400.0], [402.0], [0.0], [401.0]), "wait"))
    assert event.rank == 2
    assert slow(series(ranks([400.0], [402.0], [900.0], [401.0]), "wait")) == []


@pytest.mark.parametrize(
    ("kind", "values", "rank"),
    [
        ("score", [0.99, 1.0, 0.62, 0.98], 2),
        ("score", [0.99, 1.0, 0.80, 0.98], None),
        ("throughput", [400.0, 401.0, 300.0, 399.0], 2),
        ("throughput", [400.0, 401.0, 390.0, 399.0], None),
        ("compute", [600.0, 610.0, 630.0, 605.0], None),
        ("compute", [600.0, 610.0], None),
    ],
)
def test_limits_of_each_kind_of_measurement(kind: str, values: list[float], rank: int | None) -> None:
    events = slow(series(ranks(*([v] * 3 for v in values)), kind))
    assert [e.rank for e in events] == ([] if rank is None else [rank])


def test_nan_is_no_verdict_about_anybody() -> None:
    nan = math.nan
    assert named(slow(series(ranks([nan], [nan], [nan]), "score"))) == ["derived.straggler.no_scores"]
    assert slow(series(ranks([0.99], [nan], [1.0], [0.98]), "score")) == []
    found = attribute([series(ranks([nan], [nan]), "score")], shipped())
    assert found.action not in NODE_ACTIONS


def test_all_slower_together_have_a_common_cause() -> None:
    drift = [600.0, 602.0, 601.0, 900.0, 903.0, 901.0]
    event = series(ranks(drift, drift, drift, drift), "step")
    assert named(slow(event)) == ["derived.straggler.all_slow"]
    assert attribute([event], shipped()).action == "ask_human"
    assert slow(series(ranks(GOOD, GOOD, GOOD), "step")) == []


def test_slow_host_work_is_not_the_gpu() -> None:
    (event,) = slow(series(ranks([20.0] * 4, [21.0] * 4, [90.0] * 4, [20.0] * 4), "host"))
    assert event.signature == "derived.straggler.host"
    assert attribute([event], shipped()).action not in NODE_ACTIONS


def test_places_of_series_by_gpu_and_node() -> None:
    (event,) = slow(
        series({"a1/0": [10.0] * 3, "a1/1": [10.0] * 3, "a2/0": [30.0] * 3}, by="gpu", nodes={"a2/0": "a2"})
    )
    assert event.gpu == Gpu(index=0) and event.node == "a2"
    (event,) = slow(series({"a1": [10.0] * 3, "a2": [10.0] * 3, "a3": [30.0] * 3}, by="node"))
    assert event.node == "a3"


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 40), st.integers(3, 12), st.integers(0, 10**6))
def test_noise_alone_accuses_nobody_for_certain(count: int, points: int, seed: int) -> None:
    rng = random.Random(seed)
    event = series(ranks(*([600.0 * (1 + rng.uniform(-0.02, 0.02)) for _ in range(points)] for _ in range(count))))
    assert slow(event) == []


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=6), max_size=8),
       st.sampled_from(["compute", "host", "step", "wait", "score", "throughput", "bandwidth", "?"]),
       st.sampled_from(["rank", "gpu", "node", "pair", "nic"]))  # fmt: skip
def test_any_series_gives_events_of_the_catalog(values: dict[str, list[float]], kind: str, by: str) -> None:
    for event in [*slow(series(values, kind, by)), *links([series(values, kind, by)], shipped())]:
        assert event.signature in shipped()


def test_twenty_thousand_ranks_are_compared_in_no_time() -> None:
    rng = random.Random(3)
    values = {str(i): [600.0 + rng.random() for _ in range(5)] for i in range(20_000)}
    values["77"] = [900.0] * 5
    begin = time.process_time()
    (event,) = slow(series(values))
    assert event.rank == 77
    assert time.process_time() - begin < 10


def test_samples_of_several_kinds_that_agree_are_more_than_one() -> None:
    forward, backward = (series(ranks([n], [n], [1.5 * n], [n])) for n in (200.0, 400.0))
    assert named(slow(forward)) == ["derived.straggler.once"]
    both = stragglers([forward, backward], shipped())
    assert [(e.signature, e.rank) for e in both] == [("derived.straggler.constant", 2)]


def test_slow_data_everywhere_point_behind_the_machines() -> None:
    event = series(ranks([15.0, 900.0], [16.0, 910.0], [15.0, 930.0], [17.0, 905.0]), "host")
    assert named(slow(event)) == ["derived.straggler.all_data_slow"]
    assert attribute([event], shipped()).fault_class == "storage"
    assert slow(series(ranks([15.0, 18.0], [16.0, 17.0], [15.0, 19.0]), "host")) == []


# --- peers -----------------------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.floats(0.1, 1e6), min_size=2, max_size=12))
def test_everybody_is_compared_with_the_others_alone(values: dict[str, float]) -> None:
    for standing in standings(values, "more"):
        rest = sorted(v for name, v in values.items() if name != standing.name)
        middle = len(rest) // 2
        median = rest[middle] if len(rest) % 2 else (rest[middle - 1] + rest[middle]) / 2
        assert math.isclose(standing.peers, median)


def test_many_exceptions_are_none() -> None:
    assert outliers({"a": 1, "b": 1, "c": 1, "d": 2}, "more", 1.5)[0].name == "d"
    assert outliers({"a": 1, "b": 1, "c": 2, "d": 2}, "more", 1.5) == []
    assert outliers({"a": 1, "b": 2}, "more", 1.5) == []
    assert [s.name for s in outliers({"5": 1095.0, "others": 1980.0}, "less", 1.15)] == ["5"]


def test_always_and_rotating_exclude_each_other() -> None:
    assert always(["a"] * 4) == "a" and not rotates(["a"] * 4)
    assert always(["a", "b", "c"]) is None and rotates(["a", "b", "c"])
    assert always(["a", "a"]) is None and not rotates(["a", "b"])


# --- GPUs ------------------------------------------------------------------------------------------------------------------------


def levels(name: str, *values: float, loaded: bool | None = True, **more: object) -> list[Event]:
    return [sample(i, {name: v, **more}, loaded=loaded) for i, v in enumerate(values)]


def of_gpus(events: list[Event]) -> list[tuple[str, int | None]]:
    return [(e.signature, e.gpu.index if e.gpu else None) for e in gpu_levels(events, shipped())]


def test_a_low_clock_under_the_same_load() -> None:
    assert of_gpus(levels("clock_sm", 1980, 1965, 1200, 1980)) == [("derived.gpu.clock_low", 2)]
    assert of_gpus(levels("clock_sm", 1980, 1965, 1900, 1980)) == []
    assert of_gpus(levels("clock_sm", 210, 210, 1980, 210, loaded=False)) == []
    assert of_gpus(levels("clock_sm", 1980, 1200)) == []


def test_a_low_clock_that_somebody_asked_for_is_no_hardware() -> None:
    locked = [*levels("clock_sm", 1980, 1980, 1980), sample(3, {"clock_sm": 1200, "reason_app_clocks": True})]
    assert of_gpus(locked) == [("derived.gpu.clock_locked", 3)]
    assert attribute(locked, shipped()).action == "ask_human"
    capped = [*levels("clock_sm", 1980, 1980, 1980, power_limit=700), sample(3, {"clock_sm": 1200, "power_limit": 350})]
    assert of_gpus(capped) == [("derived.gpu.power_limit_odd", 3)]


def test_idle_links_of_peers_say_nothing() -> None:
    assert of_gpus(levels("pcie_gen", 5, 5, 1, 5)) == [("derived.gpu.pcie_odd", 2)]
    assert of_gpus(levels("pcie_gen", 5, 5, 1, 5, loaded=False)) == []
    assert of_gpus(levels("pcie_gen", 5, 5, 1, 5, loaded=None)) == []


def test_corrected_errors_count_as_a_rate_beside_peers() -> None:
    def at(number: int, at_s: float, *values: float) -> list[Event]:
        return [sample(i, {"ecc_corrected_volatile": v}, number=number, at_s=at_s) for i, v in enumerate(values)]

    rising = at(0, 0.0, 0, 0, 900, 0) + at(1, 60.0, 0, 1, 90_000, 0)
    assert ("derived.gpu.ecc_rising", 2) in of_gpus(rising)
    found = attribute(rising, shipped())
    assert (found.fault_class, found.action) == ("hardware", "drain_at_checkpoint")
    still = at(0, 0.0, 0, 0, 900, 0) + at(1, 60.0, 0, 0, 900, 0)
    assert of_gpus(still) == []
    alike = at(0, 0.0, 0, 0, 0, 0) + at(1, 60.0, 9000, 9100, 9050, 9002)
    assert of_gpus(alike) == []


def test_a_total_alone_is_a_hint_only_where_peers_have_next_to_none() -> None:
    assert of_gpus(levels("ecc_corrected_volatile", 0, 2, 48_000, 0)) == [("derived.gpu.ecc_many", 2)]
    assert of_gpus(levels("ecc_corrected_volatile", 9000, 20_000, 48_000, 7000)) == []
    assert of_gpus(levels("ecc_corrected_volatile", 0, 0, 40, 0)) == []


def test_a_hot_gpu_among_cool_ones() -> None:
    assert of_gpus(levels("temperature", 61, 63, 91, 60)) == [("derived.gpu.hot", 2)]
    assert of_gpus(levels("temperature", 61, 63, 75, 60)) == []
    assert of_gpus(levels("temperature", 88, 90, 91, 89)) == []


def test_memory_in_the_name_of_a_process_that_is_gone() -> None:
    holder = made("gpu.process", None, gpu=Gpu(index=0), attrs={"pid": 77, "used_mib": 39_000})
    gone = made("process.absent", None, attrs={"pid": 77})
    orphan = made("process.orphan", None, attrs={"pid": 80, "group": 77})
    other = made("process.orphan", None, attrs={"pid": 1234, "group": 1234})
    oom = made("torch.cuda_oom", None)
    assert of_gpus([holder]) == [] and of_gpus([holder, other]) == []
    for witness in (gone, orphan):
        assert of_gpus([holder, witness]) == [("derived.gpu.memory_held", 0)]
        found = attribute([holder, witness, oom], shipped())
        assert (found.fault_class, found.action) == ("framework", "restart_job")
    assert attribute([oom], shipped()).fault_class == "user_code"


def test_reports_of_a_memory_module_that_count_ever_more() -> None:
    def report(count: int, place: str = "DIMM#0", at: int = 0) -> Event:
        return made("edac.corrected", float(at), node="n1", attrs={"count": str(count), "location": place})

    assert of_gpus([report(31), report(4410, at=900)]) == [("derived.host.memory_rising", None)]
    assert of_gpus([report(31), report(40, at=900)]) == []
    assert of_gpus([report(31), report(4410, "DIMM#1", 900)]) == []


# --- links -----------------------------------------------------------------------------------------------------------------------


def of_links(*events: Event) -> list[tuple[str, str | None]]:
    return [(e.signature, e.nic) for e in links(list(events), shipped())]


def test_a_rate_counts_and_a_lifetime_does_not() -> None:
    first = total("symbol_error", 505_000, nic="mlx5_0", elapsed_s=0.0)
    assert of_links(first) == []
    later = total("symbol_error", 505_400, number=1, nic="mlx5_0", elapsed_s=600.0)
    assert of_links(first, later) == [("derived.link.rising", "mlx5_0")]
    slowly = total("symbol_error", 505_001, number=1, nic="mlx5_0", elapsed_s=600.0)
    assert of_links(first, slowly) == []


def test_a_counter_that_was_cleared_counts_from_there() -> None:
    readings = [total("link_downed", v, number=i, nic="mlx5_0") for i, v in enumerate((255, 0, 0))]
    assert of_links(*readings) == []
    assert of_links(*readings, total("link_downed", 2, number=3, nic="mlx5_0")) == [("derived.link.rising", "mlx5_0")]


def test_without_a_time_only_the_one_that_grows_alone() -> None:
    def twice(nic: str, grown: float) -> list[Event]:
        return [total("port_rcv_errors", 10, nic=nic), total("port_rcv_errors", 10 + grown, number=1, nic=nic)]

    quiet = [e for nic in ("mlx5_1", "mlx5_2", "mlx5_3") for e in twice(nic, 0)]
    assert of_links(*twice("mlx5_0", 400), *quiet) == [("derived.link.rising", "mlx5_0")]
    assert of_links(*twice("mlx5_0", 400)) == []
    assert of_links(*twice("mlx5_0", 400), *twice("mlx5_1", 300), *quiet[2:]) == []


def test_all_links_together_are_nobodys_cable() -> None:
    events = [total("link_downed", v, number=n, nic=f"mlx5_{i}") for i in range(8) for n, v in enumerate((3, 4))]
    (event,) = links(events, shipped())
    assert event.signature == "derived.link.common" and event.nic is None
    assert attribute(events, shipped()).action == "ask_human"


def test_the_family_of_a_counter_decides_what_is_blamed() -> None:
    def growing(counter: str) -> str:
        (event,) = links(
            [total(counter, 0, gpu=3, elapsed_s=0.0), total(counter, 99_999, number=1, gpu=3, elapsed_s=60.0)],
            shipped(),
        )
        assert event.gpu == Gpu(index=3)
        return event.signature

    assert growing("nvlink_recovery") == "derived.nvlink.rising"
    assert growing("ecc_corrected") == "derived.gpu.ecc_rising"
    assert growing("pcie_replay") == "derived.gpu.pcie_replays"


def port(nic: str, rate: float, layer: str = "InfiniBand", up: bool = True, node: str = "n1") -> Event:
    return made("nic.port", None, nic=nic, node=node, attrs={"rate_gbps": rate, "layer": layer, "up": up, "port": "1"})


def test_a_port_slower_than_its_kind() -> None:
    fast = [port(f"mlx5_{i}", 400) for i in range(4)]
    assert of_links(*fast, port("mlx5_9", 100)) == [("derived.nic.rate_low", "mlx5_9")]
    assert of_links(*fast, port("mlx5_bond_0", 100, "Ethernet")) == []
    assert of_links(*fast, port("mlx5_9", 10, up=False)) == []
    assert of_links(*fast) == []


def test_a_port_that_is_down_counts_when_the_job_complains_of_it() -> None:
    down = made("nic.port_down", None, nic="mlx5_3", node="n1")
    assert attribute([down], shipped()).action == "ask_human"
    complaint = next(
        e.id
        for e in shipped()
        if e.role == "root" and e.weights.get("fabric", 0) > 1 and e.scope == "nic" and e.id.startswith("mlx5.")
    )
    same = made(complaint, None, nic="mlx5_3", node="n1")
    other = made(complaint, None, nic="mlx5_4", node="n1")
    assert ("derived.nic.port_down_in_use", "mlx5_3") in of_links(down, same)
    assert of_links(down, other) == []


RUNS = {"a,b": 92.0, "a,c": 48.0, "b,d": 91.0, "c,d": 48.5, "b,c": 49.0}


def test_the_machine_that_all_slow_pairs_share() -> None:
    (event,) = links([series({k: [v] for k, v in RUNS.items()}, "bandwidth", "pair")], shipped())
    assert (event.signature, event.node) == ("derived.node.bandwidth_low", "c")
    assert links([series({k: [90.0] for k in RUNS}, "bandwidth", "pair")], shipped()) == []
    both = {"a,b": 48.0, "c,d": 48.0, "e,f": 92.0}
    assert links([series({k: [v] for k, v in both.items()}, "bandwidth", "pair")], shipped()) == []


def test_runs_on_groups_of_machines() -> None:
    def run(gbs: float, *nodes: str) -> Event:
        return made("bandwidth.result", None, attrs={"gbs": gbs, "nodes": list(nodes)})

    (event,) = links(
        [run(375.0, "a", "b"), run(190.0, "a", "c"), run(188.0, "b", "c"), run(374.0, "a", "d")], shipped()
    )
    assert event.node == "c"
    assert common_low([]) is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a,b", ["a", "b"]), ("a<->b", ["a", "b"]), ("a - b", ["a", "b"]), ("n-1,n-2", ["n-1", "n-2"]), ("", [])],
)
def test_names_of_pairs(text: str, parts: list[str]) -> None:
    assert split_pair(text) == parts


def test_the_gpu_whose_row_and_column_are_low() -> None:
    rows = [[None if i == j else 120.0 if 4 in (i, j) else 370.0 for j in range(6)] for i in range(6)]
    means = gpu_means(rows)
    assert min(means, key=lambda k: means[k]) == "4" and means["0"] == 370
    (event,) = links([made("bandwidth.matrix", None, attrs={"rows": rows, "metric": "p2p"})], shipped())
    assert (event.signature, event.gpu) == ("derived.gpu.bandwidth_low", Gpu(index=4))
    (event,) = links(
        [made("bandwidth.matrix", None, attrs={"rows": [[55.0, 55.1, 13.0, 55.2]], "metric": "h2d"})], shipped()
    )
    assert event.gpu == Gpu(index=2)
    assert (
        links([made("bandwidth.matrix", None, attrs={"rows": [[55.0, 54.0, 55.1]], "metric": "h2d"})], shipped()) == []
    )
