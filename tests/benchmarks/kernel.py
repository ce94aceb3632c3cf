"""`measure` compared with `tensor.sum()` over the same memory: `python -m tests.benchmarks.kernel [--millions 50]`.

`sum` reads each value once, which is about the minimal cost of a statistic.
"""

import argparse

import numpy as np
import torch

from amp_core.record.stats.measure import measure, measure_together
from tests.benchmarks.measuring import by_turns, machine, ratio, table


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--millions", type=int, default=50, help="values in the large tensor")
    options.add_argument("--turns", type=int, default=15)
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    torch.manual_seed(0)
    many = [torch.randn(64, 64, device=given.device) for _ in range(50)]
    large = torch.randn(given.millions * 1_000_000, device=given.device)
    cases = [(f"{given.millions} M {name}", large.to(dtype), 1) for name, dtype in DTYPES.items()]
    rows = []
    for label, tensor, repeats in [*cases, ("50 tensors of 64 × 64, float32", many, 200)]:
        tensors = tensor if isinstance(tensor, list) else [tensor]

        def add_up(tensors: list[torch.Tensor] = tensors, repeats: int = repeats) -> None:
            for _ in range(repeats):
                for one in tensors:
                    one.sum()
            settle(given.device)

        def record(tensors: list[torch.Tensor] = tensors, repeats: int = repeats) -> None:
            for _ in range(repeats):
                measure_together(tensors)
            settle(given.device)

        for _ in range(3):
            add_up()
            record()
        seconds = by_turns({"sum": add_up, "measure": record}, given.turns)
        sums, records = (np.median(seconds[name]) / repeats for name in ("sum", "measure"))
        rows.append([label, milliseconds(sums), milliseconds(records), ratio(seconds["measure"], seconds["sum"])])
    print(table(["what", "sum", "measure", "measure ÷ sum"], rows))
    print(f"\n{machine()}")
    check(large)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def settle(device: str) -> None:
    """Wait until the device is idle."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def check(tensor: torch.Tensor) -> None:
    """Check that the timed code computes the right result."""
    packed = measure([tensor])[0]
    assert int(packed[:3].sum() + packed[7:].sum()) == tensor.numel()


if __name__ == "__main__":
    main()
