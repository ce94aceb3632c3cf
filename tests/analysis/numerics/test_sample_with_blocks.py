"""The sample run with recorded blocks answers for every 8- and 4-bit recipe, and others say what they lack."""

import pytest

from amp_core import RunError, load_run
from amp_core.analysis import what_if
from amp_core.quantization import RECIPES
from tests.synthetic import SAMPLES


def test_the_sample_with_blocks_predicts_every_recipe_for_every_linear_layer():
    run = load_run(SAMPLES["bf16-blocks"])
    frame = what_if(run, tuple(RECIPES), kinds="weight")
    assert set(frame["format"]) == set(RECIPES)
    linear = [f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("attn.qkv", "attn.proj", "fc", "proj")]
    assert set(linear) <= set(frame["name"])
    error = frame.groupby("format")["rel_error"].median()
    assert error["mxfp8-e4m3"] < 0.04 < error["nvfp4"] < error["mxfp4-e2m1"] < 0.25


def test_a_sample_without_blocks_says_what_is_missing():
    with pytest.raises(RunError, match="blocks"):
        what_if(load_run(SAMPLES["bf16"]), ("nvfp4",))
