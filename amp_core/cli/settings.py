"""The flags that `train`, `compare` and `tune` share, and the `TrainConfig` they make.

A flag that is not given is absent, so that a `--config` file decides it. A value that is not a number is passed on
unchanged, so that `TrainConfig` refuses it with the sentence that the app shows too.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from amp_core.schema import RunError
from amp_core.settings.setting import flag, settings_of
from amp_core.settings.training import TrainConfig


def number(text: str) -> int | float | str:
    """`text` as an int or a float, or unchanged if it is neither."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


SETTINGS = settings_of(TrainConfig)
DEFAULTS = TrainConfig()


def add_settings(command: argparse.ArgumentParser) -> None:
    """Declare `--config` and a flag for every setting that the commands share: all but the precision and `--nproc`."""
    command.add_argument(
        "--config", metavar="FILE", help="JSON file of settings, or - for standard input; flags override it"
    )
    group = command.add_argument_group("settings")
    for name, one in SETTINGS.items():
        if one.shared:
            add_flag(group, name)


def add_flag(command: "argparse.ArgumentParser | argparse._ArgumentGroup", name: str) -> None:
    """Declare the flag of one setting."""
    one, default = SETTINGS[name], getattr(DEFAULTS, name)
    if one.kind == "switch":
        command.add_argument(
            flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=one.help
        )
        return
    alone: dict[str, Any] = {} if one.alone is None else {"nargs": "?", "const": one.alone}
    command.add_argument(
        flag(name),
        type=str if one.is_text or one.kind == "choice" else number,
        metavar=one.metavar,
        default=argparse.SUPPRESS,
        help=one.help if default in (None, ()) else f"{one.help} (default {default})",
        **alone,
    )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings from the file and the flags."""
    values = {name: getattr(arguments, name) for name in SETTINGS if hasattr(arguments, name)}
    return _from_file(arguments.config) | values if arguments.config is not None else values


def flags(config: TrainConfig, names: Iterable[str] = SETTINGS) -> list[str]:
    """The flags that make `config`: workload and precision always, other settings if they differ from the default. Only
    those of `names`."""
    line: list[str] = []
    for name in names:
        one, value = SETTINGS[name], getattr(config, name)
        if name not in ("workload", "precision") and value == getattr(DEFAULTS, name):
            continue
        if isinstance(value, bool):
            line.append(flag(name if value else f"no_{name}"))
        else:
            text = one.as_text(value)
            line += [flag(name), text.removesuffix(".0") if isinstance(value, float) else text]
    return line


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
