"""One process trains a recipe's seeds one after another: what it trains is what a process of its own would have."""

import numpy as np
import pytest

from amp_core import load_run
from amp_core.train.config import TrainConfig
from amp_core.train.crew import Crew
from amp_core.train.interleave import Member, interleave

OWN = """
import random
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((8,), float(i)), torch.zeros(1)

def task():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    batches = torch.utils.data.DataLoader(Data(), batch_size=2, shuffle=True)
    return model, batches, lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1])

def breaks():
    model, batches, loss = task()
    if torch.initial_seed() == 1:
        raise ValueError("no second seed")
    return model, batches, loss
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own_task.py"
    path.write_text(OWN)
    return path


def members(file, folder, seed, names=("fp32", "bf16"), function="task"):
    return [
        Member(
            TrainConfig(workload=f"{file}:{function}", precision=name, device="cpu", steps=6, every=10**6, seed=seed),
            folder / f"{name}-{seed}",
        )
        for name in names
    ]


def seen(member):
    """Its losses and who trained it."""
    run = load_run(member.folder)
    assert run.status == "finished"
    return run.steps["loss"].to_numpy(), run.head.process["pid"]


def test_seeds_of_a_recipe_share_a_process_and_no_number(file, tmp_path):
    first, second = (members(file, tmp_path / "crew", seed) for seed in (0, 1))
    with Crew() as crew:
        assert crew.interleave(first, 2, lambda done: None) == [0, 0]
        assert crew.interleave(second, 2, lambda done: None) == [0, 0]
        processes = [worker.process for worker in crew._idle.values()]
        assert len(processes) == 2 and all(process.poll() is None for process in processes)
    assert all(process.poll() == 0 for process in processes)
    (alone,) = members(file, tmp_path / "alone", 1, ("bf16",))
    assert interleave([alone], 2, lambda done: None) == [0]
    assert seen(first[0])[1] == seen(second[0])[1] != seen(first[1])[1] == seen(second[1])[1]
    np.testing.assert_array_equal(seen(second[1])[0], seen(alone)[0])  # weights, order of data, dropout
    assert (seen(first[1])[0] != seen(second[1])[0]).all()


def test_a_process_is_kept_only_where_its_training_came_to_its_end(file, tmp_path, capfd):
    made = [members(file, tmp_path, seed, ("fp32",), "breaks") for seed in range(4)]
    with Crew() as crew:
        codes = [
            crew.interleave(one, 2, lambda done: None, (lambda done: []) if seed == 2 else None)
            for seed, one in enumerate(made)
        ]
    assert codes == [[0], [2], [130], [0]]
    assert "no second seed" in capfd.readouterr().err
    runs = {seed: load_run(one[0].folder) for seed, one in enumerate(made) if seed != 1}
    assert [run.status for run in runs.values()] == ["finished", "stopped", "finished"] and len(runs[2].steps) == 2
    assert len({run.head.process["pid"] for run in runs.values()}) == 3


def test_what_was_measured_before_is_no_peak_of_the_next(monkeypatch):
    attempt = pytest.importorskip("amp_core.record.attempt")
    import torch

    sizes = iter([900, 100])
    monkeypatch.setattr(attempt, "resident_bytes", lambda: next(sizes))
    attempt.forget_peaks()
    assert attempt.memory_bytes(torch.device("cpu")) == (900, 900)
    attempt.forget_peaks()
    assert attempt.memory_bytes(torch.device("cpu")) == (100, 100)
    attempt.forget_peaks()
