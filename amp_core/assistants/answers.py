"""The answers, as plain documents: what the analyses, the rules and the guide say, with nothing added.

    answers = Answers([Path("runs")])
    answers.list_runs()["runs"][0]["run"]        # 'text-gpt-tiny-fp16-1': the name to ask further with

A run is named by its path below a root. Paths that leave the roots are refused, so a name cannot reach other files.
"""

import heapq
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amp_core.analysis import compare, kernel_table, layer_advice, overview, safe_window, tensor_core_use
from amp_core.analysis.comparison.document import comparison_document, rows
from amp_core.analysis.numerics.layer_choice import LIMIT, choose, layer_errors
from amp_core.findings import GUIDE, Entry, diagnose
from amp_core.findings.document import diagnosis_document
from amp_core.quantization import RECIPES, find_recipe, is_recipe
from amp_core.schema import RunError
from amp_core.store.run import Run, load_run

MAX_RUNS = 200
"""The newest runs of a listing."""
MAX_COMPARED = 12
MAX_DEPTH = 3
"""Levels of folders below a root that hold runs: comparisons and searches have folders of their own."""


class Answers:
    """Questions about the runs below some folders. Every method raises `RunError` with one sentence for bad input."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [root.resolve() for root in roots]

    def list_runs(self, contains: str = "") -> dict[str, Any]:
        """The newest runs, with what they trained and how they ended."""
        dated = [
            (_changed_s(file), root, file.parent)
            for root in self._roots
            for file in _heads(root)
            if contains.lower() in self._name(root, file.parent).lower()
        ]
        newest = heapq.nlargest(MAX_RUNS, dated, key=lambda item: item[0])
        runs = [self._listed(root, folder) for _, root, folder in newest]
        return {"runs": runs, "more": len(dated) - len(newest), "folders": [str(root) for root in self._roots]}

    def diagnose(self, run: str, baseline: str = "") -> dict[str, Any]:
        """The findings of a run, the worst first, with evidence, advice and a patch."""
        opened = self._open(run)
        return diagnosis_document(opened, diagnose(opened, self._open(baseline) if baseline else None))

    def compare(self, runs: Sequence[str]) -> dict[str, Any]:
        """Speed, memory and convergence of runs, compared with the first."""
        if not 2 <= len(runs) <= MAX_COMPARED:
            raise RunError(
                f"runs={list(runs)!r:.200} has {len(runs)} runs; give 2 to {MAX_COMPARED}, the baseline first"
            )
        return comparison_document(compare([self._open(run) for run in runs])) | {"baseline": runs[0]}

    def what_if(self, run: str, formats: Sequence[str], limit: float = LIMIT) -> dict[str, Any]:
        """The predicted error of each linear layer in 8- and 4-bit formats, and which of them stay below the limit."""
        for name in formats:
            if not is_recipe(name):
                raise RunError(f"formats={name!r} is unknown; choose from {', '.join(RECIPES)}")
        recipes = [find_recipe(name) for name in formats]
        if not recipes:
            raise RunError(f"formats is empty; choose from {', '.join(RECIPES)}")
        errors = layer_errors(self._open(run), recipes)
        choices = [choose(errors, recipe, limit) for recipe in recipes]
        return {
            "run": run,
            "measured": False,
            "limit": limit,
            "formats": [
                {"format": c.recipe.name, "flops_frac": c.flops_frac, "go": c.go, "stay": c.stay} for c in choices
            ],
            "layers": rows(errors),
        }

    def loss_scale_window(self, run: str, form: str = "fp16") -> dict[str, Any]:
        """The loss scales that suit every gradient of the run, beside those that it used."""
        opened = self._open(run)
        window = safe_window(opened, form)
        return {
            "run": run,
            "window": vars(window) | {"exists": window.exists},
            "used": vars(overview(opened).scale),
        }

    def worst_layers(self, run: str, count: int = 20) -> dict[str, Any]:
        """The layers with the largest share of underflow in FP16, with the format that suits each."""
        if not 1 <= count <= 200:
            raise RunError(f"count={count} is out of range; give 1 to 200")
        advice = layer_advice(self._open(run))
        worst = advice.sort_values(["island", "underflow_mass_frac"], ascending=False, kind="stable")
        return {"run": run, "layers_in_all": len(advice), "layers": rows(worst.head(count))}

    def kernels_off_tensor_cores(self, run: str, count: int = 20) -> dict[str, Any]:
        """The GEMM, convolution and attention kernels that ran without tensor cores, the longest first."""
        if not 1 <= count <= 200:
            raise RunError(f"count={count} is out of range; give 1 to 200")
        opened = self._open(run)
        use = tensor_core_use(opened)
        table = kernel_table(opened)
        off = table[(table["matrix_frac"] > 0) & (table["tensor_core"] != "yes")]
        return {"run": run, "use": vars(use), "kernels_in_all": len(off), "kernels": rows(off.head(count))}

    def guide(self, code: str = "") -> dict[str, Any]:
        """The guide's entry of a finding; without a code, all codes with their first sentence."""
        if not code:
            return {"codes": {entry.code: entry.what for entry in GUIDE.values()}}
        if code not in GUIDE:
            raise RunError(f"code={code!r} is unknown; ask without a code for the list")
        return _entry(GUIDE[code])

    # inside

    def _open(self, name: str) -> Run:
        try:
            folder = next((root / name for root in self._roots if (root / name / "run.json").is_file()), None)
        except OSError as error:  # no permission, or a name that is too long
            raise RunError(f"run={name!r:.200} cannot be read: {error.strerror}") from None
        if folder is None or not any(folder.resolve().is_relative_to(root) for root in self._roots):
            raise RunError(f"run={name!r:.200} is unknown; list_runs names the runs")
        return load_run(folder)

    def _name(self, root: Path, folder: Path) -> str:
        return folder.relative_to(root).as_posix()

    def _listed(self, root: Path, folder: Path) -> dict[str, Any]:
        record: dict[str, Any] = {"run": self._name(root, folder)}
        try:
            seen = overview(load_run(folder).salvaged())
        except RunError as error:
            return record | {"status": "damaged", "reason": str(error)}
        return record | {
            "status": seen.status,
            "reason": seen.end_reason,
            "precision": seen.recipe,
            "workload": seen.workload,
            "device": seen.device,
            "steps": seen.steps_done,
            "loss_last": seen.loss_last,
            "skipped_steps": seen.scale.skips if seen.scale.skips_recorded else None,
        }


