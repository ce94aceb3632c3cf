"""Finding cards: what is wrong, where, the number and the limit it crossed, the proof, and the fix to copy.

    findings.banner(found, summary(view), ended_well=True, run=run)
    findings.causes(found, run)

One card stands for one cause: what follows from it is named inside, not told again.
"""

import time
from collections.abc import Sequence

import streamlit as st

from amp_core import Finding, Run, RunError, diagnose
from amp_core.analysis.numerics.layers import tensor_names
from amp_core.findings import GUIDE
from amp_core.library.mutes import mute, muted
from amp_core.library.permissions import current
from pages.parts import loaders, words
from pages.parts.numbers import tensor

LOOK = {
    "error": ("red", ":material/error:"),
    "warning": ("orange", ":material/warning:"),
    "info": ("blue", ":material/info:"),
}
PAGES = {
    "loss-scale": ("pages/loss_scale.py", "Loss scale"),
    "number-ranges": ("pages/number_ranges.py", "Number ranges"),
    "layer-detail": ("pages/layer_detail.py", "Layer detail"),
    "memory": ("pages/memory_use.py", "Memory"),
    "tensor-cores": ("pages/tensor_cores.py", "Tensor cores"),
    "step-cost": ("pages/step_cost.py", "Step cost"),
    "precision-map": ("pages/precision_map.py", "Precision map"),
    "compare": ("pages/compare_runs.py", "Compare"),
}
"""By the address that the guide gives: the page, and what it is called."""
RECHECK_RATIO = 30
"""While a run trains, findings are looked for again after so many times as long as that took: a few seconds."""


def to_tell(found: Sequence[Finding], run: Run | None) -> list[Finding]:
    """Errors and warnings that nobody has muted, the gravest first."""
    silent = muted(run.path) if run is not None else frozenset()
    return [f for f in found if f.severity != "info" and f.code not in silent]


def banner(found: Sequence[Finding], summary: str, *, ended_well: bool, run: Run | None = None) -> None:
    """The verdict in one line."""
    grave = to_tell(found, run)
    if not grave and not ended_well:
        st.markdown(words.escape(summary))
    elif not grave:
        st.success(f"Nothing wrong was found. {words.unbroken(words.escape(summary))}", icon=":material/check_circle:")
    else:
        _headline(grave, summary)


def causes(found: Sequence[Finding], run: Run | None = None) -> None:
    """A card for each error and warning, the gravest first."""
    grave = to_tell(found, run)
    codes = {f.code for f in grave}
    for finding in grave:
        if finding.follows not in codes:
            card(finding, [f for f in grave if f.follows == finding.code], run)
    if run is not None and (hidden := sorted({f.code for f in found} & muted(run.path))):
        _muted(run, hidden)


def _headline(grave: Sequence[Finding], summary: str) -> None:
    codes = {f.code for f in grave}
    causes = [f for f in grave if f.follows not in codes]
    errors = sum(f.severity == "error" for f in causes)
    parts = [words.plural(n, noun) for n, noun in ((errors, "error"), (len(causes) - errors, "warning")) if n]
    following = len(grave) - len(causes)
    more = f", and {following} that follow{'s' if following == 1 else ''}" if following else ""
    say, look = (st.error, "error") if errors else (st.warning, "warning")
    say(f"{' and '.join(parts)} found{more}. {words.unbroken(words.escape(summary))}", icon=LOOK[look][1])


def remarks(found: Sequence[Finding], run: Run | None = None) -> None:
    """What is good to know and benign: it need not stand before the numbers."""
    silent = muted(run.path) if run is not None else frozenset()
    for finding in found:
        if finding.severity == "info" and finding.code not in silent:
            card(finding, [], run)


def live(run: Run) -> None:
    """What has gone wrong so far in a run under way, without proof and fix: those need the charts to hold still."""
    kept = st.session_state.setdefault("findings.live", {})
    key = str(run.path)
    due, found = kept.get(key, (0.0, []))
    if time.monotonic() >= due:
        began = time.monotonic()
        found = loaders.analysed(diagnose, run)
        now = time.monotonic()
        kept[key] = (now + RECHECK_RATIO * (now - began), found)
    grave = [finding for finding in to_tell(found, run) if not finding.follows]
    for finding in grave:
        say = st.error if finding.severity == "error" else st.warning
        say(f"**{words.escape(finding.title)}.** {words.escape(finding.advice)}", icon=LOOK[finding.severity][1])
    if not grave:
        st.caption(f":material/check_circle: Nothing wrong was found{' so far' if run.is_live else ''}.")


def card(finding: Finding, following: Sequence[Finding] = (), run: Run | None = None) -> None:
    """One finding with its evidence, its advice and what came of it."""
    color, icon = LOOK[finding.severity]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.badge(finding.severity, icon=icon, color=color)
            st.markdown(f"**{words.escape(finding.title)}**", width="content")
        st.caption(" · ".join(words.escape(text) for text in finding.evidence()))
        own = finding.advice == GUIDE[finding.code].advice  # else it holds words of the run
        advice = words.raised(finding.advice)
        st.markdown(advice if own else words.escape(advice))
        if following:
            text = "; ".join(words.escape(f"{f.title[0].lower()}{f.title[1:]}") for f in following)
            st.markdown(f"Follows from it: {text}.")
        with st.expander("Fix and proof" if finding.snippet else "Proof"):
            fix(finding)
            with st.container(horizontal=True, vertical_alignment="center"):
                if run is not None:
                    # A loss that is NaN has no page of its own: what follows from it names where that began.
                    any(_proof(one, run) for one in (finding, *following))
                query = {"search": finding.code} | (
                    {"run": st.session_state["run"]} if "run" in st.session_state else {}
                )
                label = f"What {finding.code} means"
                st.page_link("pages/findings_guide.py", label=label, icon=":material/menu_book:", query_params=query)
                if run is not None and not current().read_only:
                    key = f"findings.mute.{finding.code}"
                    st.button("Mute", key=key, help="Hide it for this run", on_click=_mute, args=(run, finding.code))


def fix(finding: Finding) -> None:
    """The code to copy: PyTorch, and frameworks where they do it otherwise."""
    if not finding.snippet:
        return
    codes = {"PyTorch": finding.snippet} | dict(finding.frameworks)
    if len(codes) == 1:
        st.code(finding.snippet, language="python")
        return
    for tab, code in zip(st.tabs(list(codes)), codes.values(), strict=True):
        with tab:
            st.code(code, language="python")


def _proof(finding: Finding, run: Run) -> bool:
    """A link to the tensor that the finding names, if it was sampled, else to the page that shows the evidence; whether
    there is one."""
    address = st.session_state.get("run")
    for kind in ("weight_grad", "output_grad", "activation", "weight"):
        if finding.where in loaders.analysed(tensor_names, run, kind):
            tensor.link(address, kind, finding.where, finding.steps)
            return True
    if (page := GUIDE[finding.code].page) not in PAGES:
        return False
    file, name = PAGES[page]
    query = {"run": address} if address else None
    st.page_link(file, label=f"See it on {name}", icon=":material/query_stats:", query_params=query)
    return True


def _muted(run: Run, codes: Sequence[str]) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"Muted for this run: {', '.join(codes)}.", width="content")
        for code in codes if not current().read_only else ():
            st.button(
                f"Show {code}", key=f"findings.unmute.{code}", type="tertiary", on_click=_mute, args=(run, code, False)
            )


def _mute(run: Run, code: str, on: bool = True) -> None:
    try:
        mute(run.path, code, on)
    except RunError as error:
        st.toast(words.escape(words.sentence(error)), icon=":material/error:")
