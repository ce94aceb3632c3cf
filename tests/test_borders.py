"""The borders of the house: which heavy packages a fresh process has loaded after importing a part of it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import amp_core

ROOT = Path(amp_core.__file__).parent.parent


def modules(*folders: str) -> list[str]:
    """Dotted names of all modules under the given folders or files of the tree."""
    files = [f for name in folders for f in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))]
    names = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files}
    return sorted(n for n in names if not n.endswith(("__main__", "jobs.launcher")))


def loaded(names: list[str], heavy: tuple[str, ...]) -> list[str]:
    """Which of `heavy` a fresh process has loaded after importing `names`."""
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(*[m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


READING = [
    m
    for m in modules("amp_core")
    if not m.startswith(("amp_core.record", "amp_core.train", "amp_core.tune", "amp_core.figures", "amp_core.report"))
]


def test_the_half_that_reads_runs_without_torch_and_streamlit() -> None:
    for name in (
        "store.run",
        "jobs",
        "schema",
        "store.packing",
        "store.untrusted.validate",
        "analysis",
        "findings",
        "settings.training",
    ):
        assert f"amp_core.{name}" in READING
    assert loaded(READING, ("torch", "streamlit", "plotly")) == []


def test_figures_and_reports_need_plotly_alone() -> None:
    assert loaded(modules("amp_core/figures", "amp_core/report"), ("torch", "streamlit", "plotly")) == ["plotly"]


FRAMEWORKS = {
    "transformers": {"transformers.py"},
    "lightning": {"lightning.py"},
    "keras": {"keras.py", "keras_run.py", "keras_values.py"},
    "tensorflow": {"keras.py", "keras_run.py"},
    "accelerate": set(),
}
"""By framework, the files of amp_core/record/frameworks that may import it."""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_is_imported_by_its_own_module_alone(framework: str) -> None:
    importing = {f.name for f in (ROOT / "amp_core").rglob("*.py") if framework in imports(f)}
    assert importing == FRAMEWORKS[framework]


def test_the_half_that_records_needs_neither_plotly_nor_streamlit() -> None:
    stems = {Path(file).stem for files in FRAMEWORKS.values() for file in files}
    own = {f"amp_core.record.{place}{stem}" for stem in stems for place in ("", "frameworks.")}
    names = [name for name in modules("amp_core/record", "amp_core/train", "amp_core/tune") if name not in own]
    assert "amp_core.record.recorder" in names and "amp_core.train.engine.training" in names
    assert loaded(names, ("torch", "streamlit", "plotly")) == ["torch"]


def test_the_package_itself_is_light() -> None:
    assert loaded(["amp_core"], ("torch", "streamlit", "plotly", "pandas", "sklearn", "numba")) == []


def imports(file: Path) -> set[str]:
    """Top-level packages that a file imports anywhere in it, in functions and for type checking too."""
    result: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            result.add(node.module.split(".")[0])
    return result


@pytest.mark.parametrize(
    ("folder", "banned"),
    [
        ("amp_core", {"streamlit"}),
        ("amp_core/analysis", {"plotly", "torch"}),
        ("amp_core/findings", {"plotly", "torch"}),
        ("amp_core/figures", {"torch"}),
        ("amp_core/views", {"torch"}),
        ("amp_core/report", {"torch"}),
        ("amp_core/record", {"plotly"}),
        ("amp_core/train", {"plotly"}),
        ("amp_core/tune", {"plotly"}),
        ("pages", {"torch"}),
    ],
)
def test_no_file_imports_what_its_folder_may_not(folder: str, banned: set[str]) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    if not files and not (ROOT / "pages").exists():
        pytest.skip("an installed package comes without the app's pages")
    assert files
    assert {f.name: wrong for f in files if (wrong := imports(f) & banned)} == {}
