"""How to make the second run of a comparison, where only one is there."""

from collections.abc import Sequence

import streamlit as st

from amp_core.library.permissions import current
from amp_core.settings.training import RECIPES
from pages.parts import words
from pages.parts.library import run_list
from pages.parts.library.run_list import Entry
from pages.parts.start import again

START = "pages/start_run.py"
COUNTERPARTS = ("fp32", "bf16", "fp16")


def offer(entries: Sequence[Entry]) -> None:
    """Ways to make another run of the task of the chosen one; of any task if none is chosen."""
    chosen = entries[0] if entries else None
    with st.container(border=True, key="compare.second"):
        if chosen is None:
            st.markdown("**Record two runs to compare.**")
        else:
            st.markdown(f"**{words.escape(chosen.name)} needs a second run of the same task.**")
            _train(chosen)
        st.markdown("In your own loop, record the same training once per precision, under one seed:")
        into = (run_list.runs_dir() / "fp32").as_posix()
        st.code(f'from amp_core import watch\nwatch(model, optimizer, into="{into}")', language="python")
        st.markdown("On the command line, interleaved, so that background load affects all runs alike:")
        st.code(_command(chosen), language="bash", wrap_lines=True)


def _train(chosen: Entry) -> None:
    """A button per precision that fills the form on Start a run with the settings of `chosen`."""
    if not again.possible(chosen) or current().read_only:
        return
    own = str((chosen.config or {}).get("precision"))
    with st.container(horizontal=True):
        for name in COUNTERPARTS:
            if name != own and st.button(
                f"Train it in {RECIPES[name].label}", key=f"compare.second.{name}", icon=":material/play_circle:"
            ):
                again.fill(chosen, precision=name)
                st.switch_page(START)


def _command(chosen: Entry | None) -> str:
    """`ampscope compare` for the workload of `chosen`, if that comes with AMPscope."""
    config = (chosen.config or {}) if chosen is not None and again.possible(chosen) else {}
    task = f"--workload {config.get('workload', 'text-gpt')}"
    if config.get("size"):
        task += f" --size {config['size']}"
    into = (run_list.runs_dir() / "comparison").as_posix()
    return f"ampscope compare {task} --precisions fp32,bf16,fp16 --steps {config.get('steps', 200)} --out {into}"
