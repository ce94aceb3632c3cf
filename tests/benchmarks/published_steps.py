"""Forecasts compared with published step times: `python -m tests.benchmarks.published_steps [--rows]`.

`published_steps.csv` lists the measurements, each with its source, GPU, model, batch, sequence length or pixels,
precision, optimizer and memory format (one GPU each):

- NeuSight: github.com/sitar-lab/NeuSight, scripts/asplos/label/GPU/MODEL-train-LENGTH-BATCH.json, `e2e_latency`:
  forward and backward in eager FP32 with TF32 off. The mixture of experts (Switch) is left out: its own program routes.
- Lambda: github.com/lambdal/deeplearning-benchmark, pytorch/csv_v1_v2: NVIDIA's programs in NGC containers of 2022 on;
  FP32 is TF32 from Ampere on; step time = batch / throughput. ResNet-50 on B200 is left out: as fast in FP32 as in
  FP16, so bound by its data. "Lambda 2020": pytorch/results with config_v0, containers of 2020 and 2021; ResNet-50 with
  `--data-backend pytorch` is left out, bound by its data. SSD300 is taken as channels first, which its logs do not say.
- NVIDIA: github.com/NVIDIA/DeepLearningExamples (commit 729963dd), READMEs of resnet50v1.5, BERT, ResNeXt, SE-ResNeXt,
  EfficientNet (batches of ConvNets/configs.yml) and SSD (channels last with AMP, its default): one GPU.
  Pre-training at sequence length 512 is left out: 19 sequences/s in FP32 on V100 are 19 TFLOP/s of its 15.7, so the
  sequences were shorter. BERT's SQuAD program (run_squad.py) in FP16 is apex O2, so all weights are in FP16
  (`fp16-pure`), with FusedAdam; in FP32 and TF32 it runs BertAdam.
- DLPerf: github.com/Oneflow-Inc/DLPerf (commit c89430ba), NVIDIADeepLearningExamples/PyTorch: BERT-base's
  pre-training, and ResNet-50, on one V100.
- PaddlePaddle: github.com/PaddlePaddle/Perf (commit e7a07c4d), OtherReports/PyTorch: NVIDIA's programs, ResNet-50
  without channels last. Its BERT, as NVIDIA's own of container 21.11, is run by TorchScript and NVFuser (`compiled`),
  and updates the weights once in hundreds of batches.
- CS336: Stanford's course (assignment 2), whose model is the same in each: github.com/yyin-dev/cs336-a2 (commit
  bc6cc1b0, data/e2e_benchmark), bolongcheng/assignment2-systems (2baa5ff4, benchmarks/A100; Modal's A100 have 40 GB)
  and luke396/assignment2-systems (24c85d16, docs, after five steps of warm-up), in FP32 with TF32 off and in BF16.
  Others do not name their GPU. Steps that the forecast says wait for the host are listed apart.
- milabench: github.com/mila-iqia/milabench (commit faf39234), config/scaling/*.yaml, for each benchmark its smallest
  batch from 16 on, its largest and the one between, with PyTorch 2.6: BERT-base over all words with fused attention and
  Adam, torchvision's ConvNeXt-Large, ResNet-50 (synthetic images, channels last) and RegNetY-128GF. A100: README.
- timm: github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-{nhwc,nchw}-pt112-cu113-rtx3090.csv.
- mli: github.com/mli/transformers-benchmarks (commit 3370b2b3), README: one layer of BERT-large, GPT-2 medium and
  T5-large in FP16, forward and backward, in an NGC container of 2022; the largest TFLOP/s of its table, taken to be
  those of the largest batch (as on the RTX 3090 Ti, whose tables it shows).
- ryujaehun: github.com/ryujaehun/pytorch-gpu-benchmark (commit 3f47a9e2), CSV files, and those of its fork by lamikr:
  torchvision's models, forward and backward of 12 images, medians; gradients are set to zero and summed anew. VGG-16
  keeps the GPU busy; the others wait for the host (`launches`), and LAUNCH_US was chosen from them.
- sandeepkumar: github.com/sandeepkumar-skb/pytorch_experiments, torchvision_exp: ResNet-50 on V100.
- torch_benchmark: github.com/XHMY/torch_benchmark (commit 1821379f), README: torchvision's models, on RTX 4090 those of
  Ubuntu and not of Windows (WSL), where ConvNeXt took 1.57 times as long. FP32 is TF32 from Ampere on in its NGC
  container; on H100, with PyTorch 2.1.1 itself, only convolutions are in TF32. In `fp16-pure` the weights are in FP16
  too. It averages 100 steps from the first on, so steps below 150 ms may be off by 10 % and more (`start-up`).
- Set 6, from Lambda's logs (commit aa5addb6, pytorch/results): Transformer-XL with segments of 192 (base) and 256 words
  (large), a softmax over all 267,735 words, JITLamb and Adam; the median of the second half of a log's `ms/batch`. FP16
  is apex O2. Folders `_v1` are of 2022 (Lambda), others of 2020 and 2021. Not taken: FP16 of March 2020, whose cuBLAS
  runs products of odd size without tensor cores, and RTX 3070 and 3080, whose 1 to 4 sequences wait for the host.
- u39kun: github.com/u39kun/deep-learning-benchmark (commit 9dc3e36), README: torchvision's models, forward and backward
  of 16 images with `model.half()` in FP16; PyTorch 0.3 on V100, 1.0 on RTX 2080 Ti.
- FlagPerf: github.com/FlagOpen/FlagPerf (commit 1b5a0303), training/nvidia/*/README.md, `p_core` on one A100 40GB. Its
  Swin-T (`unclear`) has fewer images/s than timm's on RTX 3090. Its language models do not say batch or TF32.
- Not taken, for their settings are not clear: T5 in huggingface/transformers#14608 and #15026 (padded to the longest
  sentence of a batch), Lambda's WaveGlow and Tacotron2 (as fast in FP32 as in FP16), NVIDIA's own Transformer-XL (its
  adaptive softmax depends on how frequent the words are) and nanoGPT's 250 ms (words and precision not stated).

Column `held_out`: the shares of each GPU (`amp_core.forecast.efficiency`) were first fitted to the rows with `no`. Each
of the sets was collected when the model had been fixed, forecast once, and then used in turn: sets 1 to 3 also to fit
shares and to choose constants, set 4 for the range of convolutions in groups, set 5 for the bandwidth of A100 40GB, a
random half of set 6 for `amp_core.forecast.kernel_classes.UNALIGNED_FLOP_PER_US`, set 7 for the traffic of optimizers,
and set 8 for fused attention in FP32 and convolutions on Hopper. docs/evidence.md has the errors of those first
forecasts.
"""

