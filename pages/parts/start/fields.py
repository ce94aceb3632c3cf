"""What the form of Start a run consists of, by the name of each field: `start.<name>` in the session's state.

fields.state()["steps"]                         # what stands in a field
st.number_input("Steps", **fields.keep("steps"))
fields.refusal("steps", "seed")                 # the sentence that refused one of them
"""

from typing import Any

import streamlit as st

from amp_core import RunError
from amp_core.library.permissions import current
from amp_core.settings.setting import FOLDED, FRONT, settings_of
from amp_core.settings.training import RECIPES, TrainConfig
from pages.parts import words

SETTINGS = settings_of(TrainConfig)
FORMS = {name: one.form for name, one in SETTINGS.items() if one.form is not None}
"""What `TrainConfig` says of the settings that have a field."""


def of_group(*groups: str) -> list[str]:
    """Names of the settings in those groups of the form, in the order of their fields."""
    names = [name for group in groups for name, form in FORMS.items() if form.group == group]
    return sorted(names, key=lambda name: (groups.index(FORMS[name].group), FORMS[name].place))


PLAIN = tuple(of_group(FRONT))
SCALE = ("loss_scale", "init_scale")
"""Settings of one field together, `scale`, which `scaling` gives its meaning."""
MORE = tuple(of_group(*FOLDED))
"""Those that are folded away at first."""
DEFAULTS = TrainConfig()
WIDTH = 170
"""Of a field in pixels: four in a row on a page of usual width, two on a narrow one."""


def draw(name: str, why_not: str | None = None, **options: Any) -> None:
    """The field of a setting, switched off where `why_not` says why it has no effect; `options` of the widget win."""
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
    """What stands in the field of a setting at first."""
    form, default = FORMS[name], getattr(DEFAULTS, name)
    return form.initial if form.initial is not None else typed(name, default)


def typed(name: str, value: Any) -> Any:
    """A value of a setting as it stands in its field: text is text, and a step to trace is a toggle."""
    one = SETTINGS[name]
    if one.alone is not None:
        return value is not None
    return one.as_text(value) if one.is_text else value


def meant(name: str, value: Any) -> Any:
    """The other way round: what stands in a field as the value of its setting."""
    one = SETTINGS[name]
    if one.alone is not None:
        return one.alone if value else None
    return value or getattr(DEFAULTS, name) if one.is_text else value


def keep(name: str) -> dict[str, Any]:
    """Key of a field, whose value outlives a visit to another page."""
    return {"key": f"start.{name}", "persist_state": "session"}


def state() -> dict[str, Any]:
    """What stands in the form's fields."""
    return {k.removeprefix("start."): v for k, v in st.session_state.items() if str(k).startswith("start.")}


def own() -> str:
    """The workload of one's own that was typed, where the server allows any."""
    return str(st.session_state.get("start.own") or "").strip() if current().scripts else ""


def no_scaler() -> str | None:
    """Why the loss scale's settings have no effect with the precisions that are chosen; None where they have."""
    if any(RECIPES[name].scaler for name in st.session_state.get("start.precisions") or ()):
        return None
    return f"No precision chosen has a scaler: {', '.join(r.label for r in RECIPES.values() if r.scaler)} have."


def refuse(error: RunError) -> None:
    """Keep the sentence of a refusal, with the field that it names."""
    argument = str(error).split("=", 1)[0]
    known = argument in (*PLAIN, *SCALE, *MORE, "workload", "size", "precision")
    st.session_state["start.refused"] = (argument if known else "", words.sentence(error))


def accept() -> None:
    """Nothing is refused, for now."""
    st.session_state["start.refused"] = None


def refused(*names: str) -> bool:
    """Whether one of those fields was refused."""
    told: tuple[str, str] | None = st.session_state.get("start.refused")
    return told is not None and told[0] in names


def refusal(*names: str) -> None:
    """The sentence that refused one of those fields; an empty name stands for none of them."""
    if refused(*names):
        st.error(words.escape(st.session_state["start.refused"][1]))
