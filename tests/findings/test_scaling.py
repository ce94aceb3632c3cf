from pathlib import Path
from typing import Any

import pytest

from amp_core import Run, load_run
from amp_core.findings import RULES, SEVERITIES, Finding, diagnose
from tests.synthetic import SCENARIOS, write, write_rows

EXPECTED: dict[str, set[tuple[str, str]]] = {
    "overflowing": {("warning", "frequent-skips")},
    "calibrating": {("info", "calibration-skips")},
    "collapsing": {("error", "loss-nonfinite"), ("error", "scale-collapse")},
    "underflowing": {("error", "fp16-without-scaler")},
    "bf16-with-scaler": {("warning", "scaler-with-bf16")},
    "profiled": {("warning", "autocast-inactive"), ("warning", "unaligned-dims")},
}
"""Codes of the findings in the synthetic runs; the others have none."""


def codes(run: Run) -> list[str]:
    return [f.code for f in diagnose(run)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_synthetic_run_has_its_expected_findings(scenario: str, runs: dict[str, Run]) -> None:
    assert {(f.severity, f.code) for f in diagnose(runs[scenario])} == EXPECTED.get(scenario, set())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_finding_carries_its_evidence_and_what_to_try(scenario: str, runs: dict[str, Run]) -> None:
    for finding in diagnose(runs[scenario]):
        assert finding.severity in SEVERITIES and finding.title and finding.where and finding.unit
        assert finding.advice.endswith(".") and finding.advice.count(". ") == 1  # two sentences
        assert finding.snippet or finding.severity == "info"
        compile(finding.snippet, finding.code, "exec")
        assert finding.to_dict()["code"] == finding.code


def test_the_most_severe_finding_is_first(tmp_path: Path) -> None:
    run = load_run(write(tmp_path / "run", "bf16-with-scaler", loss_breaks_at=30))
    assert [f.severity for f in diagnose(run)] == ["error", "warning"]


@pytest.mark.parametrize("seed", range(5))
def test_healthy_runs_raise_no_warning_whatever_the_seed(seed: int, tmp_path: Path) -> None:
    for scenario in ("healthy", "calibrating", "bf16", "fp32", "static"):
        run = load_run(write(tmp_path / scenario, scenario, seed=seed))
        assert not [f for f in diagnose(run) if f.severity != "info"]


RISE = [2.0] * 20 + [2.0 * 3.0**k for k in range(1, 11)]
NORMS = [1.0] * 20 + [3.0 ** (k / 2) for k in range(1, 11)]


def diverged(into: Path, loss: list[float], norms: list[float] | None) -> list[Finding]:
    columns = {"step": list(range(len(loss))), "loss": loss} | ({} if norms is None else {"grad_norm": norms})
    return [f for f in diagnose(load_run(write_rows(into, steps=columns))) if f.code == "loss-diverged"]


def test_a_finite_loss_that_rises_without_end_diverged(tmp_path: Path) -> None:
    (finding,) = diverged(tmp_path / "run", RISE, NORMS)
    assert (finding.where, finding.steps, finding.value) == ("learning rate", (0, 29), pytest.approx(3.0**10))
    assert "learning rate" in finding.advice and "while every value was finite" in finding.title


@pytest.mark.parametrize(
    ("loss", "norms"),
    [
        (RISE[:-4], NORMS[:-4]),  # 729-fold
        (RISE, [1.0] * 30),  # the objective changes, the updates do not
        (RISE, None),  # norms are not known
        ([*RISE, 2.0, 1.9, 1.8], [*NORMS, 1.0, 1.0, 1.0]),  # it recovered
        ([2.0] * 29 + [1e6], [1.0] * 29 + [1e3]),  # one bad batch
        ([*RISE, float("nan")], [*NORMS, float("nan")]),  # `loss-nonfinite` names it
        (RISE[::-1], NORMS[::-1]),  # it learns
        ([-x for x in RISE], NORMS),  # a reward
    ],
)
def test_no_other_loss_diverged(loss: list[float], norms: list[float] | None, tmp_path: Path) -> None:
    assert diverged(tmp_path / "run", loss, norms) == []


def test_an_unrecorded_loss_is_not_called_non_finite(tmp_path: Path) -> None:
    missing = write_rows(tmp_path / "a", steps={"step": [0, 1, 2], "loss": [1.0, None, None]})
    assert codes(load_run(missing)) == []
    broken = write_rows(tmp_path / "b", steps={"step": [0, 1, 2, 3], "loss": [1.0, float("inf"), None, float("nan")]})
    (finding,) = diagnose(load_run(broken))
    assert (finding.code, finding.steps, finding.value, finding.limit) == ("loss-nonfinite", (1, 3), 2.0, 0.0)
    assert "infinite or NaN from step 1 on (2 of 3 steps)" in finding.title


def scaled(path: Path, scales: list[float], skipped: list[bool], **config: Any) -> Run:
    steps = {"step": range(len(scales)), "loss_scale": scales, "skipped": skipped}
    return load_run(write_rows(path, steps=steps, config={"scaler": {"enabled": True}} | config))


def test_a_collapse_with_a_recovery_is_a_warning(tmp_path: Path) -> None:
    scales = [2.0 ** (4 - i) for i in range(9)] + [2.0**-5] * 30
    (finding,) = diagnose(scaled(tmp_path / "run", scales, [True] * 9 + [False] * 30))
    assert (finding.code, finding.severity, finding.steps) == ("scale-collapse", "warning", (0, 8))
    assert finding.value == 2.0**-5 and finding.limit == 1.0


def test_a_continuing_collapse_of_a_live_run_is_an_error(tmp_path: Path) -> None:
    scales = [1.0] * 5 + [2.0**-i for i in range(8)]
    (finding,) = diagnose(scaled(tmp_path / "run", scales, [False] * 5 + [True] * 8))
    assert (finding.severity, finding.steps, finding.value) == ("error", (5, 12), 2.0**-7)


def test_many_skips_above_a_scale_of_one_count_as_calibration(tmp_path: Path) -> None:
    scales = [2.0 ** (30 - i) for i in range(15)] + [2.0**15] * 20
    (finding,) = diagnose(scaled(tmp_path / "run", scales, [True] * 15 + [False] * 20))
    assert (finding.code, finding.severity) == ("calibration-skips", "info")
    assert finding.value == 15.0 and "15 of 35 steps" in finding.title


def test_consecutive_skips_in_mid_run_do_not_count_as_calibration(tmp_path: Path) -> None:
    scales = [2.0**16] * 50 + [2.0**16, 2.0**15, 2.0**14] + [2.0**13] * 20
    assert codes(scaled(tmp_path / "run", scales, [False] * 50 + [True] * 3 + [False] * 20)) == ["frequent-skips"]


def test_a_skip_every_few_steps_does_not_count_as_calibration(tmp_path: Path) -> None:
    skipped = [i % 20 == 19 for i in range(200)]  # one step in twenty: the growth interval is too short
    scales = [2.0**15 if i % 20 < 10 else 2.0**16 for i in range(200)]
    assert codes(scaled(tmp_path / "often", scales, skipped)) == ["frequent-skips"]
    seldom = [i == 119 for i in range(200)]
    assert codes(scaled(tmp_path / "seldom", scales, seldom)) == ["calibration-skips"]


def test_a_first_scale_that_is_far_too_high_is_a_warning(tmp_path: Path) -> None:
    for halvings, severity in ((16, "info"), (42, "warning")):
        scales = [2.0 ** (10 + max(halvings - step, 0)) for step in range(60)]
        run = scaled(tmp_path / severity, scales, [step < halvings for step in range(60)])
        assert [(f.code, f.severity, f.value) for f in diagnose(run)] == [("calibration-skips", severity, halvings)]


@pytest.mark.parametrize(
    ("config", "result"),
    [
        ({"autocast_dtype": "float16", "scaler": None}, ["fp16-without-scaler"]),
        ({"autocast_dtype": "float16", "scaler": {"enabled": False}}, ["fp16-without-scaler"]),
        ({"autocast_dtype": "float16", "scaler": {"enabled": True}, "at": 2.0}, []),
        ({"autocast_dtype": "float16", "scaler": {"enabled": True}, "at": 1.0}, ["fp16-without-scaler"]),
        ({"autocast_dtype": "bfloat16", "scaler": {"enabled": True}}, ["scaler-with-bf16"]),
        ({"precision": "bf16", "scaler": {"enabled": True}}, ["scaler-with-bf16"]),  # a loop without a recorded dtype
        (
            {"autocast_dtype": "bfloat16", "scaler": {"enabled": True, "init_scale": 8.0}, "at": 8.0},
            ["scaler-with-bf16"],
        ),
        # The scaler scaled no loss.
        ({"autocast_dtype": "bfloat16", "scaler": {"enabled": True, "init_scale": 8.0}}, []),
        ({"autocast_dtype": "bfloat16", "scaler": {"enabled": False}}, []),
        ({"autocast_dtype": None, "scaler": None}, []),
        ({}, []),
    ],
)
def test_incompatible_settings_are_reported(config: dict[str, Any], result: list[str], tmp_path: Path) -> None:
    run = load_run(
        write_rows(tmp_path / "run", steps={"step": [0], "loss_scale": [config.get("at", 1.0)]}, config=config)
    )
    assert codes(run) == result


def test_a_scaler_that_was_not_passed_to_watch_is_not_reported_as_missing(tmp_path: Path) -> None:
    for config, severity in (({}, "error"), ({"scaler_unseen": True}, "warning")):
        settings = {"autocast_dtype": "float16", "scaler": None} | config
        run = load_run(write_rows(tmp_path / severity, steps={"step": [0], "loss_scale": [1.0]}, config=settings))
        finding = diagnose(run)[0]
        assert (finding.code, finding.severity) == ("fp16-without-scaler", severity)
        assert ("watch(" in finding.snippet) == bool(config)


def test_rules_do_not_modify_the_run(runs: dict[str, Run]) -> None:
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert diagnose(runs["collapsing"]) == diagnose(runs["collapsing"])
    assert all(isinstance(f, Finding) for f in diagnose(runs["collapsing"]))
