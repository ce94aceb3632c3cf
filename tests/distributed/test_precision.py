"""BF16 in two real processes: sound DDP and FSDP2 trainings have no warnings, and each fault of sharing is named."""

import pytest

from amp_core import diagnose
from amp_core.analysis import first_difference, precision_settings


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


def test_the_same_training_under_ddp_and_fsdp2_does_not_differ_by_more_than_noise(trained):
    replicated, sharded, moved = (trained(f"alike-{how}").run for how in ("ddp", "fsdp", "ddp-moved"))
    for one, other in ((replicated, sharded), (sharded, replicated)):
        assert first_difference(one, other, floor=moved).step is None
    assert first_difference(replicated, moved).step == 0


def test_a_block_that_fsdp2_computes_in_bf16_is_where_it_differs_from_ddp(trained):
    runs = [trained(f"alike-{how}").run for how in ("ddp", "fsdp-narrow", "ddp-moved")]
    where = first_difference(*runs)
    assert (where.step, where.phase, where.kind, where.name) == (0, "forward", "activation", "blocks.1.fc")
    assert where.dtypes == ("float32", "bfloat16")
