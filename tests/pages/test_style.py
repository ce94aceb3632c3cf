"""Text on the primary colour of the dark theme can be read."""

import tomllib
from pathlib import Path

from pages.parts.style import ON_PRIMARY

THEME = tomllib.loads((Path(__file__).parents[2] / ".streamlit" / "config.toml").read_text())["theme"]


def luminance(colour: str) -> float:
    """WCAG 2.1's relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_has_contrast_4_5_to_1_on_the_primary_colour_and_that_on_the_background() -> None:
    dark, light = THEME["dark"], THEME["light"]
    assert contrast(ON_PRIMARY, dark["primaryColor"]) >= 4.5
    assert contrast(dark["primaryColor"], dark["backgroundColor"]) >= 4.5
    assert contrast("#FFFFFF", light["primaryColor"]) >= 4.5
    assert contrast(light["primaryColor"], light["backgroundColor"]) >= 4.5
    for theme in (dark, light):  # axes of charts
        assert contrast(theme["grayTextColor"], theme["backgroundColor"]) >= 4.5
