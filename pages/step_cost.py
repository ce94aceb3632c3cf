"""Where does the time of a step go, and how much faster could it become?"""

import streamlit as st

from amp_core.analysis import amdahl, step_cost
from amp_core.views import STEP_COST, STEP_COSTS
from pages.parts import charts, empty, head, loaders, words
from pages.parts.compare import baseline_cost as beside
from pages.parts.hardware import collectives, profiled, step_cost_text, timeline

head.title("Step cost")
run = head.run(table="windows")
step = profiled.pick(run)
cost = loaders.analysed(step_cost, run, step)
if cost.source == "nothing":
    sentence = f"This run recorded neither times of its steps nor a profiled window. {profiled.HOW}"
    empty.nothing(sentence, sample=True, run=run, tables=("windows", "kernels"))

bound = amdahl(cost)
head.headline(step_cost_text.headline(cost, bound))
if bound is None:
    damaged = run.damaged("windows") or run.damaged("kernels")
    why, how = ("The profiled windows cannot be read", "") if damaged else ("No profiled window", f" {profiled.HOW}")
    st.info(f"{why}: these are the recorded phases of the steps.{how}", icon=":material/info:")
else:
    step_cost_text.show_cards(cost, bound)
changes = beside.changes(run) if step is None else None
if changes is None:
    charts.view(STEP_COST, run, "step_cost.parts", step=step)
else:
    charts.show(STEP_COSTS.figure(changes, charts.dark()), "step_cost.beside.bars")
if bound is not None:
    outlook = step_cost_text.outlook(cost, bound)
    st.caption(words.unbroken(" ".join([profiled.coverage(run, step), outlook, *cost.notes])))
if changes is None:
    step_cost_text.show_parts(cost.parts)
else:
    beside.show(changes)
timeline.show(run)
collectives.show(run)
