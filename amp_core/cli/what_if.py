"""`ampscope what-if RUN --formats mxfp8,nvfp4`: which linear layers can run in 8 or 4 bits, and the code for it."""

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from amp_core.cli.untrusted import RUN_HELP, printable
from amp_core.quantization import RECIPES, find_recipe, is_recipe
from amp_core.schema import RunError
from amp_core.schema.documents import versioned
from amp_core.store.run import load_run
from amp_core.text import formatting

if TYPE_CHECKING:
    import pandas as pd

    from amp_core.analysis.numerics.layer_choice import Choice


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "what-if",
        help="predict which layers can run in 8 or 4 bits, and print the code",
        description="Needs a run with recorded blocks (watch(…, blocks=True), or train --blocks). Prints the "
        "predicted error of each linear layer in each format, the share of GEMM FLOPs below the limit, and the "
        "layers that stay in BF16 as code for torchao, torchtitan and Transformer Engine. For a measurement, use "
        "Recorder.audit.",
        allow_abbrev=False,
    )
    command.add_argument("folder", metavar="RUN", help=RUN_HELP)
    command.add_argument(
        "--formats", metavar="A,B,…", default="mxfp8,nvfp4", help=f"of {', '.join(RECIPES)} (default %(default)s)"
    )
    command.add_argument(
        "--limit",
        metavar="ERROR",
        help=("maximum relative error of a product: 0.1, or in decibels, 20dB (default 0.15)"),
    )
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the layers, the share of FLOPs, and the code."""
    from amp_core.analysis.numerics.layer_choice import LIMIT, choose, layer_errors, parse_limit

    names = [name.strip() for name in arguments.formats.split(",") if name.strip()]
    for name in names:
        if not is_recipe(name):
            raise RunError(f"formats={name!r} is unknown; choose from {', '.join(RECIPES)}")
    if not names:
        raise RunError(f"formats={arguments.formats!r} lists none; choose from {', '.join(RECIPES)}")
    recipes = list({recipe.name: recipe for recipe in map(find_recipe, names)}.values())
    limit = LIMIT if arguments.limit is None else parse_limit(arguments.limit)
    opened = load_run(arguments.folder)
    errors = layer_errors(opened, recipes)
    choices = [choose(errors, recipe, limit) for recipe in recipes]
    print(_document(opened.name, errors, choices) if arguments.json else printable(in_words(errors, choices)))
    return 0


def in_words(errors: "pd.DataFrame", choices: "list[Choice]") -> str:
    """The errors as a table, and for each format what goes and the code."""
    from amp_core.analysis.numerics.layer_choice import by_layer, in_db
    from amp_core.analysis.numerics.layer_choice_code import FRAMEWORKS, code_for, train_flags

    limit = choices[0].limit
    table = by_layer(errors)
    rows = [["layer", *(c.recipe.label for c in choices)]]
    for layer, *values in table.itertuples(name=None):
        rows.append([layer or "(the model)", *(_cell(value, in_db(limit)) for value in values)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    parts = [
        "Predicted, not measured: error of each layer's worst product in dB (higher is better), the most harmful "
        f"layers first. ! marks layers beyond the limit of {_limit(limit)}.",
        "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    for choice in choices:
        share = formatting.percent(choice.flops_frac) if choice.flops_frac == choice.flops_frac else "an unknown share"
        count = f"{len(choice.go)} of {formatting.plural(len(choice.go) + len(choice.stay), 'layer')}"
        parts.append(f"{choice.recipe.label}: {count}, {share} of GEMM FLOPs, qualify")
        parts += [f"# {title}\n{code_for(name, choice).rstrip()}" for name, title in FRAMEWORKS.items()]
        if given := train_flags(choice):
            parts.append(f"# AMPscope\n# ampscope train … {given}")
    return "\n\n".join(parts)


def _cell(decibels: float, limit: float) -> str:
    if decibels != decibels:
        return formatting.NONE
    return f"{decibels:.1f}" + (" !" if decibels < limit else "")


def _limit(error: float) -> str:
    from amp_core.analysis.numerics.layer_choice import in_db

    return f"{error:.3g} ({in_db(error):.1f} dB)"


def _document(name: str, errors: "pd.DataFrame", choices: "list[Choice]") -> str:
    from amp_core.analysis.numerics.layer_choice import in_db
    from amp_core.analysis.numerics.layer_choice_code import FRAMEWORKS, code_for, train_flags

    limit = choices[0].limit
    record = {
        "run": name,
        "measured": False,
        "limit": {"rel_error": limit, "db": in_db(limit)},
        "formats": [
            {
                "format": choice.recipe.name,
                "label": choice.recipe.label,
                "scaling": choice.recipe.scaling,
                "flops_frac": _plain(choice.flops_frac),
                "go": list(choice.go),
                "stay": list(choice.stay),
                "code": {framework: code_for(framework, choice) for framework in FRAMEWORKS},
                "train_flags": train_flags(choice) or None,
            }
            for choice in choices
        ],
        "layers": [
            {key: _plain(value) for key, value in row.items()} | {"within_limit": row["rel_error"] <= limit}
            for row in errors.to_dict("records")
        ],
    }
    return json.dumps(versioned(record), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    """A value that JSON can hold: null for NaN, text for infinities."""
    if value is None or value != value:
        return None
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
