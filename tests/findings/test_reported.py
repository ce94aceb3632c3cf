"""Faults that users reported: the thread, and the cases of the zoo that reproduce it and its repair.

`test_zoo` runs them: each fault is named by its code, and the twin, which follows the advice, has no findings.
"""

from tests.findings.zoo import ZOO

REPORTED = {
    "pytorch/torchtitan#700, #2389; modalities#462: gradients reduced in BF16": ("half-reduction", "reduced_in_bf16"),
    "modalities#464: gradients accumulated in BF16": ("half-accumulation", "accumulated_in_bf16_by_fsdp"),
    "Megatron --accumulate-allreduce-grads-in-fp32 left out": ("half-accumulation", "megatron_main_grad"),
    "huggingface/accelerate#3979: no FP32 masters under FSDP2": ("missing-fp32-masters", "masters_not_there"),
    "LlamaFactory#9769: BF16 weights under BF16 autocast": ("missing-fp32-masters", "autocast_over_bf16_weights"),
    "OneTrainer#996, torchao#1124: updates lost to rounding": ("lost-weight-updates", "lost_updates"),
    "deepspeed#7700: weight decay never applied": ("lost-weight-decay", "lost_decay"),
    "OneTrainer#1005: EMA stands still": ("average-stands-still", "still_average"),
    "huggingface/transformers#29285: rotary angles in BF16": ("rounded-positions", "rotary_angles_under_autocast"),
    "bitsandbytes#1973: second moments vanish": ("vanishing-second-moments", "second_moments_in_bf16"),
    "logits and loss in BF16 over a large vocabulary": ("half-logits", "cross_entropy"),
    "Switch Transformers, section 2.4: router in BF16": ("half-router", "router_of_one"),
    "verl#2953, #3694: two formats in one training": ("rank-dtype-mismatch", "rank_in_another_dtype"),
    "pytorch#168126, #190626: casts that compile elides": ("compile-elides-casts", "casts_left_out"),
}


def test_each_reported_fault_is_in_the_zoo_under_its_code() -> None:
    assert set(REPORTED.values()) <= {(case.code, case.name) for case in ZOO}
