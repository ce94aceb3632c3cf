"""The logo above every page, narrow margins, the bar that stays, and text that can be read.

    style.begin()             # once a pass, before the page

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
WIDE = "@media (min-width: 768px)"
"""Below that the sidebar covers the page, and the bar scrolls away with it: stuck, it would take a third of it."""
PAGE = "[data-testid='stMainBlockContainer']"
BAR = f"{PAGE} [data-testid='stLayoutWrapper']:has(> .st-key-bar)"
GRID = "[class*='st-key-grid-']"
"""Two charts side by side on a page of 1100 pixels, one below the other on a narrow one."""
LAYOUT = (
    f"{PAGE} {{padding: 4rem 1rem 2rem}}"
    f" {PAGE} > [data-testid='stVerticalBlock'] {{gap: 0.75rem}}"
    f" {PAGE} h1 {{padding: 0 0 0.4rem}}"
    " .st-key-bar [data-testid='stWidgetLabel'] {min-height: 1rem; margin-bottom: 0}"
    " [data-testid='stMetric'] > div {padding: 0.35rem 0.75rem}"
    " [data-testid='stMetricValue'] {font-size: 1.35rem}"
    " .st-key-glossary [data-testid='stPageLink'] * {white-space: normal}"
    f" {GRID} {{gap: 0.75rem}} {GRID} > * {{min-width: min(100%, 27rem)}}"
    " .st-key-bar [data-testid='stWidgetLabel'] p {font-size: 0.75rem}"
    # The logo takes so much of a narrow header that the menu would end beyond its edge.
    " @media (max-width: 767px) {[data-testid='stMainMenu'] {position: fixed; top: 1rem; right: 0.25rem}"
    " [data-testid='stLayoutWrapper']:has(> [class*='st-key-answer-']) {min-width: min(100%, 15rem)}"
    " [class*='st-key-wide-'] {overflow-x: auto} [class*='st-key-wide-'] > * {min-width: 45rem}}"
    f" {WIDE} {{{PAGE} {{padding: 0 1.5rem 2rem}}"
    f" {PAGE}:not(:has(.st-key-bar)) {{padding-top: 5.25rem}}"  # an empty library has no bar in the header
    " [data-testid='stHeader']"
    " {height: 4.5rem; border-bottom: 1px solid color-mix(in srgb, currentColor 14%, transparent)}"
    f" {BAR} {{position: sticky; top: 0; z-index: 999991; height: 4.5rem; padding: 0 7.5rem 0.35rem 0; "
    # Streamlit's menu lies beneath the right end: only the widgets take the pointer.
    f"pointer-events: none}} {BAR} [data-testid=stElementContainer] {{pointer-events: auto}}"
    f" .stApp:has([data-testid='stExpandSidebarButton']) {BAR} {{padding-left: 9rem}}"
    "}"
)
"""Streamlit's own margins are 80 pixels at each side, 96 above and 160 below. The bar stands in its header, whose menu
keeps 7.5rem at the right, and 9rem at the left for logo and arrow while the sidebar is closed."""
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
    rules = f"{LAYOUT} {CHARTS}"
    for part, colours in CODE.items():
        rules += f" .token.{part} {{color: {colours[theme == 'dark']} !important}}"
    if theme == "dark":
        inside = ", ".join(f"{one}, {one} *" for one in WHERE)
        rules += f" {inside} {{color: {ON_PRIMARY} !important}}"
    st.html(f"<style>{rules}</style>")
