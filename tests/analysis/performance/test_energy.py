"""Energy per sample, from made-up power samples with a known result."""

from pathlib import Path

import numpy as np
import pytest

from amp_core import Run, load_run
from amp_core.analysis import compare, energy_per_sample
from tests.synthetic import write_rows


def powered(
    path: Path, begins: np.ndarray, step_s: float, power: object = None, every: int = 1, **config: object
) -> Run:
    """Steps of 16 samples that begin at `begins`, one in `every` recorded; `power(time)` watts are sampled every 0.1
    s."""
    steps = {
        "step": np.arange(0, len(begins), every),
        "time_s": begins[::every] + step_s,
        "step_ms": [1e3 * step_s] * len(begins[::every]),
        "samples": [16] * len(begins[::every]),
    }
    tables = {"steps": steps}
    if power is not None:
        times = np.arange(0.0, begins[-1] + 2 * step_s, 0.1)
        watts = [power(t) for t in times]  # type: ignore[operator]
        tables["device"] = {"time_s": times, "index": [0] * len(times), "power_w": watts}
    return load_run(write_rows(path, config=config, **tables))


def test_energy_is_power_times_time_over_samples(tmp_path: Path) -> None:
    energy = energy_per_sample(powered(tmp_path / "run", np.arange(100) * 0.2, 0.2, lambda t: 400.0))
    assert energy.joules == pytest.approx(400 * 0.2 / 16) and energy.power_w == 400 and energy.why == ""


def test_power_during_the_turns_of_another_run_does_not_count(tmp_path: Path) -> None:
    # Turns of ten steps (4 s), then the turn of another run, as long, at four times the power; a second to settle.
    begins = np.array([8.0 * (n // 10) + 0.4 * (n % 10) for n in range(60)])
    own = energy_per_sample(powered(tmp_path / "run", begins, 0.4, lambda t: 200.0 if 1 <= t % 8 <= 4 else 800.0))
    assert own.power_w == 200 and own.joules == pytest.approx(200 * 0.4 / 16)


@pytest.mark.parametrize("wait_s", [0.0, 8.0])
def test_unrecorded_steps_are_not_mistaken_for_turns_of_another_run(tmp_path: Path, wait_s: float) -> None:
    begins = np.arange(4000) * 0.4 + wait_s * (np.arange(4000) // 50)
    turn_s = 20 + wait_s
    power = lambda t: 200.0 if not wait_s or 1 <= t % turn_s <= 20 else 800.0  # noqa: E731
    whole = energy_per_sample(powered(tmp_path / "whole", begins, 0.4, power))
    own = energy_per_sample(powered(tmp_path / "part", begins, 0.4, power, every=4))
    assert own.power_w == 200 and own.joules == pytest.approx(200 * 0.4 / 16)
    # Beside a wait, fewer samples certainly belong to the run.
    assert 0.7 * whole.samples <= own.samples <= whole.samples


def test_turns_too_short_for_the_average_of_power_give_no_number(tmp_path: Path) -> None:
    begins = np.array([1.0 * (n // 10) + 0.05 * (n % 10) for n in range(60)])
    energy = energy_per_sample(powered(tmp_path / "run", begins, 0.05, lambda t: 200.0))
    assert energy.joules is None and "interleaved blocks are shorter" in energy.why


def test_without_power_samples_energy_is_nan_and_not_zero(tmp_path: Path) -> None:
    bare = powered(tmp_path / "bare", np.arange(100) * 0.2, 0.2)
    assert energy_per_sample(bare).joules is None and energy_per_sample(bare).why == "no device reported its power draw"
    assert np.isnan(compare([bare]).table["energy_j"]).all()


def test_energy_ratios_are_over_the_first_recipe(tmp_path: Path) -> None:
    one = powered(tmp_path / "fp32", np.arange(100) * 0.4, 0.4, lambda t: 500.0, precision="fp32", seed=0)
    two = powered(tmp_path / "bf16", np.arange(100) * 0.2, 0.2, lambda t: 400.0, precision="bf16", seed=0)
    assert compare([one, two]).recipes["energy_ratio"].tolist() == pytest.approx([1.0, 0.4])
