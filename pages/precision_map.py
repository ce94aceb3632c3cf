"""In which precision did each operator run, and what decided it?"""

import streamlit as st

from amp_core.analysis import precision_cells, precision_map, precision_settings, traced_steps
from amp_core.views import PRECISION_MAP
from pages.parts import baseline, charts, head, loaders
from pages.parts.hardware import precision

head.title("Precision map")
run = head.run(table="ops")
asked = loaders.analysed(precision_settings, run)
if run.ops.empty:
    precision.settings(asked)
    precision.not_recorded(run)

steps = loaders.analysed(traced_steps, run)
step = precision.pick_step(steps)
view = loaders.analysed(precision_map, run, step)
head.headline(precision.headline(view))
baseline.answer("ops", lambda base: precision.headline(loaders.analysed(precision_map, base, None)))
precision.cards(view)

phase, together = precision.pick_cells(view)
cells = loaders.analysed(precision_cells, run, step, phase, together)
if len(cells):
    with st.container(key="wide-precision"):
        charts.view(PRECISION_MAP, run, "precision.map", step=step, phase=phase, folded=together)
    st.caption(precision.about_map(view, cells))

if not view.has_policies:
    st.info(precision.WITHOUT_POLICIES, icon=":material/info:")
precision.stayed(view)
precision.elsewhere(view)
precision.casts(view)
precision.islands(view)
precision.settings(asked)
precision.details(view)
