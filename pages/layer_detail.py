"""What happened to this tensor?"""

import streamlit as st

from amp_core.analysis import exponent_changes, kinds_present, layer_band, step_marks
from amp_core.analysis.numerics.layers import downsample_trace, layer_exponents, layer_health, layer_trace
from amp_core.analysis.steps import recipe
from amp_core.figures import (
    classes_over_time,
    exponent_change_figure,
    exponents_over_time,
    magnitude_figure,
    with_baseline,
)
from amp_core.figures.marks import with_marks
from pages.parts import baseline, charts, empty, head, loaders, tables, words
from pages.parts.diagnosed import chain
from pages.parts.numbers import limits, tensor

head.title("Layer detail")
run = head.run()
kinds = loaders.analysed(kinds_present, run)
if not kinds:
    sentence = "This run sampled no tensors. `watch(…, every=10)` samples them."
    empty.nothing(sentence, sample=True, run=run, tables=("tensors",))

answer = st.container()
kind, name = tensor.pick(run, kinds, chain(run).origin)
with st.container(horizontal=True, vertical_alignment="bottom"):
    formats, unscaled = limits.pick("layer")

trace = loaders.analysed(layer_trace, run, kind, name)
first, last = int(trace["step"].iloc[0]), int(trace["step"].iloc[-1])
health = layer_health(trace)
with answer:
    head.headline(tensor.headline(name, kind, health, trace["dtype"].iloc[-1]))
dark = charts.dark()
shares = loaders.analysed(layer_exponents, run, kind, name, true_exponents=unscaled, within=(first, last))
marks = loaders.analysed(step_marks, run)
marks = marks[marks["step"].between(first, last)]
values = "loss scale taken out" if unscaled else "as stored"
without = trace["step"][~(trace["absmax"] > 0)].tolist()
over_time = exponents_over_time(shares, tuple(formats), dark, values=values, without=without)
drawn = downsample_trace(trace)
magnitudes = magnitude_figure(drawn, tuple(formats), dark, values="as stored")
bases = baseline.repeats()
if bases:
    band = loaders.analysed(layer_band, [bases[0], run], kind, name)
    magnitudes = with_baseline(magnitudes, band, f"RMS in {bases[0].name}", recipe(bases[0]), dark)
left, right = charts.grid("layer")
with left:
    charts.show(with_marks(over_time, marks, dark=dark), "layer.exponents", half=True)
    if bases:
        changes = loaders.analysed(exponent_changes, [*bases, run], kind, names=frozenset([name]))
        beside = exponent_change_figure(changes, bases[0].name, recipe(bases[0]), dark)
        charts.show(beside, "layer.change", half=True)
with right:
    charts.show(with_marks(magnitudes, marks, dark=dark), "layer.magnitudes", half=True)
    charts.show(with_marks(classes_over_time(drawn, dark=dark), marks, dark=dark), "layer.classes", half=True)

predicted = tensor.predicted(run, kind)
table = tensor.predictions(predicted, name)
if table.empty:
    empty.nothing("No prediction for this tensor: it never held a finite nonzero value.")
with st.expander("What another format or loss scale would do to it"):
    st.caption(tensor.about_predictions(predicted, name, kind, health))
    tables.show(
        table,
        column_config=tensor.COLUMNS,
        alt=f"Predicted losses of {words.KIND_LABELS[kind].lower()} by format and loss scale.",
    )
