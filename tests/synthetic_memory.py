"""Rows of `memory` like those of a step of a small model, on CUDA with peaks between the moments, on a CPU without.

writer.append("memory", memory_rows(step=4, device="cuda:0", precision="bf16", parameters=8 * 2**20))
"""

from typing import Any

BLOCKS = 4
CONTEXT = 300 * 2**20
"""What a process holds beside its tensors, on a CPU."""


def memory_rows(step: int, device: str, precision: str, parameters: int = 8 * 2**20) -> dict[str, list[Any]]:
    """Columns of a sampled step: AMP halves three quarters of the activations, and copies the weights."""
    low = precision in ("fp16", "bf16", "fp16-unscaled")
    of_block = 6 * parameters * (5 if low else 8) // 8
    copied = parameters // 2 if low else 0
    cuda = device.startswith("cuda")
    rows: list[dict[str, Any]] = []

    def note(moment: str, phase: str, name: str = "", *, kept: float, grads: int, above: int = 0) -> None:
        held = {
            "parameters_bytes": parameters,
            "buffers_bytes": 4096,
            "gradients_bytes": grads,
            "optimizer_bytes": 2 * parameters,
            "activations_bytes": int(kept * of_block),
            "autocast_bytes": int(copied * min(1.0, kept / BLOCKS)),
        }
        allocated = sum(held.values()) + (2 * 2**20 if cuda else CONTEXT)
        rows.append(
            {
                "step": step,
                "number": len(rows),
                "moment": moment,
                "name": name,
                "phase": phase,
                "device": device,
                "allocated_bytes": allocated,
                "peak_bytes": allocated + above if cuda else None,
                "reserved_bytes": 2 * allocated if cuda else None,
            }
            | held
        )

    note("step begins", "forward", kept=0, grads=0)
    for i in range(BLOCKS):
        note("module", "forward", f"blocks.{i}", kept=i + 1, grads=0, above=parameters // 4)
    note("forward ends", "forward", kept=BLOCKS, grads=0)
    note("backward begins", "forward", kept=BLOCKS, grads=0, above=parameters)
    for i in reversed(range(BLOCKS)):
        grads = parameters * (BLOCKS - i) // BLOCKS
        note("gradient", "backward", f"blocks.{i}.weight", kept=i, grads=grads, above=of_block + parameters)
    note("backward ends", "backward", kept=0, grads=parameters)
    note("optimizer begins", "optimizer", kept=0, grads=parameters)
    note("step ends", "optimizer", kept=0, grads=parameters, above=2 * parameters)
    return {column: [row[column] for row in rows] for column in rows[0]}
