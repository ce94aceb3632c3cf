"""Child processes import this amp_core, in any working directory and with any other path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import amp_core
from amp_core.hardware import child_environment
from amp_core.hardware.child_environment import python_path

HERE = str(Path("/somewhere/checkout"))
WHERE = [sys.executable, "-c", "import amp_core; print(amp_core.__file__)"]


@pytest.mark.skipif(python_path() == {}, reason="what is installed is not put before another of that name")
def test_a_child_elsewhere_imports_this_amp_core_and_not_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "amp_core").mkdir()
    (tmp_path / "amp_core" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    alone, child = (
        subprocess.run(WHERE, cwd="/", env=env, capture_output=True, text=True, check=True).stdout.strip()
        for env in (dict(os.environ), os.environ | python_path())
    )
    assert alone.startswith(str(tmp_path)) and child == amp_core.__file__


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, [HERE]), ("", [HERE]), ("/a:/b", [HERE, "/a", "/b"]), (f"/a:{HERE}:/b", [HERE, "/a", "/b"])],
)
def test_the_path_is_inserted_first_and_only_once(
    before: str | None, after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_environment, "ROOT", Path(HERE))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before.replace(":", os.pathsep))
    assert python_path() == {"PYTHONPATH": os.pathsep.join(after)}


def test_an_installed_package_is_not_added_to_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its folder would precede the standard library."""
    monkeypatch.setattr(child_environment, "ROOT", Path("/usr/lib/python3/dist-packages"))
    assert python_path() == {}