import argparse
import csv
import functools
import itertools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from amp_core.forecast import Efficiency, efficiency_of
from amp_core.forecast.calibration import MIN_OVERLAP, correction, overlap
from amp_core.forecast.efficiency import OLD_SOFTWARE, generation_of
from amp_core.forecast.measured_steps import step_range
from amp_core.forecast.roofline import Work, device_time
from amp_core.forecast.traced_work import TENSORS_PER_LAUNCH
from amp_core.hardware.data_sheets import NAMES, dense_rates
from amp_core.settings.training import TrainConfig
from amp_core.train.step_on_fake_tensors import traced
from amp_core.train.workloads import Workload
from tests.benchmarks.published_models import build

APART = ("launches", "start-up", "unclear", "compiled")
"""Rows that are not in the totals: steps that wait for the host, averages with the start of the program, settings that
the source does not make clear, and programs whose operators are fused."""
OLD_SOURCES = ("u39kun", "DLPerf", "ryujaehun", "Lambda 2020")
"""With software of 2018, 2020, 2020 and 2020 (NGC containers 20.10 on the GPUs of Ampere), so `OLD_SOFTWARE`."""
FILE = Path(__file__).with_suffix(".csv")


MASTER_BYTES, UNSCALE_BYTES = 28, 6
"""Bytes for each parameter of apex's FusedAdam on 16-bit weights (weight, two averages in FP32 read and written,
16-bit gradient read, 16-bit weight written), and of the gradient's unscaling before."""
BERT_ADAM_PASSES, BERT_ADAM_OPS, BERT_ADAM_US = 32, 25, 10.0
"""Of NVIDIA's BertAdam (DeepLearningExamples, BERT/optimization.py), which runs some 25 operators for each tensor, its
norm and clipping among them: passes over the weights, operators, and the host's time for one of them without autograd.
The program waits for the loss in each step, so the host cannot run ahead of them."""
PER_TENSOR = {"adam-loop": (23, 10), "jit-lamb": (15, 12)}
"""Passes over the weights in FP32, and operators for each tensor, of optimizers that run tensor by tensor, with the
clipping of gradients, in a program that waits for the loss: torch's Adam before its multi-tensor kernels, and NVIDIA's
JITLamb (DeepLearningExamples, Transformer-XL/pytorch/lamb.py), whose elementwise operators TorchScript fuses."""

