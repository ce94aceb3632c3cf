"""The first cause is named, and findings that follow from it are listed under it."""

import re
from pathlib import Path
from typing import Any

import pytest

from amp_core import Run, load_run
from amp_core.findings import diagnose, first_cause
from amp_core.store.writer import RunWriter
from tests.findings.other_forms.losses import logarithm_of_probabilities_that_are_zero_in_fp16
from tests.findings.other_forms.nonfinite import ascent_by_gradients_that_overflowed
from tests.findings.other_forms.operators import rows_of_zeros_divided_by_their_norm
from tests.synthetic import write_rows

OUTPUT = {"kind": "non-finite output", "dtype": "float16", "limit": 65504.0, "phase": "forward", "op": "Linear"}


def run_of(path: Path, events: list[dict[str, Any]], losses: list[float], skipped: list[bool]) -> Run:
    scales = [2.0**-i for i in range(len(losses))]
    steps = {"step": range(len(losses)), "loss": losses, "loss_scale": scales, "skipped": skipped}
    return load_run(write_rows(path, steps=steps, events=events, config={"scaler": {"enabled": True}}))


def test_forward_comes_before_the_gradients_that_it_spoils(tmp_path: Path) -> None:
    nan = float("nan")
    events = [
        {"kind": "skipped", "name": "head.weight", "step": 0},
        OUTPUT | {"name": "blocks.1.up", "step": 0, "value": 300.0, "count": 9},
    ]
    run = run_of(tmp_path / "run", events, [nan] * 8, [True] * 8)
    cause = first_cause(run, 0, 7)
    assert cause is not None
    assert (cause.phase, cause.where, cause.op, cause.step, cause.clean) == (
        "forward",
        "blocks.1.up",
        "Linear",
        0,
        True,
    )
    by_code = {f.code: f for f in diagnose(run)}
    assert {by_code[c].where for c in ("activation-overflow", "loss-nonfinite", "scale-collapse")} == {"blocks.1.up"}
    assert by_code["loss-nonfinite"].follows == by_code["scale-collapse"].follows == "activation-overflow"
    assert by_code["activation-overflow"].follows == ""
    assert by_code["activation-overflow"].title.endswith("(Linear) overflows float16, from inputs of up to 300")


def test_an_input_without_a_recorded_magnitude_is_not_mentioned(tmp_path: Path) -> None:
    events = [OUTPUT | {"name": "blocks.1.up", "step": 0, "count": 9}]
    (finding,) = [
        f
        for f in diagnose(run_of(tmp_path / "run", events, [float("nan")] * 8, [True] * 8))
        if f.code == "activation-overflow"
    ]
    assert finding.title.endswith("(Linear) overflows float16") and finding.value is None


def test_a_mask_of_minus_infinity_in_a_step_that_was_made_is_no_overflow(tmp_path: Path) -> None:
    events = [OUTPUT | {"name": "attention.mask", "step": 2}]  # a GPU measures outputs without knowing the loss
    sound = run_of(tmp_path / "sound", events, [1.0] * 8, [False] * 8)
    assert "activation-overflow" not in {f.code for f in diagnose(sound)}
    broken = run_of(tmp_path / "broken", events, [1.0, 1.0, float("nan")], [False, False, True])
    assert "activation-overflow" in {f.code for f in diagnose(broken)}


def test_masked_rows_are_no_overflow_in_later_steps_that_do_not_tell_them_again(tmp_path: Path) -> None:
    nan = float("nan")
    output = OUTPUT | {"name": "attention.proj", "detail": "input"}
    events = [
        output | {"step": 0},
        {"kind": "masked rows", "name": "attention", "step": 0, "value": 4.0},
        output | {"step": 3},
    ]
    run = run_of(tmp_path / "run", events, [nan, 1.0, 1.0, nan], [True, False, False, True])
    assert {f.code for f in diagnose(run)} & {"fully-masked-row", "activation-overflow"} == {"fully-masked-row"}


def test_masked_rows_elsewhere_do_not_explain_a_module(tmp_path: Path) -> None:
    nan = float("nan")
    masked = {"kind": "masked rows", "name": "encoder.attention", "step": 0, "value": 4.0}

    def codes(where: str) -> set[str]:
        events = [OUTPUT | {"name": where, "step": 0, "detail": "input"}, masked]
        run = run_of(tmp_path / where, events, [nan] * 4, [True] * 4)
        return {f.code for f in diagnose(run)} & {"fully-masked-row", "activation-overflow"}

    assert codes("encoder.attention.proj") == {"fully-masked-row"}
    assert codes("decoder.up") == {"activation-overflow"}


