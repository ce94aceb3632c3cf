"""The input of a forecast: traces of runs, traces on fake tensors, and the command."""

import json
import math

import pytest

from amp_core import RunError, load_run
from amp_core.__main__ import main
from amp_core.forecast import calibrate, forecast, measured_factor, traces_of_run
from amp_core.forecast.calibration import Calibration, correction, overlap
from amp_core.hardware.data_sheets import dense_rates
from amp_core.settings.training import TrainConfig
from amp_core.train import train
from amp_core.train.step_on_fake_tensors import trace_workload
from tests.synthetic import write, write_rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same workload, recorded with a traced step in FP32 and in BF16."""
    folder = tmp_path_factory.mktemp("runs")
    for precision in ("fp32", "bf16"):
        settings = {"workload": "text-gpt", "size": "tiny", "steps": 4, "trace_ops": 2, "every": 1}
        train(TrainConfig(precision=precision, **settings), folder / precision, stop=lambda: None)
    return {precision: load_run(folder / precision) for precision in ("fp32", "bf16")}


@pytest.fixture(scope="module")
def fake():
    return trace_workload(TrainConfig(workload="text-gpt", size="tiny"))


def test_a_step_on_fake_tensors_has_the_operations_and_bytes_of_a_real_one(runs, fake):
    for real, faked in zip((runs["fp32"], runs["bf16"]), fake, strict=True):
        traced = traces_of_run(real)[faked.recipe == "amp"].work
        assert not traces_of_run(real)[faked.recipe == "amp"].derived
        assert faked.work["flops"].sum() == traced["flops"].sum() > 0
        assert faked.work["bytes"].sum() == pytest.approx(traced["bytes"].sum(), rel=0.1)
        assert faked.samples == traces_of_run(real)[0].samples == 8


def test_memory_on_fake_tensors_is_that_of_the_real_step(runs, fake):
    for real, faked in zip((runs["fp32"], runs["bf16"]), fake, strict=True):
        held = traces_of_run(real)[faked.recipe == "amp"].memory
        for part in ("parameters", "gradients", "optimizer"):
            assert getattr(faked.memory, part) == pytest.approx(getattr(held, part), rel=0.01), part
        assert faked.memory.activations == pytest.approx(held.activations, rel=0.15)


def test_fp32_derived_from_autocast_agrees_with_a_trace_in_fp32(runs):
    derived, real = traces_of_run(runs["bf16"])[0], traces_of_run(runs["fp32"])[0]
    assert derived.derived and not real.derived
    assert derived.work["flops"].sum() == real.work["flops"].sum()
    assert derived.work["bytes"].sum() == pytest.approx(real.work["bytes"].sum(), rel=0.15)
    assert not derived.work["narrow"].any()


def test_autocast_estimated_from_fp32_is_between_half_and_all_of_it(runs):
    guessed, real = traces_of_run(runs["fp32"])[1], traces_of_run(runs["bf16"])[1]
    assert guessed.derived and guessed.work["flops"].sum() == real.work["flops"].sum()
    assert guessed.work["bytes"].sum() == pytest.approx(real.work["bytes"].sum(), rel=0.35)
    assert "estimated" in " ".join(forecast(traces_of_run(runs["fp32"]), ["A100"]).notes)


def test_a_run_on_a_listed_gpu_is_compared_with_its_own_forecast(tmp_path):
    run = load_run(write(tmp_path / "a", "traced"))
    run.head.environment["gpus"] = [{"name": "NVIDIA A100-SXM4-80GB", "capability": [8, 0]}]
    name, factor = measured_factor(run)
    expected = forecast(traces_of_run(run), ["A100"]).table.set_index("recipe").loc["fp16", "step_ms"]
    assert name.startswith("NVIDIA A100") and factor == pytest.approx(40.0 / expected, rel=0.2)
    run.head.environment["gpus"] = [{"name": "Some other GPU"}]
    assert measured_factor(run) is None


def recorded_on(folder, gpu):
    """A traced run of 40 ms a step whose head names this GPU."""
    path = write(folder, "traced")
    head = json.loads((path / "run.json").read_text())
    head["environment"]["gpus"] = [{"name": gpu, "capability": [8, 0]}]
    (path / "run.json").write_text(json.dumps(head))
    return path


def test_a_measured_run_of_ones_own_card_calibrates_the_forecast_of_another(tmp_path, runs, capsys):
    own = recorded_on(tmp_path / "own", "NVIDIA A100-SXM4-80GB")
    found = calibrate(load_run(own), traces_of_run(runs["bf16"]))
    assert found is not None and found.factor != 1 and abs(math.log(found.factor)) < abs(math.log(found.ratio))
    times = []
    for more in ([], ["--calibrate", str(own)]):
        assert main(["forecast", str(runs["bf16"].path), "--gpu", "A100,L4", "--json", *more]) == 0
        document = json.loads(capsys.readouterr().out)
        times.append([row["step_ms"] for row in document["forecast"] if row["step_ms"]])
    assert times[1] == pytest.approx([found.factor * ms for ms in times[0]])
    assert f"{found.ratio:.2f} times its own forecast" in " ".join(document["notes"])
    assert f"multiplied by {found.factor:.2f}" in " ".join(document["notes"])


def test_a_run_corrects_a_similar_step_by_half_and_another_only_where_the_card_itself_is_slower():
    for ratio in (1.1, 0.9):
        assert correction(ratio, 0.9, 0.2) == pytest.approx(ratio**0.5)
        assert correction(ratio, 0.3, 0.2) == 1.0
    slow_card = 2.5
    assert 2 < correction(slow_card, 0.9, 0.2) < slow_card
    assert 1.7 < correction(slow_card, 0.3, 0.2) < slow_card
    assert correction(1 / slow_card, 0.3, 0.2) == pytest.approx(1 / correction(slow_card, 0.3, 0.2))


def test_a_run_of_another_kind_of_model_says_that_it_cannot_calibrate(runs):
    gpu, (_, text) = "NVIDIA A100-SXM4-80GB", traces_of_run(runs["bf16"])
    _, images = trace_workload(TrainConfig(workload="image-resnet", size="tiny", batch_size=16))
    shared = [overlap(text.work, other.work, gpu, dense_rates(gpu), "bf16") for other in (text, images)]
    assert shared[0] == pytest.approx(1.0) and shared[1] < 0.5
    found = Calibration(gpu, 1.1, shared[1], 0.2)
    assert found.factor == 1.0 and found.note.startswith("Not calibrated") and "similar model" in found.note
    slow_card = Calibration(gpu, 2.5, shared[1], 0.2)
    assert slow_card.factor > 1.7 and slow_card.note.startswith("Calibrated for the card alone")


def test_a_run_that_cannot_calibrate_is_refused_in_one_line(tmp_path, runs, capsys):
    for path, why in ((runs["fp32"].path, "'cpu'"), (recorded_on(tmp_path / "other", "Some other GPU"), "data sheet")):
        assert main(["forecast", str(runs["bf16"].path), "--calibrate", str(path)]) == 2
        error = capsys.readouterr().err
        assert why in error and "calibrate=" in error and error.count("\n") == 1


def test_a_run_on_a_cpu_corrects_nothing(runs):
    assert measured_factor(runs["fp32"]) is None


def test_a_run_without_a_trace_is_refused(tmp_path):
    with pytest.raises(RunError, match="trace_ops"):
        traces_of_run(load_run(write(tmp_path / "a", "healthy", steps=3)))


def test_the_command_prints_that_nothing_was_measured(runs, capsys):
    assert main(["forecast", str(runs["bf16"].path), "--gpu", "l40s,T4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Forecast, not measured.") and "L40S" in text and "no BF16" in text
    assert main(["forecast", "--workload", "digits-cnn", "--size", "tiny", "--gpu", "H100", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["measured"] is False and [r["recipe"] for r in record["forecast"]] == ["fp32", "tf32", "bf16", "fp16"]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--gpu", "A100"], "RUN or --workload"),
        (["--workload", "text-gpt", "--gpu", "GTX"], "gpu='GTX'"),
        (["somewhere", "--size", "tiny"], "size applies to --workload"),
        (["--workload", "text-gpt", "--size", "huge"], "size"),
    ],
)
def test_bad_input_is_one_line(arguments, wrong, capsys):
    assert main(["forecast", *arguments]) == 2
    text = capsys.readouterr().err
    assert wrong in text and text.count("\n") == 1


@pytest.mark.parametrize(("workload", "size"), [("text-lstm", "tiny"), ("text-bert", "tiny"), ("image-resnet", "tiny")])
def test_every_workload_can_be_traced_without_running_it(workload, size):
    wide, narrow = trace_workload(TrainConfig(workload=workload, size=size))
    assert wide.work["flops"].sum() == narrow.work["flops"].sum() > 0
    assert narrow.work["narrow"].any() and not wide.work["narrow"].any()
    assert narrow.memory.activations < wide.memory.activations


OWN = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8))
    data = [(torch.randn(32, 512), torch.randint(0, 8, (32,))) for _ in range(2)]
    return model, data, lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def looks():
    model, data, loss = build()
    return model, data, lambda model, batch: loss(model, batch) if model(batch[0]).sum().item() > 0 else None
"""


