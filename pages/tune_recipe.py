"""Which precision should I ship, and how do I write it?"""

import streamlit as st

from amp_core import RunError
from amp_core.library.permissions import current
from amp_core.tune.result import load_tuned
from pages.parts import empty, head, words
from pages.parts.start import queue, searches

HOW = (
    "A search runs precisions and options of your workload interleaved, stops slow or diverging ones early, and "
    "returns the fastest recipe whose loss stays within the seed-to-seed noise of FP32, and its code. On the "
    "command line: `ampscope tune my_task.py:build --budget 300`."
)

head.title("Tune")
searches_by_name = searches.listing()
own = [name for name in searches_by_name if not searches.is_sample(name)]
started = st.session_state.get("tune.started")
waiting = [job for job in queue.alive() if job.name.startswith("tune-") and job.name not in searches_by_name]
if started in searches_by_name:
    st.session_state["tune.search"] = st.session_state.pop("tune.started")
if not current().read_only:
    with st.expander("Start a search", expanded=not own and not waiting):
        st.markdown(HOW)
        searches.form()
queue.show(waiting, None)
if waiting:
    st.button("Read what is new", icon=":material/refresh:", type="tertiary")
if not searches_by_name:
    empty.nothing("The search has not written a result yet." if waiting else "No searches yet.")
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
    st.warning("Not confirmed over several seeds: do not ship it on this evidence.")
if tuned.config:
    searches.code(tuned)
searches.evidence(tuned)
