"""Import borders: the heavy packages that a fresh process has loaded after importing a part of the product."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import amp_core
from amp_core import load_run

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


def test_reading_needs_neither_torch_nor_streamlit() -> None:
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


def test_figures_and_reports_need_only_plotly() -> None:
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
def test_a_framework_is_imported_only_by_its_module(framework: str) -> None:
    importing = {f.name for f in (ROOT / "amp_core").rglob("*.py") if framework in imports(f)}
    assert importing == FRAMEWORKS[framework]


def test_recording_needs_neither_plotly_nor_streamlit() -> None:
    stems = {Path(file).stem for files in FRAMEWORKS.values() for file in files}
    own = {f"amp_core.record.{place}{stem}" for stem in stems for place in ("", "frameworks.")}
    names = [name for name in modules("amp_core/record", "amp_core/train", "amp_core/tune") if name not in own]
    assert "amp_core.record.recorder" in names and "amp_core.train.engine.training" in names
    assert loaded(names, ("torch", "streamlit", "plotly")) == ["torch"]


WATCHED = """
import sys, torch
from amp_core import watch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**120)
options = {"every": 2, "level": "full", "updates": True, "profile": (3, 4)}
with watch(model, optimizer, scaler=scaler, into=sys.argv[1], **options):
    for step in range(6):
        with torch.autocast("cpu", dtype=torch.float16 if step else torch.bfloat16):
            loss = model(torch.randn(3, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
print("pandas" in sys.modules)
from amp_core.train import TrainConfig, train
train(TrainConfig(workload="digits-cnn", device="cpu", steps=2), sys.argv[2])
print({"pandas", "sklearn"} & set(sys.modules) or "neither")
"""


def test_a_watched_process_imports_no_pandas_and_a_training_no_sklearn_either(tmp_path: Path) -> None:
    """It takes 0.4 s and 50 MB, and a signal handler that writes the end of a run would wait for the import."""
    line = [sys.executable, "-c", WATCHED, str(tmp_path / "run"), str(tmp_path / "trained")]
    done = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "neither"]
    assert not load_run(tmp_path / "run").tensors()["capped_min"].isna().all()


def test_the_commands_and_the_import_of_traces_load_no_pandas() -> None:
    """Its 40 MB would stand beside a large trace, and delay each command."""
    heavy = ("pandas", "amp_core.analysis", "torch", "plotly")
    assert loaded(["amp_core.__main__", "amp_core.traces"], heavy) == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded(["amp_core"], ("torch", "streamlit", "plotly", "pandas", "sklearn", "numba")) == []


def imports(file: Path) -> set[str]:
    """Top-level packages that a file imports, including imports in functions and for type checking."""
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
