"""The compiled kernels of `measure` in separate processes: cached code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import amp_core


def fresh_process(code: str, package: Path, **environment: str) -> str:
    """Run Python code that imports `amp_core` from beside `package`; returns its output."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG"))} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=package.parent, env=settings, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.whole
def test_compiled_code_is_reused(tmp_path):
    """Numba never finds the cached code of a kernel whose closure holds other kernels, and then adds a file each
    time."""
    code = (
        "import torch; from amp_core.record.stats.numba import measure as m; torch.set_num_threads(2); m.SHARE = 2048;"
        "assert m.measure_cpu([torch.ones(9000)])[7 + 149] == 9000;"
        "print(sum(m.measure_singles.stats.cache_hits.values()))"
    )
    package = Path(amp_core.__file__).parent
    assert fresh_process(code, package, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
    files = sorted(tmp_path.rglob("*.nbc"))
    assert files and fresh_process(code, package, NUMBA_CACHE_DIR=str(tmp_path)) == "1"
    assert sorted(tmp_path.rglob("*.nbc")) == files


@pytest.mark.whole
def test_kernels_work_if_no_cache_folder_can_be_written(tmp_path):
    """If neither the installation nor the home folder is writable, kernels are compiled in every process."""
    package = tmp_path / "amp_core"
    shutil.copytree(Path(amp_core.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "record" / "stats" / "numba" / "__pycache__").write_text("a file here: root can write any folder")
    (tmp_path / "home").write_text("")
    code = (  # the kernel that is compiled fastest; all of them have the same decorator
        "import torch; from amp_core.record.stats.numba import channels as m;"
        "from amp_core.record.stats import measure as p;"
        "assert m.channels_cpu(torch.full((4, 2), 3.0), 2, 1).tolist() == [3, 3]; print(p.__file__)"
    )
    home = str(tmp_path / "home" / "none")
    printed = fresh_process(code, package, HOME=home, XDG_CACHE_HOME=home, PYTHONDONTWRITEBYTECODE="1")
    assert Path(printed) == package / "record" / "stats" / "measure.py"
    assert not list(tmp_path.rglob("*.nbc"))
