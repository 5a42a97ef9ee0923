"""Lines with an Xid or SXid, in every form that drivers and tools print."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.coded import pci_address, sxid_details, xid_details
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Match, Matcher


@functools.cache
def matcher() -> Matcher:
    return Matcher(shipped())


def only(line: str) -> Match:
    """The one thing that a line says of a GPU or switch."""
    found = [m for m in matcher().match_line(line) if m.signature.kind in ("gpu.xid", "nvswitch.sxid")]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("line", "signature", "groups"),
    [
        (
            "NVRM: Xid (PCI:0000:4F:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "xid.79",
            {"bdf": "0000:4f:00.0", "xid": "79"},
        ),
        ("NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus.", "xid.79", {"bdf": "0000:4f:00.0"}),
        ("NVRM: Xid (0000:4f:00): 14, Channel 00000001", "xid.14", {"bdf": "0000:4f:00.0"}),
        ("NVRM: Xid (PCI:0000:4f:00): 46", "xid.46", {"bdf": "0000:4f:00.0"}),
        ("NVRM: Xid (PCI:0000:4f:00): 46,", "xid.46", {"bdf": "0000:4f:00.0"}),
        ("NVRM: Xid (PCI:0000:00:08.0): 145, RLW_REMAP Nonfatal XC1 i0 Link 10", "xid.145.nonfatal", {"link": "10"}),
        ("NVRM: Xid (PCI:000D:00:00): 31, pid=3234, MMU Fault", "xid.31", {"bdf": "000d:00:00.0", "pid": "3234"}),
        (
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7, Contained: CE User Channel (0x9). RST: No, D-RST: No",
            "xid.94",
            {"gpu_instance": "05", "rst": "No", "drst": "No", "pid": "7"},
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception",
            "xid.13",
            {"gpu_instance": "01", "compute_instance": "02", "name": "a"},
        ),
        (
            "NVRM: Xid (PCI:0000:01:00): 94, pid=7, Contained: SM (0x1). RST: Yes, D-RST: No",
            "xid.94.reset",
            {"rst": "Yes"},
        ),
        (
            "NVRM: Xid (PCI:0000:dc:00): 45, pid=18, name=python3, Ch 00000001 caused by previous Xid 149",
            "xid.45",
            {"cause_xid": "149", "name": "python3"},
        ),
        (
            "NVRM: Xid (PCI:0000:dc:00): 43, pid=18, name=my, own job, Ch 00000008",
            "xid.43",
            {"name": "my, own job", "pid": "18"},
        ),
        (
            "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
            "xid.154.drain_and_reset",
            {"recovery_action": "drain_and_reset"},
        ),
        (
            "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
            "xid.154.none",
            {"recovery_action": "none"},
        ),
        (
            "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x7 (Bus Reset Required)",
            "xid.154.reset",
            {"recovery_action": "reset"},
        ),
        (
            "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x9 (Dance)",
            "xid.154",
            {"recovery_action": "dance"},
        ),
        (
            "NVRM: Xid (PCI:0018:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x00000000 0x0 0x0 0x0)",
            "xid.149.fatal",
            {"link": "-1", "unit": "NETIR", "fatal": "yes"},
        ),
        (
            "NVRM: Xid (PCI:0000:d7:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 17 (0x04084507 0x00000004 0x0000",
            "xid.145.nonfatal",
            {"link": "17", "fatal": "no", "bucket": "XID_154_EVAL"},
        ),
        (
            "NVRM: Xid (PCI:0003:00:00): 74, NVLink: fatal error detected on link 14(0x200000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
            "xid.74.signal",
            {"link": "14"},
        ),
        ("NVRM: Xid (PCI:0000:4f:00): 4711, what is this", "xid.unknown", {"xid": "4711"}),
        ("NVRM: Xid (PCI:0000:4f:00): 063, Row Remapper: New row marked", "xid.63", {"xid": "63"}),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 28 sourcetrack timeout error (First)",
            "sxid.24007",
            {"fatal": "yes", "link": "28", "pci": "0000:c3:00.0", "switch": "0"},
        ),
        (
            "nvidia-nvswitch1: SXid (PCI:0000:c3:00.0): 24007, Non-fatal, Link 28 sourcetrack timeout error (First)",
            "sxid.24007.nonfatal",
            {"fatal": "no"},
        ),
        ("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 99999, Fatal, Link 2", "sxid.unknown.fatal", {"fatal": "yes"}),
        ("nvidia-nvswitch0: SXid (PCI:0004:00:00.0): 26008, SOE Watchdog error", "sxid.unknown", {"sxid": "26008"}),
        (
            "XidCriticalError: Xid=48 on Device=GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9, the device will go unhealthy.",
            "xid.48",
            {"uuid": "GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", "reporter": "XidCriticalError"},
        ),
        ("Detected XID 145 for GPU 0 Please consult the documentation", "xid.145", {"gpu": "0"}),
    ],
)
def test_forms(line: str, signature: str, groups: dict[str, str]) -> None:
    match = only(line)
    assert match.signature.id == signature
    assert groups.items() <= match.groups.items()


def test_a_name_that_is_unknown_is_left_out() -> None:
    groups = only("NVRM: Xid (PCI:0000:4f:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.").groups
    assert "pid" not in groups and "name" not in groups


def test_one_line_may_report_several_codes() -> None:
    line = (
        '"states":[{"reason":"XID 48 (Double Bit ECC Error) detected on GPU PCI:0000:2d:00"},'
        '{"reason":"XID 79 (fallen) detected on GPU PCI:0000:3d:00"}]'
    )
    found = {(m.signature.id, m.groups["bdf"]) for m in matcher().match_line(line)}
    assert found == {("xid.48", "0000:2d:00.0"), ("xid.79", "0000:3d:00.0")}


@pytest.mark.parametrize(
    ("printed", "address"),
    [
        ("0000:9c:00", "0000:9c:00.0"),
        ("9C:00.0", "0000:9c:00.0"),
        ("00000000:9C:00.0", "0000:9c:00.0"),
        ("000d:00:00", "000d:00:00.0"),
        ("eth0", "eth0"),
        ("", ""),
    ],
)
def test_pci_addresses_have_one_form(printed: str, address: str) -> None:
    assert pci_address(printed) == address


@given(st.text(max_size=40))
def test_normalising_an_address_twice_changes_nothing(text: str) -> None:
    assert pci_address(pci_address(text)) == pci_address(text)


@given(st.integers(0, 200).map(str), st.text(max_size=300))
def test_no_text_after_a_code_raises(code: str, detail: str) -> None:
    assert all(isinstance(v, str) for v in xid_details(code, detail).values())
    assert all(isinstance(v, str) for v in sxid_details(code, detail).values())


@given(
    st.integers(0, 99999),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=200),
    st.sampled_from(["PCI:0000:4f:00", "0000:4f:00", "PCI:0000:4f:00 GPU-I:01", "PCI:000d:01:00.0"]),
)
def test_a_kernel_line_with_a_code_is_always_seen(code: int, detail: str, device: str) -> None:
    found = [
        m for m in matcher().match_line(f"NVRM: Xid ({device}): {code}, {detail}") if m.signature.kind == "gpu.xid"
    ]
    assert found and found[0].groups["xid"] == str(code)
