"""Advice on the dtype in which processes exchange gradients."""

from pathlib import Path

import pytest

from amp_core import diagnose, load_run
from amp_core.store.writer import RunWriter


@pytest.mark.parametrize(
    ("settings", "config", "says"),
    [
        ({"reduce_dtype": "bfloat16"}, {}, "fully_shard"),
        ({"hook": "my_hook", "reduced": "float16"}, {"parallel": "ddp"}, "without register_comm_hook"),
        ({"hook": "bf16_compress_hook"}, {"parallel": "ddp"}, "without register_comm_hook"),
        ({"reduced": "bfloat16"}, {}, "gradient = p.grad.float()"),
        ({}, {"parallel": "ddp"}, "model.float()"),
    ],
)
def test_gradients_reduced_in_16_bits_get_advice_for_how_they_are_reduced(
    tmp_path: Path, settings: dict[str, str], config: dict[str, object], says: str
) -> None:
    model = {} if settings else {"dtypes": {"layer.weight": "bfloat16"}}
    with RunWriter(
        tmp_path / "run", name="run", config=config | {"communication": settings}, model=model, world_size=2
    ):
        pass
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "half-reduction"]
    assert says in finding.snippet
