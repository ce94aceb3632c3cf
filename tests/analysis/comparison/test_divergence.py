"""Where two runs part: faults planted at a known step, phase and layer of real trainings."""

import json
from pathlib import Path

import pytest
import torch

from amp_core import Run, RunError, load_run, watch
from amp_core.__main__ import main
from amp_core.analysis import first_difference
from amp_core.store.writer import RunWriter
from tests.synthetic import write_rows

KINDS = ("weight_grad", "output_grad", "activation", "weight")
STEPS = 12


class Block(torch.nn.Module):
    """A layer whose input can be multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x * self.factor))


def trained(folder: Path, fault: tuple[str, int] | None = None, perturbed: float = 0.0, every: int = 1) -> Run:
    """A training that differs from others in one phase of one step, in the third of four blocks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + perturbed * torch.randn_like(p))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    layer = model[2]
    with watch(model, optimizer, into=folder, every=every, kinds=KINDS) as rec:
        for step in range(STEPS):
            torch.manual_seed(step)
            x = torch.randn(8, 16)
            layer.factor = 1.05 if fault == ("forward", step) else 1.0
            loss = ((model(x) - x) ** 2).mean()
            loss.backward()
            if fault == ("backward", step):
                layer.linear.weight.grad.mul_(1.2)
            optimizer.step()
            optimizer.zero_grad()
            rec.log(loss=loss)
            if fault == ("optimizer", step):
                with torch.no_grad():
                    layer.linear.weight.mul_(1.1)
    return load_run(folder)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("forward", (7, "forward", "activation", "2.linear")),
        ("backward", (7, "backward", "weight_grad", "2.linear.weight")),
        ("optimizer", (8, "optimizer", "weight", "2.linear.weight")),
    ],
)
def test_a_fault_is_found_at_its_step_phase_and_layer_above_the_noise_floor(
    phase: str, expected: tuple[int, str, str, str], tmp_path: Path
) -> None:
    plain, repeat = trained(tmp_path / "plain"), trained(tmp_path / "repeat", perturbed=1e-6)
    faulty = trained(tmp_path / "faulty", (phase, 7), perturbed=1e-6)
    where = first_difference(plain, faulty, repeat)
    assert (where.step, where.phase, where.kind, where.name) == expected
    assert where.floor is not None and 0 < where.floor < 1e-4 < where.difference


def test_without_a_repeat_any_difference_counts(tmp_path: Path) -> None:
    plain, other = trained(tmp_path / "plain"), trained(tmp_path / "other", perturbed=1e-6)
    where = first_difference(plain, other)
    assert where.step == 0 and where.floor is None and where.table["floor"].isna().all()
    assert first_difference(plain, other, other).step is None
    same = first_difference(plain, trained(tmp_path / "same"))
    assert same.step is None and same.difference == 0
    assert "do not differ" in same.sentence and same.compared == where.compared != ""


def test_a_loss_that_parts_between_sampled_steps_is_named_with_the_last_sample(tmp_path: Path) -> None:
    plain, faulty = trained(tmp_path / "a", every=10), trained(tmp_path / "b", ("optimizer", 6), every=10)
    where = first_difference(plain, faulty)
    assert (where.step, where.kind, where.name, where.sampled_before) == (7, "loss", None, 0)
    assert "Tensors were last sampled at step 0" in where.sentence


def test_loss_scales_are_taken_out(tmp_path: Path) -> None:
    row = {"step": [0], "name": ["head"], "kind": ["weight_grad"], "dtype": ["float32"], "numel": [4], "normal": [4]}
    row |= {name: [0] for name in ("zero", "subnormal", "inf", "nan")}
    runs = [
        load_run(
            write_rows(
                tmp_path / str(scale),
                steps={"step": [0], "loss": [1.0]},
                tensors=row | {"loss_scale": [scale], "rms": [2.0 * scale], "abs_sum": [8.0 * scale]},
            )
        )
        for scale in (1.0, 1024.0)
    ]
    assert first_difference(*runs).step is None


