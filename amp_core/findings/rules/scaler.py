"""Rules on the setup of the scaler: whether there is one, whether there should be, its state when resumed, and anomaly
mode beside it."""

import pyarrow.compute as pc

from amp_core.analysis import scale_summary, skip_episodes
from amp_core.analysis.numerics.loss_scale import CALIBRATION_STEPS
from amp_core.analysis.steps import scaler_enabled
from amp_core.findings.model import LOSS_SCALING, TRAINING_LOOP, Entry, Finding, Remedy
from amp_core.findings.registry import GUIDE, make_finding, rule
from amp_core.findings.remedies import compute_dtype, first_scale, new_scaler
from amp_core.findings.signals import call_orders, ending_error, facts, last_step, optimizer_name, signals, split_call
from amp_core.findings.snippets import BF16, LOOP, WITH_SCALER
from amp_core.store.run import Run
from amp_core.text import formatting

MAX_CHANGE_RATIO = 8.0
"""A scaler's own growth and backoff factors are 2 and 1/2 by default; a scale further from the last one is another."""


@rule(
    Entry(
        code="fp16-without-scaler",
        severity="error",
        family=LOSS_SCALING,
        order=220,
        what="Training in float16 without loss scaling: small gradients silently underflow to zero.",
        signal="The autocast dtype, the graph of the first backward, and whether a scaler scaled by anything other "
        "than 1.",
        threshold="FP16 autocast, or gradients in FP16 without it, and no scale other than 1. FP16 rounds values below "
        "2^-25 to zero. A warning if only a part computes in FP16, or if there is a scaler that `watch` was not given: "
        "call `watch` after creating the scaler. An info if the program multiplies the loss by a "
        "constant of 64 or more itself.",
        advice="Gradients below 2^-25 silently become zero in float16, and those below 2^-14 lose precision, unless "
        "a GradScaler scales the loss before backward. Add one with the usual initial scale of 2^16, or use "
        "bfloat16, which needs none.",
        snippet=WITH_SCALER,
        frameworks={
            "Accelerate": 'accelerator = Accelerator(mixed_precision="fp16")   # makes the scaler\n'
            "accelerator.backward(loss)                          # in place of loss.backward()",
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", fp16=True)   # makes the scaler',
            "Lightning": 'trainer = Trainer(precision="16-mixed")   # makes the scaler',
        },
        page="number-ranges",
    )
)
def fp16_without_scaler(run: Run) -> list[Finding]:
    """`fp16-without-scaler`: gradients flow back in float16 without an active GradScaler, or with one whose loss scale
    was always 1, which has no effect. A warning if an active one was unknown to the recorder."""
    summary = scale_summary(run)
    if not _backward_in_half(run):
        return []
    if not summary.attempts:
        return []
    if summary.has_scaler and summary.highest != 1.0:
        return _beside_scaler(run)
    if run.head.config.get("scaler_unseen"):
        return [_unseen_scaler()]
    if _is_idle(run):
        return [_idle_scaler()]
    own = signals(run, "own loss scale")["value"]
    if len(own):
        return [_own_scale(float(own.iloc[0]), changes=own.nunique() > 1)]
    scaling = "without effective loss scaling (loss scale 1)" if summary.has_scaler else "without loss scaling"
    whole = compute_dtype(run) == "float16"  # else a network outside of the model does, or a part
    return [
        make_finding(
            "fp16-without-scaler",
            f"Training in float16 {scaling}" if whole else f"Gradients pass operators in float16 {scaling}",
            "GradScaler",
            severity=None if whole else "warning",
            value=1.0,
            unit="loss scale",
            limit=None,
            remedy=_first_scaler(run),
        )
    ]


def _beside_scaler(run: Run) -> list[Finding]:
    """An optimizer that never steps through the scaler which others use, and whose loss no scaler multiplied."""
    calls = [split_call(c) for _, _, some in call_orders(run) for c in some]
    through = {index for name, index in calls if name == "scaler.step"}
    itself = {index for name, index in calls if name == "optimizer.step"}
    unscaled = signals(run, "unscaled backward")
    in_half = {int(i) for i in unscaled[unscaled["dtype"].eq("float16")]["optimizer"].dropna()}
    alone = sorted(in_half & itself - through)
    if not alone:
        return []
    name = optimizer_name(run, alone[0])
    return [
        make_finding(
            "fp16-without-scaler",
            f"{name} trains in float16 without loss scaling, though the loop has a GradScaler for another loss",
            f"optimizer.step of {name}",
            severity="warning",
            value=1.0,
            unit="loss scale",
            limit=None,
            remedy=_first_scaler(run),
        )
    ]


