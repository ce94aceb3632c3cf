"""A copied link opens the same view: each page reads its state from the address, and keeps it there."""

import pytest

from tests.pages.conftest import words
from tests.synthetic import write

VIEWS = [
    ("pages/number_ranges.py", "overflowing", {"kind": "weight_grad", "format": "fp16,bf16", "step": "60"}),
    ("pages/number_ranges.py", "overflowing", {"search": "blocks", "depth": "2", "over": "absmax", "true": "1"}),
    ("pages/number_ranges.py", "overflowing", {"scale": "4"}),
    ("pages/layer_detail.py", "overflowing", {"kind": "weight_grad", "layer": "head.weight", "steps": "20-60"}),
    ("pages/layer_detail.py", "overflowing", {"format": "fp8-e4m3", "true": "1"}),
    ("pages/memory_use.py", "healthy", {"step": "1"}),
    ("pages/tensor_cores.py", "profiled", {"by": "phase"}),
    ("pages/precision_map.py", "traced", {"phase": "backward", "modules": "each"}),
    ("pages/gpu_forecast.py", "traced", {"gpu": "T4,L4"}),
    ("pages/findings_guide.py", "healthy", {"search": "gradient-underflow"}),
    ("pages/format_lab.py", "healthy", {"number": "2^-24", "scale": "8"}),
    ("pages/format_lab.py", "healthy", {"sum": "bf16,256,+,1"}),
]


@pytest.mark.parametrize(("page", "scenario", "view"), VIEWS, ids=[f"{p[6:-3]}-{'-'.join(v)}" for p, _, v in VIEWS])
def test_a_copied_link_opens_the_same_view(home, open_app, page, scenario, view):
    write(home.runs / "a", scenario)
    plain = open_app(page, run="run/a")
    app = open_app(page, run="run/a", **view)
    assert not app.exception
    assert {name: app.query_params[name] for name in view} == view
    assert state(app) != state(plain)
    again = open_app(page, **{name: app.query_params[name] for name in app.query_params})
    assert state(again) == state(app) and words(again) == words(app)


@pytest.mark.parametrize(("page", "scenario", "view"), VIEWS, ids=[f"{p[6:-3]}-{'-'.join(v)}" for p, _, v in VIEWS])
def test_an_invalid_link_still_opens_the_page(home, open_app, page, scenario, view):
    write(home.runs / "a", scenario)
    assert not open_app(page, run="run/a", **dict.fromkeys(view, "no such thing")).exception


def state(app):
    """The values of its widgets."""
    kinds = (
        "button_group",
        "select_slider",
        "slider",
        "toggle",
        "text_input",
        "selectbox",
        "multiselect",
        "number_input",
    )
    return {widget.key: widget.value for kind in kinds for widget in app.get(kind)}
