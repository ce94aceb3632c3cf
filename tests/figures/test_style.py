"""Colours are distinguishable: from both backgrounds, from each other, and with colour blindness."""

import itertools

import numpy as np
import pandas as pd
import pytest

from amp_core.analysis.performance.memory_breakdown import CATEGORIES
from amp_core.figures.axes import log2_axis, percent, power_of_two, share_axis, shorten, tick_names
from amp_core.figures.colours import (
    COUNTERS,
    MEANINGS,
    MEMORY,
    RECIPES,
    UNKNOWN_RECIPE,
    colour,
    recipe_colour,
    run_colours,
)
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.shapes import bridge_gaps, compact_array
from amp_core.figures.style import finish
from amp_core.settings.training import RECIPES as TRAINED

BACKGROUNDS = {False: ("#FFFFFF", "#FCFCFA"), True: ("#0E1117", "#11181B")}

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SEEN_BY = {
    "all cones": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


def linear(hex_colour: str) -> np.ndarray:
    value = np.array([int(hex_colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""
    bright = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (bright[1] + 0.05) / (bright[0] + 0.05)


def oklab(hex_colour: str, eye: str) -> np.ndarray:
    """The colour in Oklab as seen by an eye; distances are perceptually uniform (Ottosson 2020)."""
    rgb = np.clip(SEEN_BY[eye] @ linear(hex_colour), 0, 1)
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]) @ rgb
    lab = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return lab @ np.cbrt(cones)


def distance(one: str, other: str) -> float:
    """The smallest distance over all kinds of eyes; 0.02 is just noticeable side by side."""
    return min(float(np.linalg.norm(oklab(one, eye) - oklab(other, eye))) for eye in SEEN_BY)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, "unheard-of"])
def test_lines_stand_out_from_the_page(recipe: str, dark: bool) -> None:
    assert min(contrast(recipe_colour(recipe, dark), b) for b in BACKGROUNDS[dark]) >= 3.0  # WCAG 1.4.11


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("meaning", [m for m in MEANINGS if m != "zero"])
def test_colours_with_a_meaning_stand_out_from_the_page(meaning: str, dark: bool) -> None:
    assert min(contrast(colour(meaning, dark), b) for b in BACKGROUNDS[dark]) >= 3.0


@pytest.mark.parametrize("dark", [False, True])
def test_recipes_are_distinguishable_with_colour_blindness(dark: bool) -> None:
    for one, other in itertools.combinations(RECIPES, 2):
        assert distance(RECIPES[one][dark], RECIPES[other][dark]) > 0.05, (one, other)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, "unheard-of"])
def test_runs_of_one_recipe_are_distinguishable_from_each_other_and_the_page(recipe: str, dark: bool) -> None:
    hues = run_colours(pd.DataFrame({"run": ["a", "b", "c"], "precision": recipe}), dark)
    assert hues["a"] == recipe_colour(recipe, dark)
    for one, other in itertools.combinations(hues.values(), 2):
        assert distance(one, other) > 0.045
    assert all(contrast(hue, ground) >= 2.99 for hue in hues.values() for ground in BACKGROUNDS[dark])


@pytest.mark.parametrize("dark", [False, True])
def test_overflow_underflow_and_healthy_are_distinguishable_with_colour_blindness(dark: bool) -> None:
    for one, other in itertools.combinations(("overflow", "underflow", "healthy", "zero", "nan"), 2):
        assert distance(MEANINGS[one][dark], MEANINGS[other][dark]) > 0.1, (one, other)


@pytest.mark.parametrize("dark", [False, True])
def test_device_counters_are_distinguishable_with_colour_blindness(dark: bool) -> None:
    lines = [c for c in COUNTERS if c != "hmma_active_frac"]  # dotted, in the colour of the counter that it is part of
    for one, other in itertools.combinations(lines, 2):
        assert distance(COUNTERS[one][dark], COUNTERS[other][dark]) > 0.05, (one, other)
    for line in lines:
        assert min(contrast(COUNTERS[line][dark], b) for b in BACKGROUNDS[dark]) >= 3.0


@pytest.mark.parametrize("dark", [False, True])
def test_neighbours_in_a_stack_of_memory_are_distinguishable_with_colour_blindness(dark: bool) -> None:
    assert set(MEMORY) == set(CATEGORIES)
    for one, other in itertools.pairwise(CATEGORIES):
        assert distance(MEMORY[one][dark], MEMORY[other][dark]) > 0.08, (one, other)


