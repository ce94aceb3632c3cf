"""Finding cards: what is wrong, where, the number and the limit it crossed, the proof, and the fix to copy.

    findings.banner(diagnosed, summary(view), ended_well=True, run=run)
    findings.causes(diagnosed, run)

One card stands for one cause; findings that follow from it are named inside.
"""

import time
from collections.abc import Sequence

import streamlit as st

from amp_core import Finding, Run, RunError, diagnose
from amp_core.analysis.numerics.layers import tensor_names
from amp_core.findings import GUIDE, first_sentence
from amp_core.findings.rules.damage import DAMAGED_TABLE
from amp_core.library.mutes import mute, muted
from amp_core.library.permissions import current
from pages.parts import callbacks, loaders, words
from pages.parts.diagnosed import chain
from pages.parts.numbers import tensor

SEVERITY_STYLE: dict[str, tuple[words.Color, str]] = {
    "error": ("red", ":material/error:"),
    "warning": ("orange", ":material/warning:"),
    "info": ("blue", ":material/info:"),
}
PAGES = {
    "loss-scale": ("pages/loss_scale.py", "Loss scale"),
    "number-ranges": ("pages/number_ranges.py", "Number ranges"),
    "layer-detail": ("pages/layer_detail.py", "Layer detail"),
    "updates": ("pages/update_losses.py", "Updates"),
    "memory": ("pages/memory_use.py", "Memory"),
    "tensor-cores": ("pages/tensor_cores.py", "Tensor cores"),
    "step-cost": ("pages/step_cost.py", "Step cost"),
    "precision-map": ("pages/precision_map.py", "Precision map"),
    "compare": ("pages/compare_runs.py", "Compare"),
    "format-lab": ("pages/format_lab.py", "Format lab"),
    "low-bits": ("pages/low_precision.py", "8 and 4 bits"),
}
"""File and name of a page, by its address in the guide."""
MAX_UNFOLDED = 3
"""Cards of findings above the numbers; the others are folded."""
RECHECK_RATIO = 30
"""While a run trains, it is diagnosed again after this many times as long as the diagnosis took: a few seconds."""


def unmuted_problems(findings: Sequence[Finding], run: Run | None) -> list[Finding]:
    """Errors and warnings that are not muted, the most severe first."""
    return [f for f in _unmuted(findings, run) if f.severity != "info"]


def _unmuted(findings: Sequence[Finding], run: Run | None) -> list[Finding]:
    silent = muted(run.path) if run is not None else frozenset()
    return [f for f in findings if f.code not in silent]


def trail(run: Run, *, named: bool = False) -> None:
    """The diagnosis in two lines, the same on every page, and which tables cannot be read; nothing without a fault.
    `named`: several runs are shown."""
    diagnosed = chain(run)
    if diagnosed.cause is None:
        return
    for finding in unmuted_problems(loaders.analysed(diagnose, run), run):
        if finding.code == DAMAGED_TABLE:
            _unreadable(finding, run, named)
    if diagnosed.cause.code == DAMAGED_TABLE:
        return
    name = f"{words.escape(run.name)}: " if named else ""
    icon = SEVERITY_STYLE[diagnosed.cause.severity][1]
    st.markdown(f"{icon} {name}**{words.escape(words.sentence(diagnosed.verdict))}** {words.escape(diagnosed.began)}")
    st.caption(" · ".join(words.escape(text) for text in diagnosed.evidence))
    line = diagnosed.patch.partition("\n")[0]
    if line and "`" not in line:
        st.markdown(f"Change: `{line}`" + (" …" if "\n" in diagnosed.patch else ""))


def _unreadable(finding: Finding, run: Run, named: bool) -> None:
    name = f"{words.escape(run.name)}: " if named else ""
    icon = SEVERITY_STYLE[finding.severity][1]
    st.markdown(f"{icon} {name}**{_text(finding.title)}**")
    st.caption(words.prose(finding.advice))


def banner(findings: Sequence[Finding], summary: str, *, ended_well: bool, run: Run | None = None) -> None:
    """The number of errors and warnings, the verdict, and `summary`; of a trace that has a sentence of its own but no
    finding, that sentence."""
    grave = unmuted_problems(findings, run)
    if not grave and not ended_well:
        st.markdown(words.escape(summary))
    elif not grave and run is not None and loaders.analysed(first_sentence, run):
        st.info(words.unbroken(words.escape(summary)), icon=":material/lightbulb:")
    elif not grave:
        st.success(f"Nothing wrong was found. {words.unbroken(words.escape(summary))}", icon=":material/check_circle:")
    else:
        diagnosed = chain(run) if run is not None else None
        verdict = [] if diagnosed is None or diagnosed.verdict in summary else [f"**{_text(diagnosed.verdict)}**"]
        began = [] if diagnosed is None else [words.escape(diagnosed.began)]
        _headline(grave, " ".join(filter(None, [*verdict, *began, words.unbroken(words.escape(summary))])))


