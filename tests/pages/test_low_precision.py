"""8 and 4 bits: the answer, the limit, the code, audits beside predictions, and runs without blocks."""

import shutil

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.analysis.numerics.layer_choice import layer_errors
from amp_core.figures import layer_error_figure
from amp_core.quantization import RECIPES
from amp_core.record import watch
from tests.pages.conftest import titles, words
from tests.synthetic import write

PAGE = "pages/low_precision.py"


def record(folder, blocks=True, net=None, audit=False):
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with watch(net, optimizer, into=folder, every=1, blocks=blocks) as rec:
        for _ in range(2):
            x = torch.randn(16, 32)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        if audit:
            rec.audit(lambda: net(x).square().mean(), precision="nvfp4")
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recorded") / "a", audit=True)


@pytest.fixture
def app_of(home, open_app, recorded):
    def made(**query):
        shutil.copytree(recorded, home.runs / "a")
        return open_app(PAGE, run="run/a", **query)

    return made


def test_the_headline_says_which_share_can_go(app_of):
    app = app_of(limit="16dB")
    assert not app.exception and not app.error
    page = words(app)
    assert "Predicted: all 3 linear layers can go to MXFP8 E4M3 (100 % of GEMM FLOPs)" in page
    assert "The limit is a relative error of 0.158 (16.0 dB)." in page
    assert titles(app) == ["Predicted error of linear layers"]
    assert len(app.dataframe[0].value) == 6


def test_a_stricter_limit_keeps_layers_in_bf16(app_of):
    app = app_of(limit="0.08", formats="nvfp4")
    assert "Predicted: no layer can go to NVFP4." in words(app)
    assert set(app.dataframe[0].value["goes"]) == {"BF16"}
    assert "# No layer qualifies for NVFP4 under this limit: train in BF16." in app.code[0].value


def test_code_is_written_for_the_chosen_library(app_of):
    app = app_of(limit="16dB", library="transformer-engine", code="mxfp8-e4m3")
    assert "te.autocast(enabled=True, recipe=MXFP8BlockScaling())" in app.code[0].value


def test_measured_errors_stand_beside_predicted_ones(app_of):
    app = app_of()
    table = app.dataframe[1].value
    assert table["name"].tolist() == ["0.weight", "2.weight", "4.weight"]
    assert (table["predicted"] > 0).all() and (table["rel_error"] > 0).all()
    assert "Loss of the batch: NVFP4 " in words(app)


def test_a_limit_that_is_none_is_one_sentence(app_of):
    app = app_of(limit="much")
    assert not app.exception
    assert len(app.error) == 1 and "'much' is not a valid error; give a relative error above 0" in app.error[0].value


def test_a_click_opens_a_tensor_of_that_layer(app_of):
    app = app_of()
    app.session_state["low.errors"] = {"selection": {"points": [{"x": "NVFP4", "y": "2"}]}}
    app.run()
    assert not app.exception
    assert app.title[0].value == "Layer detail" and app.query_params["layer"][0] in ("2.weight", "2")


def test_a_row_of_the_table_opens_a_tensor_of_that_layer(app_of):
    app = app_of()
    layer = app.dataframe[0].value["layer"].iloc[1]
    app.session_state["low.table"] = {"selection": {"rows": [1]}}
    app.run()
    assert app.title[0].value == "Layer detail" and app.query_params["layer"][0].partition(".")[0] == layer


def test_a_run_without_blocks_says_how_to_record_them(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    assert "This run was recorded without blocks" in words(app) and "watch(…, blocks=True)" in words(app)


def test_a_run_that_could_not_record_blocks_says_why(home, open_app):
    conv = nn.Sequential(nn.Unflatten(1, (4, 8)), nn.Conv1d(4, 2, 3))
    record(home.runs / "a", net=conv)
    app = open_app(PAGE, run="run/a")
    assert "Not recorded: blocks: the model has no linear layer" in words(app)


@pytest.mark.parametrize("dark", [False, True])
def test_cells_beyond_the_limit_are_crossed_and_counted(recorded, dark):
    errors = layer_errors(load_run(recorded), [RECIPES["nvfp4"], RECIPES["mxfp8-e4m3"]])
    figure = layer_error_figure(errors, 0.08, dark)
    text = figure.data[0].text
    assert sum("✕" in cell for row in text for cell in row) == 3
    assert "3 of 6 cells are beyond the limit of 0.08" in figure.layout.meta["alt"]
    assert "limit 21.9" in figure.data[0].colorbar.ticktext
    assert layer_error_figure(errors.iloc[:0], 0.1).layout.meta["alt"]


def test_the_choice_is_given_as_flags_for_training_and_handed_to_the_forecast(app_of):
    app = app_of(limit="16dB", formats="nvfp4", code="nvfp4")
    assert "ampscope train … --precision nvfp4 --keep-bf16 ''" in [code.value for code in app.code]
    link = next(link for link in app.get("page_link") if link.proto.label.startswith("Forecast with"))
    assert link.proto.label == "Forecast with 100 % of GEMM FLOPs in 4 bits"
    assert "fp4=100" in link.proto.query_string and "run%2Fa" in link.proto.query_string


def test_where_no_layer_goes_there_is_nothing_to_hand_on(app_of):
    app = app_of(limit="0.01", formats="nvfp4")
    assert not [code for code in app.code if code.value.startswith("ampscope train")]
    assert not [link for link in app.get("page_link") if link.proto.label.startswith("Forecast with")]


def test_with_a_baseline_each_layer_shows_by_how_much_its_error_differs(home, app_of, recorded):
    shutil.copytree(recorded, home.runs / "b")
    app = app_of(baseline="run/b")
    assert not app.exception and titles(app)[-1] == "Difference in predicted error"
    assert "none of 6 products differs in predicted error" in words(app)


def test_a_baseline_without_blocks_is_said_to_be_incomparable(home, app_of):
    write(home.runs / "b", "fp32")
    app = app_of(baseline="run/b")
    assert not app.exception and "was recorded without blocks, so errors cannot be compared" in words(app)
