"""The fields of the form on Start a run. The field `<name>` is `start.<name>` in the session's state.

fields.state()["steps"]                         # the value of a field
st.number_input("Steps", **fields.keep("steps"))
fields.refusal("steps", "seed")                 # the error of one of them
"""

from typing import Any

import streamlit as st

from amp_core import RunError
from amp_core.library.permissions import current
from amp_core.settings.setting import FOLDED, FRONT, settings_of
from amp_core.settings.training import RECIPES, TrainConfig
from pages.parts import callbacks, words
from pages.parts.start import places

SETTINGS = settings_of(TrainConfig)
FORMS = {name: one.form for name, one in SETTINGS.items() if one.form is not None}
"""What `TrainConfig` says of the settings that have a field."""


def in_group(*groups: str) -> list[str]:
    """Names of the settings in those groups of the form, in the order of their fields."""
    names = [name for group in groups for name, form in FORMS.items() if form.group == group]
    return sorted(names, key=lambda name: (groups.index(FORMS[name].group), FORMS[name].place))


PLAIN = tuple(in_group(FRONT))
SCALE = ("loss_scale", "init_scale")
"""Settings that share the field `scale`, whose meaning `scaling` selects."""
MORE = tuple(in_group(*FOLDED))
"""Settings that are folded at first."""
DEFAULTS = TrainConfig()
WIDTH = 170
"""Pixels of a field: four fit in a row on a page of usual width, two on a narrow one."""


def draw(name: str, why_not: str | None = None, **options: Any) -> None:
    """The field of a setting, disabled if `why_not` gives a reason why it has no effect; `options` override the
    widget's."""
    one, form = SETTINGS[name], FORMS[name]
    of_flag = words.sentence(one.help[:1].upper() + one.help[1:]) if one.kind != "choice" else None
    help_ = why_not or form.help or of_flag
    first = initial(name)
    given: dict[str, Any] = {"help": help_, "disabled": why_not is not None} | dict(form.options)
    if one.kind == "switch" or one.alone is not None:
        st.toggle(form.full_label, **({"value": first} | given | options | keep(name)))
    elif one.kind == "choice":
        place = one.choices.index(first)
        st.selectbox(form.full_label, one.choices, **({"index": place, "width": WIDTH} | given | options | keep(name)))
    elif one.is_text:
        st.text_input(form.full_label, **({"value": first, "width": WIDTH} | given | options | keep(name)))
    else:
        st.number_input(form.full_label, **({"value": first, "width": WIDTH} | given | options | keep(name)))


def initial(name: str) -> Any:
    """The initial value of a setting's field."""
    form, default = FORMS[name], getattr(DEFAULTS, name)
    return form.initial if form.initial is not None else to_field(name, default)


def to_field(name: str, value: Any) -> Any:
    """The value of a setting as its field holds it: text is text, and a step to trace is a toggle."""
    one = SETTINGS[name]
    if one.alone is not None:
        return value is not None
    return one.as_text(value) if one.is_text else value


def from_field(name: str, value: Any) -> Any:
    """The inverse: the value of a field as that of its setting."""
    one = SETTINGS[name]
    if one.alone is not None:
        return one.alone if value else None
    return value or getattr(DEFAULTS, name) if one.is_text else value


def keep(name: str) -> dict[str, Any]:
    """Widget arguments of a field whose value outlives a visit to another page."""
    return {"key": f"start.{name}", "persist_state": "session"}


def state() -> dict[str, Any]:
    """The values of the form's fields."""
    return {str(k).removeprefix("start."): v for k, v in st.session_state.items() if str(k).startswith("start.")}


def own_workload() -> str:
    """The user's own workload that was typed, if the server allows any."""
    return str(st.session_state.get("start.own") or "").strip() if current().scripts else ""


def trains(precision: str) -> bool:
    """Whether that precision is chosen."""
    return precision in (st.session_state.get("start.precisions") or ())


def no_scaler() -> str | None:
    """Why the loss scale's settings have no effect with the chosen precisions; None if they have."""
    if any(RECIPES[name].scaler for name in st.session_state.get("start.precisions") or ()):
        return None
    scaled = ", ".join(recipe.label for recipe in RECIPES.values() if recipe.scaler)
    return f"None of the chosen precisions has a scaler. With one: {scaled}."


def refuse(error: RunError) -> None:
    """Keep the sentence of a refusal, with the field that it names."""
    argument = str(error).split("=", 1)[0]
    known = argument in (*PLAIN, *SCALE, *MORE, "workload", "size", "precision", *places.FIELDS)
    callbacks.put("start.refused", (argument if known else "", words.sentence(error)))


def accept() -> None:
    """Clear the refusal."""
    callbacks.put("start.refused", None)


def refused(*names: str) -> bool:
    """Whether one of those fields was refused."""
    refusal: tuple[str, str] | None = st.session_state.get("start.refused")
    return refusal is not None and refusal[0] in names


def refusal(*names: str) -> None:
    """Show the sentence that refused one of those fields; an empty name stands for a refusal that names no field."""
    if refused(*names):
        st.error(words.escape(st.session_state["start.refused"][1]))
