"""Which recipe to try first: what was measured on the machine replaces what its instructions promise."""

from pathlib import Path

import numpy as np
import pytest

from amp_core import Run, load_run
from amp_core.analysis.comparison.measured_recipes import after_measurement, measured_recipes
from amp_core.hardware.gpus import Advice
from amp_core.store.writer import RunWriter

BF16 = Advice("bf16", "This CPU has BF16 instructions.")
TASK = {"workload": "text-gpt", "size": "tiny", "batch_size": 8, "accumulate": 1, "device": "cpu"}


def recorded(folder: Path, precision: str, step_ms: float, cpu: str = "a", **config: object) -> Run:
    times = step_ms * (1 + 0.01 * np.random.default_rng(0).standard_normal(200))
    head = TASK | {"precision": precision} | config
    with RunWriter(folder / f"{precision}-{step_ms:g}-{cpu}", config=head, environment={"cpu": cpu, "gpus": []}) as w:
        w.append("steps", {"step": range(200), "loss": [2.0] * 200, "step_ms": times, "samples": [8] * 200})
    return load_run(folder / f"{precision}-{step_ms:g}-{cpu}")


@pytest.mark.parametrize(
    ("bf16_ms", "fp16_ms", "recipe", "why"),
    [
        (12.0, None, "fp32", "Measured here on text-gpt tiny, BF16 AMP is 1.20 × slower than FP32."),
        (5.0, None, "bf16", "Measured here on text-gpt tiny, BF16 AMP is 2.00 × faster than FP32."),
        (5.0, 2.0, "fp16", "BF16 AMP is 2.00 × faster than FP32, and FP16 AMP is 5.00 × faster than FP32."),
        (12.0, 2.0, "fp16", "BF16 AMP is 1.20 × slower than FP32, and FP16 AMP is 5.00 × faster than FP32."),
        (10.0, None, "fp32", "BF16 AMP is no faster than FP32."),
    ],
)
def test_the_fastest_measured_recipe_is_tried_first(tmp_path, bf16_ms, fp16_ms, recipe, why):
    runs = [recorded(tmp_path, "fp32", 10.0), recorded(tmp_path, "bf16", bf16_ms)]
    runs += [recorded(tmp_path, "fp16", fp16_ms)] if fp16_ms else []
    advice = after_measurement(BF16, measured_recipes(runs[::-1]))
    assert advice.recipe == recipe and advice.why.replace("\u00a0", " ").endswith(why)


def test_the_fastest_run_of_a_precision_counts(tmp_path):
    slow, fast, fp32 = (recorded(tmp_path, *run) for run in (("bf16", 35.0), ("bf16", 12.0), ("fp32", 10.0)))
    told = [after_measurement(BF16, measured_recipes(runs)).why for runs in ([slow, fp32, fast], [fast, fp32, slow])]
    assert told[0] == told[1] and told[0].replace("\u00a0", " ").endswith("BF16 AMP is 1.20 × slower than FP32.")


def test_advice_stands_where_its_recipe_was_not_measured_there(tmp_path):
    fp16 = recorded(tmp_path, "fp16", 40.0)
    fp32 = recorded(tmp_path, "fp32", 10.0)
    elsewhere, another = recorded(tmp_path, "bf16", 12.0, cpu="b"), recorded(tmp_path, "bf16", 13.0, batch_size=16)
    for others in ([], [fp32], [fp32, elsewhere], [fp32, another]):
        assert after_measurement(BF16, measured_recipes([fp16, *others])) == BF16
