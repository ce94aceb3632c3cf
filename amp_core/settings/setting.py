"""Declaration of a training setting: a field of `TrainConfig` with what the command line, form and checks need.

    steps: int = setting(200, "whole", "optimizer steps to attempt", form=Form("Steps", group=FRONT))

The flag `--steps`, its help, the check of its value, the field of the app's form, "As a command" and "Run again" follow
from that one line.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from amp_core.formats import FORMATS
from amp_core.schema import RunError

METAVARS = {
    "whole": "N",  # a whole number
    "positive": "X",  # a number above 0
    "switch": "",  # on or off
    "choice": "NAME",  # one of `choices`
    "names": "A,B,…",  # a tuple of names
    "window": "FIRST:STOP",  # two whole numbers
    "text": "TEXT",  # checked by `TrainConfig` itself
    "scale": "X",  # a number above 0, or `dynamic`
}
"""Kinds of settings, and the metavar of their values."""

FRONT, TRAINING, SWITCHES, SCALE, RECORDED = "front", "Training", "", "Dynamic loss scale", "What else is recorded"
FOLDED = (TRAINING, SWITCHES, SCALE, RECORDED)
"""Groups of the form under "More settings", in order, by heading; fields in `FRONT` are always visible."""


@dataclass(frozen=True)
class Form:
    """The field of a setting on the app's form."""

    label: str
    help: str = ""
    """Empty: the help of the flag, as a sentence."""
    group: str = TRAINING
    place: int = 9
    """Orders the fields of a group; equal ones keep the order of `TrainConfig`."""
    unit: str = ""
    initial: Any = None
    """Initial value of the field, if it differs from the setting's default."""
    needs: str = ""
    """What the field needs to have an effect: `scaler`, `gpus`, `compiler` or `nvfp4`; empty for nothing."""
    options: tuple[tuple[str, Any], ...] = ()
    """More arguments of the Streamlit widget, e.g. `placeholder`."""

    @property
    def full_label(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True)
class Setting:
    """One setting. Make it with `setting`, as the default of a field."""

    kind: str
    """One of `METAVARS`."""
    help: str
    """Help of the flag."""
    metavar: str
    least: int = 1
    """Bounds of a whole number: this one and `most`."""
    most: int | None = None
    choices: tuple[str, ...] = ()
    alone: Any = None
    """Value of the flag without an argument, and of the form's toggle if on; None if a value is required."""
    unset: str = "the default"
    """The meaning of None, if None is allowed."""
    shared: bool = True
    """Whether `train`, `compare` and `tune` all have its flag; other commands declare it with `add_flag`."""
    may_change: bool = False
    """Whether a resumed run may use another value, since it does not change the training."""
    form: Form | None = None
    """None: the form has no field for it."""

    @property
    def is_text(self) -> bool:
        """Whether it is entered as text, not as a number or a switch."""
        return self.kind in ("text", "names", "window")

    def checked(self, name: str, value: Any, optional: bool) -> Any:
        """`value` converted to the setting's type. Raises `RunError` if that is not possible."""
        if optional and value is None:
            return None
        if self.kind == "whole":
            check_whole(name, value, self.least, self.most)
        elif self.kind == "positive" or (self.kind == "scale" and not isinstance(value, str)):
            return positive(name, value)
        elif self.kind == "scale" and value != "dynamic":
            raise RunError(f"{name}={value!r} is unknown; give dynamic or a positive number such as 128")
        elif self.kind == "names":
            return _names(name, value)
        elif self.kind == "window":
            return _window(name, value)
        elif self.kind == "choice":
            check_choice(name, value, self.choices)
        elif self.kind == "switch" and not isinstance(value, bool):
            right = f"true, false or null for {self.unset}" if optional else "true or false"
            raise RunError(f"{name}={value!r} is not a switch; give {right}")
        return value

    def as_text(self, value: Any) -> str:
        """A value as a user enters it; empty for None."""
        if isinstance(value, list | tuple):
            return (":" if self.kind == "window" else ",").join(map(str, value))
        return "" if value is None else str(value)


def setting(
    default: Any,
    kind: str,
    text: str = "",
    metavar: str = "",
    *,
    form: Form | None = None,
    **more: Any,
) -> Any:
    """A field of `TrainConfig`: its default and a `Setting` with the rest.

    `text` is the help of the flag; empty, it lists the choices.
    """
    help_text = text or ", ".join(more.get("choices", ()))
    one = Setting(kind, help_text, metavar or METAVARS[kind], form=form, **more)
    return dataclasses.field(default=default, metadata={"setting": one})


def settings_of(config: Any) -> dict[str, Setting]:
    """The settings of a dataclass or an instance of it, by name and in order."""
    return {field.name: field.metadata["setting"] for field in dataclasses.fields(config)}


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def unknown(argument: str, value: object, choices: Iterable[str], of: str = "") -> RunError:
    """The error for a value that is none of `choices`, with the closest match, if there is one."""
    names = list(choices)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return RunError(f"{argument}={value!r} is unknown; choose one of {', '.join(names)}{of}{hint}")


def check_choice(argument: str, value: object, choices: Iterable[str], of: str = "") -> None:
    """Raise `RunError` for a value that is none of `choices`."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        raise unknown(argument, value, names, of)


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise `RunError` for a value that is not a whole number from `least` to `most`."""
    right = f"a whole number of {least} or more" if most is None else f"a whole number from {least} to {most}"
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise RunError(f"{name}={value!r} is not possible; give {right}")


def positive(name: str, value: Any) -> float:
    """A number above 0 that FP32 holds, as a float: 128 and 128.0 are one setting, on disk too. Raises `RunError` for
    any other value."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= FORMATS["fp32"].max_value:  # not true of NaN either
        raise RunError(f"{name}={value!r} is not possible; give a number above 0")
    return float(value)


def _window(name: str, value: object) -> tuple[int, int]:
    """The first step and the step after the last: two numbers, which JSON has as a list, or `50:53`."""
    ends = value.split(":") if isinstance(value, str) else value
    if isinstance(ends, list | tuple) and len(ends) == 2:
        first, stop = (int(n) if isinstance(n, str) and n.isdecimal() else n for n in ends)
        if all(isinstance(n, int) and not isinstance(n, bool) for n in (first, stop)) and 0 <= first < stop:
            return first, stop
    raise RunError(f"{name}={value!r} is not a window of steps; 50:53 profiles steps 50, 51 and 52")


def _names(argument: str, value: object) -> tuple[str, ...]:
    """Names of modules: a tuple, a list, as JSON has it, or text with commas between them."""
    names = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names):
        return tuple(names)
    raise RunError(f"{argument}={value!r} lists no modules; give their names separated by commas")
