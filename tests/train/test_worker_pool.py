"""One process trains a recipe's seeds one after another, with the same results as separate processes."""

import numpy as np
import pytest
import torch

from amp_core import load_run
from amp_core.record.backends import backend_of, cpu, forget_peaks
from amp_core.train import TrainConfig, train
from amp_core.train.turns.interleave import Member, interleave
from amp_core.train.turns.worker_pool import WorkerPool

OWN = """
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.full((8,), float(i)), torch.zeros(1)

def task():
    if torch.initial_seed() == 2:
        raise ValueError("no third seed")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    batches = torch.utils.data.DataLoader(Data(), batch_size=2, shuffle=True)
    return model, batches, lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1])
"""


def member(folder, name, seed):
    settings = TrainConfig(
        workload=f"{folder / 'own_task.py'}:task", precision=name, device="cpu", steps=6, every=10**6, seed=seed
    )
    return Member(settings, folder / f"{name}-{seed}")


def run_of(folder, name, seed):
    return load_run(folder / f"{name}-{seed}")


def pid(run):
    return run.head.process["pid"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pool that has trained two seeds of two recipes, a seed that was refused, one that was stopped, and one more:
    the folder of the runs, the exit codes, and the pool's processes after the first two seeds and at the end."""
    folder = tmp_path_factory.mktemp("pool")
    (folder / "own_task.py").write_text(OWN)
    rounds = [(("fp32", "bf16"), 0), (("fp32", "bf16"), 1), (("bf16",), 2), (("fp32",), 3), (("fp32",), 4)]
    codes, kept = [], []
    with WorkerPool() as pool:
        for names, seed in rounds:
            members = [member(folder, name, seed) for name in names]
            leave = (lambda done: []) if seed == 3 else None
            codes.append(interleave(members, 2, lambda done: None, leave, pool=pool))
            kept.append([worker.process for worker in pool._idle.values()])
            assert all(process.poll() is None for process in kept[-1])
    return folder, codes, kept


@pytest.mark.whole
def test_seeds_of_a_recipe_share_a_process_and_no_state(trained):
    folder, codes, _ = trained
    assert codes[:2] == [[0, 0], [0, 0]]
    runs = {(name, seed): run_of(folder, name, seed) for name in ("fp32", "bf16") for seed in (0, 1)}
    assert {run.status for run in runs.values()} == {"finished"}
    assert pid(runs["fp32", 0]) == pid(runs["fp32", 1]) != pid(runs["bf16", 0]) == pid(runs["bf16", 1])
    alone = member(folder, "bf16", 1).config
    train(alone, folder / "alone")
    losses = {key: run.steps["loss"].to_numpy() for key, run in runs.items()}
    # Weights, order of data and dropout are those of a separate training.
    np.testing.assert_array_equal(losses["bf16", 1], load_run(folder / "alone").steps["loss"].to_numpy())
    assert (losses["bf16", 0] != losses["bf16", 1]).all()


@pytest.mark.whole
def test_a_process_is_kept_only_if_its_training_finished(trained):
    folder, codes, kept = trained
    assert codes[2:] == [[2], [130], [0]]
    assert [len(processes) for processes in kept] == [2, 2, 1, 0, 1]
    assert all(process.poll() == 0 for process in kept[-1])  # the pool has ended its processes
    stopped, last = run_of(folder, "fp32", 3), run_of(folder, "fp32", 4)
    assert stopped.status == "stopped" and len(stopped.steps) == 2 and last.status == "finished"
    assert pid(stopped) == pid(run_of(folder, "fp32", 0)) != pid(last)


def test_the_memory_peak_of_a_training_excludes_earlier_ones(monkeypatch):
    sizes = iter([900, 100])
    monkeypatch.setattr(cpu, "resident_bytes", lambda: next(sizes))
    host = backend_of(torch.device("cpu"))
    forget_peaks()
    assert host.memory_bytes() == (900, 900)
    forget_peaks()
    assert host.memory_bytes() == (100, 100)
    forget_peaks()
