"""Which layers can run in 8 or 4 bits, and which stay in BF16?"""

import streamlit as st

from amp_core import RunError
from amp_core.analysis.numerics.layer_choice import LIMIT, layer_errors, parse_limit
from amp_core.figures import layer_error_figure
from amp_core.quantization import RECIPES
from pages.parts import charts, clicks, empty, head, loaders
from pages.parts.numbers import casts, low_precision

head.title("8 and 4 bits")
run = head.run()
casts.losses(run)
if run.blocks.empty:
    low_precision.not_recorded(run)

answer = st.container()
names = low_precision.pick_formats()
limit = low_precision.pick_limit()
if not names:
    empty.nothing("Choose a format.")
recipes = tuple(RECIPES[name] for name in names)
try:
    threshold = parse_limit(limit) if limit.strip() else LIMIT
    errors = loaders.analysed(layer_errors, run, recipes)
except RunError as error:
    empty.sentence(error)
if errors.empty:
    empty.nothing("No linear layer of this run has both operands of a product recorded.")

chosen = low_precision.choices(errors, recipes, threshold)
with answer:
    head.headline(low_precision.headline(chosen))
figure = layer_error_figure(errors, threshold, charts.dark())
clicked = clicks.points(charts.show(figure, "low.errors", clicks=True), "low.errors")
st.caption(low_precision.ABOUT)
opened = low_precision.table(errors, threshold)
by_label = {recipe.label: recipe.name for recipe in recipes}
opened += [(str(point["y"]), by_label[point["x"]]) for point in clicked[:1] if point["x"] in by_label]
for layer, name in opened:
    low_precision.go(run, errors, layer, name)
low_precision.against_baseline(run, recipes)
low_precision.code(chosen)
low_precision.measured(run)
casts.beside_prediction(run)
