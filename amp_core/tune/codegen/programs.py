"""The code for a recipe, as a runnable program: plain PyTorch, Accelerate, Transformers, Lightning.

    >>> print(code_for(TrainConfig(workload="my_task.py:build", precision="bf16"), "lightning"))

Each program has the same parts: backend switches, the changes to the model (the source of the functions AMPscope
trains with, `train/engine/model_changes.py`), the optimizer, and `train(model, batches, loss_fn, steps)`, which returns
the loss of each step. `templates/program.jinja` holds the parts, a template per framework its `train`. This module
imports no torch: pages show the programs.
"""

import ast
import functools
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig, unknown

LABELS = {
    "plain": "PyTorch",
    "accelerate": "Accelerate",
    "transformers": "Transformers",
    "lightning": "Lightning",
}
FRAMEWORKS = tuple(LABELS)
SUPPORTED_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""Precisions that code is written for. The others demonstrate failures, or are emulated."""


def code_for(config: TrainConfig | Mapping[str, Any], framework: str, evidence: str = "") -> str:
    """A Python program that trains with the recipe of `config`; the sentence `evidence` goes into its docstring.

    Raises `RunError` for an unknown framework, and for a precision that no code is written for.
    """
    if not isinstance(config, TrainConfig):
        config = TrainConfig.from_dict(config)
    if framework not in FRAMEWORKS:
        raise unknown("framework", framework, FRAMEWORKS)
    if config.precision not in SUPPORTED_PRECISIONS:
        raise RunError(
            f"precision={config.precision!r} has no generated code; choose one of {', '.join(SUPPORTED_PRECISIONS)}"
        )
    config = config.resolved()
    return (
        _templates()
        .get_template(f"{framework}.jinja")
        .render(
            config=config,
            framework=framework,
            docstring=_docstring(config, framework, evidence),
            model_changes=_model_changes(config),
            scaler_arguments=_scaler_arguments(config),
            workload_arguments=_workload_arguments(config),
        )
    )


@functools.cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("amp_core.tune.codegen"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,  # the output is Python, not HTML
    )
    environment.filters["quoted"] = _quoted
    return environment


def _docstring(config: TrainConfig, framework: str, evidence: str) -> str:
    task = " ".join(str(part) for part in (config.workload, config.size) if part)
    title = f"Train in {config.recipe.label} with {LABELS[framework]}: the recipe that AMPscope found best for {task}."
    text = "\n\n".join(filter(None, (title, evidence)))
    return text.replace("\\", "/").replace('"""', "'''")


def _model_changes(config: TrainConfig) -> list[str]:
    """The source of the functions of `model_changes.py` that the recipe needs."""
    fp8 = config.precision == "fp8"
    needed = {"keep_in_fp32": config.islands, "pad_linears": config.pad_to, "layers_to_quantize": fp8, "to_fp8": fp8}
    source = (files("amp_core") / "train" / "engine" / "model_changes.py").read_text(encoding="utf-8")
    source = re.sub(r"  # (type: ignore|noqa).*", "", source)
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return [ast.get_source_segment(source, functions[name]) or "" for name, value in needed.items() if value]


def _scaler_arguments(config: TrainConfig) -> str:
    if config.loss_scale != "dynamic":
        # The longest interval that a scaler's 32-bit tracker counts. The factor must be below 1, and FP32 rounds this
        # one to 1: a skipped step leaves the loss scale as it was.
        return f"init_scale={config.loss_scale!r}, growth_interval=2147483647, backoff_factor=1 - 2**-30"
    arguments = {"init_scale": config.init_scale, "growth_interval": config.growth_interval}
    arguments |= {"growth_factor": config.growth_factor} if config.growth_factor != 2.0 else {}
    arguments |= {"backoff_factor": config.backoff_factor} if config.backoff_factor != 0.5 else {}
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _workload_arguments(config: TrainConfig) -> str:
    names = ("workload", "size", "batch_size", "seed")
    values = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return ", ".join(f"{k}={_quoted(v) if isinstance(v, str) else v}" for k, v in values.items())


def _quoted(text: str) -> str:
    """A string literal in double quotes where possible, as ruff formats it."""
    literal = repr(text)
    return f'"{literal[1:-1]}"' if '"' not in literal else literal
