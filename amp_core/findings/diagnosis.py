"""One diagnosis of a run: the verdict, the tensor where the fault began, the evidence, the patch.

    chain = diagnosis(run)
    chain.verdict, chain.began, chain.evidence, chain.patch

Every page, the report, the command line and its JSON show this object, so that all name the same cause, the same tensor
and the same numbers. Origin and propagation differ: an infinity in one gradient reaches every gradient computed from
it. Tensors are ranked by how many skipped steps began in them, not by how many of their values were not finite.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from amp_core.analysis import SafeWindow, ScaleSummary, kinds_present, safe_window, scale_summary, skip_episodes
from amp_core.analysis.numerics.audits import own_audits
from amp_core.analysis.numerics.layers import first_nonfinite, tensor_names
from amp_core.analysis.numerics.loss_scale import CALIBRATION_STEPS
from amp_core.analysis.ranks import end_in_words
from amp_core.analysis.steps import attempts, autocast_dtype
from amp_core.findings.first_cause import INPUT_DATA, LEARNING_RATE, LOSS
from amp_core.findings.model import LOSS_SCALING, Finding
from amp_core.findings.registry import GUIDE
from amp_core.findings.signals import facts, signals
from amp_core.findings.trace_sentence import first_sentence
from amp_core.schema import RunError
from amp_core.store.run import Run
from amp_core.text import formatting

NOTHING = "Nothing wrong was found."
NO_TENSOR = (INPUT_DATA, LEARNING_RATE, LOSS)
"""Places of a fault that are neither a tensor nor a module."""
ORIGIN_KINDS = ("weight_grad", "output_grad", "activation", "weight")
_REACHED = re.compile(r"(\d+) of (\d+) gradients non-finite")


@dataclass(frozen=True)
class Origin:
    """The tensor or module where a fault began, and how far it spread."""

    name: str
    kind: str
    """Kind of tensor under which it was sampled; empty if it was not."""
    step: int | None
    """The first step of the fault there."""
    skips: int | None = None
    """Skipped steps that began there, of `all_skips`; None if the fault is not about skipped steps."""
    all_skips: int | None = None
    calibrating: bool = False
    """Whether those are the skips of calibration: there were none after it."""
    reached: int | None = None
    """Most gradients that were not finite at one of those steps, of `gradients`; None if not recorded."""
    gradients: int | None = None

    def in_words(self) -> str:
        """`head (output gradients), in 14 of 22 skips after calibration; at most 2 of 28 gradients non-finite`"""
        kind = f" ({formatting.KIND_LABELS[self.kind].lower()})" if self.kind else ""
        text = f"{self.name}{kind}"
        if self.skips is not None:
            when = "in calibration" if self.calibrating else "after calibration"
            text += f", in {self.skips:,} of {formatting.plural(self.all_skips or 0, 'skip')} {when}"
        elif self.step is not None:
            text += f", step {self.step:,}"
        if self.reached is not None:
            text += f"; at most {self.reached:,} of {formatting.plural(self.gradients or 0, 'gradient')} non-finite"
        return text


@dataclass(frozen=True)
class Diagnosis:
    """The chain from verdict to patch."""

    verdict: str
    cause: Finding | None
    """The gravest finding that does not follow from another; None if there is no error and no warning."""
    others: int
    """Further errors and warnings that do not follow from `cause`."""
    origin: Origin | None
    """None if the fault is in no tensor, as in the order of calls, or in none that was recorded."""
    skips: ScaleSummary | None
    """Skipped steps, those of calibration apart; None if no step was skipped."""
    window: SafeWindow | None
    """The loss scales that suit the run, if its fault is one of loss scaling in FP16."""
    measured: str
    """What audits measured of the underflow; empty if nothing underflowed or the run was not audited."""

    @property
    def began(self) -> str:
        """Where the fault began and how far it spread, as one sentence; empty without a fault, or if it is in no
        tensor."""
        return f"Origin: {self.origin.in_words()}." if self.origin and self.cause else ""

    @property
    def evidence(self) -> tuple[str, ...]:
        """The numbers, in words: those of the finding and `measurements`."""
        return (*(self.cause.evidence() if self.cause else ()), *self.measurements)

    @property
    def measurements(self) -> tuple[str, ...]:
        """Numbers of the run beside those of the finding: skipped steps, audited underflow, the recommended scale."""
        parts = [skips_in_words(self.skips)] if self.skips is not None else []
        parts += [self.measured] if self.measured else []
        if self.window is not None and self.window.exists and self.recommends_scale:
            parts.append(f"recommended loss scale {formatting.scale(self.window.recommended)}")
        return tuple(parts)

    @property
    def advice(self) -> str:
        """What the fault means and what to try; empty if nothing is wrong."""
        return self.cause.advice if self.cause else ""

    @property
    def recommends_scale(self) -> bool:
        """Whether a loss scale may mend the run. If the patch of a fault of loss scaling is another dtype or other
        code, a scale predicted from the values that were left would contradict it."""
        fault = self.cause is not None and GUIDE[self.cause.code].family == LOSS_SCALING
        return not fault or not self.patch or ("scaler" in self.patch and "torch.bfloat16" not in self.patch)

    @property
    def patch(self) -> str:
        """Code that mends the cause; empty if nothing has to change."""
        return self.cause.snippet if self.cause else ""

    def in_words(self) -> str:
        """Verdict and origin in one line."""
        return f"{formatting.sentence(self.verdict)} {self.began}".strip()

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data, for JSON."""
        skips, scales = self.skips, self.window
        return {
            "verdict": self.verdict,
            "cause": self.cause.code if self.cause else None,
            "where": self.cause.where if self.cause else None,
            "origin": asdict(self.origin) if self.origin else None,
            "evidence": list(self.evidence),
            "advice": self.advice,
            "patch": self.patch,
            "skips": skips
            and {
                "in_calibration": skips.calibration_skips,
                "after_calibration": skips.settled_skips,
                "steps_after_calibration": skips.settled_steps,
                "first_scale": skips.first,
            },
            "loss_scale": scales
            and {
                "lowest": scales.lowest,
                "highest": scales.highest,
                "recommended": scales.recommended if scales.exists and self.recommends_scale else None,
                "underflowed_at": scales.underflowed_at,
            },
        }


