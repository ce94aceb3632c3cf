"""Which layers can run in 8 or 4 bits: errors and order of layers, the choice under a limit, and its code."""

import argparse
import ast
import dataclasses
import functools
import json
import re
import shlex

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import RunError, load_run
from amp_core.__main__ import main
from amp_core.analysis.numerics.layer_choice import Choice, by_layer, choose, in_db, layer_errors, parse_limit
from amp_core.analysis.numerics.layer_choice_code import FRAMEWORKS, code_for, train_flags
from amp_core.analysis.numerics.quantized import quantized
from amp_core.cli.settings import add_flag, add_settings, settings
from amp_core.quantization import OPERANDS, RECIPES
from amp_core.record import watch
from amp_core.record.quantized_products import QuantizedProducts
from amp_core.settings.training import RECIPES as TRAINED
from amp_core.settings.training import TrainConfig
from tests.paths import SAMPLE_RUNS

CHOSEN = [RECIPES["nvfp4"], RECIPES["mxfp8-e4m3"]]


class Model(nn.Module):
    """Two ordinary layers, one whose input lies between the values of FP4, and a head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.between = nn.Linear(32, 32)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.relu(self.first(self.embedding(x))))
        between = torch.where(torch.arange(32) % 16 == 0, 6.0, 5.0) * hidden.sign()  # FP4 has 4 and 6
        return self.head(hidden + 1e-3 * self.between(between))


def recorded(folder, **options):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=folder, every=1, blocks=True, **options):
        for _ in range(2):
            x = torch.randint(48, (4, 16))
            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return load_run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("runs") / "a")


def test_a_layers_error_is_that_of_its_worst_product(run):
    errors = layer_errors(run, CHOSEN).set_index(["layer", "format"])
    assert set(errors.index.get_level_values(0)) == {"first", "second", "between", "head"}
    operands = quantized(run, CHOSEN).set_index(["name", "kind", "product", "format"])["rel_error"]
    sides = {"forward": ("weight", "activation"), "input_grad": ("weight", "output_grad")}
    sides["weight_grad"] = ("activation", "output_grad")
    for product, kinds in sides.items():
        parts = [operands["first" + ".weight" * (kind == "weight"), kind, product, "nvfp4"] for kind in kinds]
        assert errors.loc[("first", "nvfp4"), "rel_error"] >= np.hypot(*parts) - 1e-12
    row = errors.loc[("first", "nvfp4")]
    assert row["operand"] in OPERANDS and row["tensor"] in ("first", "first.weight")
    assert row["rel_error_db"] == pytest.approx(in_db(row["rel_error"]))


def test_a_tied_weight_belongs_to_the_linear_layer_that_has_it(run):
    errors = layer_errors(run, CHOSEN)
    head = errors[(errors["layer"] == "head") & (errors["format"] == "nvfp4")].iloc[0]
    assert np.isfinite(head["harm"]) and head["tensor"] in ("head", "embedding.weight")


def test_shares_of_flops_follow_from_the_sizes_of_layers(run):
    errors = layer_errors(run, CHOSEN)
    one = errors[errors["format"] == "nvfp4"].set_index("layer")
    work = {"first": 32 * 64, "second": 64 * 32, "between": 32 * 32, "head": 32 * 48}
    for layer, products in work.items():
        assert one.loc[layer, "flops"] == 3 * 2 * 64 * products
        assert one.loc[layer, "flops_frac"] == pytest.approx(products / sum(work.values()))


def test_a_layer_with_larger_errors_stays_in_bf16_and_the_others_go(run):
    errors = layer_errors(run, CHOSEN)
    choice = choose(errors, RECIPES["nvfp4"], 0.17)
    assert choice.stay == ("between",) and set(choice.go) == {"first", "second", "head"}
    assert choice.flops_frac == pytest.approx(1 - 1024 / (2 * 2048 + 1024 + 1536))
    assert choose(errors, RECIPES["nvfp4"], 1e-6).flops_frac == 0
    assert choose(errors, RECIPES["nvfp4"], 9.0).stay == ()


def test_flops_of_a_traced_step_include_what_is_no_linear_layer(tmp_path):
    class Attends(Model):
        def forward(self, x):
            hidden = self.first(self.embedding(x))
            return self.head(self.second(hidden @ hidden.mT @ hidden) + self.between(self.embedding(x)))

    torch.manual_seed(0)
    model = Attends()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with watch(model, optimizer, into=tmp_path / "run", every=1, blocks=True, trace_ops=1):
        for _ in range(3):
            x = torch.randint(48, (4, 16))
            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    errors = layer_errors(load_run(tmp_path / "run"), CHOSEN)
    one = errors[errors["format"] == "nvfp4"]
    assert 0.5 < one["flops_frac"].sum() < 0.95


def test_layers_of_a_run_without_sizes_have_no_share(run, monkeypatch):
    blocks = run.blocks.assign(numel=None)
    monkeypatch.setattr(type(run), "blocks", property(lambda self: blocks))
    errors = layer_errors(run, CHOSEN)
    assert errors["flops_frac"].isna().all() and errors["harm"].notna().all()
    assert np.isnan(choose(errors, RECIPES["nvfp4"], 9.0).flops_frac)


def test_layers_come_with_the_most_harmful_first(run):
    errors = layer_errors(run, CHOSEN)
    for _, rows in errors.groupby("format", sort=False):
        assert rows["harm"].is_monotonic_decreasing and rows["rank"].tolist() == [1, 2, 3, 4]
    table = by_layer(errors)
    assert list(table.columns) == ["nvfp4", "mxfp8-e4m3"] and set(table.index) == set(errors["layer"])


@pytest.fixture(scope="module")
def errors_of(run):
    """The errors of the layers in a recipe."""
    return functools.cache(lambda recipe: layer_errors(run, [RECIPES[recipe]]))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("limit", [1e-9, 0.2, 99.0])
def test_code_is_python_that_keeps_the_layers(errors_of, recipe, framework, limit):
    choice = choose(errors_of(recipe), RECIPES[recipe], limit)
    code = code_for(framework, choice)
    ast.parse(code)
    if code.startswith("#"):
        assert "does not support training in" in code or not choice.go
        return
    named = choice.go if framework == "torchtitan" and "filter_fqns=[" not in code else choice.stay
    assert all(f'"{layer}"' in code for layer in named)


def test_the_torchao_filter_converts_exactly_the_layers_that_go(run):
    torchao = pytest.importorskip("torchao.float8")
    choice = choose(layer_errors(run, [RECIPES["fp8-tensorwise"]]), RECIPES["fp8-tensorwise"], 0.2)
    choice = choice.__class__(choice.recipe, 0.2, choice.go, (*choice.stay, "second"), 0.5)
    model = nn.Module()
    model.first, model.second, model.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)
    code = code_for("torchao", choice).replace(
        'Float8LinearConfig.from_recipe_name("tensorwise")', "Float8LinearConfig(emulate=True)"
    )
    exec(code, {"model": model})
    assert type(model.first) is torchao.float8_linear.Float8Linear and type(model.second) is nn.Linear


@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "mxfp8-e4m3-rceil", "nvfp4"])
def test_imports_for_torchao_exist(run, recipe):
    pytest.importorskip("torchao")
    choice = choose(layer_errors(run, [RECIPES[recipe]]), RECIPES[recipe], 99.0)
    code = code_for("torchao", choice)
    imports = [line for line in code.splitlines() if line.startswith(("from torchao", "import"))]
    try:
        exec("\n".join(imports), {})
    except ModuleNotFoundError as error:
        if error.name and not error.name.startswith("torchao"):
            pytest.skip(f"needs {error.name}")
        raise


def test_names_that_match_others_in_torchtitan_are_told(run):
    choice = choose(layer_errors(run, [RECIPES["nvfp4"]]), RECIPES["nvfp4"], 0.17)
    code = code_for("torchtitan", choice.__class__(choice.recipe, 0.2, ("head",), ("lm_head",), 0.5))
    assert "# 'head' also matches lm_head" in code


@pytest.mark.parametrize(
    ("text", "limit"), [("0.1", 0.1), ("20dB", 0.1), (" 20 dB", 0.1), ("6db", 10**-0.3), ("2", 2.0)]
)
def test_limits_are_relative_errors_or_decibels(text, limit):
    assert parse_limit(text) == pytest.approx(limit)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "dB", "0dB", "-3dB"])
def test_another_limit_is_one_sentence(text):
    with pytest.raises(
        RunError, match=re.escape(f"limit={text!r} is not a valid error; give a relative error above 0")
    ):
        parse_limit(text)


def test_the_command_prints_the_layers_the_share_and_the_code(run, capsys):
    assert main(["what-if", str(run.path), "--formats", "mxfp8,nvfp4,mxfp8-e4m3", "--limit", "15.5dB"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Predicted, not measured") and out.count("MXFP8 E4M3: ") == 1
    assert re.search(r"^between .*!$", out, re.M) and "NVFP4: 3 of 4 layers, 84.6 % of GEMM FLOPs, qualify" in out
    assert 'BF16_LAYERS = {"between"}' in out


def test_the_command_prints_one_json_document(run, capsys):
    assert main(["what-if", str(run.path), "--json", "--limit", "0.17"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["measured"] is False and record["limit"]["rel_error"] == 0.17
    assert [f["format"] for f in record["formats"]] == ["mxfp8-e4m3", "nvfp4"]
    assert record["formats"][1]["stay"] == ["between"]
    assert len(record["layers"]) == 8 and {row["within_limit"] for row in record["layers"]} == {True, False}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--formats", "fp16"], "formats='fp16' is unknown; choose from fp8-tensorwise"),
        (["--formats", ","], "formats=',' lists none; choose from fp8-tensorwise"),
        (["--limit", "much"], "limit='much' is not a valid error"),
        ([], "recorded without blocks; record one with watch(…, blocks=True) or ampscope train --blocks"),
    ],
)
def test_bad_input_is_one_sentence(more, expected, capsys):
    assert main(["what-if", str(SAMPLE_RUNS / "fp32"), *more]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_flags_of_ampscope_train_keep_exactly_the_layers_that_stay(recipe):
    parser = argparse.ArgumentParser()
    add_settings(parser)
    add_flag(parser, "precision")
    choice = Choice(RECIPES[recipe], 0.1, ("blocks.0.fc",), ("head", "blocks.1.attn.qkv"), 0.5)
    given = train_flags(choice)
    if recipe not in {"fp8-tensorwise", "mxfp8-e4m3", "nvfp4"}:  # those that `ampscope train` has
        assert given == ""
        return
    config = TrainConfig.from_dict(settings(parser.parse_args(shlex.split(given))))
    assert TRAINED[config.precision].quantization == recipe and config.keep_bf16 == choice.stay
    all_go = shlex.split(train_flags(dataclasses.replace(choice, stay=())))
    assert TrainConfig.from_dict(settings(parser.parse_args(all_go))).keep_bf16 == ()  # unset, the head would stay
    assert train_flags(dataclasses.replace(choice, go=())) == ""


class Branches(nn.Module):
    """Two layers side by side, of which `share` says how much the first counts in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
        self.share = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.share * self.one(x), (1 - self.share) * self.other(x)
        return sum(((out - 1.0) ** 2).mean() for out in outputs)


