"""Forecasts compared with published measurements: these lie in the range, and GPUs and models rank as measured.

NVIDIA DeepLearningExamples, READMEs of PyTorch/Classification/ConvNets/resnet50v1.5 and PyTorch/LanguageModeling/BERT
(commit 729963dd, 2024-04), one GPU, training; on A100 the reference is TF32, on V100 FP32:

    ResNet-50       V100 16 GB   367 → 1200 images/s, 3.26 ×        A100   938 → 2470, 2.63 ×
    BERT-large      V100         sequence 512: 3.94 ×, 128: 4.48 ×  A100   1.90 ×, 1.83 ×
"""

import pytest

from amp_core.forecast import forecast
from amp_core.settings.training import TrainConfig
from amp_core.train.step_on_fake_tensors import trace_workload

GPUS = ["V100", "A100 40GB", "A100", "H100", "B200"]


@pytest.fixture(scope="module")
def resnet():
    traces = trace_workload(TrainConfig(workload="image-resnet", size="resnet50", batch_size=256))
    return forecast(traces, GPUS).table.set_index(["gpu", "recipe"])


@pytest.fixture(scope="module")
def bert():
    traces = trace_workload(TrainConfig(workload="text-bert", size="large", batch_size=16))
    return forecast(traces, GPUS).table.set_index(["gpu", "recipe"])


@pytest.mark.parametrize(
    ("gpu", "recipe", "published"),
    [("V100", "fp32", 367), ("V100", "fp16", 1200), ("A100 40GB", "tf32", 938), ("A100 40GB", "fp16", 2470)],
)
def test_images_per_second_of_resnet_50_are_near_the_measured_ones(resnet, gpu, recipe, published):
    assert published / 1.5 < resnet.loc[(gpu, recipe), "samples_per_s"] < published * 1.5


@pytest.mark.whole
def test_measured_speed_ups_lie_in_the_range(resnet, bert):
    for table, v100, a100 in ((resnet, 3.26, 2.63), (bert, 3.94, 1.90)):
        row = table.loc[("V100", "fp16")]
        assert row["speedup_low"] < v100 < row["speedup_high"]
        assert row["speedup"] == pytest.approx(v100, rel=0.3)
        row = table.loc[("A100 40GB", "fp16")]
        assert row["over_tf32"] == pytest.approx(a100, rel=0.3)
        assert row["over_tf32_low"] < a100 < row["over_tf32_high"]


def test_gpus_and_models_rank_as_measured(resnet, bert):
    for table in (resnet, bert):
        times = [table.loc[(gpu, "fp16"), "step_ms"] for gpu in GPUS]
        assert times == sorted(times, reverse=True)
        assert table.loc[("V100", "fp16"), "speedup"] > table.loc[("A100 40GB", "fp16"), "over_tf32"]
    assert bert.loc[("V100", "fp16"), "speedup"] > resnet.loc[("V100", "fp16"), "speedup"]
    assert bert.loc[("A100 40GB", "fp16"), "over_tf32"] < resnet.loc[("A100 40GB", "fp16"), "over_tf32"]


def test_16_bits_allow_larger_batches(resnet):
    for gpu in GPUS:
        assert 1.5 < resnet.loc[(gpu, "fp16"), "batch_low"] / resnet.loc[(gpu, "fp32"), "batch_low"] < 2.2