WRITTEN_OUT = {"cs336-adamw": (35, 16), "luke396-adamw": (22, 8)}
"""Passes over the weights in FP32, and operators for each tensor, of an AdamW in Python that does not wait for the
loss: that of the course CS336 (assignment 2, cs336_basics/optimizer.py), and one with operators in place
(luke396/assignment1-basics, cs336_basics/training_utility.py)."""


@dataclass(frozen=True)
class Traced:
    """A step without an optimizer's, that of the optimizer, and the model's parameters."""

    step: pd.DataFrame
    optimizer: pd.DataFrame
    tensors: int
    elements: int


@functools.cache
def trace(model: str, batch: int, length: int, optimizer: str, channels_last: bool, precision: str) -> Traced:
    """The traced step with `sgd` or `adamw`, in `fp32`, `fp16` (autocast) or `fp16-pure`."""
    own, batches, loss_fn = build(model, batch, length, channels_last)
    if precision == "fp16-pure":
        own = own.half()
        batches = [tuple(t.half() if t.is_floating_point() else t for t in batch) for batch in batches]
    config = TrainConfig(workload="text-gpt", size="tiny", optimizer=optimizer)
    step = traced(config.resolved(), Workload(own, batches, loss_fn), batches[0], model, precision == "fp16")
    last = step.work["phase"] == "optimizer"
    parameters = list(own.parameters())
    return Traced(step.work[~last], step.work[last], len(parameters), sum(p.numel() for p in parameters))


def _optimizer(traced: Traced, optimizer: str, width: int) -> pd.DataFrame:
    """The optimizer's operators as the measured program ran them; weights have `width` bytes."""
    if optimizer in ("sgd", "adamw"):
        return traced.optimizer
    rows: list[dict[str, Any]] = []
    if optimizer == "fused-adam":
        launches = math.ceil(traced.tensors / TENSORS_PER_LAUNCH)
        rows = [
            {"op": op, "count": launches, "bytes": float(each * traced.elements)}
            for op, each in (("fused_adam", MASTER_BYTES), ("unscale", UNSCALE_BYTES))
        ]
    elif optimizer == "bert-adam":
        count, moved = BERT_ADAM_OPS * traced.tensors, float(BERT_ADAM_PASSES * 4 * traced.elements)
        rows = [{"op": "bert_adam", "count": count, "bytes": moved, "serial_us": BERT_ADAM_US * count}]
    elif optimizer in WRITTEN_OUT:
        passes, operators = WRITTEN_OUT[optimizer]
        moved = float(4 * passes * traced.elements)
        rows = [{"op": optimizer, "count": operators * traced.tensors, "bytes": moved}]
    elif optimizer in PER_TENSOR:
        passes, operators = PER_TENSOR[optimizer]
        master = 2 * UNSCALE_BYTES if width == 2 else 0  # unscaled into FP32, and the weights back into 16 bits
        count = (operators + (2 if width == 2 else 0)) * traced.tensors
        moved = float((4 * passes + master) * traced.elements)
        rows = [{"op": optimizer, "count": count, "bytes": moved, "serial_us": BERT_ADAM_US * count}]
    elif optimizer == "zero-grad":
        size = float(width * traced.elements)
        rows = [{"op": op, "count": traced.tensors, "bytes": n * size} for op, n in (("zero_", 1), ("add_", 3))]
    others = {"phase": "optimizer", "narrow": False, "kind": "elementwise"}
    table = pd.DataFrame([others | row for row in rows], columns=traced.step.columns)
    unknown = ("batch", "m", "n", "k")
    return table.fillna({column: 0.0 for column in table.columns if column not in unknown})


def forecast_ms(row: Mapping[str, Any], of: Efficiency | None = None) -> tuple[float, float, float]:
    """Likely, shortest and longest time of a step, with the shares `of` a GPU, by default those of the table."""
    work, recipe = _work(row), row["precision"].removesuffix("-pure")
    device = NAMES.get(row["gpu"], row["gpu"])
    rates = dense_rates(device)
    assert rates is not None, row["gpu"]
    speeds = step_range(work, rates, recipe, of or efficiency_of(device))
    factor = _software(row) / 1e3
    times = [
        device_time(Work.of(work), rates, recipe, one).total_us * factor for one in (speeds.likely, *speeds.corners())
    ]
    return times[0], min(times), max(times)