def test_with_a_finite_loss_the_cause_is_in_backward(tmp_path: Path) -> None:
    events = [{"kind": "skipped", "name": "blocks.2.up.weight", "step": 3}]
    run = run_of(tmp_path / "run", events, [1.0] * 8, [False] * 3 + [True] * 5)
    cause = first_cause(run, 3, 7)
    assert cause is not None and (cause.phase, cause.where) == ("backward", "blocks.2.up.weight")


def test_weights_spoiled_by_bad_gradients_are_not_the_cause(tmp_path: Path) -> None:
    nan = float("nan")
    events = [
        {"kind": "non-finite", "name": "blocks.0.up.weight", "step": 2},
        OUTPUT | {"name": "embed", "step": 3, "detail": "weights", "count": 9},
    ]
    run = run_of(tmp_path / "run", events, [1.0, 1.0, 1.0, nan, nan], [False] * 5)
    cause = first_cause(run, 0, 4)
    assert cause is not None and (cause.step, cause.where) == (2, "blocks.0.up.weight")
    (finding,) = [f for f in diagnose(run) if f.code == "loss-nonfinite"]
    assert finding.where == "blocks.0.up.weight"


def test_a_cause_between_two_modules_is_assigned_to_their_parent(tmp_path: Path) -> None:
    events = [OUTPUT | {"name": "blocks.1.down", "step": 0, "detail": "input"}]
    cause = first_cause(run_of(tmp_path / "run", events, [1.0], [False]), 0, 0)
    assert cause is not None and (cause.where, cause.op) == ("blocks.1", "before blocks.1.down")


def test_without_records_no_cause_is_named(tmp_path: Path) -> None:
    assert first_cause(run_of(tmp_path / "run", [], [1.0], [False]), 0, 0) is None


def skip(step: int, name: str = "head.bias") -> dict[str, Any]:
    return {"kind": "skipped", "name": name, "step": step}


def test_a_skipped_step_before_a_recovery_is_not_the_cause(tmp_path: Path) -> None:
    """A skip at step 0, as in most FP16 runs, sixty steps before a module overflows."""
    events = [skip(0), OUTPUT | {"name": "blocks.1.up", "step": 60, "value": 300.0}]
    losses = [1.0] * 60 + [float("nan")] * 3
    run = run_of(tmp_path / "run", events, losses, [True] + [False] * 59 + [True] * 3)
    cause = first_cause(run, 0, 62)
    assert cause is not None and (cause.phase, cause.where, cause.step) == ("forward", "blocks.1.up", 60)
    by_code = {f.code: f for f in diagnose(run)}
    assert by_code["activation-overflow"].where == by_code["loss-nonfinite"].where == "blocks.1.up"
    assert by_code["loss-nonfinite"].follows == "activation-overflow"


def test_skips_just_before_a_non_finite_output_are_not_its_cause(tmp_path: Path) -> None:
    """Skipped steps do not change the weights."""
    events = [skip(4), skip(5), OUTPUT | {"name": "blocks.1.up", "step": 6}]
    run = run_of(tmp_path / "run", events, [1.0] * 6 + [float("nan")], [False] * 4 + [True] * 3)
    cause = first_cause(run, 0, 6)
    assert cause is not None and (cause.phase, cause.step) == ("forward", 6)


def test_weights_spoiled_long_before_their_use_are_traced_to_that_step(tmp_path: Path) -> None:
    events = [
        {"kind": "non-finite", "name": "rare.weight", "step": 2},
        OUTPUT | {"name": "rare", "step": 9, "detail": "weights"},
    ]
    run = run_of(tmp_path / "run", events, [1.0] * 9 + [float("nan")], [False] * 10)
    cause = first_cause(run, 0, 9)
    assert cause is not None and (cause.phase, cause.where, cause.step) == ("backward", "rare.weight", 2)


def test_poisoned_statistics_are_traced_to_a_forward_pass_before_a_recovery(tmp_path: Path) -> None:
    """On a GPU they are checked every tenth step."""
    events = [
        skip(0),
        OUTPUT | {"name": "conv", "step": 33},
        skip(37),
        {"kind": "statistics", "name": "bn.running_mean", "step": 40, "count": 2},
    ]
    losses = [float("nan") if step == 33 else 1.0 for step in range(50)]
    run = run_of(tmp_path / "run", events, losses, [step in (0, 33, 37) for step in range(50)])
    (finding,) = [f for f in diagnose(run) if f.code == "batchnorm-poisoned"]
    assert "first in forward at step 33: conv" in finding.title


