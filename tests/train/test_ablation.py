"""The loss-scale ablation: a training that fails in FP16 without a loss scale, and works in FP32 and with both kinds of
scale.

A fifth of the steps of the app's preset on a smaller model: the full preset takes a minute. `tests/test_samples.py`
checks the same on recorded runs each time.
"""

import pytest
import torch

from amp_core import load_run
from amp_core.train import TrainConfig, train
from amp_core.train.workloads import build
from amp_core.train.workloads.text import logistic_loss

STEPS = 15
WAYS = {
    "fp32": {"precision": "fp32"},
    "unscaled": {"precision": "fp16-unscaled"},
    "static": {"precision": "fp16", "loss_scale": 128.0},
    "dynamic": {"precision": "fp16"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    result = {}
    for name, differs in WAYS.items():
        config = TrainConfig(
            workload="text-lstm", size="logistic", device="cpu", steps=STEPS, every=STEPS, evaluate=False, **differs
        )
        train(config, folder / name)
        result[name] = load_run(folder / name)
    return result


@pytest.mark.whole
def test_without_a_loss_scale_fp16_fails_to_train_and_with_one_it_follows_fp32(runs):
    last = {name: run.steps["loss"].iloc[-3:].mean() for name, run in runs.items()}
    learned = runs["fp32"].steps["loss"].iloc[0] - last["fp32"]
    assert learned > 0.005
    assert last["unscaled"] > last["fp32"] + 0.5 * learned
    for name in ("static", "dynamic"):
        assert last[name] == pytest.approx(last["fp32"], rel=0.01)
        assert not runs[name].steps["skipped"].any()


@pytest.mark.whole
def test_gradients_of_the_head_underflow_without_a_loss_scale_and_not_at_128(runs):
    def zeros(name):
        first = runs[name].tensors(kind="output_grad", name="head", steps=(0, 0)).iloc[0]
        return first["zero"] / first["numel"]

    assert zeros("fp32") == 0
    assert zeros("unscaled") > 0.99
    assert zeros("static") < 0.01


def test_a_wrong_prediction_gets_no_gradient_below_the_stated_probability():
    workload = build(TrainConfig(workload="text-lstm", size="logistic").resolved())
    tokens = torch.zeros(256, 32, dtype=torch.int64)

    class Answer(torch.nn.Module):
        def __init__(self, probability):
            super().__init__()
            self.logits = torch.full((256, 32, 256), probability).logit().half().requires_grad_()

        def forward(self, tokens):
            return self.logits

    for factor, underflows in ((0.98, True), (1.02, False)):
        model = Answer(factor / 16)
        logistic_loss(model, (tokens, tokens)).backward()
        assert (model.logits.grad[0, 0, 1] == 0) == underflows
    assert workload.loss_fn is logistic_loss
