"""BF16 in two real processes: sound DDP and FSDP2 trainings have no warnings, and each fault of sharing is named."""

import pytest

from amp_core import diagnose
from amp_core.analysis import precision_settings


def warnings_of(done):
    assert done.codes == [0, 0]
    return {(f.code, f.where) for f in diagnose(done.run) if f.severity != "info"}


@pytest.mark.parametrize("how", ["bf16-ddp", "bf16-fsdp"])
def test_a_sound_training_of_two_ranks_has_no_warnings(trained, how):
    assert warnings_of(trained(how)) == set()


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("bf16-ddp", "float32"),
        ("bf16-fsdp", "float32"),
        ("bf16-ddp-reduce", "float16"),
        ("bf16-fsdp-reduce", "bfloat16"),
    ],
)
def test_the_dtype_of_the_reduction_is_seen(trained, how, dtype):
    assert precision_settings(trained(how).run).set_index("stage").loc["reduction", "seen"] == dtype


@pytest.mark.parametrize(
    ("how", "code", "where"),
    [
        ("bf16-ddp-reduce", "half-reduction", "fp16_compress_hook"),
        ("bf16-fsdp-reduce", "half-reduction", "reduce_dtype"),
        ("bf16-fsdp-output", "half-output-policy", "output_dtype"),
        ("bf16-ddp-ranks", "rank-dtype-mismatch", "rank 1"),
    ],
)
def test_a_fault_of_sharing_is_named(trained, how, code, where):
    assert code in {c for c, w in warnings_of(trained(how)) if where in w}, warnings_of(trained(how))
