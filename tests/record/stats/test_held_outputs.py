"""Output gradients that wait for others are measured as they would be alone, with the CUDA kernels run on the host."""

from collections.abc import Iterator

import pytest
import torch

from amp_core.record import backends
from amp_core.record.backends.cpu import Cpu
from amp_core.record.stats import dispatch, holding
from amp_core.record.stats.channels import ChannelLargest, cap_for
from amp_core.record.stats.cuda.measure import measure_cuda, outputs_cuda
from amp_core.record.stats.held_outputs import HeldOutputs, LayerChannel
from amp_core.record.stats.layout import LEADING, Cap, Key
from amp_core.record.stats.plain import measure_plain
from tests.compilers import needs_cxx
from tests.record.stats.cuda.on_host import on_host

CPU = torch.device("cpu")
LINEAR = LayerChannel(weight=1, channel=1, row=0, dims=2)
CONVOLUTION = LayerChannel(weight=2, channel=1, row=0, dims=4)

pytestmark = needs_cxx


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The kernel that holds outputs is one of the CPU's."""
    monkeypatch.setattr(dispatch, "_kernels", {"cpu": {"outputs": outputs_cuda, "measure": measure_cuda}})
    with on_host() as made:
        yield made


def key(number: int) -> Key:
    return f"module.{number}", "output_grad", "float32"


def values_of(largest: ChannelLargest) -> torch.Tensor:
    """Those of a layer that are in a tensor of their own, as on a device."""
    assert isinstance(largest.held, torch.Tensor)
    return largest.held


def plainly(*grads: torch.Tensor) -> torch.Tensor:
    return torch.cat([measure_plain(grad) for grad in grads])


def assert_same(packed: torch.Tensor, *grads: torch.Tensor) -> None:
    assert torch.allclose(packed, plainly(*grads), rtol=1e-12)


def test_gradients_of_a_backward_take_one_launch_for_each_kernel(launches: list[tuple[str, str]]) -> None:
    largest: dict[int, ChannelLargest] = {}
    held = HeldOutputs(CPU, largest)
    first, again, image = torch.randn(8, 5), torch.randn(3, 5), torch.randn(2, 4, 3, 3)
    for number, (grad, layer) in enumerate([(first, LINEAR), (image, CONVOLUTION), (again, LINEAR)]):
        assert held.add(key(number), grad, layer)
    assert held.add(key(3), torch.ones(7), None) and launches == []
    ((keys, packed),) = held.take()
    assert keys == [key(k) for k in range(4)] and [kernel for _, kernel in launches] == ["measure", "channels"]
    assert_same(packed, first, image, again, torch.ones(7))
    assert torch.equal(values_of(largest[1]), torch.cat([first, again]).abs().amax(0))
    assert torch.equal(values_of(largest[2]), image.abs().amax((0, 2, 3)))
    assert held.take() == []


def test_no_more_than_so_many_bytes_are_held(launches: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "MIN_BYTES", 4 * 100)
    largest: dict[int, ChannelLargest] = {}
    held = HeldOutputs(CPU, largest)
    grads = [torch.randn(10, 6) for _ in range(5)]
    for number, grad in enumerate(grads):
        held.add(key(number), grad, LINEAR)
        assert sum(g.grad.nbytes for g in held._waiting) < 400
    measured = held.take()
    assert [len(keys) for keys, _ in measured] == [2, 2, 1]
    assert_same(torch.cat([packed for _, packed in measured]), *grads)
    assert torch.equal(values_of(largest[1]), torch.cat(grads).abs().amax(0))  # over all batches of the step


def test_the_largest_of_an_earlier_step_does_not_count(launches: list[tuple[str, str]]) -> None:
    largest: dict[int, ChannelLargest] = {}
    held = HeldOutputs(CPU, largest)
    held.add(key(0), torch.full((2, 3), 9.0), LINEAR)
    held.take()
    largest[1].present = False
    held.add(key(0), torch.ones(2, 3), LINEAR)
    held.take()
    assert values_of(largest[1]).tolist() == [1, 1, 1] and largest[1].present


