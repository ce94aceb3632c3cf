"""Which operators autocast runs in 16 bits, which in FP32, and which it leaves alone: one table per device.

    >>> policy("aten::linear", "cuda"), policy("softmax", "cuda"), policy("softmax", "cpu")
    ('lower_precision_fp', 'fp32_set_opt_dtype', None)
    >>> listed_as("aten::_softmax")
    'softmax'

The lists of the two devices differ: a trace of a CPU does not show what a GPU would do. An operator that is in no list
runs in the dtype of its inputs. `KERNELS` maps the names in a trace to the names in the lists: autocast has a policy
for `softmax`, and a trace shows `_softmax`.

Taken from PyTorch 2.13.0: for CUDA the AT_FORALL_ macros of aten/src/ATen/autocast_mode.h, with the further
registrations of autocast_mode.cpp and native/cudnn/RNN.cpp; for CPU the KERNEL_CPU lines of autocast_mode.cpp. The
tests compare both with what the installed torch has registered, and call on the CPU what can be called.
"""

from collections.abc import Mapping
from types import MappingProxyType


def _lists(**words: str) -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType({policy: tuple(text.split()) for policy, text in words.items()})


READ_AT = "PyTorch 2.13.0"
"""The version that the lists were taken from."""

POLICIES = MappingProxyType(
    {
        "lower_precision_fp": "runs in autocast's 16-bit dtype",
        "fp32": "runs in FP32",
        "fp32_set_opt_dtype": "runs in FP32, unless the call sets a dtype",
        "fp32_append_dtype": "runs in FP32",
        "promote": "runs in the widest dtype among its inputs",
        "banned": "raises an error",
    }
)
"""What each policy does to an operator. Inputs in FP64 or on another device are left as they are."""

FP32_POLICIES = frozenset(name for name in POLICIES if name.startswith("fp32"))
"""The policies that run an operator in FP32."""

CUDA = _lists(
    lower_precision_fp=(
        "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution "
        "cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot "
        "linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell "
        "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn _scaled_dot_product_flash_attention "
        "scaled_dot_product_attention"
    ),
    fp32=(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
        "native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
        "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
        "mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
        "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
        "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
        "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
    ),
    fp32_set_opt_dtype=("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"),
    fp32_append_dtype="norm",
    promote=("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"),
    banned="binary_cross_entropy",
)
"""CUDA, including ROCm. Only builds with cuDNN have `_cudnn_rnn`."""

CPU = _lists(
    lower_precision_fp=(
        "conv1d conv2d conv3d bmm mm linalg_vecdot baddbmm addmm _addmm_activation addbmm linear _convolution "
        "matmul conv_tbc mkldnn_rnn_layer conv_transpose1d conv_transpose2d conv_transpose3d prelu "
        "scaled_dot_product_attention _native_multi_head_attention"
    ),
    fp32=(
        "avg_pool3d binary_cross_entropy grid_sampler polar prod quantile nanquantile stft cdist grid_sampler_2d "
        "_grid_sampler_2d_cpu_fallback grid_sampler_3d trace view_as_complex cholesky cholesky_inverse "
        "cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d max_unpool3d "
        "adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
        "replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss "
        "poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss "
        "soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss kl_div multilabel_margin_loss "
        "binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft "
        "fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond linalg_matrix_rank "
        "linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv "
        "linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf "
        "_lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d "
        "multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh "
        "linalg_lstsq linalg_inv_ex"
    ),
    promote="stack cat index_copy",
)

LISTS = MappingProxyType({"cuda": CUDA, "cpu": CPU})
"""The lists of each device type that a training can be sent to, by policy; empty if nothing is known of them."""

KERNELS = MappingProxyType(
    {
        "_softmax": "softmax",
        "_log_softmax": "log_softmax",
        "native_layer_norm": "layer_norm",
        "native_group_norm": "group_norm",
        "_fused_rms_norm": "rms_norm",
        "convolution": "_convolution",
        "mkldnn_convolution": "_convolution",
        "convolution_overrideable": "_convolution",
        "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
        "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
        "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
        "_scaled_dot_product_fused_attention_overrideable": "scaled_dot_product_attention",
        "_scaled_dot_product_attention_math": "scaled_dot_product_attention",
        "_prelu_kernel": "prelu",
        "nll_loss_forward": "nll_loss",
        "nll_loss2d_forward": "nll_loss2d",
        "cross_entropy": "cross_entropy_loss",
        "_ctc_loss": "ctc_loss",
        "_cdist_forward": "cdist",
        "_euclidean_dist": "cdist",
        "_pdist_forward": "pdist",
        "_trilinear": "bilinear",
        "linalg_cross": "cross",
        "_index_put_impl_": "index_put",
        "cudnn_grid_sampler": "grid_sampler",
        "grid_sampler_2d": "grid_sampler",
        "grid_sampler_3d": "grid_sampler",
        "max_pool3d_with_indices": "max_pool3d",
        "_adaptive_avg_pool3d": "adaptive_avg_pool3d",
        "multilabel_margin_loss_forward": "multilabel_margin_loss",
        "_linalg_svd": "linalg_svd",
        "_linalg_eigh": "linalg_eigh",
        "_linalg_solve_ex": "linalg_solve",
        "_fft_r2c": "fft_rfft",
        "_fft_c2r": "fft_irfft",
        "_fft_c2c": "fft_fft",
    }
)
"""Name in autocast's lists of an operator, by its name in a trace; and of one Python function, `cross_entropy`."""

_POLICY = {device: {op: policy for policy, ops in lists.items() for op in ops} for device, lists in LISTS.items()}


def listed_as(op: str, device: str = "cuda") -> str:
    """The name that autocast's lists use for `op`; `op` itself where the list of the device type has it.

    Operators of other libraries than torch's own (`mine::mm`) are in no list.
    """
    library, _, bare = op.rpartition("::")
    if library not in ("", "aten"):
        return op
    bare = bare.partition(".")[0]
    return bare if bare in _POLICY.get(device, {}) else KERNELS.get(bare, bare)


def policy(op: str, device: str = "cuda") -> str | None:
    """The policy (a key of `POLICIES`) of an operator, given with or without `aten::`, or None if it has none.

    `device` is a type: `cuda` or `cpu`. Operators of any other device have None.
    """
    return _POLICY.get(device, {}).get(listed_as(op, device))