def diagnosis(run: Run, findings: Sequence[Finding]) -> Diagnosis:
    """The diagnosis of a run from its findings, in the order of `diagnose`, without those that are muted."""
    grave = [f for f in findings if f.severity != "info"]
    codes = {f.code for f in grave}
    causes = [f for f in grave if f.follows not in codes]
    cause = causes[0] if causes else None
    following = [f for f in grave if cause is not None and f.follows == cause.code]
    summary = scale_summary(run)
    scaling = cause is not None and GUIDE[cause.code].family == LOSS_SCALING
    window = _window(run) if scaling and autocast_dtype(run) == "float16" else None
    return Diagnosis(
        verdict=_verdict(run, cause),
        cause=cause,
        others=max(0, len(causes) - 1),
        origin=_origin(run, cause, following, window),
        skips=summary if summary.skips else None,
        window=window,
        measured=measured_underflow(run) if scaling or cause is None else "",
    )


def skips_in_words(summary: ScaleSummary) -> str:
    """`18 skips in calibration, 22 in the 375 steps after it`; `50 skips in 50 steps` if none came after it."""
    early, later = summary.calibration_skips, summary.settled_skips
    if not summary.settled_steps:  # nothing shows that it was calibration
        return f"{formatting.plural(early, 'skip')} in {formatting.plural(summary.attempts, 'step')}"
    in_calibration = f"{formatting.plural(early, 'skip')} in calibration, " if early else ""
    return f"{in_calibration}{later:,} in the {summary.settled_steps:,} steps after {'it' if early else 'calibration'}"