def test_a_skip_before_a_recovery_does_not_mark_half_the_model_as_broken(tmp_path: Path) -> None:
    model = {"dtypes": {"a.weight": "float16"}, "shapes": {"a.weight": [4, 4], "b.weight": [4, 4]}}
    with RunWriter(tmp_path / "run", config={"scaler": None}, model=model) as writer:
        writer.append("steps", {"step": range(9), "loss": [1.0] * 9, "skipped": [True] + [False] * 8})
        writer.event(**skip(0))
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "half-model"]
    assert (finding.where, finding.severity) == ("a", "warning")


@pytest.mark.parametrize("skips", [0, 1])
def test_a_loss_scale_that_grows_without_end_is_detected_after_a_first_skip_too(skips: int, tmp_path: Path) -> None:
    scales = [2.0**16] * skips + [2.0 ** (15 + step // 10) for step in range(150)]
    steps = {"step": range(len(scales)), "loss_scale": scales, "skipped": [step < skips for step in range(len(scales))]}
    tensors = {"step": [149], "name": ["a"], "kind": ["weight_grad"], "absmax": [2.0**-9]}
    run = load_run(write_rows(tmp_path / "run", steps=steps, tensors=tensors, config={"scaler": {"enabled": True}}))
    assert "scale-unbounded" in {f.code for f in diagnose(run)}


RISING = [2.0 * 800 ** (max(step - 20, 0) / 9) for step in range(30)]
"""Calm for twenty steps; in the nine that follow it rises 800-fold."""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", None])
@pytest.mark.parametrize("broken", ["forward", "backward", "unknown"])
def test_a_loss_that_rose_while_all_values_were_finite_is_a_divergence(
    broken: str, dtype: str | None, tmp_path: Path
) -> None:
    """An overflow that follows, in any precision, is not the cause."""
    events = {
        "forward": [OUTPUT | {"name": "up", "step": 30, "dtype": dtype or "float32"}],
        "backward": [{"kind": "non-finite", "name": "up.weight", "step": 29}],
        "unknown": [],
    }[broken]
    steps = {"step": range(36), "loss": RISING + [float("nan")] * 6}
    run = load_run(write_rows(tmp_path / "run", steps=steps, events=events, config={"autocast_dtype": dtype}))
    by_code = {f.code: f for f in diagnose(run)}
    finding = by_code["loss-nonfinite"]
    rose = "588" if broken == "backward" else "800"  # the last step's own gradients were not finite
    assert finding.where == "learning rate" and finding.follows == "" and "activation-overflow" not in by_code
    assert f"the loss rose {rose}-fold while every value was still finite" in finding.title or broken == "backward"
    assert "learning rate" in finding.advice and not re.search("float16|float32|bfloat16", finding.advice)


@pytest.mark.parametrize(
    "losses_before",
    [
        [2.0 + 0.5 * (-1) ** step for step in range(30)],  # noise
        [2.0 - step / 20 for step in range(30)],  # it learned
        [0.2] + [2.3] * 29,  # a small first loss
        [2.0] * 29 + [900.0],  # one bad batch
        [0.01] * 5 + [2.0] * 200,  # long ago
    ],
)
def test_a_loss_that_did_not_rise_is_no_divergence(losses_before: list[float], tmp_path: Path) -> None:
    losses = [*losses_before, float("nan")]
    run = run_of(tmp_path / "run", [OUTPUT | {"name": "up", "step": len(losses_before)}], losses, [False] * len(losses))
    (finding,) = [f for f in diagnose(run) if f.code == "loss-nonfinite"]
    assert finding.where == "up"


def test_a_loss_scale_that_collapsed_as_the_loss_rose_is_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    """The scaler keeps every bad gradient off the weights, so the loss stays finite."""
    skipped = [False] * 30 + [True] * 20
    steps = {"step": range(50), "loss": RISING + [RISING[-1]] * 20, "skipped": skipped}
    steps["loss_scale"] = [4.0] * 30 + [4.0 / 2**i for i in range(20)]
    events = [skip(step) for step in range(30, 50)]
    run = load_run(write_rows(tmp_path / "run", steps=steps, events=events, config={"scaler": {"enabled": True}}))
    (finding,) = [f for f in diagnose(run) if f.code == "scale-collapse"]
    assert finding.where == "learning rate" and "learning rate" in finding.advice


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", None])
@pytest.mark.parametrize("detail", ["data", "weights", "input", "", "loss", "gradient", "unknown"])
def test_advice_fits_the_cause_and_the_precision(detail: str, dtype: str | None, tmp_path: Path) -> None:
    """A wider format is a remedy only if float16 overflowed."""
    output = OUTPUT | {"name": "up.0", "step": 3, "dtype": dtype or "float32", "detail": detail}
    events = {
        "gradient": [{"kind": "non-finite", "name": "up.weight", "step": 2}],
        "unknown": [],
        "loss": [output | {"name": "", "op": "loss", "detail": ""}],
    }.get(detail, [output])
    statistics = {"kind": "statistics", "name": "bn.running_var", "step": 3, "count": 1}
    steps = {"step": range(12), "loss": [1.0] * 3 + [float("nan")] * 9, "skipped": [False] * 3 + [True] * 9}
    steps["loss_scale"] = [2.0**-i for i in range(12)]
    config = {"autocast_dtype": dtype, "scaler": {"enabled": True}}
    run = load_run(write_rows(tmp_path / "run", steps=steps, events=[*events, statistics], config=config))
    by_code = {f.code: f for f in diagnose(run)}
    for code in ("loss-nonfinite", "scale-collapse", "batchnorm-poisoned"):
        finding = by_code[code]
        assert finding.advice.count(". ") == 1 and finding.advice.endswith(".")
        compile(finding.snippet, code, "exec")
        recorded = f"{finding.advice} {finding.snippet} {finding.frameworks}"
        if dtype is None or detail in ("data", "weights"):
            assert not re.search("float32|float16|bfloat16|bf16", recorded), recorded
    if detail == "data":
        assert "samples" in by_code["loss-nonfinite"].advice and by_code["loss-nonfinite"].where == "input data"


@pytest.mark.parametrize(("precision", "result"), [("fp32", False), ("bf16", True), (None, True)])
def test_an_fp32_run_whose_losses_have_few_bits_is_not_advised_to_use_fp32(
    precision: str | None, result: bool, tmp_path: Path
) -> None:
    """Counts over a batch of 64 have few bits in any format."""
    steps = {"step": range(30), "loss": [(90 - step) / 64 for step in range(30)]}
    run = load_run(write_rows(tmp_path / "run", steps=steps, config={"precision": precision}))
    assert ("half-accumulation" in {f.code for f in diagnose(run)}) is result


def test_an_eps_of_zero_comes_before_the_overflow_that_it_causes(tmp_path: Path) -> None:
    rows_of_zeros_divided_by_their_norm(tmp_path / "run")
    findings = diagnose(load_run(tmp_path / "run"))
    assert findings[0].code == "eps-rounds-to-zero"
    follows = {f.code: f.follows for f in findings}
    assert follows["loss-nonfinite"] == "eps-rounds-to-zero"
    assert "activation-overflow" not in follows  # a division by 0 exceeds no range


def test_a_logarithm_of_zero_is_no_overflow(tmp_path: Path) -> None:
    logarithm_of_probabilities_that_are_zero_in_fp16(tmp_path / "run")
    finding, *others = diagnose(load_run(tmp_path / "run"))
    assert finding.code == "loss-nonfinite" and "loss (log of 0, float16)" in finding.title
    assert "log_softmax" in finding.snippet
    assert "activation-overflow" not in {f.code for f in others}


def test_a_log_softmax_in_16_bits_comes_before_the_loss_that_it_rounds(tmp_path: Path) -> None:
    events = [
        {"kind": "loss dtype", "step": 0, "dtype": "bfloat16", "detail": ""},
        {"kind": "narrow classes", "step": 0, "name": "loss", "op": "_log_softmax", "value": 32000.0, "limit": 8192.0}
        | {"dtype": "bfloat16"},
    ]
    found = diagnose(run_of(tmp_path / "run", events, [1.1, 1.2], [False, False]))
    assert [f.code for f in found if f.where == "loss"] == ["half-logits", "half-accumulation"]


def test_a_router_that_is_the_whole_model_has_its_name(tmp_path: Path) -> None:
    router = {"kind": "narrow router", "step": 0, "name": "", "op": "topk", "value": 0.0, "limit": 64.0}
    run = run_of(tmp_path / "run", [router | {"dtype": "bfloat16"}], [1.1, 1.2], [False, False])
    (title,) = [f.title for f in diagnose(run) if f.code == "half-router"]
    assert title.split()[0] != "selects" and not title.startswith(" ")


def test_weights_that_the_loop_broke_within_a_step_have_advice_of_their_own(tmp_path: Path) -> None:
    ascent_by_gradients_that_overflowed(tmp_path / "run")
    finding = next(f for f in diagnose(load_run(tmp_path / "run")) if f.code == "loss-nonfinite")
    assert "were finite in an earlier forward of the same step" in finding.advice
