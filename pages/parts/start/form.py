"""The form that starts trainings: workload, recipe, estimate, and Start.

Its fields are those of `fields`, the folded ones drawn by `more`; `asked` turns them into trainings. The sentence of a
refusal is shown beside the field that it names.
"""

import streamlit as st

from amp_core.library.permissions import current
from amp_core.settings.training import RECIPES, WORKLOADS
from pages.parts import address, words
from pages.parts.start import asked, devices, estimate, fields, more, places, presets, workloads
from pages.parts.start.fields import DEFAULTS, keep

OWN_HELP = "A function that returns model, batches and loss, in a folder that `ampscope serve --scripts` allows."
OWN_INSTEAD = "Your own workload below is trained instead."
OWN_BATCH = "Your own workload makes its batches itself."
DYNAMIC_HELP = "Dynamic: halved at each overflow, doubled after many clean steps. Static: constant."
STARTS_HELP = "Initial value of the dynamic loss scale; 65536 is 2¹⁶."
STAYS_HELP = "The factor that multiplies the loss in each step."
TURNS_HELP = (
    "A fair comparison, as by ampscope compare: the precisions train alternating blocks of steps, so background load "
    "slows all of them alike. Needs two or more."
)


def show() -> None:
    """Draw the form."""
    presets.show()
    with st.container(border=True, key="start.form"):
        with st.container(horizontal=True):  # stacked on a narrow page
            with st.container(width=340):
                _workload()
            with st.container(width=500):
                _precisions()
        with st.container():
            _sizes_and_scale()
        with st.container(horizontal=True):
            st.text_input("Name", placeholder="derived from the settings", width=230, **keep("name"))
            st.text_input("Tags", placeholder="comma-separated", width=230, **keep("tags"))
            st.text_input("Note", placeholder="what this run is for", max_chars=2000, **keep("note"))
        with st.expander("More settings", expanded=fields.refused(*fields.MORE), key="form.more"):
            more.show()
        places.show("start", st.session_state.get("start.refused"), persist_state="session")
        state = fields.state()
        with st.container():  # of any length, so that the buttons keep their place while a pass runs
            fields.refusal("")
            if fields.own_workload():
                st.caption("No estimate: the cost of your own workload is unknown before it has run.")
            elif state.get("on", "local") != "local":
                st.caption("No estimate for another machine.")
            else:
                estimate.show(state)
        with st.container(horizontal=True, vertical_alignment="center"):
            many = len(state["precisions"])
            st.button("Start", key="start.go", on_click=asked.begin, type="primary", icon=":material/play_arrow:")
            st.button(
                "Run interleaved",
                key="start.turns",
                on_click=asked.begin,
                args=(True,),
                icon=":material/compare_arrows:",
                disabled=many < 2,
                help=TURNS_HELP,
            )
            if commands := asked.commands(state):
                with st.popover("As a command", icon=":material/terminal:"):
                    st.markdown("The equivalent command:" if many < 2 else "The equivalent commands:")
                    st.code(commands, language="bash", wrap_lines=True)
            if state.get("on", "local") != "local":
                runs = "One array, a task per run." if many > 1 and state["on"] == "slurm" else "One job per run."
            else:
                one = "Trains in its own process."
                runs = f"{words.plural(many, 'run')}, one after another." if many > 1 else one
            st.caption(f"{runs} Training continues if you close the browser.", width="content")


def _workload() -> None:
    first, own = workloads.ALL.index(("text-gpt", "tiny")), bool(fields.own_workload())
    st.selectbox(
        "Workload and size",
        workloads.ALL,
        first,
        workloads.label,
        disabled=own,
        help=OWN_INSTEAD if own else workloads.HELP,
        **keep("what"),
    )
    if current().scripts:
        st.text_input("Or your own", placeholder="FILE.py:FUNCTION", help=OWN_HELP, **keep("own"))
    fields.refusal("workload", "size")


def _precisions() -> None:
    no_tf32 = devices.no_tf32(st.session_state.get("start.device"))
    offered = [name for name in RECIPES if name != "tf32" or no_tf32 is None]
    if kept := st.session_state.get("start.precisions"):
        address.set_value("start.precisions", [name for name in kept if name in offered])
    st.pills(
        "Precision (one run each)",
        offered,
        selection_mode="multi",
        wrap=True,
        default=["fp16"],
        format_func=lambda name: RECIPES[name].label,
        help="\n".join(f"- **{r.label}** ({r.name}): {r.description}" for r in RECIPES.values()),
        **keep("precisions"),
    )
    if no_tf32 is not None:
        st.caption(no_tf32)
    fields.refusal("precision")


def _sizes_and_scale() -> None:
    available, why_no_gpu = devices.available()
    names = dict(available)
    own, no_scaler = fields.own_workload(), fields.no_scaler()
    workload, size = st.session_state["start.what"]
    static = st.session_state.get("start.scaling") == "static"
    with st.container(horizontal=True):  # wraps on a narrow page
        usual = "its own" if own else str(WORKLOADS[workload].sizes[size].batch_size)
        fields.draw("steps", width=130)
        fields.draw("batch_size", OWN_BATCH if own else None, step=1, placeholder=usual, width=130)
        fields.draw("seed", step=1, width=100)
        st.selectbox("Device", list(names), format_func=names.__getitem__, width=170, **keep("device"))
        st.segmented_control(
            "Loss scale",
            ["dynamic", "static"],
            default="dynamic",
            required=True,
            format_func=str.capitalize,
            disabled=no_scaler is not None,
            help=no_scaler or DYNAMIC_HELP,
            **keep("scaling"),
        )
        st.number_input(
            "Scale" if static else "Initial scale",
            value=DEFAULTS.init_scale,
            format="%.6g",
            disabled=no_scaler is not None,
            help=no_scaler or (STAYS_HELP if static else STARTS_HELP),
            width=130,
            **keep("scale"),
        )
    fields.refusal(*fields.PLAIN, *fields.SCALE)
    if why_no_gpu:
        st.caption(f"No CUDA: {words.escape(why_no_gpu)}.")
