"""Where do the values of each layer lie, and do they fit the format?"""

import functools

import streamlit as st

from amp_core.analysis import class_shares, kinds_present, sampled_steps
from amp_core.views import CLASSES, RANGES
from pages.parts import address, charts, clicks, empty, head, loaders, words
from pages.parts.choice import one_of
from pages.parts.diagnosed import chain
from pages.parts.numbers import casts, limits, prediction, ranges

head.title("Number ranges")
run = head.run()
kinds = loaders.analysed(kinds_present, run)
if not kinds:
    casts.losses(run)  # a run imported from Transformer Engine may have nothing else
    empty.nothing(
        "This run sampled no tensors, so their ranges are not known. `watch(…, every=10)` samples them.",
        sample=True,
        run=run,
        tables=("tensors",),
    )

answer = st.container()
label_of = words.KIND_LABELS.__getitem__
order = [k for k in words.KIND_LABELS if k in kinds]
with st.container(horizontal=True, vertical_alignment="bottom"):
    address.take("kind", "ranges.kind", address.choice(order), order[0])
    if st.session_state["ranges.kind"] not in order:  # chosen on another run
        st.session_state["ranges.kind"] = order[0]
    kind = one_of("Values of", order, "ranges.kind", format_func=label_of)
    address.keep("kind", "ranges.kind", kind if kind != order[0] else "")
    formats, unscaled = limits.pick("ranges")
steps = loaders.analysed(sampled_steps, run, kind)
fields = st.container(horizontal=True, vertical_alignment="bottom")
with fields:
    step = ranges.pick_step(steps) if len(steps) > 1 else None

classes = loaders.analysed(class_shares, run, kind, step)
with answer:
    if step is None:
        began = ranges.origins(run, kind, chain(run).origin)
        head.headline(ranges.headline(classes, kind, functools.partial(ranges.when, run, kind), began))
    else:
        head.headline(ranges.headline(classes, kind))
if unfold := st.session_state.pop("ranges.unfold", None):
    st.session_state["ranges.search"] = unfold
    st.session_state[f"ranges.depth.{kind}"] = None
with fields:
    layers, depth = ranges.pick_layers(classes["name"].tolist(), kind)
    column = ranges.pick_column(run, kind, layers, depth) if len(steps) > 1 else None
frame = RANGES.frame(run, loaders.analysed, kind=kind, step=step, unscaled=unscaled, names=layers, depth=depth)
classes = frame.classes
heatmap = RANGES.figure(frame, charts.dark(), formats=tuple(formats))
left, right = charts.grid("ranges")
with left:
    clicked = clicks.points(charts.show(heatmap, "ranges.heatmap", clicks=True, half=True), f"ranges.heatmap.{kind}")
    st.caption("Click a cell, or the start of a row of the table, to see that tensor over time.")
with right:
    if column is not None:
        ranges.over_steps(run, kind, layers, depth, column)
ranges.against_baseline(run, kind, layers, depth)
with st.expander("Tensor by tensor, in numbers"):
    if (classes[["subnormal_frac", "inf_frac", "nan_frac"]] > ranges.MIN_SHOWN_FRAC).any(axis=None):
        with st.container(key="wide-classes"):
            charts.show(CLASSES.figure(classes, charts.dark()), "ranges.classes")
    opened = ranges.table(classes, kind)
here = None if step is None else (step, step)
for point in clicked[:1]:
    ranges.go(kind, str(point["y"]), here)
for name in opened:
    ranges.go(kind, name, here)
with st.expander("What another loss scale would lose"):
    prediction.show(run, kind, formats[0] if formats else "fp16", layers)
casts.losses(run)