def _heads(root: Path) -> list[Path]:
    """The `run.json` files below `root`, no deeper than `MAX_DEPTH`, without hidden folders and links out of it.

    Those of folders that may not be listed are among them, since nobody can say that they hold no run. Raises
    `RunError` if that is `root`.
    """
    heads: list[Path] = []

    def denied(error: OSError) -> None:
        if isinstance(error, PermissionError):
            if Path(error.filename) == root:
                raise RunError(f"runs={str(root)!r} cannot be read: {error.strerror}")
            heads.append(Path(error.filename) / "run.json")

    for where, folders, files in os.walk(root, onerror=denied):
        depth = len(Path(where).relative_to(root).parts)
        folders[:] = sorted(f for f in folders if not f.startswith(".")) if depth < MAX_DEPTH else []
        if "run.json" in files and depth:
            heads.append(Path(where) / "run.json")
            folders[:] = []
    return heads


def _changed_s(file: Path) -> float:
    """When a file was changed, seconds since 1970; 0 if it may not be seen."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "code": entry.code,
        "severity": entry.severity,
        "family": entry.family,
        "what": entry.what,
        "signal": entry.signal,
        "threshold": entry.threshold,
        "advice": entry.advice,
        "snippet": entry.snippet,
        "frameworks": dict(entry.frameworks),
        "follows": list(entry.follows),
    }
