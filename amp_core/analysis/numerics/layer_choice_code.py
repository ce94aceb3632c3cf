"""A choice of layers as code for the libraries that train in 8 and 4 bits.

    print(code_for("torchao", choice))

Checked against torchao 0.18, torchtitan's converters of 2026 and Transformer Engine 2.15.
"""

import shlex
from collections.abc import Callable, Collection

from amp_core.analysis.numerics.layer_choice import Choice
from amp_core.settings.catalog import RECIPES

_MX = "torchao.prototype.moe_training.config"
_TORCHAO = {
    "fp8-tensorwise": 'Float8LinearConfig.from_recipe_name("tensorwise")',
    "fp8-rowwise": 'Float8LinearConfig.from_recipe_name("rowwise")',
    "fp8-rowwise-pow2": 'Float8LinearConfig.from_recipe_name("rowwise")',
    "mxfp8-e4m3": "MXFP8TrainingOpConfig(scale_calculation_mode=ScaleCalculationMode.FLOOR)",
    "mxfp8-e4m3-rceil": "MXFP8TrainingOpConfig()",
    "nvfp4": "NVFP4TrainingConfig()",
    "nvfp4-2d": "NVFP4TrainingConfig()",
}
_TORCHAO_IMPORTS = {
    "Float8": "from torchao.float8 import Float8LinearConfig, convert_to_float8_training",
    "MXFP8": f"from {_MX} import MXFP8TrainingOpConfig\n"
    "from torchao.prototype.mx_formats.config import ScaleCalculationMode\n"
    "from torchao.quantization import quantize_",
    "NVFP4": "from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig\n"
    "from torchao.quantization import quantize_",
}
_TORCHTITAN = {
    "fp8-tensorwise": ("Float8LinearConverter", "float8", "tensorwise"),
    "fp8-rowwise": ("Float8LinearConverter", "float8", "rowwise"),
    "fp8-rowwise-pow2": ("Float8LinearConverter", "float8", "rowwise"),
    "mxfp8-e4m3": ("MXFP8LinearConverter", "mx", "mxfp8_cublas"),
    "mxfp8-e4m3-rceil": ("MXFP8LinearConverter", "mx", "mxfp8_cublas_rceil"),
    "nvfp4": ("NVFP4LinearConverter", "", ""),
    "nvfp4-2d": ("NVFP4LinearConverter", "", ""),
}
"""Converter; section and recipe of the command-line flags, which NVFP4 has none of."""
_TRANSFORMER_ENGINE = {
    "fp8-tensorwise": "Float8CurrentScaling()",
    "fp8-delayed": 'DelayedScaling(amax_history_len=1024, amax_compute_algo="max")',
    "fp8-block": "Float8BlockScaling()",
    "fp8-block-pow2": "Float8BlockScaling()",
    "mxfp8-e4m3": "MXFP8BlockScaling()",
    "mxfp8-e4m3-rceil": "MXFP8BlockScaling()",
    "nvfp4": "NVFP4BlockScaling()",
    "nvfp4-2d": "NVFP4BlockScaling()",
}

FRAMEWORKS = {"torchao": "torchao", "torchtitan": "torchtitan", "transformer-engine": "Transformer Engine"}
"""Libraries that code is written for, and what they are called."""


def code_for(framework: str, choice: Choice) -> str:
    """The choice as code for one of `FRAMEWORKS`; a comment where it does not train in that recipe, or if no layer
    goes to it."""
    label = choice.recipe.label
    write, known = _WRITERS[framework]
    if choice.recipe.name not in known:
        return f"# {FRAMEWORKS[framework]} does not support training in {label}.\n"
    if not choice.go:
        return f"# No layer qualifies for {label} under this limit: train in BF16.\n"
    return write(choice)


def train_flags(choice: Choice) -> str:
    """The choice as flags of `ampscope train`; empty if it has no such precision, or if no layer goes to the recipe."""
    precision = next((name for name, one in RECIPES.items() if one.quantization == choice.recipe.name), None)
    if precision is None or not choice.go:
        return ""
    return f"--precision {precision} --keep-bf16 {shlex.quote(','.join(choice.stay))}"