def causes(findings: Sequence[Finding], run: Run | None = None) -> None:
    """A card for each error and warning that has no other cause, the most severe first."""
    grave = unmuted_problems(findings, run)
    codes = {f.code for f in grave}
    first = [finding for finding in grave if finding.follows not in codes]
    unfolded = [f for rank, f in enumerate(first) if rank < MAX_UNFOLDED or f.code == DAMAGED_TABLE]
    for finding in unfolded:
        card(finding, [f for f in grave if f.follows == finding.code], run)
    if folded := [f for f in first if f not in unfolded]:
        with st.expander(words.plural(len(folded), "further finding")):
            for finding in folded:
                card(finding, [f for f in grave if f.follows == finding.code], run)
    if run is not None and (hidden := sorted({f.code for f in findings} & muted(run.path))):
        _muted(run, hidden)


def _headline(grave: Sequence[Finding], text: str) -> None:
    codes = {f.code for f in grave}
    causes = [f for f in grave if f.follows not in codes]
    errors = sum(f.severity == "error" for f in causes)
    parts = [words.plural(n, noun) for n, noun in ((errors, "error"), (len(causes) - errors, "warning")) if n]
    following = len(grave) - len(causes)
    more = f", and {following} that follow{'s' if following == 1 else ''}" if following else ""
    alert, look = (st.error, "error") if errors else (st.warning, "warning")
    alert(f"{' and '.join(parts)} found{more}. {text}", icon=SEVERITY_STYLE[look][1])


def _text(sentence: str) -> str:
    return words.escape(words.sentence(sentence))


def remarks(findings: Sequence[Finding], run: Run | None = None) -> None:
    """Cards of the benign findings of severity "info", which follow below the numbers."""
    for finding in _unmuted(findings, run):
        if finding.severity == "info":
            card(finding, [], run)


def live(run: Run) -> None:
    """The problems so far of a run under way, without proof and fix: those need charts that hold still."""
    kept = st.session_state.setdefault("findings.live", {})
    key = str(run.path)
    due, findings = kept.get(key, (0.0, []))
    if time.monotonic() >= due:
        began = time.monotonic()
        findings = loaders.analysed(diagnose, run)
        now = time.monotonic()
        kept[key] = (now + RECHECK_RATIO * (now - began), findings)
    grave = [finding for finding in unmuted_problems(findings, run) if not finding.follows]
    for finding in grave:
        alert = st.error if finding.severity == "error" else st.warning
        alert(
            f"**{words.escape(finding.title)}.** {words.prose(finding.advice)}",
            icon=SEVERITY_STYLE[finding.severity][1],
        )
    if not grave:
        st.caption(f":material/check_circle: Nothing wrong was found{' so far' if run.is_live else ''}.")


def card(finding: Finding, following: Sequence[Finding] = (), run: Run | None = None) -> None:
    """One finding with its evidence, its advice and its consequences. The verdict of `run` is in the banner already."""
    color, icon = SEVERITY_STYLE[finding.severity]
    evidence = " · ".join(words.escape(text) for text in finding.evidence())
    with st.container(border=True):
        titled = run is None or chain(run).verdict != finding.title
        with st.container(horizontal=True, vertical_alignment="center"):
            st.badge(finding.severity, icon=icon, color=color)
            if titled:
                st.markdown(f"**{words.escape(finding.title)}**", width="content")
            else:
                st.caption(evidence, width="content")
        if titled:
            st.caption(evidence)
        st.markdown(words.prose(finding.advice))
        if following:
            text = "; ".join(words.escape(f"{f.title[0].lower()}{f.title[1:]}") for f in following)
            st.markdown(f"Follows from it: {text}.")
        with st.expander("Fix and evidence" if finding.snippet else "Evidence"):
            fix(finding)
            with st.container(horizontal=True, vertical_alignment="center"):
                if run is not None:
                    # A NaN loss has no page of its own: its consequences name where it began.
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
    """The code to copy: PyTorch, and frameworks that differ from it."""
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
    """A link to the finding's tensor if it was sampled, else to the page that shows the evidence. Returns whether there
    is one."""
    address = st.session_state.get("run") or ""
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


@callbacks.uninterrupted
def _mute(run: Run, code: str, on: bool = True) -> None:
    try:
        mute(run.path, code, on)
    except RunError as error:
        callbacks.toast(words.escape(words.sentence(error)), ":material/error:")
