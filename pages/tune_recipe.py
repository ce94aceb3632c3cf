"""Which precision should I ship, and how do I write it?"""

import streamlit as st

from amp_core import RunError
from amp_core.library.permissions import current
from amp_core.tune.result import load_tuned
from pages.parts import empty, head, words
from pages.parts.start import queue, searches

HOW = (
    "A search tries precisions and options on your workload, in turns, stops the losers early, and gives the fastest "
    "recipe whose loss is within FP32's own noise from seed to seed, with the code for it. On the command line: "
    "`ampscope tune my_task.py:build --budget 300`."
)

head.title("Tune")
searches_by_name = searches.listing()
started = st.session_state.get("tune.started")
waiting = [job for job in queue.alive() if job.name.startswith("tune-") and job.name not in searches_by_name]
if started in searches_by_name:
    st.session_state["tune.search"] = st.session_state.pop("tune.started")
if not current().read_only:
    with st.expander("Start a search", expanded=not searches_by_name and not waiting):
        st.markdown(HOW)
        searches.form()
queue.show(waiting, None)
if waiting:
    st.button("Read what is new", icon=":material/refresh:", type="tertiary")
if not searches_by_name:
    begun = "The search has not begun to write yet. What it finds" if waiting else "No search yet. What one finds"
    empty.nothing(f"{begun} will stand here.")
folder = searches.choose(searches_by_name)
try:
    tuned = load_tuned(folder)
except RunError as error:
    empty.sentence(error)
what = words.workload({"workload": tuned.workload, "size": tuned.size})
state = searches.status(folder, tuned)
goes_on = state in ("queued", "starting", "running")
with st.container(horizontal=True, vertical_alignment="center", gap="small"):
    color, icon = words.STATUS_LOOK.get(state, words.STATUS_LOOK["lost"])
    st.badge(state, icon=icon, color=color)
    budget = f"budget {words.duration(tuned.budget_s)}"
    took = budget if goes_on else f"took {words.duration(tuned.seconds)}, {budget}"
    st.caption(words.escape(f"{what} on {tuned.device} · {took}"), width="content")
if goes_on:
    searches.follow(folder)
    st.stop()
if tuned.answer:
    head.headline(words.escape(tuned.answer))
if tuned.why:
    st.markdown(words.escape(tuned.why))
if not tuned.confirmed:
    st.warning("This is what looks best so far, and no finding: do not ship it on this evidence.")
if tuned.config:
    searches.code(tuned)
searches.evidence(tuned)