def branches(folder, shares, loss_scale=1.0, **options):
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
    with watch(model, optimizer, scaler=scaler, into=folder, every=1, blocks=True, **options):
        for model.share in shares:
            scaler.scale(model(torch.randn(64, 32))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, load_run(folder)


def test_layers_are_ranked_by_the_gradients_of_the_second_half(tmp_path):
    _, run = branches(tmp_path / "run", [0.99, 0.99, 0.99, 0.2, 0.2, 0.2])
    errors = layer_errors(run, CHOSEN)
    assert errors.drop_duplicates("format")["layer"].tolist() == ["other", "other"]


@pytest.mark.parametrize("kinds", [("weight_grad", "output_grad"), ("weight_grad",), ()])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_harm_is_the_typical_change_of_the_loss(tmp_path, loss_scale, kinds):
    model, run = branches(tmp_path / "run", [0.3] * 3, loss_scale, kinds=kinds)
    harm = layer_errors(run, CHOSEN).set_index(["layer", "format"])["harm"]
    batches = [torch.randn(64, 32) for _ in range(20)]
    for layer, format_name in harm.index:
        changes = []
        for batch in batches:
            with torch.no_grad(), QuantizedProducts(RECIPES[format_name], model, only=[layer]):
                quantized_loss = model(batch).item()
            changes.append(quantized_loss - model(batch).item())
        # The weight's rounding error is one draw, the same in all batches.
        assert 1 / 4 < np.sqrt(np.mean(np.square(changes))) / harm[layer, format_name] < 4