def measured_underflow(run: Run) -> str:
    """What audits of the run's own recipe and loss scale measured of the underflow of its weight gradients; empty if
    nothing underflowed there or none was made."""
    audits = own_audits(run)
    nonzero = float(audits["nonzero"].sum())
    if not nonzero or not audits["lost"].sum():
        return ""
    shares = audits["lost"] / audits["nonzero"].where(audits["nonzero"] > 0)
    worst = audits.iloc[int(shares.fillna(0.0).to_numpy().argmax())]
    return (
        f"audits measured {formatting.percent(float(audits['lost'].sum()) / nonzero)} of weight-gradient elements "
        f"flushed to 0, at most {formatting.percent(float(shares.max()))}, in {worst['name']} at loss scale "
        f"{formatting.scale(float(worst['loss_scale']))}"
    )


def _verdict(run: Run, cause: Finding | None) -> str:
    if sentence := first_sentence(run):
        return sentence
    if cause is not None:
        return cause.title
    if run.status in ("failed", "lost"):
        return f"The run {'failed' if run.status == 'failed' else 'was lost'}: {end_in_words(run) or 'reason unknown'}"
    return NOTHING


def _window(run: Run) -> SafeWindow | None:
    try:
        return safe_window(run)
    except RunError:  # no gradients were recorded
        return None


def _origin(run: Run, cause: Finding | None, following: Sequence[Finding], window: SafeWindow | None) -> Origin | None:
    """Where the cause says, else where its consequences do, else where skipped steps or underflow began."""
    for finding in (cause, *following):
        if finding is not None and (origin := _named(run, finding)) is not None:
            return origin
    if cause is None or cause.where == "loss scale":
        return _origin_of_skips(run)
    if window is not None and cause.where == "GradScaler":
        return Origin(window.lowest_by, kind_of(run, window.lowest_by), window.first_step)
    return None


def _named(run: Run, finding: Finding) -> Origin | None:
    """The tensor or module that a finding names; None if it names neither."""
    name = finding.where.split(", ")[0]
    kind = kind_of(run, name)
    modules = {*facts(run.head.model, "layers"), *facts(run.head.model, "shapes")}
    if not name or not (kind or name in modules or name in NO_TENSOR):
        return None
    step = finding.steps[0] if finding.steps is not None else None
    reached, gradients = _reached(run, finding.steps)
    return Origin(name, kind, step, reached=reached, gradients=gradients)


def kind_of(run: Run, name: str) -> str:
    """The kind of tensor under which `name` was sampled; empty if it was not."""
    present = kinds_present(run)
    return next((k for k in ORIGIN_KINDS if k in present and name in tensor_names(run, k)), "")


def _reached(run: Run, *stretches: tuple[int, int] | None) -> tuple[int, int] | tuple[None, None]:
    """The most gradients that were not finite at a step of these stretches, and the number of all; None if none was."""
    frame = signals(run, "skipped", "non-finite")
    within = pd.Series(False, index=frame.index)
    for stretch in stretches:
        if stretch is not None:
            within |= frame["step"].between(*stretch)
    matches = (_REACHED.match(str(text)) for text in frame["detail"][within])
    return max(((int(m[1]), int(m[2])) for m in matches if m), default=(None, None))


def _origin_of_skips(run: Run) -> Origin | None:
    """The tensor in which the most skipped steps began: of those after calibration, if there are any."""
    episodes = skip_episodes(run)
    if episodes.empty:
        return None
    settled = int(attempts(run)["step"].iloc[0]) + CALIBRATION_STEPS
    later = episodes[episodes["first"] >= settled]
    shown = later if len(later) else episodes
    firsts = first_nonfinite(run, "output_grad")
    began = [
        (firsts[first], "output_grad") if first in firsts else (str(tensors).split(", ")[0], "weight_grad")
        for first, tensors in zip(shown["first"].tolist(), shown["tensors"], strict=True)
    ]
    counted = Counter(name for name in began if name[0])
    if not counted:
        return None
    (name, kind), _ = counted.most_common(1)[0]
    here = shown[[place == (name, kind) for place in began]]
    reached, gradients = _reached(run, *zip(here["first"].tolist(), here["last"].tolist(), strict=True))
    return Origin(
        name,
        kind if kind in kinds_present(run) and name in tensor_names(run, kind) else "",
        int(here["first"].iloc[0]),
        skips=int(here["skips"].sum()),
        all_skips=int(shown["skips"].sum()),
        calibrating=not len(later),
        reached=reached,
        gradients=gradients,
    )
