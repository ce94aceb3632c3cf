"""The logo above every page, narrow margins on a narrow page, and text that can be read.

    look.begin()             # once a pass, before the page

A wide page of Streamlit has margins of 80 pixels, of a window of 900 a quarter of what the sidebar leaves to it.

Streamlit writes in white on the primary colour, whatever that is. In a dark theme the same colour is also that of text
on the dark background, and none is dark enough under white and light enough on nearly black (4.5 : 1 for both: WCAG
2.1, criterion 1.4.3). So where it is a background, its text is dark. Nor can the colours of its code be read by all.

Who chooses the other theme in Streamlit's menu starts no pass: until the next one charts have the colours of the one
before. Their ground and what stands around their data take those of the page at once.
"""

from pathlib import Path

import streamlit as st

ON_PRIMARY = "#0B1214"
"""5.4 : 1 on the primary colour of the dark theme."""
NARROW = "@media (min-width: 768px) and (max-width: 1300px)"
"""Below that Streamlit takes 16 pixels itself; above it the margins take no room from a chart."""
MARGINS = f"{NARROW} {{[data-testid='stMainBlockContainer'] {{padding-left: 1.5rem; padding-right: 1.5rem}}}}"
CHARTS = (
    ".js-plotly-plot .main-svg {background: none !important}"
    " .js-plotly-plot :is(.gtitle, .legendtext) {fill: currentColor !important}"
    " .js-plotly-plot :is(.xtick text, .ytick text, .xtitle, .ytitle, .cbaxis text, .cbtitle text)"
    " {fill: color-mix(in srgb, currentColor 75%, transparent) !important}"
    " .js-plotly-plot .gridlayer path {stroke: color-mix(in srgb, currentColor 14%, transparent) !important}"
)
CODE = {
    "keyword": ("#0B55B0", "#7FB2EC"),
    "string": ("#1B6E3C", "#6FCF97"),
    "number": ("#176B60", "#5CC0CC"),
    "operator": ("#9A4A0C", "#F0A16A"),
    "punctuation": ("#56666B", "#A9B7B5"),
}
"""Colours of code, light and dark: Streamlit's own are 2.9 : 1 on these grounds, these 5 : 1 and more."""
WHERE = (
    'button[data-testid^="stBaseButton-primary"]:not([disabled])',
    '[data-testid="stMultiSelectTagsContainer"] [data-tag]',
)


def begin() -> None:
    """Write the style rules for the browser's theme."""
    st.logo(Path(__file__).with_name("logo.svg"), size="large")
    theme = st.context.theme.type or "light"
    rules = f"{MARGINS} {CHARTS}"
    for part, colours in CODE.items():
        rules += f" .token.{part} {{color: {colours[theme == 'dark']} !important}}"
    if theme == "dark":
        inside = ", ".join(f"{one}, {one} *" for one in WHERE)
        rules += f" {inside} {{color: {ON_PRIMARY} !important}}"
    st.html(f"<style>{rules}</style>")
