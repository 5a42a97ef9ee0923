"""Which modules may be preloaded: what is installed, never what the user is working on."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher.config import RunConfig
from keepstep.launcher.ranks.learn import library_folders, worth_learning


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project: a script, a module beside it and a package."""
    folder = tmp_path / "project"
    (folder / "mypackage").mkdir(parents=True)
    for name in ("train.py", "mymodule.py", "mypackage/__init__.py", "mypackage/part.py"):
        (folder / name).touch()
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    return folder


def config(project: Path, **fields: Any) -> RunConfig:
    usual: dict[str, Any] = {"run_id": "r", "run_dir": "/r", "node": "n", "script": str(project / "train.py")}
    return RunConfig(**{**usual, **fields})


def test_installed_and_standard_modules_are_kept_in_order(project: Path) -> None:
    names = ["msgspec", "json.decoder", "torch.nn.modules", "sqlite3", "asyncio"]
    assert worth_learning(names, config(project)) == names


def test_builtin_modules_are_kept(project: Path) -> None:
    assert "gc" in sys.builtin_module_names
    assert worth_learning(["gc", "sys", "_thread"], config(project)) == ["gc", "sys", "_thread"]


def test_the_users_own_are_left_out(project: Path) -> None:
    names = ["mymodule", "mypackage", "mypackage.part", "json"]
    assert worth_learning(names, config(project)) == ["json"]


def test_what_does_not_exist_is_left_out(project: Path) -> None:
    assert worth_learning(["no_such_module", "no_such.part"], config(project)) == []


def test_an_editable_install_is_left_out(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is on the path through a .pth file."""
    source = tmp_path / "elsewhere" / "src"
    (source / "editable").mkdir(parents=True)
    (source / "editable" / "__init__.py").touch()
    monkeypatch.syspath_prepend(source)
    assert importlib.import_module("editable").__name__ == "editable"
    assert worth_learning(["editable", "editable.part"], config(project)) == []


def test_keepstep_itself_as_it_is_installed_here(project: Path) -> None:
    import keepstep

    installed = str(Path(keepstep.__file__).resolve()).startswith(tuple(library_folders()))
    assert bool(worth_learning(["keepstep.trainer"], config(project))) is installed


def test_a_module_beside_the_script_hides_an_installed_one(project: Path) -> None:
    (project / "msgspec.py").touch()
    importlib.invalidate_caches()
    assert worth_learning(["msgspec", "msgspec.json", "json"], config(project)) == ["json"]


def test_a_package_that_links_into_the_project_is_the_users(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "linked.py").symlink_to(project / "mymodule.py")
    monkeypatch.syspath_prepend(tmp_path / "links")
    assert worth_learning(["linked"], config(project)) == []


def test_a_script_in_the_folder_that_holds_the_environment(tmp_path: Path) -> None:
    """The usual layout: project/.venv. Installed packages below the script's folder are still installed ones."""
    above = Path(sysconfig.get_paths()["purelib"]).resolve().parents[3]
    assert worth_learning(["msgspec", "torch"], config(above)) == ["msgspec", "torch"]


def test_with_m_the_working_directory_takes_the_scripts_place(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    names = ["mymodule", "mypackage.part", "json"]
    assert worth_learning(names, config(project, mode="module", script="mypackage.part")) == ["json"]


def test_namespace_packages_are_left_out(project: Path) -> None:
    (project / "spread").mkdir()
    importlib.invalidate_caches()
    assert worth_learning(["spread", "spread.x"], config(project)) == []


def test_nothing_is_imported_to_find_out(project: Path) -> None:
    (project / "explodes.py").write_text("raise SystemExit(3)")
    importlib.invalidate_caches()
    before = set(sys.modules)
    worth_learning(["explodes", "antigravity", "mypackage.part"], config(project))
    assert set(sys.modules) == before