def ranks(
    folder: Path, losses: list[float], gradients: dict[str, list[float]], whole: int, kind: str = "output_grad"
) -> Run:
    """One step of a run on as many ranks as there are losses. `gradients`: rms of each rank, by module; their tensors
    are shares of a batch of `whole` elements, those of `pos` are not split."""
    number = len(losses)
    with RunWriter(folder, world_size=number) as writer:
        writer.append("steps", {"step": [0] * number, "loss": losses, "rank": list(range(number))})
        for name, sizes in gradients.items():
            numel = whole if name == "pos" else whole // number
            columns = {"step": 0, "name": name, "kind": kind, "dtype": "float32", "numel": numel}
            columns |= {"normal": numel, "zero": 0, "subnormal": 0, "inf": 0, "nan": 0}
            rows = {key: [value] * number for key, value in columns.items()} | {"rank": list(range(number))}
            writer.append("tensors", rows | {"rms": sizes, "abs_sum": [size * numel for size in sizes]})
    return load_run(folder)


def test_a_run_on_two_ranks_is_compared_for_the_whole_batch(tmp_path: Path) -> None:
    alone = ranks(tmp_path / "alone", [2.0], {"up": [0.5], "pos": [1.0]}, 8)
    repeat = ranks(tmp_path / "repeat", [2.0], {"up": [0.5], "pos": [1.0]}, 8)
    # Each rank averages over half of the batch; the mean of their losses is rounded.
    same = ranks(tmp_path / "same", [1.5, 2.5 + 3e-7], {"up": [1.0, 1.0], "pos": [1.7, 1.7]}, 8)
    assert first_difference(alone, same, floor=repeat).step is None
    other = ranks(tmp_path / "other", [1.5, 2.5], {"up": [1.1, 1.1], "pos": [1.0, 1.0]}, 8)
    where = first_difference(alone, other, floor=repeat)
    assert (where.kind, where.name) == ("output_grad", "up")


def test_the_norm_of_sharded_gradients_is_that_of_all_shards(tmp_path: Path) -> None:
    """DDP has the whole norm on each rank, FSDP2 that of each rank's shards."""

    def two_ranks(name: str, config: dict[str, object], norms: list[float]) -> Run:
        with RunWriter(tmp_path / name, config=config, world_size=2) as writer:
            columns = {"step": [0, 0], "loss": [1.0, 1.0], "rank": [0, 1], "grad_norm": norms}
            writer.append("steps", columns)
        return load_run(tmp_path / name)

    replicated = two_ranks("ddp", {"parallel": "ddp", "shards": 1}, [5.0, 5.0])
    assert first_difference(replicated, two_ranks("fsdp", {"parallel": "fsdp", "shards": 2}, [3.0, 4.0])).step is None
    other = first_difference(replicated, two_ranks("other", {"parallel": "fsdp", "shards": 2}, [4.0, 4.0]))
    assert other.kind == "grad_norm"


def test_sums_over_other_shards_are_no_difference_and_dtypes_are_named(tmp_path: Path) -> None:
    """The mean magnitude of a sharded tensor is a sum of float64 sums, which rounds differently."""

    def weights(name: str, size: float, dtype: str = "float32", shards: int = 1) -> Run:
        with RunWriter(tmp_path / name, config={"shards": shards}) as writer:
            writer.append("steps", {"step": [0], "loss": [1.0]})
            row = {"step": [0], "name": ["up"], "kind": ["activation"], "dtype": [dtype], "numel": [8], "normal": [8]}
            row |= {column: [0] for column in ("zero", "subnormal", "inf", "nan")}
            writer.append("tensors", row | {"rms": [size], "abs_sum": [8 * size]})
        return load_run(tmp_path / name)

    whole, moved = weights("whole", 0.1), 0.1 * (1 + 2.0**-50)
    assert first_difference(whole, weights("sharded", moved, shards=2)).step is None
    assert first_difference(whole, weights("moved", moved)).step == 0
    where = first_difference(whole, weights("narrow", 0.1001, "bfloat16", shards=2))
    assert where.dtypes == ("float32", "bfloat16")
    assert "up (activation): 0.0999 % apart, float32 in the first run and bfloat16 in the second;" in where.sentence


def test_a_loss_that_is_nan_in_one_run_alone_is_a_difference(tmp_path: Path) -> None:
    a, b = (
        load_run(write_rows(tmp_path / str(i), steps={"step": [0, 1], "loss": [1.0, loss]}))
        for i, loss in enumerate((0.5, float("inf")))
    )
    where = first_difference(a, b)
    assert (where.step, where.kind) == (1, "loss") and "only one of them is finite" in where.sentence


