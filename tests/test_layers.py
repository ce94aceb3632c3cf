"""The layers of the product: a package imports only from packages below it, and no private names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import amp_core

PACKAGE = Path(amp_core.__file__).parent
LAYERS = (
    "_version", "formats", "phases",
    "schema", "quantization", "text", "hardware", "store", "settings", "library", "jobs",
    "traces", "interop", "record", "analysis", "findings", "forecast", "train", "tune",
    "figures", "views", "report", "notebook", "assistants", "cli", "__main__",
)  # fmt: skip
"""Bottom to top."""

SHOWN_IN_A_NOTEBOOK = {"store.run", "findings.model", "analysis.comparison.compare"}
"""Their `_repr_html_` asks `notebook` for the HTML, once Jupyter asks them: the one way back up."""

MAX_MODULES_AT_THE_TOP = 12


def modules() -> list[tuple[str, Path]]:
    """Dotted names below `amp_core`, and files."""
    result = ((".".join(f.relative_to(PACKAGE).with_suffix("").parts), f) for f in sorted(PACKAGE.rglob("*.py")))
    return [(name.removesuffix(".__init__"), file) for name, file in result if name != "__init__"]


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Modules below `amp_core` that a file imports from, and the imported names."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("amp_core."):
            yield from ((node.module.removeprefix("amp_core."), alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "amp_core":
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name.removeprefix("amp_core."), "") for a in node.names if a.name.startswith("amp_core."))


def layer(module: str) -> int:
    return LAYERS.index(module.partition(".")[0])


@pytest.mark.parametrize(("module", "file"), modules(), ids=[name for name, _ in modules()])
def test_a_module_imports_only_from_layers_below_and_no_private_name(module: str, file: Path) -> None:
    for source, name in imported(file):
        if source == "__version__" or (source == "notebook" and module in SHOWN_IN_A_NOTEBOOK):
            continue
        assert layer(source) <= layer(module), f"{module} imports {source}, which lies above it"
        assert not name.startswith("_") or name == "__version__", f"{module} imports the private name {source}.{name}"


BACKENDS = ("record.backends",)
"""Where an accelerator's own functions may be called; elsewhere a recorder asks its backend."""


def cuda_specific(file: Path) -> Iterator[str]:
    """Code in a file that is specific to CUDA: uses of `torch.cuda`, and comparisons with its name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            yield f"line {node.lineno}: torch.cuda"
        elif isinstance(node, ast.ImportFrom | ast.Import) and "torch.cuda" in ast.unparse(node):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            yield f"line {node.lineno}: is_cuda"
        elif isinstance(node, ast.Compare | ast.Call) and '"cuda' in ast.unparse(node).replace("'", '"'):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", ["record", "train", "tune"])
def test_only_backends_contain_code_for_one_accelerator(package: str) -> None:
    ours = [(name, file) for name, file in modules() if name.partition(".")[0] == package]
    result = {name: list(cuda_specific(file)) for name, file in ours if not name.startswith(BACKENDS)}
    assert {name: lines for name, lines in result.items() if lines} == {}
    backend = dict(ours).get("record.backends.cuda")
    assert backend is None or list(cuda_specific(backend))  # the check itself detects such code


def test_few_modules_are_at_the_top_level() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_MODULES_AT_THE_TOP


def test_every_package_documents_its_content() -> None:
    for init in sorted(PACKAGE.rglob("__init__.py")):
        documentation = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
        assert documentation is not None and len(documentation) > 40, init