def test_a_user_workload_is_forecast_too(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert main(["forecast", "--workload", f"{file}:build", "--gpu", "A100", "--json"]) == 0
    rows = {r["recipe"]: r for r in json.loads(capsys.readouterr().out)["forecast"]}
    assert rows["fp16"]["step_ms"] > 0 and rows["fp32"]["memory_bytes_low"] > 0
    wide, _ = trace_workload(TrainConfig(workload=f"{file}:build"))
    assert wide.samples == 32
    forward = 2 * 32 * (512 * 1024 + 1024 * 8)
    assert wide.work["flops"].sum() == 3 * forward - 2 * 32 * 512 * 1024  # the input needs no gradient


def test_a_step_that_reads_values_raises_with_a_remedy(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert main(["forecast", "--workload", f"{file}:looks", "--gpu", "A100"]) == 2
    text = capsys.readouterr().err
    assert "cannot be traced on fake tensors" in text and "--trace-ops" in text


@pytest.mark.parametrize("shapes", ["no JSON", "5", '["a"]', '[[2, "x"]]', "[[2, 3], [[3, -4], 7]]", "[[2.5]]"])
def test_damaged_shapes_are_empty(tmp_path, shapes):
    ops = {"step": [0], "op": ["aten::mm"], "in_shapes": [shapes], "in_dtypes": ["float32"], "out_dtype": ["float32"]}
    events = [{"kind": "traced", "step": 0}]
    run = load_run(write_rows(tmp_path / "run", steps={"step": [0]}, ops=ops, events=events))
    assert len(forecast(traces_of_run(run), ["A100"]).table) == 4
