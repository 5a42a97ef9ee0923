"""Ports, counters, PCIe and NVLink as their tools print them."""

from __future__ import annotations

import pytest

from keepstep.catalog.load import shipped
from keepstep.sources.snapshots import lspci, ncclras, nvlink, port_counters, ports
from tests.sources.snapshot_texts import IBSTAT, document, of, parsed


def test_ibstat_tells_every_port_and_which_is_down() -> None:
    events = parsed(ports.parse, IBSTAT)
    up, down = of(events, "nic.port")
    assert (up.nic, up.attrs["up"], up.attrs["rate_gbps"], up.attrs["layer"]) == ("mlx5_0", True, 400, "InfiniBand")
    assert (down.nic, down.attrs["up"], down.attrs["physical"]) == ("mlx5_1", False, "Polling")
    assert [e.nic for e in of(events, "nic.port_down")] == ["mlx5_1"]


SYS = "Infiniband device 'mlx5_4' port 1 status:\n"
VERBS = "hca_id:\tmlx5_2\n\t\tport:\t1\n\t\t\tstate:\t\t\t"
MLXLINK = "State                           : Active\nPhysical state                  : LinkUp\nSpeed : IB-NDR\n"


@pytest.mark.parametrize(
    ("text", "title", "nic", "up"),
    [
        (
            SYS + "\tstate:\t\t 4: ACTIVE\n\tphys state:\t 5: LinkUp\n\trate:\t\t 400 Gb/sec (4X NDR)\n",
            "",
            "mlx5_4",
            True,
        ),
        (SYS + "\tstate:\t\t 1: DOWN\n\tphys state:\t 3: Disabled\n", "", "mlx5_4", False),
        (VERBS + "PORT_ACTIVE (4)\n\t\t\tlink_layer:\t\tInfiniBand\n", "", "mlx5_2", True),
        (VERBS + "PORT_INIT (2)\n", "", "mlx5_2", False),
        ("link mlx5_0/1 state ACTIVE physical_state LINK_UP netdev ib0\n", "rdma link", "mlx5_0", True),
        ("link rocep1s0/1 state DOWN physical_state DISABLED netdev ens1\n", "", "rocep1s0", False),
        ("mlx5_3 port 1 ==> ib3 (Down)\n", "ibdev2netdev", "mlx5_3", False),
        (MLXLINK, "mlxlink -d mlx5_7", "mlx5_7", True),
        ("mlx5_0 Active  mlx5_1 Active\n", "", "mlx5_1", True),
        ("mlx5_0: state Down\n", "", "mlx5_0", False),
    ],
)
def test_other_tools_say_the_same(text: str, title: str, nic: str, up: bool) -> None:
    port = next(e for e in of(parsed(ports.parse, text, title), "nic.port") if e.nic == nic)
    assert port.attrs["up"] is up
    assert bool([e for e in of(parsed(ports.parse, text, title), "nic.port_down") if e.nic == nic]) is not up


def test_a_spare_ethernet_port_is_only_context() -> None:
    text = (
        "2: eno1: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 9000 qdisc mq state UP\n"
        "3: eno2: <NO-CARRIER,BROADCAST,MULTICAST,UP> mtu 1500 qdisc mq state DOWN\n"
        "4: docker0: <NO-CARRIER> mtu 1500 state DOWN\n"
    )
    events = parsed(ports.parse, text)
    assert [e.nic for e in of(events, "nic.port_down_ethernet")] == ["eno2"]
    assert shipped()["nic.port_down_ethernet"].role == "context"
    assert not of(events, "nic.port_down")


def test_perfquery_twice_gives_two_samples_and_the_time_between() -> None:
    text = (
        "# Port extended counters: Lid 212 port 1 (CapMask: 0x5A00)\n"
        "SymbolErrorCounter:..............118\nPortRcvErrors:...................9\n"
        "# 10 min later\nSymbolErrorCounter:..............9120\n"
        "PortRcvErrors:...................9\n"
    )
    totals = of(parsed(port_counters.parse, text, "perfquery -x 212 1"), "counter.total")
    symbols = [e.attrs for e in totals if e.attrs["counter"] == "symbol_error"]
    assert [(a["value"], a["sample"], a["elapsed_s"]) for a in symbols] == [(118, 0, 0), (9120, 1, 600)]


