"""The code for a recipe, as a program one can run and take apart: plain PyTorch, Accelerate, Transformers, Lightning.

    >>> print(code_for(TrainConfig(workload="my_task.py:build", precision="bf16"), "lightning"))

Each program has the same parts: the switches of the backends, the changes to the model (the very functions that
AMPscope trains with, `train/engine/model_changes.py`), the optimizer, and `train(model, batches, loss_fn, steps)`,
which gives the loss of each step. No torch here: a page shows them.
"""

import ast
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig, unknown
from amp_core.tune.codegen.loops import LOOPS

FRAMEWORKS = tuple(LOOPS)
LABELS = {
    "plain": "PyTorch",
    "accelerate": "Accelerate",
    "transformers": "Transformers",
    "lightning": "Lightning",
}
WRITTEN = ("fp32", "tf32", "bf16", "fp16")
"""Precisions that code is written for. The others are there to show what goes wrong."""
_IMPORTS = {  # what stands in a program where the word on the left occurs in it
    r"\bfunctools\.": "import functools",
    r"\brunpy\.": "import runpy",
    r"\bSequence\b": "from collections.abc import Sequence",
    r"\bAny\b": "from typing import Any",
    r"\blightning\.": "import lightning",
    r"\btorch\.": "import torch",
    r"\bF\.": "import torch.nn.functional as F",
    r"\bAccelerator\(": "from accelerate import Accelerator",
    r"\bGradScalerKwargs\(": "from accelerate.utils import GradScalerKwargs",
    r"\bMixedPrecision\(": "from lightning.pytorch.plugins import MixedPrecision",
    r"\bIterableDataset\b": "from torch.utils.data import IterableDataset",
    r"\bTrainingArguments\(": "from transformers import Trainer, TrainingArguments",
}
_STANDARD = ("functools", "runpy", "Sequence", "Any")


def code_for(config: TrainConfig | Mapping[str, Any], framework: str, says: str = "") -> str:
    """A whole Python program that trains with the recipe of `config`; `says` is what is known of it, in a sentence.

    Raises `RunError` for an unknown framework, and for a precision that no code is written for.
    """
    if not isinstance(config, TrainConfig):
        config = TrainConfig.from_dict(config)
    if framework not in LOOPS:
        raise unknown("framework", framework, FRAMEWORKS)
    if config.precision not in WRITTEN:
        raise RunError(f"precision={config.precision!r} has no code to ship; choose one of {', '.join(WRITTEN)}")
    config = config.resolved()
    body = "\n\n\n".join([_switches(config), *_functions(config), _prepare(config), _optimizer(config)])
    body = "\n\n\n".join([body, LOOPS[framework](config), _main(config)])
    return f"{_docstring(config, framework, says)}\n\n{_imports(body)}\n\n{body}\n"


def _docstring(config: TrainConfig, framework: str, says: str) -> str:
    what = " ".join(str(part) for part in (config.workload, config.size) if part)
    first = f"Train in {config.recipe.label} with {LABELS[framework]}, as AMPscope found best for {what}."
    parts = [first.replace("\\", "/"), *([says.replace("\\", "/")] if says else [])]
    return '"""' + "\n\n".join(parts).replace('"""', "'''") + '\n"""'


def _imports(body: str) -> str:
    found = [line for pattern, line in _IMPORTS.items() if re.search(pattern, body)]
    pytree = sorted({name for name in ("tree_leaves", "tree_map") if re.search(rf"\b{name}\(", body)})
    found += [f"from torch.utils._pytree import {', '.join(pytree)}"] if pytree else []
    standard = [line for line in found if any(name in line for name in _STANDARD) and "torch" not in line]
    rest = [line for line in found if line not in standard]

    def in_order(lines: list[str]) -> list[str]:
        return sorted(lines, key=lambda line: (line.startswith("from"), line.split()[1].lower()))

    return "\n\n".join("\n".join(in_order(group)) for group in (standard, rest) if group)


