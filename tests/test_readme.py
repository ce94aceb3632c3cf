"""README and docs are correct: their commands, flags, code and links work."""

import ast
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from amp_core.__main__ import parser
from amp_core.findings import registry
from amp_core.formats import FORMATS
from amp_core.record.recorder import Recorder
from amp_core.schema import TABLES
from amp_core.settings.catalog import RECIPES, WORKLOADS
from amp_core.store.run import load_run
from tests import test_layers
from tests.paths import ROOT, SAMPLE_RUNS

README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMAT = (SAMPLE_RUNS / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
LINKING = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "sample_runs/README.md")]
MAX_README_LINES = 210

SETUP = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
layer = torch.nn.Linear(32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
loss_fn = torch.nn.functional.mse_loss
loader = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(25)]
"""
"""What a reader has before the first block of a page."""

ELSEWHERE = {
    "frameworks.md": "",  # tests/record/frameworks/test_docs.py
    "reading.md": "pyspark",  # tests/remote/test_fleet.py
    "architecture.md": "pages.parts",  # test_the_page_of_the_architecture_is_a_page
}
"""Pages of which the blocks that contain a text run in another test."""


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_readme_is_short():
    assert len(README.splitlines()) <= MAX_README_LINES


def test_ci_runs_the_readmes_test_command():
    assert "./dev test\n" in blocks(README, "bash")
    assert "./dev test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_dev_refuses_unknown_commands():
    done = subprocess.run([ROOT / "dev", "tests"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "usage: ./dev app | test | lint | docs | build | publish\n"


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ("", "dev: pyproject.toml has no [project.urls]"),
        ('[project.urls]\nHomepage = "http://127.0.0.1:1/gone"\n', "dev: http://127.0.0.1:1/gone in [project.urls]"),
    ],
)
def test_dev_publishes_nothing_without_addresses_of_the_project_that_answer(tmp_path, urls, says):
    for name in ("dev", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "ampscope"\n{urls}')
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "pip").symlink_to("/bin/true")
    (programs / "python").symlink_to(sys.executable)
    (tmp_path / ".venv" / ".installed[release]").touch()
    done = subprocess.run([tmp_path / "dev", "publish"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and says in done.stderr
    assert "nothing was published" in done.stderr and not (tmp_path / "dist").exists()


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A function that runs the code of a page, block after block, and returns its variables.

    In a folder of its own with the sample runs, on the CPU; an address in S3 is one in memory, and W&B a stand-in.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample_runs").symlink_to(SAMPLE_RUNS)
    (tmp_path / "runs").mkdir()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda project: Tracker()))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    def run(page):
        result = {}
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [v.close() for v in result.values() if isinstance(v, Recorder)])
            exec(SETUP, result)
            for block in blocks(PAGES[page], "python"):
                if page not in ELSEWHERE or ELSEWHERE[page] not in block:
                    code = block.replace('"cuda"', '"cpu"').replace("s3://bucket", f"memory://{tmp_path.name}")
                    exec(compile(code, page, "exec"), result)
        return result

    return run


class Tracker:
    def log(self, values, step):
        pass


def test_the_loop_in_the_readme_runs(reader):
    """The code of the README, verbatim, with a small model on the CPU."""
    result = reader("README.md")
    assert len(result["run"].steps) == 25
    assert sorted(result["run"].tensors().step.unique()) == [0, 10, 20]


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if name != "README.md" and "```python" in text])
def test_the_code_of_a_page_runs(reader, page, tmp_path):
    if page == "run-folder.md":
        pytest.importorskip("fsspec", reason="fsspec is not installed: pip install '.[remote]'")
    if page in ("reading.md", "tune.md"):
        reader("README.md")  # records runs/a
    reader(page)
    for run in (tmp_path / "runs").iterdir():
        assert len(load_run(run).steps) >= 25


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(path, tmp_path, monkeypatch):
    (tmp_path / "sample_runs").symlink_to(SAMPLE_RUNS)
    (tmp_path / "docs" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "docs" / "notebooks")
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    result = {}
    for cell in cells:
        assert cell["outputs"] == []  # a notebook in the tree is one that has not run
        exec(compile("".join(cell["source"]), path.name, "exec"), result)
    if path.stem == "first-steps":
        assert len(result["run"].steps) == 60
        return
    assert result["lost"].loc["head", 0] == pytest.approx(0.40, abs=0.01)
    assert result["lost"].loc["lstm", 0] == pytest.approx(0.09, abs=0.01) and (result["lost"][7] < 0.01).all()
    assert result["findings"][0].code == "fp16-without-scaler"
    assert result["comparison"].parity["fp16-unscaled"].startswith("worse")


def test_the_reference_is_built_from_the_public_modules(tmp_path):
    pytest.importorskip("pdoc", reason="pdoc is not installed: pip install '.[docs]'")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, ROOT / "docs" / "reference.py", tmp_path]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": path})
    top = (tmp_path / "amp_core.html").read_text(encoding="utf-8")
    assert 'id="watch"' in top and 'id="diagnose"' in top
    assert 'id="what_if"' in (tmp_path / "amp_core" / "analysis.html").read_text(encoding="utf-8")


def test_the_container_serves_read_only_with_options_that_exist():
    lines = (ROOT / "Containerfile").read_text(encoding="utf-8").splitlines()
    (entry,) = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT ")]
    settings = parser().parse_args(entry[1:])
    assert entry[0] == "ampscope" and settings.read_only and settings.address == "0.0.0.0"
    assert any(line.endswith(f"EXPOSE {settings.port}") for line in lines)
    assert f"VOLUME {settings.runs}" in lines
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ".streamlit/secrets.toml" in ignored


def test_the_rule_of_the_architecture_imports_what_a_rule_may(tmp_path):
    (example,) = [block for block in blocks(PAGES["architecture.md"], "python") if "@rule(" in block]
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    test_layers.test_a_module_imports_only_from_layers_below_and_no_private_name(
        "findings.rules.example", tmp_path / "example.py"
    )


def test_the_page_of_the_architecture_is_a_page():
    """Its code needs the app around it: its names exist, and it begins as pages do."""
    (page,) = [b for b in blocks(PAGES["architecture.md"], "python") if ELSEWHERE["architecture.md"] in b]
    tree = ast.parse(page)
    assert ast.get_docstring(tree).endswith("?")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")


COMMANDS = {
    line: page
    for page, text in PAGES.items()
    for line in re.sub(r"\\\n *", "", "".join(blocks(text, "bash"))).splitlines()
    if line.startswith("ampscope")
}


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_is_valid(line):
    parser().parse_args(shlex.split(line, comments=True)[1:])


def known_flags():
    """The flags of each command."""
    (commands,) = (action.choices for action in parser()._actions if isinstance(action.choices, dict))
    return {name: set(command._option_string_actions) for name, command in commands.items()}


@pytest.mark.parametrize("page", PAGES)
def test_each_flag_exists(page):
    """In comments beside commands, and in the text, alone or in a part of a command."""
    spoken = [*(line for line, of in COMMANDS.items() if of == page), *re.findall(r"`(ampscope [^`]+)`", PAGES[page])]
    for line in spoken:
        assert set(re.findall(r"(?<!\S)--[\w-]+", line)) <= known_flags()[line.split()[1]], line
    assert set(re.findall(r"`(--[\w-]+)", PAGES[page])) <= set.union(*known_flags().values())


@pytest.mark.parametrize("page", PAGES)
def test_each_module_that_is_run_exists(page):
    for module in re.findall(r"python -m\s+([\w.]+)", PAGES[page]):
        assert importlib.util.find_spec(module), module


def anchors(path):
    """The anchors of a page's headings, as GitHub and pandoc write them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *LINKING],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_each_relative_link_resolves(path: Path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", ["README.md", "docs/architecture.md", "CONTRIBUTING.md"])