def capped_by(largest: dict[int, ChannelLargest], *weights: torch.Tensor) -> list[Cap | None]:
    """The cap of each gradient of the weight of `LINEAR`."""
    return [cap_for(w, values_of(largest[1]), row=0, dims=2, dtype=largest[1].dtype) for w in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weight_gradients_share_the_table_and_have_the_caps_of_what_waited(
    launches: list[tuple[str, str]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    whole = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda rows: copies.append(len(rows)) or whole(rows))
    largest: dict[int, ChannelLargest] = {}
    held = HeldOutputs(CPU, largest)
    grad, weight, bias = torch.randn(8, 5).half(), 1e3 * torch.randn(5, 7, dtype=dtype), torch.randn(5)
    held.add(key(0), grad, LINEAR)
    packed, caps = held.measure_with([weight, bias], lambda: capped_by(largest, weight, bias))
    # BF16 gradients need the largest FP16 ones converted first.
    assert len(copies) == (2 if dtype is torch.bfloat16 else 1)
    assert caps[1] is None and caps[0] is not None
    assert torch.equal(caps[0].largest, grad.abs().amax(0).to(caps[0].largest.dtype))
    limited = measure_plain(weight, caps[0])
    assert_same(packed[: -len(limited)], weight, bias)
    assert torch.equal(packed[-len(limited) :][LEADING:], limited[LEADING:])
    ((keys, of_outputs),) = held.take()
    assert keys == [key(0)]
    assert_same(of_outputs, grad)


def test_weight_gradients_are_measured_where_all_that_waited_was_written_to(launches: list[tuple[str, str]]) -> None:
    held = HeldOutputs(CPU, {})
    written = torch.ones(4, 5)
    held.add(key(0), written, LINEAR)
    written.mul_(2)
    weight = torch.randn(5, 7)
    packed, caps = held.measure_with([weight], lambda: [None])
    assert caps == [None] and held.take() == []
    assert_same(packed, weight)


def test_a_gradient_that_is_written_to_is_left_out_and_then_none_is_held(launches: list[tuple[str, str]]) -> None:
    held = HeldOutputs(CPU, {})
    kept, written = torch.ones(4), torch.ones(4)
    held.add(key(0), kept, None)
    held.add(key(1), written, None)
    written.mul_(2)
    ((keys, packed),) = held.take()
    assert keys == [key(0)]
    assert_same(packed, kept)
    assert not held.add(key(2), kept, None)


def test_forgotten_gradients_are_not_measured(launches: list[tuple[str, str]]) -> None:
    held = HeldOutputs(CPU, {})
    held.add(key(0), torch.ones(4), None)
    held.forget()
    assert held.take() == [] and launches == []


def test_where_the_kernel_fails_nothing_that_waits_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Accelerator(Cpu):
        may_lack_kernels = True

    def fails(*args: object) -> None:
        raise RuntimeError("CUDA driver: an error")

    monkeypatch.setitem(backends.BACKENDS, "cpu", Accelerator)
    monkeypatch.setattr(dispatch, "_kernels", {"cpu": {"outputs": fails}})
    monkeypatch.setattr(dispatch, "fallbacks", {})
    largest: dict[int, ChannelLargest] = {}
    held = HeldOutputs(CPU, largest)
    first, again = torch.randn(8, 5).bfloat16(), torch.randn(3, 5).bfloat16()
    held.add(key(0), first, LINEAR)
    held.add(key(1), again, LINEAR)
    weight = torch.randn(5, 7)
    measured, caps = held.measure_with([weight], lambda: capped_by(largest, weight))
    assert caps[0] is not None
    assert torch.allclose(measured, torch.cat([plainly(weight), measure_plain(weight, caps[0])]), rtol=1e-12)
    ((_, packed),) = held.take()
    assert_same(packed, first, again)
    assert torch.equal(values_of(largest[1]), torch.cat([first, again]).abs().amax(0).float())
    cap = cap_for(torch.ones(5, 2).bfloat16(), values_of(largest[1]), row=0, dims=2, dtype=largest[1].dtype)
    assert cap is not None and cap.largest.dtype is torch.float32  # nothing converts what is exact
    assert dispatch.fallbacks == {"cpu": "CUDA driver: an error"}
    assert not held.add(key(2), first, LINEAR)
