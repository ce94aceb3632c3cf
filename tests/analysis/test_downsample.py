import numpy as np
import pandas as pd
import pytest

from amp_core.analysis import downsample, sparkline


def walk(count: int) -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame({"step": np.arange(count), "loss": random.standard_normal(count).cumsum(), "mark": False})


def test_short_frames_stay_as_they_are() -> None:
    frame = walk(100)
    assert downsample(frame, "step", "loss", max_points=100).equals(frame)


def test_every_spike_is_kept_with_its_whole_row() -> None:
    frame = walk(50_000)
    frame.loc[[123, 40_001], "loss"] = [1e6, -1e6]
    small = downsample(frame, "step", "loss", max_points=1000)
    assert len(small) <= 1002
    assert {123, 40_001, 0, 49_999} <= set(small["step"])
    assert small["step"].is_monotonic_increasing
    assert small.merge(frame, how="left", indicator=True)["_merge"].eq("both").all()


def test_the_envelope_is_kept_in_every_stretch() -> None:
    frame = walk(10_000)
    small = downsample(frame, "step", "loss", max_points=200)
    for start in range(0, 10_000, 100):  # a hundred stretches of a hundred steps
        whole = frame["loss"].iloc[start : start + 100]
        kept = small["loss"][small["step"].between(start, start + 99)]
        assert kept.max() == pytest.approx(whole.max()) and kept.min() == pytest.approx(whole.min())


def test_marked_rows_are_kept() -> None:
    frame = walk(20_000)
    frame.loc[[5, 777, 12_345], "mark"] = True
    small = downsample(frame, "step", "loss", max_points=100, keep="mark")
    assert small["step"][small["mark"]].tolist() == [5, 777, 12_345]


def test_values_that_are_not_finite_leave_a_gap() -> None:
    frame = walk(20_000)
    frame.loc[4000:5999, "loss"] = np.nan
    small = downsample(frame, "step", "loss", max_points=200)
    gap = small[small["step"].between(4000, 5999)]
    assert len(gap) >= 10 and gap["loss"].isna().all()
    assert downsample(frame.assign(loss=np.nan), "step", "loss", max_points=10)["loss"].isna().all()


def test_each_group_is_downsampled_separately() -> None:
    frame = pd.concat([walk(5000).assign(run="a"), walk(50).assign(run="b")], ignore_index=True)
    small = downsample(frame, "step", "loss", max_points=100, by="run")
    assert (small["run"] == "b").sum() == 50
    assert 50 <= (small["run"] == "a").sum() <= 102
    assert not len(downsample(frame.iloc[:0], "step", "loss", by="run"))


def test_stretches_follow_the_axis_not_the_row() -> None:
    frame = pd.DataFrame({"time_s": np.r_[np.linspace(0, 1, 9000), np.linspace(1, 100, 1000)], "y": np.arange(1e4)})
    small = downsample(frame, "time_s", "y", max_points=200)
    assert (small["time_s"] > 1).sum() > 150  # most of the axis gets most of the points
    later = downsample(frame.assign(time_s=frame["time_s"] + 1e4), "time_s", "y", max_points=200)
    assert later["y"].equals(small["y"])  # for any start of the axis


def test_sparkline_is_short_and_finite() -> None:
    assert sparkline(pd.Series([1.0, np.nan, 3.0])) == [1.0, 3.0]
    assert len(sparkline(pd.Series(np.arange(1000.0)), max_points=50)) == 50
    assert sparkline(pd.Series(np.arange(100.0)), max_points=2) == [24.5, 74.5]
    assert sparkline(pd.Series([], dtype=float)) == []
