"""The kernels on the device: equal to their specifications, and `measure` bound by memory bandwidth."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from amp_core.record.stats import dispatch
from amp_core.record.stats import measure as measuring
from amp_core.record.stats.blocks import measure_blocks
from amp_core.record.stats.channels import channel_largest
from amp_core.record.stats.layout import LEADING, Cap, packed_size
from amp_core.record.stats.plain import measure_plain
from tests.gpu.checks import Place, Row

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
BANDWIDTH = 0.7
"""Least bandwidth, as a fraction of that of a device copy."""


def cases(dtype: torch.dtype, large: int) -> dict[str, torch.Tensor]:
    """Tensors on the CPU with all edge cases of a kernel."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (300_007 * dtype.itemsize,), dtype=torch.uint8, generator=draw).view(dtype)
    if dtype == torch.float64:  # whose squares are finite, so that sums can be compared
        bits = torch.where(bits.isfinite() & (bits.abs() > 1e150), bits.sign(), bits)
    normal = torch.randn(large, generator=draw)
    tiny = (normal[:100_000] * 2.0**-140).to(dtype)
    return {
        "every bit pattern": bits,
        "normal": normal.to(dtype),
        "beginning off a boundary": normal.to(dtype)[3:],
        "transposed": normal[:200_000].to(dtype).reshape(400, 500).t(),
        "every third": normal[:30_000].to(dtype)[::3],
        "subnormal and zero": tiny,
        "one value": normal[:1].to(dtype),
        "empty": normal[:0].to(dtype),
        "zeros": torch.zeros(70).to(dtype),
    }


def exact(place: Place) -> Iterator[Row]:
    """Compare each count, extreme and sum with the plain specification on the CPU, for each dtype."""
    large = 300_000 if place.quick else 1_000_000  # the specification measures them too, on the CPU
    for dtype in DTYPES:
        tensors = cases(dtype, large)
        parts = measuring.measure([t.to(place.device) for t in tensors.values()])
        wrong = []
        for (name, tensor), got in zip(tensors.items(), parts, strict=True):
            expected, measured = measure_plain(tensor), got.cpu()
            counts = torch.equal(measured[:5], expected[:5]) and torch.equal(measured[7:], expected[7:])
            if not counts or not torch.allclose(measured[5:7], expected[5:7], rtol=1e-9):
                wrong.append(name)
        yield Row(
            f"kernel exact, {str(dtype).removeprefix('torch.')}",
            "counts and extremes equal, sums to 1e-9",
            f"differs: {', '.join(wrong)}" if wrong else f"{len(tensors)} tensors agree",
            "FAIL" if wrong else "pass",
        )
    if place.cuda:
        used = dispatch._kernels.get("cuda", {}).get("measure")
        yield Row(
            "kernel in use",
            "CUDA C++",
            "plain torch" if used is None else used.__module__,
            "FAIL" if used is None else "pass",
        )


SHAPES = ((300, 700), (5000, 41), (40, 30, 3, 3), (7, 64, 28, 28))


def channels(place: Place) -> Iterator[Row]:
    """Compare channel maxima, and measurements capped by them, with plain torch on the CPU."""
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        wrong = []
        for shape in SHAPES:
            grad = (
                torch.randn(shape, generator=draw, device="cpu")
                * 2.0 ** torch.randint(-30, 8, shape, generator=draw, device="cpu")
            ).to(dtype)
            grad.view(-1)[::97] = torch.inf
            laid_out = [grad, grad.transpose(0, 1)]
            laid_out += [grad.to(memory_format=torch.channels_last)] if len(shape) == 4 else []
            for turned in laid_out:
                for channel in range(len(shape)):
                    others = [d for d in range(len(shape)) if d != channel]
                    largest = channel_largest(turned.to(place.device), channel).cpu()
                    if not torch.equal(largest, turned.abs().amax(others)):
                        wrong.append(f"channel {channel} of {list(turned.shape)}")
            cap = Cap(torch.rand(shape[0], generator=draw, device="cpu").to(dtype), grad.stride(0))
            there = Cap(cap.largest.to(place.device), cap.inner)
            packed = measuring.measure_together([grad.to(place.device)], [there]).cpu()
            plain, capped = packed.split([packed_size(dtype)] * 2)
            if not torch.equal(capped[LEADING:], measure_plain(grad, cap)[LEADING:]):
                wrong.append(f"capped {list(shape)}")
            if not torch.equal(plain[LEADING:], measure_plain(grad)[LEADING:]):
                wrong.append(f"uncapped with capped {list(shape)}")
        yield Row(
            f"channels and caps, {str(dtype).removeprefix('torch.')}",
            "equal to plain torch's",
            f"differs: {', '.join(wrong)}" if wrong else f"{len(SHAPES)} shapes agree",
            "FAIL" if wrong else "pass",
        )