def test_each_path_in_the_text_exists(path):
    """What is said to lie in the checkout; `<name>` stands for any name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:amp_core|pages|tests|sample_runs|docs)/[\w./<>]*\w)`", text))
    assert [name for name in named if "<" not in name and not (ROOT / name).exists()] == []


def test_the_formats_in_docs_are_those_of_the_code():
    rows = re.findall(
        r"^\| ((?:FP|BF|TF)\d+[^|(]*?)(?: \([^|]*)? \| (.*?) \|$", PAGES["formats.md"], flags=re.MULTILINE
    )
    by_label = {f.label: f for f in FORMATS.values()}
    superscript = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    assert {label for label, _ in rows} == set(by_label) - {"FP64"}
    for label, cells in rows:
        bits, subnormal, normal, largest = cells.split(" | ")
        known = by_label[label]
        assert bits == f"1, {known.exponent_bits}, {known.mantissa_bits}"
        assert subnormal.translate(superscript) == f"2{known.min_subnormal_exponent}"
        assert normal.translate(superscript) == f"2{known.min_normal_exponent}"
        assert float(largest.translate(superscript).replace(" × 10", "e")) == pytest.approx(known.max_value, rel=0.01)


def test_every_recipe_and_workload_is_described():
    assert [name for name in (*RECIPES, *WORKLOADS) if f"`{name}`" not in PAGES["tune.md"]] == []


def test_the_limits_of_a_server_have_the_defaults_that_docs_name():
    rows = re.findall(r"^\| `--([\w-]+) \w+` \| .* \| (\d+) \|$", PAGES["serving.md"], flags=re.MULTILINE)
    settings = vars(parser().parse_args(["serve"]))
    assert len(rows) == 4
    assert {name: settings[name.replace("-", "_")] for name, _ in rows} == {name: int(value) for name, value in rows}


@pytest.mark.parametrize("table", TABLES)
def test_the_format_page_describes_every_column_as_the_schema_does(table):
    section = FORMAT.split(f"**{table}**: ")[1].split("\n**")[0]
    assert section.startswith(TABLES[table].doc)
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| (.*?)(?: \(missing: .*\))? \|$", section, flags=re.MULTILINE)
    described = [
        (c.name, re.sub(r"list<item: (\w+)>", r"list of \1", str(c.type)), c.doc) for c in TABLES[table].columns
    ]
    assert rows == described