def test_ethtool_and_ip_name_their_device() -> None:
    ethtool = of(
        parsed(
            port_counters.parse,
            "NIC statistics:\n     rx_crc_errors_phy: 5\n     rx_packets: 9\n",
            "ethtool -S ens3f0np0",
        ),
        "counter.total",
    )
    assert [(e.nic, e.attrs["counter"], e.attrs["value"]) for e in ethtool] == [("ens3f0np0", "rx_crc_errors_phy", 5)]
    ip = (
        "2: eth0: <BROADCAST,UP,LOWER_UP> mtu 9000 state UP\n"
        "    RX:  bytes packets errors dropped  missed   mcast\n    123 9 77 0 0 0\n"
        "    TX:  bytes packets errors dropped carrier collsns\n    99 8 0 12 3 0\n"
    )
    totals = {e.attrs["counter"]: e.attrs["value"] for e in of(parsed(port_counters.parse, ip), "counter.total")}
    assert totals == {"port_rcv_errors": 77, "port_xmit_discards": 12, "carrier_changes": 3}


@pytest.mark.parametrize(
    ("path", "text", "signature", "nic"),
    [
        ("tree/class-infiniband/mlx5_4/ports/1/counters/symbol_error", "7\n", "counter.total", "mlx5_4"),
        ("/sys/class/infiniband/mlx5_0/ports/1/hw_counters/local_ack_timeout_err", "3\n", "counter.total", "mlx5_0"),
        ("x/mlx5_2/ports/1/state", "1: DOWN\n", "nic.port_down", "mlx5_2"),
        ("x/mlx5_2/ports/1/state", "4: ACTIVE\n", "nic.port", "mlx5_2"),
    ],
)
def test_files_of_a_sysfs_tree_are_known_by_their_path(path: str, text: str, signature: str, nic: str) -> None:
    events = of(parsed(port_counters.parse, text, path=path), signature)
    assert [e.nic for e in events] == [nic]


@pytest.mark.parametrize(
    "path", ["x/mlx5_0/ports/1/counters/symbol_error", "x/mlx5_0/ports/1/counters/unicast_rcv_packets"]
)
def test_counters_that_say_nothing_give_nothing(path: str) -> None:
    text = "0\n" if path.endswith("symbol_error") else "99\n"
    assert port_counters.parse(document(text, path=path), shipped()) is None


DEVICE = "{bdf} {kind}: {name}\n\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported\n\t\tLnkSta:\t{sta}\n"


@pytest.mark.parametrize(
    ("kind", "name", "sta", "signature"),
    [
        ("Infiniband controller", "Mellanox Technologies MT2910", "Speed 32GT/s, Width x8 (downgraded)", "pcie.nic_degraded"),
        ("Ethernet controller", "Mellanox Technologies MT2892", "Speed 8GT/s (downgraded), Width x16", "pcie.nic_degraded"),
        ("Ethernet controller", "Mellanox Technologies MT2892", "Speed 8GT/s, Width x16 (ok)", "pcie.nic_degraded"),
        ("3D controller", "NVIDIA Corporation GH100", "Speed 2.5GT/s (downgraded), Width x16", "gpu.pcie_unclear"),
        ("Infiniband controller", "Mellanox Technologies MT2910", "Speed 32GT/s (ok), Width x16 (ok)", None),
        ("PCI bridge", "Broadcom / LSI PEX890xx", "Speed 2.5GT/s (downgraded), Width x1 (downgraded)", None),
    ],
)  # fmt: skip
def test_links_of_devices_below_what_they_can(kind: str, name: str, sta: str, signature: str | None) -> None:
    text = DEVICE.format(bdf="9b:00.0", kind=kind, name=name, sta=sta)
    events = lspci.parse(document(text), shipped()) or []
    assert [e.signature for e in events] == ([signature] if signature else [])


def test_acs_on_a_bridge_and_devices_that_are_gone() -> None:
    acs = (
        "3a:00.0 PCI bridge: PLX Technology device\n"
        "\tACSCtl: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-\n"
    )
    assert [e.signature for e in parsed(lspci.parse, acs)] == ["pcie.acs_on"]
    assert lspci.parse(document(acs.replace("+", "-")), shipped()) is None
    gone = "5e:00.0 3D controller: NVIDIA Corporation GA100 (rev ff)\n\t!!! Unknown header type 7f\n"
    assert {e.signature for e in parsed(lspci.parse, gone)} == {"gpu.lost"}
    assert {e.gpu.pci for e in parsed(lspci.parse, gone) if e.gpu} == {"0000:5e:00.0"}


