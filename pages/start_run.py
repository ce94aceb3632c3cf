"""How do I train with this precision, and how is it going?"""

import streamlit as st

from amp_core.library.permissions import current
from pages.parts import address, empty, head, live, picker
from pages.parts.hardware import abilities
from pages.parts.start import batch, comparisons, form, queue

head.title("Start a run")
if current().read_only:
    empty.nothing("This server is read-only: it shows runs and starts none.")
entry = picker.chosen()
address.take("followed", "start.followed", lambda text: text.split(","))
followed: list[str] = st.session_state.setdefault("start.followed", [])
if entry is not None and entry.under_way and entry.key not in followed and queue.job_of(entry.path) is not None:
    followed.append(entry.key)  # its end is then shown here too, even after a reload
address.keep("followed", "start.followed", ",".join(followed))
if entry is not None and entry.key in followed:
    with st.expander("Start another run", expanded=st.session_state.get("start.refused") is not None):
        form.show()
    if not entry.under_way:
        together = picker.baseline_first(followed)
        with st.container(horizontal=True):
            st.page_link("pages/run_overview.py", label="See its overview", icon=":material/monitor_heart:")
            st.page_link(
                "pages/compare_runs.py",
                label="Compare these runs" if len(together) > 1 else "Compare it with others",
                icon=":material/compare_arrows:",
                query_params=picker.compare_address(together) if len(together) > 1 else None,
            )
    comparisons.show_latest()
    batch.show_latest()
    live.show(entry, with_queue=True)
else:
    st.markdown("Each precision is one run, trained in its own process. Runs on the same device are queued.")
    form.show()
    comparisons.show_latest()
    batch.show_latest()
    live.show(None, with_queue=True)
    abilities.show_this_machine()
