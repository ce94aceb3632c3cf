"""Write the API reference of the public modules, from their docstrings: `python docs/reference.py build/api`.

Needs pdoc (extra `docs`) and torch.
"""

import sys
import warnings
from pathlib import Path

import pdoc

import amp_core

PUBLIC = (
    "amp_core",
    "amp_core.analysis",
    "amp_core.findings",
    "amp_core.formats",
    "amp_core.notebook",
    "amp_core.quantization",
    "amp_core.record",
    "amp_core.schema",
    "amp_core.views",
)
"""Every module that a user imports from, except the callbacks, whose frameworks may be missing: docs/frameworks.md."""


def main() -> None:
    """Write the pages into the folder that the command line names."""
    (folder,) = sys.argv[1:]
    for name in amp_core.__all__:
        vars(amp_core)[name] = getattr(amp_core, name)  # pdoc does not see names that are imported on first use
    # `pd.Series[float]` is generic for type checkers alone; pdoc then shows it as it is written.
    warnings.filterwarnings("ignore", message=".*'Series' is not subscriptable")
    pdoc.render.configure(docformat="google", footer_text=f"AMPscope {amp_core.__version__}")
    pdoc.pdoc(*PUBLIC, output_directory=Path(folder))


if __name__ == "__main__":
    main()