SPEEDS = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-0000000000a0)\n"
    "\t Link 0: 26.562 GB/s\n\t Link 1: {}\n"
    "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-0000000000a1)\n"
    "\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
)


@pytest.mark.parametrize(("speed", "found"), [("26.562 GB/s", 0), ("<inactive>", 1), ("13.281 GB/s", 1)])
def test_an_nvlink_that_differs_from_its_peers(speed: str, found: int) -> None:
    events = nvlink.parse(document(SPEEDS.format(speed)), shipped()) or []
    assert len(of(events, "nvlink.inactive")) == found
    for event in events:
        assert event.gpu is not None and event.gpu.index == 0


def test_no_active_link_at_all_is_only_context() -> None:
    text = (
        "GPU 0: X (UUID: GPU-00000000-0000-0000-0000-0000000000a0)\n\t Link 0: <inactive>\n"
        "GPU 1: X (UUID: GPU-00000000-0000-0000-0000-0000000000a1)\n\t Link 0: <inactive>\n"
    )
    assert [e.signature for e in parsed(nvlink.parse, text)] == ["nvlink.all_inactive"]
    assert shipped()["nvlink.all_inactive"].role == "context"


def test_error_counters_of_links_are_totals_by_gpu_and_link() -> None:
    text = (
        "GPU 3: NVIDIA H100 (UUID: GPU-33333333-0000-0000-0000-000000000003)\n"
        "\t Link 7: Replay Errors: 41\n\t Link 7: Recovery Errors: 12\n"
        "\t Link 7: CRC Errors: 0\n"
    )
    totals = of(parsed(nvlink.parse, text), "counter.total")
    assert {e.attrs["counter"]: (e.attrs["value"], e.attrs["port"]) for e in totals} == {
        "nvlink_replay": (41, "7"),
        "nvlink_recovery": (12, "7"),
        "nvlink_crc_flit": (0, "7"),
    }


def test_the_matrix_names_the_gpu_that_is_worse_connected() -> None:
    row = "GPU{}\t{}\t0-31\t0\n"
    even = "".join(row.format(i, "\t".join(" X " if i == j else "NV18" for j in range(4))) for i in range(4))
    assert nvlink.parse(document(even, "nvidia-smi topo -m"), shipped()) is None
    odd = "".join(
        row.format(i, "\t".join(" X " if i == j else "SYS" if 2 in (i, j) else "NV18" for j in range(4)))
        for i in range(4)
    )
    (event,) = parsed(nvlink.parse, odd, "nvidia-smi topo -m")
    assert event.signature == "nvlink.pair_missing" and event.gpu is not None and event.gpu.index == 2
    pcie = odd.replace("NV18", "SYS")
    assert nvlink.parse(document(pcie, "nvidia-smi topo -m"), shipped()) is None


def test_ncclras_says_which_ranks_are_missing_dead_or_behind() -> None:
    text = (
        "NCCL version 2.24.3\n  INCOMPLETE\n  Missing communicator data from 1 job process\n"
        "  Process 3487984 on node 172.16.64.213 managing GPU 5\n\n"
        "Errors\n  DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
        "  Process 99 on node gx-7 managing GPU 1\n\n"
        "  MISMATCH\n  Communicator ranks have different collective operation counts\n"
        "  63 ranks have launched up to operation 1234\n  1 rank has launched up to operation 1230\n"
        "  Rank 12 -- GPU 4 managed by process 3001 on node gx-2\n"
    )
    events = parsed(ncclras.parse, text)
    assert {e.signature for e in events} == {"ncclras.missing", "ncclras.dead", "ncclras.mismatch"}
    assert [e.node for e in of(events, "ncclras.dead") if e.node] == ["gx-7"]
    assert [e.attrs["about_rank"] for e in of(events, "ncclras.mismatch") if "about_rank" in e.attrs] == [12]


@pytest.mark.parametrize("dead", [(1,), (0, 1, 2)])
def test_a_gpu_without_any_active_link_is_told_from_a_machine_without(dead: tuple[int, ...]) -> None:
    text = "\n".join(
        f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-aa0{i})\n"
        + (
            "NVML: Unable to retrieve NVLink information as all links are inActive"
            if i in dead
            else "\t Link 0: 26.562 GB/s"
        )
        for i in range(3)
    )
    found = [(e.signature, None if e.gpu is None else e.gpu.index) for e in parsed(nvlink.parse, text)]
    assert found == ([("nvlink.gpu_isolated", 1)] if len(dead) == 1 else [("nvlink.all_inactive", 0)])