def _switches(config: TrainConfig) -> str:
    tf32 = config.recipe.tf32 if config.tf32 is None else config.tf32
    kind, _, number = config.device.partition(":")
    device = f'"{"cuda" if kind == "auto" else kind}"'
    device += f"  # CUDA_VISIBLE_DEVICES={number} chooses the one it was found for" if number else ""
    lines = [
        f"DEVICE = {device}",
        f"ACCUMULATE = {config.accumulate}  # batches whose gradients add up to one step",
        "",
        f"torch.backends.cuda.matmul.allow_tf32 = {tf32}",
        f"torch.backends.cudnn.allow_tf32 = {tf32}",
    ]
    if config.cudnn_benchmark:
        lines.append("torch.backends.cudnn.benchmark = True")
    if config.deterministic:
        lines.append("torch.use_deterministic_algorithms(True)  # on CUDA with CUBLAS_WORKSPACE_CONFIG=:4096:8")
    return "\n".join(lines)


def _functions(config: TrainConfig) -> list[str]:
    """The functions of `model_changes.py` that the recipe needs, as they stand there."""
    wanted = {"keep_in_fp32": config.islands, "pad_linears": config.pad_to, "to_fp8": config.fp8}
    source = (files("amp_core") / "train" / "engine" / "model_changes.py").read_text(encoding="utf-8")
    source = re.sub(r"  # (type: ignore|noqa).*", "", source)
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return [ast.get_source_segment(source, found[name]) or "" for name, asked in wanted.items() if asked]


def _prepare(config: TrainConfig) -> str:
    lines = [
        "def prepare(model):",
        '    """The model as the recipe wants it; its parameters keep their names, shapes and values."""',
        "    model = model.to(DEVICE)",
    ]
    if config.channels_last:
        lines.append("    model = model.to(memory_format=torch.channels_last)")
    if config.fp8:
        lines.append("    model = to_fp8(model)")
    if config.islands:
        lines.append(f"    keep_in_fp32(model, [{', '.join(_quoted(name) for name in config.islands)}])")
    if config.pad_to is not None:
        lines.append(f"    pad_linears(model, {config.pad_to})")
    if config.compile:
        lines.append("    model.compile()")
    return "\n".join([*lines, "    return model"])


def _optimizer(config: TrainConfig) -> str:
    kind = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[config.optimizer]
    more = ", momentum=0.9" if config.optimizer == "sgd" else ""
    lines = [
        "def make_optimizer(model):",
        '    """The optimizer, over all parameters that train."""',
        "    parameters = [p for p in model.parameters() if p.requires_grad]",
        f"    optimizer = torch.optim.{kind}(parameters, lr={config.lr!r}{more}, fused={config.fused})",
    ]
    if config.optimizer == "sgd" and config.fused:
        lines += [
            "    for parameter in parameters:  # a skipped first step would leave fused SGD's momentum uninitialised",
            '        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)',
        ]
    return "\n".join([*lines, "    return optimizer"])


def _main(config: TrainConfig) -> str:
    lines = ['if __name__ == "__main__":', f"    torch.manual_seed({config.seed})"]
    if config.own is not None:
        file, function = config.own
        lines += [
            f"    task = runpy.run_path({_quoted(str(file))})[{_quoted(function)}]()",
            "    task = task if isinstance(task, tuple) else (task.model, task.batches, task.loss_fn)",
            f"    losses = train(*task, steps={config.steps})",
        ]
    else:
        names = ("workload", "size", "batch_size", "seed")
        given = ", ".join(
            f"{name}={_quoted(value) if isinstance(value, str) else value}"
            for name in names
            if (value := getattr(config, name)) is not None
        )
        lines += [
            "    from amp_core.train import TrainConfig",
            "    from amp_core.train.workloads import build",
            "",
            f"    task = build(TrainConfig({given}))",
            f"    losses = train(task.model, task.batches, task.loss_fn, steps={config.steps})",
        ]
    return "\n".join([*lines, '    print(f"loss {losses[0]:.4g} → {losses[-1]:.4g}")'])


def _quoted(text: str) -> str:
    """As ruff would write it."""
    found = repr(text)
    return f'"{found[1:-1]}"' if '"' not in found else found