def _torchao(choice: Choice) -> str:
    config = _TORCHAO[choice.recipe.name]
    imports = next(text for start, text in _TORCHAO_IMPORTS.items() if config.startswith(start))
    if "ScaleCalculationMode" not in config:
        imports = "\n".join(line for line in imports.split("\n") if "ScaleCalculationMode" not in line)
    convert = (
        f"convert_to_float8_training(model, module_filter_fn=goes, config={config})"
        if config.startswith("Float8")
        else f"quantize_(model, {config}, filter_fn=goes)"
    )
    return (
        f"import torch\n{imports}\n\n{_stays(choice)}\n\n"
        "def goes(module: torch.nn.Module, fqn: str) -> bool:  # torchao converts Linear, not GPT-2's Conv1D\n"
        "    return isinstance(module, torch.nn.Linear) and fqn not in BF16_LAYERS\n\n\n"
        f"{convert}\n"
    )


def _torchtitan(choice: Choice) -> str:
    converter, section, recipe = _TORCHTITAN[choice.recipe.name]
    float8 = section == "float8"
    argument, names, others = ("filter_fqns", choice.stay, choice.go) if float8 else ("fqns", choice.go, choice.stay)
    first = f'\n        recipe_name="{recipe}",' if float8 else ""
    lines = [
        f"from torchtitan.components.quantization import {converter}\n",
        "quantization = [  # in the call of model_registry",
        f"    {converter}.Config({first}",
        f"        {argument}={_literal(names, '[]', 8)},",
        "        model_compile_enabled=True,",
        "    ),",
        "]",
        *_also_matched(names, others),
    ]
    if section:
        flags = f'--model.converters="quantize.linear.{section}" --quantize.linear.{section}.recipe_name="{recipe}"'
        stays = f'--quantize.linear.{section}.filter_fqns="{",".join(choice.stay)}"'
        lines += ["", "# As flags, for versions that have them:", f"# {flags}", f"# {stays}"]
        lines += _also_matched(choice.stay, choice.go) if not float8 else []
    return "\n".join(lines) + "\n"


def _also_matched(names: tuple[str, ...], others: tuple[str, ...]) -> list[str]:
    """Comments on names that, as parts of others, match those too."""
    also = {name: [other for other in others if name in other] for name in names}
    return [f"# {name!r} also matches {', '.join(matching)}" for name, matching in also.items() if matching]


def _transformer_engine(choice: Choice) -> str:
    recipe = _TRANSFORMER_ENGINE[choice.recipe.name]
    name = recipe.partition("(")[0]
    return (
        f"import transformer_engine.pytorch as te\nfrom transformer_engine.common.recipe import {name}\n\n"
        f"{_stays(choice)}\n\n"
        "def in_bf16(forward):\n"
        "    def call(*args, **kwargs):\n"
        "        with te.autocast(enabled=False):\n"
        "            return forward(*args, **kwargs)\n\n"
        "    return call\n\n\n"
        "for fqn, module in model.named_modules():\n"
        "    if fqn in BF16_LAYERS:\n"
        "        module.forward = in_bf16(module.forward)\n\n"
        f"with te.autocast(enabled=True, recipe={recipe}):  # around forward; its layers are te.Linear\n"
        "    loss = loss_fn(model(x), y)\n"
    )


_WRITERS: dict[str, tuple[Callable[[Choice], str], Collection[str]]] = {
    "torchao": (_torchao, _TORCHAO),
    "torchtitan": (_torchtitan, _TORCHTITAN),
    "transformer-engine": (_transformer_engine, _TRANSFORMER_ENGINE),
}


def _stays(choice: Choice) -> str:
    return f"BF16_LAYERS = {_literal(choice.stay, '{}')}\n" if choice.stay else "BF16_LAYERS: set[str] = set()\n"


def _literal(names: tuple[str, ...], brackets: str, indent: int = 0) -> str:
    """Names as a Python list or set, one to a line if there are several."""
    if len(names) < 2:
        return f"{brackets[0]}{''.join(_quoted(name) for name in names)}{brackets[1]}"
    lines = "".join(f"\n{' ' * (indent + 4)}{_quoted(name)}," for name in names)
    return f"{brackets[0]}{lines}\n{' ' * indent}{brackets[1]}"


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