@pytest.mark.parametrize(("loss", "unseen"), [(1.0, False), (1.001, True)])
def test_without_activations_a_difference_in_the_backward_may_be_of_the_forward(
    loss: float, unseen: bool, tmp_path: Path
) -> None:
    runs = [
        ranks(tmp_path / str(i), [value], {"up": [mean]}, 8, kind="weight_grad")
        for i, (value, mean) in enumerate(((1.0, 1.0), (loss, 2.0), (1.01, 1.0)))
    ]
    where = first_difference(runs[0], runs[1], floor=runs[2])
    assert (where.phase, where.name, where.forward_unseen) == ("backward", "up", unseen)
    assert ("the cause may lie in the forward" in where.sentence) == unseen


def test_layers_are_in_the_order_of_their_calls_not_of_the_model(tmp_path: Path) -> None:
    """As in GPT-2, whose activation function is registered after the layer that it precedes."""
    model = {"layers": {"fc": "Linear", "proj": "Linear", "act": "GELU"}}
    same = {"step": [0] * 3, "kind": ["activation"] * 3, "name": ["fc", "act", "proj"], "numel": [4] * 3}
    same |= {count: [0] * 3 for count in ("inf", "nan")}
    a, b = (
        load_run(
            write_rows(
                tmp_path / str(i),
                model=model,
                steps={"step": [0], "loss": [1.0]},
                tensors=same | {"rms": [1.0, rms, rms], "abs_sum": [4.0, 4 * rms, 4 * rms]},
            )
        )
        for i, rms in enumerate((1.0, 1.1))
    )
    assert first_difference(a, b).name == "act"


def test_an_audit_of_compiled_code_names_the_layer_of_the_forward(tmp_path: Path) -> None:
    audited = {
        "step": [1] * 3,
        "name": ["first", "norm", "head"],
        "kind": ["compiled"] * 3,
        "rel_error": [0, 1e-4, 0.1],
    }
    a, b = (
        load_run(write_rows(tmp_path / name, steps={"step": [0], "loss": [loss]}, **audits))
        for name, loss, audits in (("a", 1.0, {}), ("b", 1.1, {"audits": audited}))
    )
    where = first_difference(a, b)
    assert (where.kind, where.layer, where.layer_difference) == ("loss", "norm", 1e-4)
    assert "norm is the first module whose output differs from eager mode, by 0.0100 %" in where.sentence
    assert (
        "compiled=True"
        in first_difference(a, load_run(write_rows(tmp_path / "c", steps={"step": [0], "loss": [2.0]}))).sentence
    )


def test_runs_of_other_seeds_or_without_a_common_step_are_refused(tmp_path: Path) -> None:
    a, b = (
        load_run(write_rows(tmp_path / str(seed), config={"seed": seed}, steps={"step": [0], "loss": [1.0]}))
        for seed in (0, 1)
    )
    with pytest.raises(RunError, match="0 has seed 0 and 1 has seed 1"):
        first_difference(a, b)
    late = load_run(write_rows(tmp_path / "late", steps={"step": [5], "loss": [1.0]}))
    with pytest.raises(RunError, match="no recorded step in common"):
        first_difference(a, late)


def test_the_command_prints_the_place_and_the_tensors_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, fault, perturbed in (("a", None, 0.0), ("b", ("backward", 3), 0.0), ("c", None, 1e-6)):
        trained(tmp_path / name, fault, perturbed)
    assert main(["compare", "--localise", *(str(tmp_path / n) for n in "ab"), "--floor", str(tmp_path / "c")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("They diverge at step 3, in the backward, first in 2.linear.weight (weight_grad): ")
    assert lines[1].startswith("Compared: loss of ") and "weight_grad of " in lines[1]
    assert lines[3].startswith("first at step") and "2.linear.weight (weight_grad)" in lines[4]
    assert main(["compare", "--json", "--localise", *(str(tmp_path / n) for n in "ab")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["step"], document["name"]) == (1, 3, "2.linear.weight")
    assert document["sentence"].startswith("They diverge at step 3") and document["tensors"][0]["step"] == 3
    assert main(["compare", "--precisions", "fp32"]) == 2
    assert "out is missing" in capsys.readouterr().err
    assert main(["compare", "--floor", "x"]) == 2
    assert "--localise" in capsys.readouterr().err
