"""The flags that `train`, `compare` and `tune` share, and the `TrainConfig` they make.

A flag that is not given is absent, so that a `--config` file decides it; a value that is no number is handed on as it
is, so that `TrainConfig` refuses it with the sentence that the app shows too.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from amp_core.schema import RunError
from amp_core.train.config import OPTIMIZERS, WORKLOADS, TrainConfig


def number(text: str) -> int | float | str:
    """`text` as an int or a float, or itself where it is neither."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


_VALUES: dict[str, tuple[Any, str, str]] = {
    "workload": (str, "NAME", f"{', '.join(WORKLOADS)}, or FILE.py:FUNCTION"),
    "size": (str, "SIZE", "; ".join(f"{w.name}: {', '.join(w.sizes)}" for w in WORKLOADS.values())),
    "steps": (number, "N", "optimizer steps to attempt"),
    "batch_size": (number, "N", "samples of one micro-batch"),
    "accumulate": (number, "N", "micro-batches per optimizer step"),
    "lr": (number, "X", "learning rate"),
    "optimizer": (str, "NAME", ", ".join(OPTIMIZERS)),
    "clip_norm": (number, "X", "clip the unscaled gradients to this 2-norm"),
    "loss_scale": (number, "dynamic|X", "dynamic, or a fixed number such as 128"),
    "init_scale": (number, "X", "loss scale that the dynamic one begins with"),
    "growth_interval": (number, "N", "clean steps after which the loss scale grows"),
    "growth_factor": (number, "X", "by what the loss scale is multiplied then"),
    "backoff_factor": (number, "X", "by what the loss scale is multiplied after a skipped step"),
    "device": (str, "DEVICE", "auto, cpu, cuda or cuda:N"),
    "seed": (number, "N", "decides initial weights, data order and dropout"),
    "every": (number, "N", "sample number ranges every N steps"),
    "audit_every": (number, "N", "replay a batch in FP32 every N steps and record what the recipe loses"),
    "checkpoint_every": (number, "N", "save the training's state every N steps and at the end, for --resume"),
    "profile": (str, "FIRST:STOP", "profile steps FIRST up to, not including, STOP, e.g. 50:53"),
    "islands": (str, "A,B,…", "modules that compute in FP32 inside autocast"),
    "pad_to": (number, "N", "multiply linear layers with sizes rounded up to a multiple of N"),
    "trace_ops": (number, "STEP", "trace every operator of one step, with its dtypes; step 2 where none is named"),
}
_WITHOUT_VALUE: dict[str, dict[str, Any]] = {"trace_ops": {"nargs": "?", "const": 2}}
"""What a flag means that is given alone."""
_SWITCHES = {
    "fused": "use the optimizer's fused kernel",
    "channels_last": "lay images and the weights of convolutions out with the channels last",
    "fp8": "multiply linear layers in FP8 inside BF16 autocast, with torchao",
    "compile": "run the model through torch.compile",
    "tf32": "TF32 inside CUDA's matrix units, whatever the recipe says",
    "cudnn_benchmark": "let cuDNN try its algorithms and keep the fastest",
    "deterministic": "deterministic algorithms only",
    "evaluate": "measure loss on held-out data at the end",
}


def add_settings(command: argparse.ArgumentParser) -> None:
    """Declare `--config` and a flag for every setting but the precision."""
    command.add_argument(
        "--config", metavar="FILE", help="JSON file of settings, - for standard input; flags win over it"
    )
    group = command.add_argument_group("settings")
    defaults = TrainConfig()
    for name, (kind, metavar, text) in _VALUES.items():
        default = getattr(defaults, name)
        shown = text if default in (None, ()) else f"{text} (default {default})"
        group.add_argument(
            _flag(name),
            type=kind,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=shown,
            **_WITHOUT_VALUE.get(name, {}),
        )
    for name, text in _SWITCHES.items():
        group.add_argument(
            _flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=f"{text}"
        )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by file and by flags."""
    names = (*_VALUES, *_SWITCHES, "precision")
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return _from_file(arguments.config) | given if arguments.config is not None else given


def flags(config: TrainConfig) -> list[str]:
    """The flags that make `config`: workload and precision always, of the rest what is not as it is by default."""
    found: list[str] = []
    default = TrainConfig()
    for name in dict.fromkeys(("workload", "size", "precision", *_VALUES, "nproc", *_SWITCHES)):
        value = getattr(config, name)
        if name not in ("workload", "precision") and value == getattr(default, name):
            continue
        if isinstance(value, bool):
            found.append(_flag(name if value else f"no_{name}"))
        else:
            between = ":" if name == "profile" else ","
            text = between.join(map(str, value)) if isinstance(value, tuple) else str(value)
            found += [_flag(name), text.removesuffix(".0") if isinstance(value, float) else text]
    return found


def _from_file(file: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        record = json.loads(text)
    except OSError as error:
        raise RunError(f"config={file!r} cannot be read: {error.strerror}; give a JSON file of settings") from None
    except (ValueError, RecursionError):
        raise RunError(f"config={file!r} does not hold JSON; give a JSON object of settings") from None
    if not isinstance(record, dict):
        raise RunError(f"config={file!r} holds a JSON {type(record).__name__}; give a JSON object of settings")
    return record


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
