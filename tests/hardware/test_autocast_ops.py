"""Autocast's lists, compared with the registrations of the installed torch, and with its behaviour.

CUDA operators are called on fake tensors, which have a device and a dtype but no memory: autocast depends only on
these, so no GPU is needed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core.hardware import autocast_ops

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
READ_HERE = torch.__version__.startswith(autocast_ops.READ_AT.removeprefix("PyTorch "))
"""Whether this is the torch whose lists were read; others have a few operators more or less."""
NO_DRIVER = torch.version.cuda is not None and not torch.cuda.is_available()
"""A build for CUDA asks the driver some things even of fake tensors."""
aten = torch.ops.aten


def ones(*shape: int) -> Callable[[torch.dtype, str], torch.Tensor]:
    """A placeholder for a tensor with the dtype and device of the test."""
    return lambda dtype, device: torch.ones(shape, dtype=dtype, device=device)


def index(*shape: int) -> Callable[[torch.dtype, str], torch.Tensor]:
    return lambda _, device: torch.zeros(shape, dtype=torch.long, device=device)


M, V, S = ones(4, 4), ones(4), ones(2, 4, 4)
I1, I2, I3 = ones(1, 2, 8), ones(1, 2, 8, 8), ones(1, 2, 8, 8, 8)
PRODUCTS: dict[str, tuple[Any, ...]] = {
    "conv1d": (I1, ones(3, 2, 3)),
    "conv2d": (I2, ones(3, 2, 3, 3)),
    "conv3d": (I3, ones(3, 2, 3, 3, 3)),
    "conv_tbc": (ones(5, 2, 3), ones(3, 3, 4), V, 1),
    "conv_transpose1d": (I1, ones(2, 3, 3)),
    "conv_transpose2d": (I2, ones(2, 3, 3, 3)),
    "conv_transpose3d": (I3, ones(2, 3, 3, 3, 3)),
    "convolution": (I2, ones(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "prelu": (I2, ones(2)),
    "addmm": (M, M, M),
    "addmv": (V, M, V),
    "addr": (M, V, V),
    "matmul": (M, M),
    "einsum": ("ij,jk->ik", [M, M]),
    "mm": (M, M),
    "mv": (M, V),
    "linalg_vecdot": (M, M),
    "linear": (M, M),
    "addbmm": (M, S, S),
    "baddbmm": (S, S, S),
    "bmm": (S, S),
    "chain_matmul": ([M, M, M],),
    "linalg_multi_dot": ([M, M, M],),
    "rnn_tanh_cell": (M, M, M, M),
    "rnn_relu_cell": (M, M, M, M),
    "scaled_dot_product_attention": (ones(1, 2, 4, 8), ones(1, 2, 4, 8), ones(1, 2, 4, 8)),
    "_addmm_activation": (V, M, M),
}
"""Arguments of operators that autocast runs in 16 bits on one of the devices."""

PAIR = (M, M)
TARGETS = (M, index(4))
WIDE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"), (M,)),
    **dict.fromkeys(("reciprocal", "rsqrt", "sinh", "tan"), (M,)),
    "pow": (M, 2.0),
    "softplus": (M,),
    "layer_norm": (M, [4]),
    "native_layer_norm": (M, [4], None, None, 1e-5),
    "rms_norm": (M, [4]),
    "group_norm": (I2, 2),
    "frobenius_norm": (M, [1]),
    "nuclear_norm": (M,),
    "cosine_similarity": PAIR,
    "poisson_nll_loss": (M, M, True, False, 1e-8, 1),
    "cosine_embedding_loss": (M, M, V),
    "nll_loss": TARGETS,
    "nll_loss2d": (ones(1, 4, 2, 2), index(1, 2, 2)),
    "hinge_embedding_loss": PAIR,
    "kl_div": PAIR,
    "l1_loss": PAIR,
    "smooth_l1_loss": PAIR,
    "huber_loss": PAIR,
    "mse_loss": PAIR,
    "margin_ranking_loss": (V, V, V),
    "multilabel_margin_loss": (M, index(4, 4)),
    "soft_margin_loss": PAIR,
    "triplet_margin_loss": (M, M, M),
    "multi_margin_loss": TARGETS,
    "binary_cross_entropy_with_logits": PAIR,
    "binary_cross_entropy": PAIR,
    "dist": PAIR,
    "pdist": (M,),
    "cdist": PAIR,
    "renorm": (M, 2, 0, 1.0),
    "logsumexp": (M, [1]),
    "upsample_nearest1d": (I1, [4]),
    "upsample_nearest2d": (I2, [4, 4]),
    "upsample_nearest3d": (I3, [4, 4, 4]),
    "upsample_linear1d": (I1, [4], False),
    "upsample_bilinear2d": (I2, [4, 4], False),
    "upsample_trilinear3d": (I3, [4, 4, 4], False),
    "upsample_bicubic2d": (I2, [4, 4], False),
    "prod": (M,),
    "softmax": (M, 1),
    "log_softmax": (M, 1),
    "cumprod": (M, 1),
    "cumsum": (M, 1),
    "linalg_vector_norm": (M,),
    "linalg_matrix_norm": (M,),
    "sum": (M,),
    "norm": (M, 2),
    "cross_entropy_loss": TARGETS,
    "avg_pool3d": (I3, [2, 2, 2]),
    "max_pool3d": (I3, [2, 2, 2]),
    "adaptive_avg_pool3d": (I3, [2, 2, 2]),
    "adaptive_max_pool3d": (I3, [2, 2, 2]),
    "grid_sampler": (I2, ones(1, 2, 2, 2), 0, 0, False),
    "grid_sampler_2d": (I2, ones(1, 2, 2, 2), 0, 0, False),
    "grid_sampler_3d": (I3, ones(1, 2, 2, 2, 3), 0, 0, False),
    "polar": PAIR,
    "quantile": (M, 0.5),
    "nanquantile": (M, 0.5),
    "trace": (M,),
    "view_as_complex": (ones(4, 2),),
    "cholesky_solve": PAIR,
    "inverse": (lambda dtype, device: torch.eye(3, dtype=dtype, device=device),),
    "linalg_inv": (lambda dtype, device: torch.eye(3, dtype=dtype, device=device),),
    "linalg_cholesky": (lambda dtype, device: torch.eye(3, dtype=dtype, device=device),),
    "linalg_svdvals": (M,),
    "linalg_qr": (M,),
    "linalg_svd": (M,),
    "linalg_eigvals": (M,),
    "linalg_eigvalsh": (M,),
    "pinverse": (M,),
    "reflection_pad1d": (I1, [1, 1]),
    "reflection_pad2d": (I2, [1, 1, 1, 1]),
    "replication_pad1d": (I1, [1, 1]),
    "replication_pad2d": (I2, [1, 1, 1, 1]),
    "replication_pad3d": (I3, [1] * 6),
    **dict.fromkeys(("fft_fft", "fft_ifft", "fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn", "fft_rfft"), (M,)),
    **dict.fromkeys(("fft_rfft2", "fft_rfftn"), (M,)),
    "fft_ihfft": (V,),
}
"""Arguments of operators that autocast runs in FP32 on one of the devices."""

PROMOTED: dict[str, Callable[[Any, Any], Any]] = {
    "addcdiv": lambda narrow, wide: torch.addcdiv(narrow, wide, narrow),
    "addcmul": lambda narrow, wide: torch.addcmul(narrow, wide, narrow),
    "atan2": torch.atan2,
    "cross": lambda narrow, wide: torch.cross(narrow, wide, dim=1),
    "dot": lambda narrow, wide: torch.dot(narrow.flatten(), wide.flatten()),
    "vdot": lambda narrow, wide: torch.vdot(narrow.flatten(), wide.flatten()),
    "tensordot": torch.tensordot,
    "scatter_add": lambda narrow, wide: narrow.scatter_add(
        0, torch.zeros((3, 3), dtype=torch.long, device=narrow.device), wide
    ),
    "index_put": lambda narrow, wide: torch.index_put(
        narrow, (torch.zeros(3, dtype=torch.long, device=narrow.device),), wide
    ),
    "cat": lambda narrow, wide: torch.cat([narrow, wide]),
    "stack": lambda narrow, wide: torch.stack([narrow, wide]),
    "index_copy": lambda narrow, wide: torch.index_copy(
        narrow, 0, torch.arange(3, device=narrow.device), wide
    ),
}  # fmt: skip


def on(device: str, call: Callable[[], Any]) -> Any:
    """`call()` under autocast to bfloat16 on that device, with fake tensors if there is no such device."""

    def under_autocast() -> Any:
        before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, True)  # torch.autocast refuses a missing device
        torch.set_autocast_dtype(device, torch.bfloat16)
        try:
            return call()
        finally:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])

    with torch.no_grad():
        if device == "cpu":
            return under_autocast()
        with FakeTensorMode():
            return under_autocast()


def result_dtype(name: str, arguments: tuple[Any, ...], dtype: torch.dtype, device: str) -> torch.dtype:
    def as_tensor(value: Any) -> Any:
        if isinstance(value, list):
            return [as_tensor(v) for v in value]
        return value(dtype, device) if callable(value) else value

    out = on(device, lambda: getattr(aten, name)(*[as_tensor(a) for a in arguments]))
    out = out if isinstance(out, torch.Tensor) else out[0]
    return {torch.complex64: torch.float32}.get(out.dtype, out.dtype)


def registered(device: str) -> set[str]:
    """The operators of torch with an autocast entry."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device])  # type: ignore[attr-defined]
    return {name.partition("::")[2].partition(".")[0] for name in names if name.startswith("aten::")}