def test_every_recipe_of_the_engine_has_a_colour() -> None:
    assert set(RECIPES) == set(TRAINED)
    assert recipe_colour(None) == recipe_colour("other") == UNKNOWN_RECIPE[0]


def test_powers_of_two_are_written_as_such() -> None:
    assert power_of_two(65536.0) == "2<sup>16</sup>"
    assert power_of_two(2.0**-14) == "2<sup>−14</sup>"
    assert power_of_two(1000.0) == "1,000"
    assert power_of_two(0.0) == "0" and power_of_two(float("nan")) == "nan"


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (10, 17), (-60, 16), (-1000, 1000)])
def test_log2_ticks_are_powers_of_two_within_the_axis(low: int, high: int) -> None:
    axis = log2_axis(low, high)
    exponents = np.log2(axis["tickvals"])
    assert 2 <= len(exponents) <= 10
    assert (exponents == np.rint(exponents)).all() and low <= exponents.min() and exponents.max() <= high
    assert np.allclose(axis["range"], [low * np.log10(2), high * np.log10(2)])


def test_fractions_are_written_as_in_the_tables() -> None:
    text = [percent(share) for share in (1.0, 0.996, 0.99, 0.123, 0.00012, 0.00001, 0.0)]
    assert text == ["100 %", "99.6 %", "99 %", "12.3 %", "0.012 %", "<0.01 %", "0 %"]


@pytest.mark.parametrize(
    ("top", "past", "text"),
    [
        (1.0, 0.0, ["0 %", "25 %", "50 %", "75 %", "100 %"]),
        (1.0, 1.4, ["0 %", "25 %", "50 %", "75 %", "100 %"]),
        (0.3, 0.3, ["0 %", "10 %", "20 %", "30 %"]),
        (0.004, 0.004, ["0 %", "0.1 %", "0.2 %", "0.3 %", "0.4 %"]),
    ],
)
def test_ticks_of_a_share_axis_have_a_space_before_the_percent_sign(top: float, past: float, text: list[str]) -> None:
    axis = share_axis("share", top, past)
    assert axis["ticktext"] == text and axis["range"] == [0, max(top, past)]
    assert axis["tickvals"][-1] <= top + 1e-9 and len(axis["tickvals"]) <= 6


def test_steps_are_whole_numbers_with_separated_thousands() -> None:
    figure = FigureSpec()
    figure.xaxis(title="step", range=[549.5, 554.5])
    assert finish(figure, "a", "b").layout.xaxis.dtick == 1
    figure.xaxis(title="step", range=[0, 20_000], dtick=None)
    axis = finish(figure, "a", "b").layout.xaxis
    assert (axis.exponentformat, axis.separatethousands, axis.dtick) == ("none", True, None)


def test_long_names_are_shortened_in_the_middle() -> None:
    name = "transformer.encoder.layers.11.attention.output.dense.weight"
    assert shorten(name, 30) == "transformer.…tput.dense.weight"
    assert len(shorten(name, 30)) == 30 and shorten("short") == "short"


def test_shortened_names_on_an_axis_stay_distinct() -> None:
    names = [f"model.layers.{i}.attention.output.projection.weight" for i in range(12)]
    assert tick_names(names)[11] == "…11…" and len(set(tick_names(names))) == 12
    mixed = ["model.decoder.layers.0.fc.weight", "model.decoder.layers.1.fc.weight", "model.decoder.head"]
    assert tick_names(mixed) == ["…layers.0.fc.weight", "…layers.1.fc.weight", "…head"]
    assert tick_names(["a.weight", "b.weight"]) == ["a.weight", "b.weight"]
    assert tick_names(names[:1]) == [shorten(names[0])] and tick_names([]) == []


def test_whole_numbers_stay_whole() -> None:
    assert compact_array(np.array([1, 2**30])).dtype == np.int32
    assert compact_array(np.array([1, 2**40])).dtype == np.float32
    assert compact_array(np.array([0.5])).dtype == np.float32


def test_a_line_has_a_gap_only_if_the_gap_is_visible() -> None:
    steps = pd.Series(range(10_000))
    values = pd.Series(1.0, index=steps.index).where(~steps.isin([0, 50, 70, 71, *range(4000, 4100)]))
    x, y = bridge_gaps(steps, values)
    assert sorted(set(steps) - set(x)) == [50, 70, 71]  # narrower than a pixel
    assert y.isna().sum() == 101 and y[y.isna()].index.tolist() == [0, *range(4000, 4100)]
    assert y.notna().sum() == values.notna().sum()
    assert bridge_gaps(steps[:1], values[:1])[0].tolist() == [0]