def _backward_in_half(run: Run) -> bool:
    """Whether gradients flow back in float16: under autocast; or, without it, as the graph or the output gradients
    show. Of a model that is mostly stored in float16, that part may be frozen and run without gradients."""
    precision = run.head.config.get("precision")
    if run.head.config.get("autocast_dtype") == "float16":
        return True
    if len(signals(run, "half backward")) and precision != "fp16-pure":  # `half-model` has that
        return True
    if precision != "fp16-unscaled":
        return False
    table = run.table("tensors").select(["kind", "dtype"])
    dtypes = pc.unique(table.filter(pc.equal(table.column("kind"), "output_grad")).column("dtype")).to_pylist()
    return not dtypes or "float16" in dtypes


def _first_scaler(run: Run) -> Remedy | None:
    """The remedy with the loss scale that the recorded gradients call for; None if that is unknown."""
    power, entry = first_scale(run), GUIDE["fp16-without-scaler"]
    if power is None:
        return None
    advice = (
        "Gradients below 2^-25 silently become zero in float16, and those below 2^-14 lose precision, unless a "
        f"GradScaler scales the loss before backward. Add one with an initial scale of 2^{power}, as recommended for "
        "this run, or use bfloat16, which needs none."
    )
    return Remedy(advice, f"{new_scaler(run)}\n\n{LOOP}", entry.frameworks)


def _is_idle(run: Run) -> bool:
    """Whether the watched scaler began with a scale other than 1 and never scaled a loss."""
    scaler = facts(run.head.config, "scaler")
    begun = scaler.get("init_scale")
    return scaler.get("enabled") is True and isinstance(begun, int | float) and begun != 1


def _idle_scaler() -> Finding:
    return make_finding(
        "fp16-without-scaler",
        "Training in float16 with a GradScaler that scaled no loss: another scaler is active, or none",
        "GradScaler",
        severity="warning",
        unit="loss scale",
        remedy=Remedy(
            "The scaler that `watch` was given scaled no loss: the loop does not use it, or created a new one later "
            "whose scale and skipped steps are not in this run. Use this one scaler for the whole training.",
            LOOP,
        ),
    )


def _own_scale(scale: float, *, changes: bool) -> Finding:
    at = f"{formatting.number(scale)} at first" if changes else f"a constant {formatting.number(scale)}"
    return make_finding(
        "fp16-without-scaler",
        f"Training in float16 with a loss scale of the program's own, {at}",
        "GradScaler",
        severity="info",
        value=scale,
        unit="loss scale",
        remedy=Remedy(
            "Small gradients are kept. The program itself has to skip steps whose gradients overflow and to divide by "
            "the scale before the others, and the recorded gradients are scaled; a GradScaler does all of it.",
            LOOP,
        ),
    )


def _unseen_scaler() -> Finding:
    return make_finding(
        "fp16-without-scaler",
        "Training in float16 with a GradScaler that is not watched: losses and gradients were recorded with the "
        "scale in them",
        "GradScaler",
        severity="warning",
        unit="loss scale",
        remedy=Remedy(
            "The scaler was created after `watch` was called, so its loss scale and skipped steps are not in this "
            "run. Call `watch` after creating the scaler, or pass it explicitly; the training itself may be correct.",
            "watch(model, optimizer, scaler=scaler, into=into)",
        ),
    )


@rule(
    Entry(
        code="scaler-with-bf16",
        severity="warning",
        family=LOSS_SCALING,
        order=350,
        what="A GradScaler is active although bfloat16 has the range of float32 and needs none.",
        signal="The autocast dtype, and whether a scaler is enabled.",
        threshold="Both at once: bfloat16 has the 8 exponent bits of float32.",
        advice="bfloat16 has the range of float32, so loss scaling rescues no gradient, but the scaler still checks "
        "every gradient and may skip steps as its scale grows. Disable it; the rest of the loop can stay.",
        snippet="scaler = torch.amp.GradScaler(device_type, enabled=False)",
        frameworks=BF16,
    )
)
def scaler_with_bf16(run: Run) -> list[Finding]:
    """`scaler-with-bf16`: a GradScaler was active although autocast used bfloat16."""
    config = run.head.config
    dtype = config.get("autocast_dtype")
    if dtype != "bfloat16" and not (dtype is None and config.get("precision") == "bf16"):
        return []
    summary = scale_summary(run)
    if not summary.has_scaler or not summary.attempts:
        return []
    if summary.highest == 1.0 and _is_idle(run):
        return []  # the loop does not use the watched scaler
    return [
        make_finding(
            "scaler-with-bf16",
            f"A GradScaler is active with bfloat16, which needs none ({summary.skips:,} skipped steps)",
            "GradScaler",
            value=float(summary.skips),
            limit=0.0,
            unit="skipped steps",
        )
    ]


