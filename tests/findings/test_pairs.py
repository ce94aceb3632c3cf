"""Findings that need an FP32 run for comparison."""

from pathlib import Path

from amp_core import load_run
from amp_core.findings import diagnose
from tests.synthetic import write


def test_a_run_that_learns_worse_than_its_baseline_is_reported(tmp_path: Path) -> None:
    baseline = load_run(write(tmp_path / "fp32", "fp32"))
    broken = load_run(write(tmp_path / "fp16", "healthy", loss_breaks_at=60))
    (finding,) = [f for f in diagnose(broken, baseline) if f.code == "amp-loss-gap"]
    assert finding.where == "loss" and finding.title.startswith(
        "The run converges worse than fp32: the loss is not finite"
    )
    assert finding.follows == "loss-nonfinite"
    assert not [f for f in diagnose(broken) if f.code == "amp-loss-gap"]
    wide = load_run(write(tmp_path / "wide", "fp32", loss_breaks_at=60))  # not caused by the precision
    assert not [f for f in diagnose(wide, baseline) if f.code == "amp-loss-gap"]
    healthy = load_run(write(tmp_path / "ok", "healthy"))
    assert not [f for f in diagnose(healthy, baseline) if f.severity != "info"]


def test_memory_that_does_not_fall_is_reported_only_on_a_gpu(tmp_path: Path) -> None:
    def codes(device: str, peak: int) -> set[str]:
        folder = tmp_path / f"{device}-{peak}".replace(":", "")
        amp = load_run(write(folder / "amp", "bf16", device=device, memory_bytes=peak))
        fp32 = load_run(write(folder / "fp32", "fp32", device=device))
        return {f.code for f in diagnose(amp, fp32)}

    assert "memory-not-lower" in codes("cuda:0", 495 * 2**20)
    assert "memory-not-lower" not in codes("cuda:0", 300 * 2**20)
    assert "memory-not-lower" not in codes("cpu", 495 * 2**20)