def _software(row: Mapping[str, Any]) -> float:
    return OLD_SOFTWARE if row["source"] in OLD_SOURCES else 1.0


def compared(wanted: str = "") -> pd.DataFrame:
    """One line per measurement whose model contains `wanted`: its columns, and forecast_ms, low_ms, high_ms, error."""
    with FILE.open() as file:
        rows = [row for row in csv.DictReader(file) if wanted in row["model"]]
    table = pd.DataFrame(
        [row | dict(zip(("forecast_ms", "low_ms", "high_ms"), forecast_ms(row), strict=True)) for row in rows]
    )
    table["step_ms"] = table["step_ms"].astype(float)
    return _with_errors(table)


def _with_errors(table: pd.DataFrame) -> pd.DataFrame:
    table["error"] = table["forecast_ms"] / table["step_ms"] - 1
    table["inside"] = table["step_ms"].between(table["low_ms"], table["high_ms"])
    return table


def calibrated_errors(table: pd.DataFrame) -> pd.DataFrame:
    """One line per pair of measurements of one source on the same GPU: whether their steps are similar, the error of
    the first, and its error once the second has corrected it as `ampscope forecast --calibrate` would."""
    pairs = []
    for (gpu, _), rows in table.groupby(["gpu", "source"]):
        device = NAMES.get(str(gpu), str(gpu))
        rates, spread = dense_rates(device), efficiency_of(device).spread
        assert rates is not None, gpu
        works = {at: _work(row) for at, row in rows.iterrows()}
        for one, other in itertools.permutations(rows.index, 2):
            recipe = rows.loc[other, "precision"].removesuffix("-pure")
            shared = overlap(works[other], works[one], device, rates, recipe)
            factor = correction(1 / (1 + rows.loc[other, "error"]), shared, spread)
            error = rows.loc[one, "error"]
            pairs.append((one, shared >= MIN_OVERLAP, abs(error), abs((1 + error) * factor - 1)))
    return pd.DataFrame(pairs, columns=["row", "similar", "error", "calibrated"])


@functools.cache
def _step(model: str, batch: int, length: int, optimizer: str, channels_last: bool, precision: str) -> pd.DataFrame:
    known = optimizer if optimizer in ("sgd", "adamw") else "sgd"
    found = trace(model, batch, length, known, channels_last, precision)
    last = _optimizer(found, optimizer, 2 if precision == "fp16-pure" else 4)
    return pd.concat([found.step, last], ignore_index=True) if len(last) else found.step


def _work(row: Mapping[str, Any]) -> pd.DataFrame:
    how = row["model"], int(row["batch"]), int(row["length"]), row["optimizer"], row["channels_last"] == "yes"
    return _step(*how, row["precision"] if row["precision"].startswith("fp16") else "fp32")


def left_out(table: pd.DataFrame) -> pd.DataFrame:
    """The rows again, with shares that are fitted without those of the same source."""
    result = table.copy()
    for _, rows in table.groupby(table["gpu"].map(_generation)):
        for source, own in rows.groupby("source"):
            shares = fitted_shares(rows[rows["source"] != source], own)
            for at, row in own.iterrows():
                result.loc[at, ["forecast_ms", "low_ms", "high_ms"]] = forecast_ms(row, _with(row, shares[row["gpu"]]))
    return _with_errors(result)


