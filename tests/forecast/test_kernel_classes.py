"""How the kernels of an operator use a GPU: shapes of products, passes over memory, layouts, fused kernels, and L2."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from amp_core.forecast import efficiency_of, forecast
from amp_core.forecast.kernel_classes import aligned_elements, shape_share
from amp_core.forecast.roofline import Work, device_time
from amp_core.forecast.traced_work import device_work
from amp_core.hardware.data_sheets import NAMES, named_part
from amp_core.record.op_trace.op_counter import OpCounter, OpCounterMode
from amp_core.settings.training import TrainConfig
from amp_core.train.step_on_fake_tensors import traced
from amp_core.train.workloads import Workload


def share(batch, m, n, k, sms=108):
    return float(shape_share(*(np.array([float(size)]) for size in (batch, m, n, k)), sms)[0])


def test_a_large_product_runs_at_full_speed_and_a_small_or_ragged_one_does_not():
    assert share(1, 8192, 8192, 8192) == pytest.approx(1.0, abs=0.07)
    assert share(1, 256, 256, 64) < 0.2
    full, one_more = (share(1, 128 * 108, columns, 4096) for columns in (128, 129))
    assert one_more < 0.8 * full  # a second wave with tiles that hold one column
    assert share(math.nan, math.nan, math.nan, math.nan) == 1.0


@pytest.mark.parametrize(("gpu", "lost"), [("A100", 2.0), ("H100", 4.0), ("RTX A6000", 0.6)])
def test_rows_of_odd_length_slow_products_where_tensor_cores_are_faster_than_loads(gpu, lost):
    rates, of = named_part(gpu)[1], efficiency_of(NAMES[gpu])

    def time(columns, recipe):
        sizes = {"batch": 1.0, "m": 8192.0, "n": float(columns), "k": 1024.0}
        row = {"op": "mm", "count": 1, "flops": 2.0 * 8192 * columns * 1024, "bytes": 0.0, "kind": "product"}
        aligned = float(aligned_elements([8192, columns, 1024]))
        row |= sizes | {"narrow": recipe == "fp16", "aligned": aligned}
        return device_time(Work.of(pd.DataFrame([row])), rates, recipe, of.range().likely).device_us

    padded, odd = time(50304, "fp16"), time(50257, "fp16")
    assert odd / padded - 1 == pytest.approx(lost, rel=0.6)
    assert time(50257, "fp32") == pytest.approx(time(50304, "fp32"), rel=0.02)
    assert time(50260, "tf32") == pytest.approx(time(50304, "tf32"), rel=0.02)  # multiples of 4 are 16 bytes in TF32


def test_loads_take_at_most_16_bytes():
    assert [aligned_elements(sizes) for sizes in ([64, 128, 96], [64, 50257], [30522, 8], [12, 8])] == [8, 1, 2, 4]


def test_the_gradient_of_a_weight_fills_the_gpu_by_parts_of_k():
    few_tiles_long_k = share(1, 384, 384, 100_000)
    assert few_tiles_long_k > 0.6 > 10 * share(1, 384, 384, 64)


def work_of(model, *inputs, amp=False, backward=True, channels_last=False):
    counter = OpCounter(model, ("cpu",))
    counter.attach()
    with OpCounterMode(counter), torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        out = model(*inputs)
        if backward:
            out.float().sum().backward()
    counter.detach()
    assert counter.error is None
    return device_work(pd.DataFrame(counter.rows()), channels_last)


def convolution_ms(gpu, recipe="fp32", backward=False, size=28, channels=(256, 512), **how):
    """Forward or backward of a convolution of 16 images."""
    with torch.device("meta"):
        conv = nn.Conv2d(*channels, bias=False, **{"kernel_size": 3, "padding": 1, **how})
        work = work_of(conv, torch.randn(16, channels[0], size, size, requires_grad=True))
    work = work[work["op"].eq("convolution_backward" if backward else "convolution")]
    rates = named_part(gpu)[1]
    return device_time(Work.of(work), rates, recipe, efficiency_of(NAMES[gpu]).range().likely).total_us / 1e3


@pytest.mark.parametrize(
    ("size", "channels", "forward_ms", "backward_ms"),  # results/train/DeepBench_NV_V100.xlsx, FP32, 16 images
    [
        (112, (64, 128), 1.246, 3.137),
        (56, (128, 256), 0.900, 1.837),
        (28, (256, 512), 0.801, 1.625),
        (14, (512, 512), 0.506, 0.976),
    ],
)
def test_convolutions_of_3_by_3_run_in_winograds_form_in_fp32(size, channels, forward_ms, backward_ms):
    given = {"size": size, "channels": channels}
    assert convolution_ms("V100", **given) == pytest.approx(forward_ms, rel=0.25)
    assert convolution_ms("V100", backward=True, **given) == pytest.approx(backward_ms, rel=0.25)


@pytest.mark.filterwarnings("error")
def test_a_step_with_and_without_such_convolutions_is_forecast_silently():
    with torch.device("meta"):
        for first in (nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)):
            model = nn.Sequential(first, nn.Flatten(), nn.Linear(8 * 64, 4))
            work = Work.of(work_of(model, torch.randn(2, 4, 8, 8)))
            assert device_time(work, named_part("V100")[1], "fp32", efficiency_of("V100").range().likely).total_us > 0


def test_winograds_form_is_for_filters_of_3_by_3_with_stride_1_in_one_group():
    in_3_by_3 = convolution_ms("V100")
    assert convolution_ms("V100", kernel_size=5, padding=2) > 3 * in_3_by_3
    strided = convolution_ms("V100", stride=2)  # a quarter of the outputs
    assert strided > 0.5 * in_3_by_3
    assert convolution_ms("V100", groups=2) > 0.8 * in_3_by_3  # half of the operations
    assert convolution_ms("A100", "tf32") < convolution_ms("A100")  # tensor cores multiply directly
    with torch.device("meta"):
        assert (work_of(nn.Conv1d(8, 8, 3, padding=1), torch.randn(4, 8, 64))["winograd_flops"] == 0).all()


def test_a_convolutions_gradients_take_twice_its_operations_with_groups_too():
    for groups in (1, 2, 8):
        conv = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        work = work_of(conv, torch.randn(2, 8, 10, 10, requires_grad=True))
        by_op = work.groupby("op")["flops"].sum()
        assert by_op["convolution"] == 2 * 2 * 8 * 100 * 9 * 8 / groups
        assert by_op["convolution_backward"] == 2 * by_op["convolution"], groups


def test_depthwise_convolutions_are_bound_by_memory_and_never_on_tensor_cores():
    work = work_of(nn.Conv2d(64, 64, 3, padding=1, groups=64), torch.randn(4, 64, 32, 32), amp=True)
    convolutions = work[work["op"].str.startswith("convolution")]
    assert set(convolutions["kind"]) == {"depthwise"} and not convolutions["narrow"].any()
    assert device_time(
        Work.of(convolutions), named_part("A100")[1], "fp16", efficiency_of("A100").range().likely
    ).bound_by != ("GEMM/conv")


def test_a_large_depthwise_convolution_is_bound_by_its_taps_and_its_gradients_are_slow_in_fp32():
    rates, speeds = named_part("RTX 3090")[1], efficiency_of("RTX 3090").range().likely
    x = torch.randn(8, 64, 64, 64, requires_grad=True)

    def taken(taps, amp):
        work = work_of(nn.Conv2d(64, 64, taps, padding=taps // 2, groups=64), x, amp=amp)
        depthwise = work[work["kind"] == "depthwise"]
        us = {
            phase: device_time(Work.of(rows), rates, "fp16" if amp else "fp32", speeds).device_us
            for phase, rows in depthwise.groupby("phase")
        }
        return us, depthwise.groupby("phase")["flops"].sum()

    (large, flops), (narrow, _), (small, _) = taken(7, False), taken(7, True), taken(3, False)
    assert large["forward"] == pytest.approx(flops["forward"] / 15e3 / 82) and large["forward"] > 3 * small["forward"]
    assert large["backward"] == pytest.approx(2 * large["forward"] / 0.27)
    assert narrow["forward"] == pytest.approx(large["forward"] / 2)
    assert narrow["backward"] == pytest.approx(2 * narrow["forward"])


def test_batch_norm_with_weights_in_16_bits_waits_for_the_elements_of_a_channel():
    rates, speeds = named_part("A100")[1], efficiency_of("A100").range().likely
    x = torch.randn(4, 8, 224, 224, requires_grad=True)

    def forward_us(model, x, **how):
        work = work_of(model, x, backward=False, **how)
        return device_time(Work.of(work), rates, "fp16", speeds).device_us

    channel = 4 * 224 * 224
    half = forward_us(nn.BatchNorm2d(8).half(), x.half())
    assert half == pytest.approx(channel * 0.0017)  # one block for each channel
    assert forward_us(nn.BatchNorm2d(8), x, amp=True) < half / 10


class Windows(nn.Module):
    """Swin's windows of 7 × 7, put together and shifted back: microsoft/Swin-Transformer, `reverse_pyt_forward`."""

    def forward(self, x):
        images = x.view(-1, 8, 8, 7, 7, 96).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 56, 56, 96)
        return torch.roll(images, (2, 2), (1, 2))