@rule(
    Entry(
        code="scaler-state-not-restored",
        severity="warning",
        family=TRAINING_LOOP,
        order=340,
        what="Training was resumed with the optimizer's state but a fresh scaler, which calibrates again.",
        signal="The optimizer's step count at the start, and whether the scaler has clean steps or a restored scale; "
        "scalers that replace another.",
        threshold="An optimizer that has stepped, with a scaler that has not; or a scaler that replaces another, with "
        f"more than {MAX_CHANGE_RATIO:g} times its loss scale, and skips its first step.",
        advice="The loss scale starts from its initial value again, which costs skipped steps and a bump in the "
        "loss. Save and load `scaler.state_dict()` in the checkpoint.",
        snippet="torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), "
        "'scaler': scaler.state_dict()}, path)\n"
        "scaler.load_state_dict(torch.load(path, weights_only=True)['scaler'])",
        frameworks={
            "Accelerate": "accelerator.save_state(folder)\naccelerator.load_state(folder)   # the scaler too",
            "Transformers Trainer": "trainer.train(resume_from_checkpoint=True)   # the scaler too",
            "Lightning": "trainer.fit(model, ckpt_path=path)   # the scaler too",
        },
    )
)
def scaler_state_not_restored(run: Run) -> list[Finding]:
    """`scaler-state-not-restored`: the optimizer has the state of earlier steps, the scaler does not."""
    return _resumed(run) or _replaced(run)


def _resumed(run: Run) -> list[Finding]:
    resumed = facts(run.head.config, "resumed")
    if resumed.get("optimizer") is not True or resumed.get("scaler") is not False:
        return []
    begun = signals(run, "resumed")["step"].dropna()
    first = int(begun.iloc[-1]) if len(begun) else 0
    if first and _recorded_before(run, first, resumed.get("first_scale")):
        return []  # the scaler's state was loaded just after its scale had changed
    return [_fresh_scaler(run, "Training was resumed with a fresh GradScaler", first, resumed.get("first_scale"))]


def _replaced(run: Run) -> list[Finding]:
    """A scaler that replaces another during training, with a scale that overflows at once where the other's did not."""
    changes = signals(run, "phase change")
    changes = changes[(changes["name"] == "scaler") & changes["step"].notna()]
    if changes.empty:
        return []
    first = int(changes["step"].iloc[-1])
    frame = run.table("steps").select(["step", "loss_scale"]).to_pandas().dropna()
    before = frame[frame["step"] < first]["loss_scale"]
    after = frame[frame["step"] >= first]["loss_scale"]
    if before.empty or after.empty or not after.iloc[0] > MAX_CHANGE_RATIO * before.iloc[-1]:
        return []
    if first not in skip_episodes(run)["first"].to_numpy():
        return []
    return [_fresh_scaler(run, "A fresh GradScaler replaced the one of earlier steps", first, after.iloc[0])]


def _fresh_scaler(run: Run, what: str, first: int, scale: object) -> Finding:
    """`what` happened before step `first`, and the scaler began with `scale`."""
    skips = skip_episodes(run)
    start = skips[(skips["first"] >= first) & (skips["first"] < first + CALIBRATION_STEPS)]["skips"].sum()
    return make_finding(
        "scaler-state-not-restored",
        f"{what}, which skipped {int(start):,} of its first steps",
        "GradScaler",
        steps=(first, min(first + CALIBRATION_STEPS, last_step(run) or 0)),
        value=float(scale) if isinstance(scale, int | float) else None,
        unit="loss scale",
    )


def _recorded_before(run: Run, step: int, scale: object) -> bool:
    """Whether the run had this loss scale before `step`, later than its first, or within one change of its last."""
    frame = run.table("steps").select(["step", "loss_scale"]).to_pandas().dropna()
    scales = frame[frame["step"] < step]["loss_scale"].to_numpy()
    if not len(scales) or not isinstance(scale, int | float) or scale == scales[0]:
        return False
    return scale in scales or bool(1 / MAX_CHANGE_RATIO <= scale / scales[-1] <= MAX_CHANGE_RATIO)


@rule(
    Entry(
        code="anomaly-mode-with-scaler",
        severity="warning",
        family=TRAINING_LOOP,
        order=420,
        what="Anomaly mode is on with a scaler: an overflow that the scaler would have skipped ends the run, and "
        "every step is slow.",
        signal="Anomaly mode at backward; the error that it raised.",
        threshold="Both at once. An error if it ended the run.",
        advice="Scaled gradients overflow now and then by design, but anomaly mode treats that as an error. Turn it "
        "off, or use it only for a few steps after the scale has settled.",
        snippet="torch.autograd.set_detect_anomaly(False)",
        frameworks={"Lightning": "trainer = Trainer(detect_anomaly=False)"},
    )
)
def anomaly_mode_with_scaler(run: Run) -> list[Finding]:
    """`anomaly-mode-with-scaler`: backward in anomaly mode with an active scaler."""
    frame = signals(run, "anomaly mode")
    if frame.empty or not scaler_enabled(run):
        return []
    raised = "returned nan values in its" in ending_error(run)
    at = int(frame["step"].iloc[0])
    return [
        make_finding(
            "anomaly-mode-with-scaler",
            "Anomaly mode is on with a GradScaler" + (", and ended the run" if raised else ""),
            "torch.autograd.set_detect_anomaly",
            severity="error" if raised else None,
            steps=(at, at),
            value=1.0,
            limit=0.0,
            unit="backward passes",
        )
    ]