def fitted_shares(rows: pd.DataFrame, wanted: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Shares of each GPU in `wanted`, fitted to `rows`, all of one generation: those of the generation, from what is
    known before any measurement, and then the GPU's own, from those of its generation."""
    shared = _fitted(rows, _before(wanted.iloc[0]["gpu"]))
    return {gpu: _fitted(rows[rows["gpu"] == gpu], shared) for gpu in wanted["gpu"].unique()}


def _generation(gpu: str) -> str:
    return generation_of(NAMES.get(gpu, gpu))


def _before(gpu: str) -> dict[str, float]:
    """Shares of a generation before any measurement. Where an SM has 128 lanes in FP32 they share its registers and
    schedulers, so they reach less than 64 do. On GeForce, products in FP16 and TF32 run at half of what the tensor
    cores can do, so no limit on power lowers their clock."""
    rates = dense_rates(NAMES.get(gpu, gpu))
    assert rates is not None
    tensor = 0.95 if rates.tf32 is not None and rates.tf32 <= rates.fp32 else 0.65
    fp32 = 0.9 if _generation(gpu) in ("Volta", "Turing", "A100") else 0.65
    return {"fp32": fp32, "tf32": tensor, "half": tensor, "bandwidth": 0.85}


def _with(row: Mapping[str, Any], shares: Mapping[str, float]) -> Efficiency:
    return replace(efficiency_of(NAMES.get(row["gpu"], row["gpu"])), **shares)


def _fitted(rows: pd.DataFrame, start: Mapping[str, float]) -> dict[str, float]:
    """Shares with which the absolute logarithms of the errors over `rows` are least, found one share at a time. A share
    that is twice that of `start` costs as much as an error by a factor of two, so few rows move it little."""
    shares = dict(start)
    used = [name for name in shares if name != "bandwidth" and rows["precision"].str.startswith(_PRECISION[name]).any()]
    measured = rows.to_dict("records")

    def cost(shares: Mapping[str, float]) -> float:
        off = [abs(math.log(_likely_ms(row, shares) / row["step_ms"])) for row in measured]
        return sum(off) + sum(abs(math.log(share / start[name])) for name, share in shares.items())

    if rows.empty:
        return shares
    least = cost(shares)
    for step, name in itertools.product(_STEPS, (*used, "bandwidth")):
        for factor in (step, 1 / step):
            while (tried := shares | {name: shares[name] * factor})[name] < _MAX_SHARE[name == "bandwidth"]:
                if (now := cost(tried)) >= least:
                    break
                shares, least = tried, now
    return shares


_PRECISION = {"fp32": "fp32", "tf32": "tf32", "half": "fp16"}
_STEPS = (1.25, 1.25, 1.1, 1.1, 1.05, 1.05, 1.025, 1.025)
_MAX_SHARE = (1.0, 0.96)


def _likely_ms(row: Mapping[Hashable, Any], shares: Mapping[str, float]) -> float:
    rates = dense_rates(NAMES.get(row["gpu"], row["gpu"]))
    assert rates is not None
    work = _arrays(*(row[name] for name in ("model", "batch", "length", "optimizer", "channels_last", "precision")))
    speeds = _with(row, shares).range().likely
    return device_time(work, rates, row["precision"].removesuffix("-pure"), speeds).total_us / 1e3 * _software(row)


@functools.cache
def _arrays(*how: str) -> Work:
    names = ("model", "batch", "length", "optimizer", "channels_last", "precision")
    return Work.of(_work(dict(zip(names, how, strict=True))))


def summary(table: pd.DataFrame, by: str) -> str:
    """Markdown: mean and largest error, and the share inside the range."""
    lines = [f"| {by} | measurements | mean error | largest | inside the range |", "|---|---|---|---|---|"]
    for name, rows in [*table.groupby(by), ("all", table)]:
        error = rows["error"].abs()
        lines.append(
            f"| {name} | {len(rows)} | {100 * error.mean():.1f} % | {100 * error.max():.1f} % | "
            f"{100 * rows['inside'].mean():.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="only models whose name contains this")
    parser.add_argument("--rows", action="store_true", help="each measurement too")
    parser.add_argument("--fit", action="store_true", help="the shares of each GPU, fitted to all rows")
    arguments = parser.parse_args()
    table = compared(arguments.model)
    if arguments.rows:
        columns = [
            "source",
            "gpu",
            "model",
            "batch",
            "precision",
            "step_ms",
            "forecast_ms",
            "low_ms",
            "high_ms",
            "error",
        ]
        print(table[columns].round(3).to_string(index=False))
    apart = table["held_out"].isin(APART)
    print(summary(table[apart], "held_out"), end="\n\n")
    table = table[~apart]
    if arguments.fit:
        for name, rows in table.groupby(table["gpu"].map(_generation)):
            for gpu, shares in fitted_shares(rows, rows).items():
                print(name, gpu, *(f"{share} {value:.2f}" for share, value in shares.items()), sep=", ")
    for by in ("gpu", "model", "source", "precision", "held_out"):
        print(summary(table, by), end="\n\n")
    print("Each source with shares that are fitted without it:", end="\n\n")
    print(summary(left_out(table), "source"), end="\n\n")
    for similar, pairs in calibrated_errors(table).groupby("similar"):
        before, after = (100 * pairs.groupby("row")[name].mean().mean() for name in ("error", "calibrated"))
        print(f"calibrated by a {'similar' if similar else 'different'} run on the same GPU and of the same source, "
              f"{len(pairs)} pairs: {before:.1f} % → {after:.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