@pytest.mark.parametrize(("dtype", "published_ms"), [(torch.float32, 2.632), (torch.float16, 2.260)])
def test_copies_into_another_layout_take_as_long_as_measured_in_few_bytes_too(dtype, published_ms):
    rates, speeds = named_part("A100")[1], efficiency_of("A100").range().likely
    images = 12  # of 192
    work = work_of(Windows(), torch.randn(images * 64, 7, 7, 96, dtype=dtype, requires_grad=True))
    moved = work[work["op"].isin(["clone", "roll"])]
    taken_ms = device_time(Work.of(moved), rates, "fp32", speeds).device_us * 192 / images / 1e3
    assert published_ms * 0.75 < taken_ms < published_ms  # the published time has the sum of gradients too


def test_inputs_that_are_broadcast_are_bound_by_elements_and_equal_ones_by_bytes():
    rates, speeds = named_part("A100")[1], efficiency_of("A100").range().likely
    x, mask = torch.randn(64, 8, 128, 128).half(), torch.randn(64, 1, 1, 128).half()

    class Sum(nn.Module):
        def forward(self, a, b):
            return a + b

    broadcast, equal = (
        device_time(Work.of(work_of(Sum(), x, other, backward=False)), rates, "fp16", speeds).device_us
        for other in (mask, x)
    )
    assert broadcast == pytest.approx(x.numel() / 1500 / 108) and equal < 0.7 * broadcast


