"""An sdist, the wheel built from it, and an environment with that wheel: `ampscope serve` works with the pages and
samples in the wheel."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.serve.running import ROOT, run_async, serving
from tests.serve.viewer import Seen, Viewer


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist; building it asks the index for hatchling."""
    tools, folder = tmp_path_factory.mktemp("tools"), tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), "hatchling>=1.26"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and any(
        message in done.stderr for message in ("No matching distribution", "No module named pip")
    ):
        pytest.skip("no hatchling to be had here, and nothing can be built without it")
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tools)}, capture_output=True)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as `pip install` of the sdist builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(sdist), "--no-deps", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    return next(folder.glob("*.whl"))


def test_sdist_holds_the_sources_and_nothing_private(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"pyproject.toml", "README.md", "LICENSE", "docs/architecture.md", "amp_core/__init__.py"} <= set(names)
    assert not [n for n in names if "secrets" in n or "__pycache__" in n or n.startswith((".git/", ".venv/", "runs/"))]


def test_wheel_holds_the_app_and_nothing_private(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.run(
        ["git", "ls-files", "pages", "app.py", "server.py"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode == 0:
        assert {f"amp_core/_app/{name}" for name in tracked.stdout.split()} <= set(names)
    assert {"amp_core/_app/.streamlit/config.toml", "amp_core/py.typed"} <= set(names)
    assert any(name.startswith("amp_core/_app/sample_runs/") and name.endswith("run.json") for name in names)
    assert not [n for n in names if "secrets" in n or "__pycache__" in n or n.startswith(("tests/", "runs/"))]


def test_installed_ampscope_serves_its_pages(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "fresh")], check=True, timeout=600)
    python = tmp_path / "fresh" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, timeout=600)
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    ).stdout.strip()
    # Dependencies, which take gigabytes, come from this environment; AMPscope itself does not.
    (Path(where) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    with serving(tmp_path / "home" / "runs", program=tmp_path / "fresh" / "bin" / "ampscope") as server:
        command = Path(f"/proc/{server.process.pid}/cmdline")
        if command.exists():
            assert str(Path(where) / "amp_core" / "_app" / "server.py") in command.read_text()

        async def look() -> list[Seen]:
            async with Viewer(server.base) as viewer:
                return [await viewer.open(page) for page in ("", "loss-scale", "library", "start", "format-lab")]

        for shown in run_async(look()):
            assert shown.errors == []
            assert shown.words