def listed(device: str, *policies: str) -> list[str]:
    return [op for policy in policies for op in autocast_ops.LISTS[device].get(policy, ())]


@pytest.mark.parametrize("device", KEYS)
def test_the_lists_match_the_registrations_of_torch(device: str) -> None:
    ours = [op for ops in autocast_ops.LISTS[device].values() for op in ops]
    assert len(ours) == len(set(ours)) > 100
    difference = set(ours) ^ registered(device)
    assert difference <= {"_cudnn_rnn"} if READ_HERE else len(difference) <= 20


CALLED = [
    (device, name)
    for device in KEYS
    for name in listed(device, "lower_precision_fp", "fp32", "fp32_set_opt_dtype", "fp32_append_dtype")
    if (name in PRODUCTS or name in WIDE) and name in registered(device)
]


@pytest.fixture(autouse=True)
def _needs_a_driver(request: pytest.FixtureRequest) -> None:
    if NO_DRIVER and "cuda" in request.node.name:
        pytest.skip("a torch built for CUDA needs its driver here")


@pytest.mark.parametrize(("device", "name"), CALLED)
def test_a_listed_operator_returns_the_dtype_of_its_policy(device: str, name: str) -> None:
    if autocast_ops.policy(name, device) == "lower_precision_fp":
        assert result_dtype(name, PRODUCTS[name], torch.float32, device) == torch.bfloat16
    else:
        assert result_dtype(name, WIDE[name], torch.bfloat16, device) == torch.float32


