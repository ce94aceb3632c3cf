"""The module tree folded at a depth: nothing is lost, and shares stay shares."""

import numpy as np
import pytest

from amp_core import load_run
from amp_core.analysis import class_shares, exponent_shares
from amp_core.analysis.numerics.module_tree import (
    deepest,
    fold_classes,
    fold_shares,
    folded_name,
    matching_names,
    readable_depth,
)
from tests.synthetic import write


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(write(tmp_path_factory.mktemp("folding") / "a", "underflowing"))


def test_names_are_cut_at_a_depth_and_marked_as_cut():
    assert folded_name("blocks.0.attn.qkv", 2) == "blocks.0.*" and folded_name("head", 2) == "head"
    assert deepest(["head", "blocks.0.attn.qkv"]) == 4 and deepest([]) == 1


def test_a_large_model_is_folded_to_a_readable_number_of_rows():
    names = [f"layers.{i}.attn.{p}.weight" for i in range(60) for p in "qkvo"]
    assert readable_depth(names) == 3 and readable_depth(names, 1000) == 5
    assert readable_depth([f"l{i}.w" for i in range(200)]) == 1


def test_search_matches_all_words_ignoring_case():
    assert matching_names(["blocks.0.attn.qkv", "blocks.1.fc"], "ATTN 0") == ["blocks.0.attn.qkv"]
    assert matching_names(["a", "b"], "") == ["a", "b"]


def test_folding_adds_counts_up(run):
    shares = exponent_shares(run, "output_grad")
    folded = fold_shares(shares, 1)
    assert folded["count"].sum() == shares["count"].sum() and len(folded) < len(shares)
    assert np.allclose(folded.groupby("name")["share"].sum(), 1)


def test_folded_classes_are_those_of_all_elements(run):
    classes = class_shares(run, "output_grad")
    folded = fold_classes(classes, 1).set_index("name")
    assert folded["tensors"].sum() == len(classes) and folded["counted"].sum() == classes["counted"].sum()
    blocks = classes[classes["name"].str.startswith("blocks.")]
    expected = (blocks["subnormal_frac"] * blocks["counted"]).sum() / blocks["counted"].sum()
    assert folded.loc["blocks.*", "subnormal_frac"] == pytest.approx(expected)
    assert folded.loc["blocks.*", "absmax"] == blocks["absmax"].max()


def test_a_frame_that_needs_no_folding_is_unchanged(run):
    classes = class_shares(run, "output_grad")
    same = fold_classes(classes, deepest(classes["name"]))
    assert list(same["name"]) == list(classes["name"]) and np.allclose(same["rms"], classes["rms"], equal_nan=True)