def test_the_weight_gradient_of_a_layer_norm_takes_its_time_per_row():
    rates, speeds = named_part("A100")[1], efficiency_of("A100").range().likely

    def backward_us(rows, columns, **how):
        work = work_of(nn.LayerNorm(columns, **how), torch.randn(rows, columns, requires_grad=True))
        return device_time(Work.of(work[work["op"] == "native_layer_norm_backward"]), rates, "fp32", speeds).device_us

    many, few = backward_us(65536, 32), backward_us(512, 4096)
    assert many > 65536 * 0.0088 > 10 * few
    assert backward_us(65536, 32, elementwise_affine=False) < many / 10


def test_dropout_is_one_kernel_on_cuda():
    x = torch.randn(64, 256, requires_grad=True)
    work = work_of(nn.Dropout(0.1), x)
    assert not work["op"].isin(["bernoulli_", "div_"]).any()
    assert work["op"].tolist().count("mul") == 2  # forward and backward


def test_softmax_under_autocast_casts_in_its_own_kernel():
    class Attention(nn.Module):
        def forward(self, q, k):
            return torch.softmax(q @ k.mT, -1)

    q, k = (torch.randn(2, 64, 32, requires_grad=True) for _ in range(2))
    work = work_of(Attention(), q, k, amp=True)
    scores = 2 * 64 * 64
    casts = work[(work["op"] == "_to_copy") & (work["bytes"] >= scores * 6)]
    assert len(casts) == 0


def test_convolutions_that_are_not_channels_last_are_transposed_on_tensor_cores():
    model, x = nn.Conv2d(32, 32, 3, padding=1), torch.randn(8, 32, 64, 64)
    rates, speeds = named_part("RTX 3090")[1], efficiency_of("RTX 3090").range().likely
    times = {
        last: device_time(Work.of(work_of(model, x, amp=True, channels_last=last)), rates, "fp16", speeds).device_us
        for last in (True, False)
    }
    assert times[False] > 1.3 * times[True]
    wide = {last: work_of(model, x, channels_last=last) for last in (True, False)}
    fp32 = [device_time(Work.of(work), rates, "fp32", speeds).device_us for work in wide.values()]
    assert fp32[0] == fp32[1]


def test_tensors_that_fit_into_l2_are_read_from_it():
    rates, speeds = named_part("L4")[1], efficiency_of("L4").range().likely
    columns = ["op", "phase", "count", "flops", "bytes", "narrow", "kind"]
    works = [
        Work.of(pd.DataFrame([("add", "forward", n, 0.0, 1.2e9, False, "elementwise")], columns=columns))
        for n in (100, 1)
    ]
    small, large = (device_time(work, rates, "fp32", speeds).device_us for work in works)
    without = replace(speeds, l2_mb=0.0)
    small_without, large_without = (device_time(work, rates, "fp32", without).device_us for work in works)
    assert small < 0.6 * small_without and large == large_without


def test_norms_that_reduce_first_read_their_input_twice():
    x = torch.randn(8, 16, 32, 32)
    work = work_of(nn.BatchNorm2d(16), x, backward=False)
    assert work["bytes"].sum() == pytest.approx(3 * x.nbytes, rel=0.01)


def test_every_listed_gpu_has_shares_with_a_source():
    for name, device in NAMES.items():
        of = efficiency_of(device)
        assert "no measurement of this generation" not in of.source, name
        assert 0.2 < of.fp32 <= 1 and 0.2 < of.half <= 1.1 and 0.5 < of.bandwidth < 1 and 0.1 < of.spread <= 0.4
    assert efficiency_of("NVIDIA L4").fp32 < 0.5 < efficiency_of("NVIDIA A100 80GB PCIe").fp32  # 72 W, 300 W
    assert "A100 PCIe" in NAMES and "V100 PCIe" in NAMES


def test_the_optimizers_step_has_its_own_column():
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))
    batch = torch.randn(4, 2048)

    def steps(optimizer):
        workload = Workload(model, [batch], lambda model, batch: model(batch).square().mean())
        config = TrainConfig(workload="text-gpt", size="tiny", optimizer=optimizer).resolved()
        return tuple(traced(config, workload, batch, optimizer, amp) for amp in (False, True))

    sgd, adamw = (forecast(steps(o), ["A100"]).table.set_index("recipe") for o in ("sgd", "adamw"))
    assert 0 < sgd.loc["fp32", "optimizer_ms"] < adamw.loc["fp32", "optimizer_ms"] < adamw.loc["fp32", "step_ms"]
    assert adamw.loc["fp32", "optimizer_ms"] == pytest.approx(adamw.loc["fp16", "optimizer_ms"])