@pytest.mark.parametrize(("device", "name"), [(d, n) for d in KEYS for n in listed(d, "promote") if n in PROMOTED])
def test_promotion_is_to_the_widest_input(device: str, name: str) -> None:
    def call() -> torch.Tensor:
        narrow = torch.ones(3, 3, dtype=torch.bfloat16, device=device)
        return PROMOTED[name](narrow, torch.ones(3, 3, device=device))

    assert on(device, call).dtype == torch.float32


def test_most_of_each_list_was_called() -> None:
    for device in KEYS:
        called = {name for d, name in CALLED if d == device} | (PROMOTED.keys() & set(listed(device, "promote")))
        assert len(called) >= 0.65 * sum(len(ops) for ops in autocast_ops.LISTS[device].values()), device


def test_operators_banned_on_cuda_raise_only_there() -> None:
    assert autocast_ops.policy("binary_cross_entropy", "cuda") == "banned"
    assert autocast_ops.policy("binary_cross_entropy", "cpu") == "fp32"
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        result_dtype("binary_cross_entropy", PAIR, torch.float32, "cuda")


def test_known_differences_between_cpu_and_cuda_are_in_the_lists() -> None:
    for op in ("layer_norm", "softmax", "pow", "sum"):
        assert autocast_ops.policy(op, "cpu") is None and (autocast_ops.policy(op, "cuda") or "").startswith("fp32")
    for op in ("batch_norm", "gelu", "relu", "add", "mul", "embedding"):
        assert autocast_ops.policy(op, "cpu") is autocast_ops.policy(op, "cuda") is None
    assert autocast_ops.policy("mm", "mps") is None  # other devices have no lists


def test_operators_are_looked_up_by_kernel_names() -> None:
    assert autocast_ops.listed_as("aten::_log_softmax.default") == "log_softmax"
    assert autocast_ops.policy("mine::mm") is None and autocast_ops.listed_as("mine::mm") == "mine::mm"
    assert (
        autocast_ops.policy("aten::convolution", "cpu")
        == autocast_ops.policy("aten::convolution")
        == "lower_precision_fp"
    )
    assert autocast_ops.policy("aten::_scaled_dot_product_flash_attention_for_cpu", "cpu") == "lower_precision_fp"
    missing = {name for name in autocast_ops.KERNELS if name != "cross_entropy" and not hasattr(aten, name)}
    assert not missing if READ_HERE else len(missing) <= 3
    for target in autocast_ops.KERNELS.values():
        assert any(autocast_ops.policy(target, device) for device in KEYS), target


def test_cross_entropy_on_cuda_keeps_the_dtype_of_its_logits() -> None:
    logits = lambda device: torch.ones(4, 4, dtype=torch.bfloat16, device=device)  # noqa: E731
    inner = on("cuda", lambda: torch.log_softmax(logits("cuda"), 1, dtype=torch.bfloat16))
    assert inner.dtype == torch.bfloat16  # the policy only sets an unspecified dtype
    assert on("cuda", lambda: F.log_softmax(logits("cuda"), 1)).dtype == torch.float32
