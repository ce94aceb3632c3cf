"""Device samples of one device, in order; the last known values; missing values stay unknown."""

import numpy as np

from amp_core import load_run
from amp_core.analysis import device_now, device_samples, not_recorded_reasons
from tests.synthetic import write_rows


def test_device_now_has_the_last_known_value_of_each_column(tmp_path):
    rows = {
        "time_s": [0.5, 1.0, 1.5],
        "gpu_util_frac": [0.5, 0.9, None],
        "tensor_active_frac": [None, 0.4, 0.6],
        "power_w": [100.0, None, None],
        "throttle": ["none", "power cap", None],
    }
    run = load_run(write_rows(tmp_path / "run", device=rows))
    now = device_now(run)
    assert (now.samples, now.gpu_util_frac, now.tensor_active_frac, now.power_w) == (3, 0.9, 0.6, 100.0)
    assert now.throttle == "power cap"
    assert now.temperature_c is now.sm_active_frac is now.memory_total_bytes is None
    assert np.isnan(device_samples(run)["tensor_active_frac"].iloc[0])


def test_the_first_of_several_devices_is_shown(tmp_path):
    rows = {
        "time_s": [1.0, 1.1, 2.0, 2.1],
        "index": [1, 0, 1, 0],
        "rank": [1, 0, 1, 0],
        "power_w": [9.0, 1.0, 8.0, 2.0],
    }
    run = load_run(write_rows(tmp_path / "run", device=rows))
    assert device_samples(run)["power_w"].tolist() == [1.0, 2.0]


def test_without_samples_there_are_only_the_reasons(tmp_path):
    text = {"kind": "warning", "name": "not recorded", "detail": "device samples: no NVIDIA driver is installed"}
    run = load_run(
        write_rows(tmp_path / "run", events=[text, text, {"kind": "warning", "name": "other", "detail": "x"}])
    )
    assert device_now(run).samples == 0 and not len(device_samples(run))
    assert not_recorded_reasons(run) == ["device samples: no NVIDIA driver is installed"]
