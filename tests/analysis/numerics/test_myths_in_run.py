"""Myths in a run: each myth has its page, and the gradients in its band are counted by hand."""

import pytest

from amp_core import load_run
from amp_core.analysis.numerics.myths_in_run import MYTHS, gradients_in_band
from amp_core.store.writer import RunWriter
from tests.synthetic import SAMPLES, write


def test_the_band_is_counted_without_the_loss_scale(tmp_path):
    with RunWriter(tmp_path / "a") as writer:
        row = {"step": [0], "name": ["w"], "kind": ["weight_grad"], "loss_scale": [4.0], "numel": [16], "zero": [4]}
        writer.append("tensors", row | {"exp_min": [-24], "exp_counts": [[3, 0, 5, 4]]})  # true: -26, -24, -23
    band = gradients_in_band(load_run(tmp_path / "a"))
    assert (band.kind, band.elements_frac) == ("weight_grad", 3 / 12)
    assert band.mass_frac == pytest.approx(3 * 2**-26 / (3 * 2**-26 + 5 * 2**-24 + 4 * 2**-23))


def test_output_gradients_are_preferred_and_without_gradients_there_is_no_band(tmp_path):
    assert gradients_in_band(load_run(SAMPLES["fp32"])).kind == "output_grad"
    assert gradients_in_band(load_run(write(tmp_path / "b", "empty"))) is None


def test_each_myth_is_examined_once():
    assert len({myths.key for myths in MYTHS}) == len(MYTHS)
    assert {myths.rating for myths in MYTHS} <= {"true", "imprecise", "false"}
    assert all(myths.correction.endswith(".") and not myths.claim.endswith(".") for myths in MYTHS)
