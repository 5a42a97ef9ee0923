"""What a site may change in the catalog, and what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.catalog.load import VERSION, load, shipped, site_files
from keepstep.catalog.matcher import Matcher
from keepstep.records.errors import ConfigError


def written(folder: Path, text: str, name: str = "site.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_change_with_a_reason_is_made_and_named(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [[override]]
        id = "xid.94"
        reason = "RMA agreement: every contained error counts"
        action = "drain_at_checkpoint"
        weights = { hardware = 4.0 }
        severity = "fatal"
        """,
    )
    catalog = load([path])
    entry = catalog["xid.94"]
    assert (entry.action, entry.weights, entry.severity) == ("drain_at_checkpoint", {"hardware": 4.0}, "fatal")
    assert entry.title == shipped()["xid.94"].title
    assert catalog["xid.94.reset"] == shipped()["xid.94.reset"]
    assert catalog.describe() == {
        "version": VERSION,
        "digest": catalog.digest,
        "changes": [
            {
                "id": "xid.94",
                "reason": "RMA agreement: every contained error counts",
                "file": str(path),
                "added": False,
                "disabled": False,
            }
        ],
    }
    assert catalog.digest != shipped().digest and shipped().describe()["changes"] == []


def test_a_disabled_entry_is_seen_and_means_nothing(tmp_path: Path) -> None:
    path = written(
        tmp_path, '[[override]]\nid = "mlx5.slot_power"\nreason = "printed at every boot"\ndisabled = true\n'
    )
    catalog = load([path])
    (match,) = Matcher(catalog).match_line(shipped()["mlx5.slot_power"].examples[0])
    assert match.signature.role == "noise" and match.signature.weights == {} and match.signature.action == "none"


def test_an_entry_may_be_added(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [[signature]]
        id = "site.gateway_down"
        reason = "our own storage gateway"
        kind = "storage.stall"
        title = "gateway {gateway} is down"
        severity = "error"
        role = "root"
        scope = "storage"
        depth = 2
        weights = { storage = 3.0 }
        action = "restart_job"
        pattern = ['gateway (?P<gateway>gw-\\d+) is down']
        """,
    )
    catalog = load([path])
    (match,) = Matcher(catalog).match_line("gateway gw-7 is down")
    assert match.signature.id == "site.gateway_down" and match.groups == {"gateway": "gw-7"}
    assert [(c.id, c.added) for c in catalog.changes] == [("site.gateway_down", True)]


def test_later_files_win_and_the_sites_own_folder_is_read_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "catalog.d"
    folder.mkdir()
    for name, action in (("20-b.toml", "ask_human"), ("10-a.toml", "cordon_node")):
        written(folder, f'[[override]]\nid = "xid.63"\nreason = "{name}"\naction = "{action}"\n', name)
    (folder / "notes.txt").write_text("not read")
    assert [path.name for path in site_files(tmp_path)] == ["10-a.toml", "20-b.toml"]
    assert load(site_files(tmp_path))["xid.63"].action == "ask_human"
    assert site_files(tmp_path / "nowhere") == []


SIGNATURE = 'kind = "a.b"\ntitle = "t"\nseverity = "info"\nrole = "root"\nscope = "rank"\ndepth = 3\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[overide]]\n", ["overide", "did you mean override"]),
        ("override = 3\n", ["override", "[[override]]"]),
        ('[[override]]\nid = "xid.63"\n', ["reason"]),
        ('[[override]]\nid = "xid.63"\nreason = "  "\n', ["xid.63", "reason"]),
        ('[[override]]\nid = "xid.630"\nreason = "r"\n', ["xid.630", "did you mean xid.63"]),
        ('[[override]]\nid = "xid.63"\nreason = "r"\nacton = "none"\n', ["acton", "did you mean action"]),
        ('[[override]]\nid = "xid.63"\nreason = "r"\naction = "cordon"\n', ["cordon", "action"]),
        ('[[override]]\nid = "xid.63"\nreason = "r"\nweights = { hardwear = 1.0 }\n', ["hardwear", "weights"]),
        ('[[override]]\nid = "xid.13"\nreason = "r"\nnever = []\n', ["unknown key 'never'"]),
        (
            f'[[signature]]\nid = "site.a"\nreason = "r"\n{SIGNATURE}pattern = ["our gateway"]\n',
            ["site.a", "a root without weights"],
        ),
        ('[[override]]\nid = "xid.13"\nreason = "r"\naction = "cordon_node"\n', ["xid.13", "cannot be allowed"]),
        ('[[override]]\nid = "oom.cgroup"\nreason = "r"\naction = "reset_gpu"\n', ["oom.cgroup", "cannot be allowed"]),
        (f'[[signature]]\nid = "xid.63"\nreason = "r"\n{SIGNATURE}', ["xid.63", "[[override]]"]),
        (f'[[signature]]\nid = "site.a"\n{SIGNATURE}', ["site.a", "reason"]),
        (f'[[signature]]\nid = "site.a"\nreason = "r"\n{SIGNATURE}pattern = ["(?=x)"]\n', ["site.a", "(?=x)"]),
        (
            f'[[signature]]\nid = "site.a"\nreason = "r"\n{SIGNATURE}action = "cordon_node"\npattern = ["Killed process"]\n',
            ["site.a", "oom.", "may never lead to"],
        ),
        ("[[override]\n", ["not TOML"]),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, words: list[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load([path])
    assert str(path) in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: No such file"):
        load([tmp_path / "gone.toml"])


def test_bytes_that_are_no_text_are_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(b"\xff\xfe[[override]]")
    with pytest.raises(ConfigError, match="not TOML"):
        load([path])