def many(place: Place) -> Iterator[Row]:
    """A thousand and five thousand tensors of all sizes in one call."""
    draw = torch.Generator().manual_seed(0)
    for count in (100, 500) if place.quick else (1000, 5000):
        sizes = torch.randint(1, 5000, (count,), generator=draw, device="cpu").tolist()
        tensors = [torch.randn(size, generator=draw, device="cpu") for size in sizes]
        there = [tensor.to(place.device) for tensor in tensors]
        got = measuring.measure_together(there).cpu().view(count, -1)
        expected = torch.stack([measure_plain(tensor) for tensor in tensors])
        same = torch.equal(got[:, :5], expected[:, :5]) and torch.equal(got[:, 7:], expected[:, 7:])
        took = seconds_of(place, partial(measuring.measure_together, there), 5)
        yield Row(
            f"{count:,} tensors measured together",
            "counts and extremes equal",
            f"{'equal' if same else 'differ'}; {took * 1e3:.2f} ms",
            "pass" if same else "FAIL",
            {"seconds": took},
        )


def blocks(place: Place) -> Iterator[Row]:
    """Compare distances below the tops of blocks with plain torch, for each way of scaling a weight."""
    draw = torch.Generator().manual_seed(0)
    faults: set[str] = set()
    for shape in ((515, 770), (512, 768)):  # rows that begin off a boundary of 16 bytes, and on it
        matrix = torch.exp2(4 * torch.randn(shape, generator=draw)) * torch.randn(shape, generator=draw).sign()
        there = matrix.to(place.device)
        got = [row.packed.cpu() for row in measure_blocks(there, "weight")]
        kernel = dispatch._kernels[place.device.type].pop("blocks", None)
        expected = [row.packed.cpu() for row in measure_blocks(there, "weight")]
        if kernel is None:
            faults.add("no kernel")
        else:
            dispatch._kernels[place.device.type]["blocks"] = kernel
        for one, other in zip(got, expected, strict=True):
            faults |= set() if torch.equal(one[[0, 3]], other[[0, 3]]) else {f"counts of {shape}"}
            faults |= set() if torch.allclose(one, other, rtol=1e-9) else {f"sums of {shape}"}
    large = torch.randn((512, 512) if place.quick else (8192, 3072), device=place.device)
    scalings = seconds_of(place, partial(measure_blocks, large, "activation"), 3)
    once = seconds_of(place, partial(measuring.measure_together, [large]), 3)
    yield Row(
        f"distances below the tops of blocks, {len(got)} scalings",
        "counts equal to plain torch's, sums to 1e-9, by the kernel",
        f"{f'wrong: {sorted(faults)}' if faults else 'agree'}; {scalings * 1e3:.1f} ms for {large.numel() / 1e6:.1f} M "
        f"values, {scalings / once:.0f} × the other statistics",
        "FAIL" if faults else "pass",
        {"seconds": scalings, "measure_seconds": once},
    )


def seconds_of(place: Place, work: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """Median seconds of `work` after a warm-up. With several `calls` in a row, the host prepares one while the device
    runs another."""
    taken = []
    for k in range(repeats + 3):
        place.settle()
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        place.settle()
        if k >= 3:
            taken.append((time.perf_counter() - begun) / calls)
    return float(np.median(taken))


def bandwidth(place: Place) -> Iterator[Row]:
    """Bytes per second that `measure` reads, compared with those that a copy reads and writes."""
    # Large enough that the GPU takes longer over each call than the host, which prepares the next one.
    values = 2**29 if place.cuda and not place.quick else 2**22
    repeats, calls = (5, 1) if place.quick else (7, 10)
    source = torch.randn(values, device=place.device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds_of(place, partial(target.copy_, source), repeats, calls)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensor = source.to(dtype)
        read = tensor.nbytes / seconds_of(place, partial(measuring.measure_together, [tensor]), repeats, calls)
        what = f"{values / 1e6:.0f} M {str(dtype).removeprefix('torch.')}"
        yield _row(what, read, copy, place.judged(read >= BANDWIDTH * copy))
    many = [torch.randn(shape, device=place.device) for shape in gpt2_shapes(layers=1 if place.quick else 12)]
    read = sum(t.nbytes for t in many) / seconds_of(place, partial(measuring.measure_together, many), repeats, calls)
    yield _row(f"{len(many)} gradients of GPT-2 small", read, copy, "shown")


def gpt2_shapes(layers: int) -> list[tuple[int, ...]]:
    """Shapes of the parameters of GPT-2 small."""
    width = 768
    block = [(width,)] * 4
    for outputs, inputs in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
        block += [(outputs, inputs), (outputs,)]
    return block * layers + [(50304, width), (1024, width), (width,), (width,)]


def _row(what: str, read: float, copy: float, verdict: str) -> Row:
    return Row(
        f"kernel bandwidth, {what}",
        f"≥ {BANDWIDTH:.0%} of a copy",
        f"{read / copy:.0%}: {read / 1e9:,.0f} of {copy / 1e9:,.0f} GB/s",
        verdict,
        {"bytes_per_s": read, "copy_bytes_per_s": copy},
    )
