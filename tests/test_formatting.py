"""Names of kernels in words."""

import pytest

from amp_core.text.formatting import kernel_in_words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, add>(int)", "vectorized_elementwise_kernel<4, add>"),
        (
            "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiii",
            "cutlass::device_kernel<gemm::kernel::GemmUniversal…>",
        ),
        ("_Z20magma_sgemmEx_kernelIfffLb1ELb0ELi6E", "magma_sgemmEx_kernel<…>"),
        ("_ZN6Kernel3runEv", "Kernel::run"),
        ("_ZN12_GLOBAL__N_13fooEv", "foo"),
        ("_Z9gemm", "_Z9gemm"),
        ("/home/user/torchinductor/sdsc_fused_mm_0_434jgp19/bundle.mlir", "sdsc_fused_mm_0_434jgp19"),
    ],
)
def test_kernels_have_readable_names(name, words):
    assert kernel_in_words(name) == words
