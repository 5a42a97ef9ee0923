"""Which machines could not talk, and whether they ever did."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, verdict_of


def failed(node: str, peer: str, at: str = "") -> str:
    return (
        f"{at}{node}:88:99 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer {peer}<41001> with error 12, "
        "opcode 0, len 0, vendor err 129"
    )


USING = "{}:5:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:{}<0>"


def test_a_failure_before_the_first_step_is_a_setting() -> None:
    text = lines(
        USING.format("n1", "10.0.0.1"),
        failed("n1", "10.0.0.2"),
        "# elapsed since launch: 20 s ; iterations completed: 0",
    )
    verdict = verdict_of(text)
    assert (verdict.signature, verdict.action) == ("derived.transport_never_worked", "fail_fast")


def test_a_failure_after_steps_is_the_link_of_that_pair() -> None:
    text = lines("2031-02-14T08:00:00Z step 900 loss 2.1", failed("n1", "n2", "2031-02-14T08:10:00Z "))
    assert "derived.link_failed" in conclusions(text)
    assert verdict_of(text).fault_class == "fabric"


def test_the_node_that_all_pairs_share_is_taken_out() -> None:
    text = lines("step 900 loss 2.1", failed("n1", "n7"), failed("n2", "n7"), failed("n7", "n3"))
    verdict = verdict_of(text)
    assert (verdict.signature, verdict.entity.node, verdict.action) == ("derived.node_unreachable", "n7", "cordon_node")


def test_addresses_are_nodes_where_nccl_said_so() -> None:
    text = lines(
        USING.format("n7", "10.0.0.7"),
        "step 900 loss 2.1",
        failed("n1", "10.0.0.7"),
        failed("n2", "10.0.0.7"),
        failed("n7", "n3"),
    )
    assert conclusions(text)["derived.node_unreachable"].node == "n7"


def test_pairs_without_a_common_node_blame_no_node() -> None:
    found = conclusions(lines("step 900 loss 2.1", failed("n1", "n2"), failed("n3", "n4")))
    assert "derived.node_unreachable" not in found


def test_one_pair_whose_ends_both_complain_blames_neither_end() -> None:
    found = conclusions(lines("step 900 loss 2.1", failed("n1", "n2"), failed("n2", "n1")))
    assert "derived.node_unreachable" not in found
    assert "derived.link_failed" in found


def test_falling_back_to_tcp_after_a_restart_is_seen() -> None:
    text = lines(
        USING.format("n3", "10.0.0.3"),
        "n3:5:9 [0] NCCL INFO Using network IB",
        "step 900 loss 2.1",
        "n3:5:9 [0] NCCL INFO NET/IB : No device found.",
        "n3:5:9 [0] NCCL INFO Using network Socket",
    )
    assert conclusions(text)["derived.transport_changed"].node == "n3"


def test_the_node_with_fewer_nics_than_the_others_is_odd() -> None:
    one = "n4:5:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.4<0>"
    text = lines(*[USING.format(f"n{i}", f"10.0.0.{i}") for i in (1, 2, 3)], one)
    assert conclusions(text)["derived.transport_odd"].node == "n4"


def test_all_nodes_alike_are_not_odd() -> None:
    assert conclusions(lines(*[USING.format(f"n{i}", f"10.0.0.{i}") for i in (1, 2, 3)])) == {}


@pytest.mark.parametrize(
    ("setting", "conclusion"),
    [
        ("NCCL_P2P_DISABLE=1", "derived.works_without_p2p"),
        ("NCCL_NET_GDR_LEVEL=0", "derived.works_without_gpu_direct"),
        ("NCCL_IB_DISABLE=1", "derived.works_without_rdma"),
        ("NCCL_CUMEM_ENABLE=0", "derived.works_without_feature"),
        ("NCCL_NVLS_ENABLE=0", "derived.works_without_nvls"),
        ("NCCL_SHM_DISABLE=1", "derived.works_without_shared_memory"),
    ],
)
def test_what_a_setting_switches_off_is_what_does_not_work(setting: str, conclusion: str) -> None:
    failing = "[rank0]: ncclInternalError: Internal check failed."
    assert conclusion in conclusions(lines(failing, f"with {setting} the run works"))
    assert conclusion in conclusions(lines(failing, f"==> rerun {setting} <==", "step 100 loss 3.2"))
    assert conclusion not in conclusions(lines(failing, f"{setting} does not help, it still hangs"))


def test_a_setting_of_the_run_that_failed_is_no_workaround() -> None:
    text = lines(
        "$ NCCL_IB_DISABLE=1 torchrun train.py",
        "step 100 loss 3.2",
        "[rank0]: ncclInternalError: Internal check failed.",
    )
    assert "derived.works_without_rdma" not in conclusions(text)


def test_addresses_that_may_be_other_names_of_known_nodes_take_nobody_out() -> None:
    text = lines(
        "hostA:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB bond0:10.1.0.4<0>",
        failed("hostB", "10.1.0.4"),
        failed("hostA", "10.1.0.5"),
        "# 0 steps completed",
    )
    verdict = verdict_of(text)
    assert (verdict.signature, verdict.action) == ("derived.transport_never_worked", "fail_fast")


def test_the_node_without_gpu_direct_among_others_with_it() -> None:
    line = "gpu-{}:9:10 [0] NCCL INFO NET/IB : GPU Direct RDMA {} for HCA 0 'mlx5_0'"
    text = lines(line.format(14, "Disabled"), *[line.format(n, "Enabled") for n in (11, 12, 13)])
    assert conclusions(text)["derived.transport_odd"].node == "gpu-14"
    assert conclusions(lines(*[line.format(n, "Disabled") for n in (11, 12, 13)])) == {}
