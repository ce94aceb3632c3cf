"""The search for the largest batch: exact, few trials, and no trial can crash the search or the machine."""

import dataclasses
import json
import os
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from amp_core import RunError
from amp_core.__main__ import main
from amp_core.cli.tune import parse_size
from amp_core.train import TrainConfig
from amp_core.tune import max_batch
from amp_core.tune.batch_trial import out_of_memory, run_trial
from amp_core.tune.max_batch import MaxBatch, Trial, free_bytes, largest_batch

MIB = 2**20
CONFIG = TrainConfig(workload="digits-cnn", precision="fp32", device="cuda")


def machine(capacity, *, bytes_per_sample=MIB, base=100 * MIB, noise=0):
    """Trials on a machine where batches up to `capacity` fit."""

    def attempt(config, limit_bytes, timeout_s):
        fits = config.batch_size <= capacity
        peak = base + bytes_per_sample * config.batch_size + noise * (config.batch_size % 3)
        return Trial(config.batch_size, fits, "" if fits else "out of memory", peak if fits else None, 1.0, 2.0, 0.1)

    return attempt


def search(capacity, **options):
    options.setdefault("attempt", machine(capacity))
    return largest_batch(CONFIG, **options)


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 31, 32, 33, 63, 64, 100, 1000, 4095, 65535])
def test_the_result_is_the_largest_batch_that_fits(capacity):
    result = search(capacity)
    assert (result.largest, result.next_larger) == (capacity, capacity + 1)
    tried = [t.batch_size for t in result.trials]
    assert len(tried) == len(set(tried)) <= 2 * 17 + 2
    assert all(t.fits == (t.batch_size <= capacity) for t in result.trials)


@pytest.mark.parametrize("capacity", [1, 20, 500])
def test_a_batch_beyond_what_kernels_can_index_does_not_fit(capacity):
    limit = "RuntimeError: Expected tensor to fit into 32-bit index math"

    def attempt(config, limit_bytes, timeout_s):
        fits = config.batch_size <= capacity
        return Trial(config.batch_size, fits, "" if fits else limit, MIB, 1.0, 2.0, 0.1, failed=not fits)

    found = search(capacity, attempt=attempt)
    assert (found.largest, found.next_larger) == (capacity, capacity + 1) and limit in found.in_words()


def test_a_training_that_fails_at_every_size_is_tried_with_one_sample_and_no_more():
    asked = []

    def attempt(config, limit_bytes, timeout_s):
        asked.append(config.batch_size)
        return Trial(config.batch_size, False, "shapes do not match", None, None, None, 0.1, failed=True)

    with pytest.raises(RunError, match="batch_size=1 fails for a reason other than memory: shapes do not match"):
        search(1, attempt=attempt)
    assert asked[1:] == [1]


@pytest.mark.parametrize("noise", [0, 5 * MIB])
def test_linear_memory_is_extrapolated_to_the_limit(noise):
    capacity = 3333
    limit = 100 * MIB + capacity * MIB
    guided = search(capacity, limit_bytes=limit, attempt=machine(capacity, noise=noise))
    blind = search(capacity)
    assert guided.largest == blind.largest == capacity
    if not noise:
        assert len(guided.trials) < len(blind.trials) - 3


def test_no_batch_above_the_bound_is_tried():
    result = search(10**6, most=100)
    assert (result.largest, result.next_larger) == (100, None)
    assert max(t.batch_size for t in result.trials) == 100 and "larger ones were not tried" in result.in_words()
    assert search(10**6, most=1).largest == 1


def test_the_result_is_zero_if_no_batch_fits():
    result = search(0)
    assert result.largest is None and result.next_larger == 1
    assert result.in_words() == "not even a batch of 1 fits: out of memory"
    assert [t.batch_size for t in result.trials] == [32, 16, 8, 4, 2, 1]


def test_on_a_cpu_every_trial_has_a_memory_limit():
    limits = []

    def attempt(config, limit_bytes, timeout_s):
        limits.append(limit_bytes)
        return machine(40)(config, limit_bytes, timeout_s)

    result = largest_batch(dataclasses.replace(CONFIG, device="cpu"), attempt=attempt)
    assert set(limits) == {result.limit_bytes} and 0 < result.limit_bytes < psutil.virtual_memory().total
    assert search(40).limit_bytes is None  # on a GPU its memory is the limit
    with pytest.raises(RunError, match="device='auto' does not say"):
        largest_batch(dataclasses.replace(CONFIG, device="auto"), attempt=attempt)


def test_each_trial_is_reported_and_trains_few_steps_without_evaluation():
    reported, configs = [], []

    def attempt(config, limit_bytes, timeout_s):
        configs.append((config.steps, config.evaluate, timeout_s))
        return machine(40)(config, limit_bytes, timeout_s)

    result = search(40, attempt=attempt, on_trial=reported.append, timeout_s=7.0)
    assert tuple(reported) == result.trials and set(configs) == {(3, False, 7.0)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most": 0}, "most=0 is not possible"),
        ({"limit_bytes": 0}, "memory_limit=0 is not possible"),
        ({"timeout_s": 0}, "timeout=0 is not possible"),
    ],
)
def test_invalid_bounds_are_refused(options, message):
    with pytest.raises(RunError, match=message):
        search(10, **options)


def test_a_workload_that_makes_its_own_batches_is_refused(tmp_path):
    with pytest.raises(RunError, match="makes its own batches"):
        largest_batch(TrainConfig(workload=f"{tmp_path}/own.py:build"), attempt=machine(1))


# real trials, each in its own process


def quick(batch_size, **changes):
    return TrainConfig(**{"workload": "digits-cnn", "precision": "fp32", "device": "cpu", "steps": 3, "evaluate": False}
                       | {"batch_size": batch_size} | changes)  # fmt: skip


def test_a_trial_that_fits_reports_memory_and_speed():
    trial = max_batch.try_batch(quick(8), 8 * 2**30, 120.0)
    assert trial.fits and trial.why == ""
    assert trial.peak_bytes > 100 * MIB and trial.step_ms > 0 and trial.samples_per_s > 0


def test_a_trial_that_grows_beyond_the_limit_is_killed():
    trial = max_batch.try_batch(quick(8), 64 * MIB, 120.0)
    assert not trial.fits and trial.why == "its resident set exceeded 64.0 MiB" and trial.peak_bytes is None


def test_a_trial_that_takes_too_long_is_ended():
    trial = max_batch.try_batch(quick(8), None, 0.2)
    assert not trial.fits and trial.why == "3 steps took longer than 0.2 s"
    assert trial.too_slow


def test_a_trial_that_takes_too_long_ends_the_search():
    def attempt(config, limit_bytes, timeout_s):
        fitting = machine(10_000)(config, limit_bytes, timeout_s)
        slow = dataclasses.replace(fitting, fits=False, too_slow=True, why="3 steps took longer than 300 s")
        return slow if config.batch_size > 500 else fitting

    result = search(10_000, attempt=attempt)
    assert [t.batch_size for t in result.trials] == [32, 64, 128, 256, 512] and result.largest == 256
    assert result.in_words().endswith("; at 512 its 3 steps took longer than 300 s, so larger ones were not tried")


def as_child(monkeypatch, code):
    """Make trials run `code` in place of the training."""
    script = [sys.executable, "-c", code]
    real = max_batch.subprocess.Popen
    monkeypatch.setattr(max_batch.subprocess, "Popen", lambda command, **options: real(script, **options))


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals")
def test_a_trial_killed_by_the_system_counts_as_out_of_memory(monkeypatch):
    as_child(monkeypatch, "import os, signal, sys; sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)")
    trial = max_batch.try_batch(quick(8), None, 600.0)
    assert not trial.fits and "the system killed it" in trial.why


@pytest.mark.parametrize(
    "code", ["raise ValueError('a bug')", "import sys; sys.stdin.read(); raise ValueError('a bug')"]
)
def test_another_failure_does_not_count_as_out_of_memory(monkeypatch, code):
    as_child(monkeypatch, code)
    with pytest.raises(RunError, match=r"batch_size=8 fails for a reason other than memory: .*ValueError: a bug"):
        max_batch.try_batch(quick(8), None, 600.0)


def test_ctrl_c_leaves_no_trial_behind(monkeypatch, tmp_path):
    file = tmp_path / "pid"
    as_child(monkeypatch, f"import os, time; open({os.fspath(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    def pressed(seconds):
        if file.exists() and file.read_text():
            raise KeyboardInterrupt
        time.sleep(seconds)

    monkeypatch.setattr(max_batch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pressed))
    with pytest.raises(KeyboardInterrupt):
        max_batch.try_batch(quick(8), None, 600.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_a_trial_distinguishes_out_of_memory_from_other_errors(tmp_path, monkeypatch):
    from amp_core.tune import batch_trial

    monkeypatch.setattr(batch_trial, "limit_memory", lambda device, limit: None)
    for error, expected in (
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), {"fits": False}),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), {"fits": False}),
        (RuntimeError("cuBLAS error: CUBLAS_STATUS_ALLOC_FAILED"), {"fits": False}),
        (MemoryError(), {"fits": False, "why": "out of memory"}),
        (RunError("device='cuda' is not available"), {"refused": "device='cuda' is not available"}),
        (RuntimeError("input must fit into 32-bit index math"), {"fits": False, "failed": True}),
        (ValueError("a bug"), {"error": "ValueError: a bug"}),
    ):

        def fail(*args, error=error, **options):
            raise error

        monkeypatch.setattr(batch_trial, "train", fail)
        assert expected.items() <= run_trial(quick(8), None, tmp_path).items()
    assert not out_of_memory(ValueError("out of memory"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of one process's data is Linux's")
def test_one_huge_allocation_is_refused_at_once():
    code = """
import torch
from amp_core.tune.batch_trial import limit_memory, out_of_memory
limit_memory(torch.device("cpu"), 256 * 2**20)
torch.ones(2**20)
try:
    torch.empty(2**30)
except RuntimeError as error:
    print(out_of_memory(error))
"""
    done = max_batch.subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_free_memory_is_less_than_the_memory_of_the_machine():
    assert 0 < free_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# the command


def test_the_command_prints_one_document_on_stdout_and_trials_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr(max_batch, "try_batch", machine(48))
    argv = ["tune", "--max-batch", "--workload", "digits-cnn", "--precision", "bf16", "--device", "cpu"]
    assert main([*argv, "--memory-limit", "2GiB", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["largest_batch"], result["smallest_that_does_not_fit"]) == (48, 49)
    assert result["memory_limit_bytes"] == 2 * 2**30 and result["precision"] == "bf16" and result["size"] == "tiny"
    assert result["memory"] == "resident set of the process" and result["trials"][0]["batch_size"] == 32
    assert err.splitlines()[0] == "batch sizes of digits-cnn tiny in bf16 on cpu, up to 2.00 GiB:"
    assert len(err.splitlines()) == 1 + len(result["trials"])
    assert main([*argv, "--memory-limit", "2GiB"]) == 0
    assert capsys.readouterr().out.startswith(
        "largest batch that fits: 48, with 148 MiB resident set of the process; at 49"
    )


def test_the_result_is_saved_if_a_folder_is_given(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(max_batch, "try_batch", machine(48))
    argv = ["tune", "--max-batch", "--workload", "digits-cnn", "--device", "cpu", "--out"]
    assert main([*argv, str(tmp_path / "a")]) == 0
    result = json.loads((tmp_path / "a" / max_batch.FILE).read_text())
    assert result["largest_batch"] == 48 and result["answer"].startswith("largest batch that fits: 48")
    (tmp_path / "file").write_text("")
    assert main([*argv, str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_exit_code_shows_that_nothing_fits(monkeypatch, capsys):
    monkeypatch.setattr(max_batch, "try_batch", machine(0))
    assert main(["tune", "--max-batch", "--workload", "digits-cnn", "--device", "cpu"]) == 1
    assert "not even a batch of 1 fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tune", "--max-batch", "own.py:f"], "remove FILE.py:FUNCTION"),
        (["tune", "--max-batch", "--budget", "60"], "max_batch=True does not use --budget; remove --budget"),
        (["tune", "--max-batch", "--code", "plain"], "remove --code"),
        (["tune", "--precision", "bf16"], "max_batch=False does not use --precision"),
        (["tune", "--memory-limit", "2GiB"], "max_batch=False does not use --memory-limit"),
        (["tune", "--most", "8"], "max_batch=False does not use --most"),
        (["tune", "--timeout", "8"], "max_batch=False does not use --timeout"),
        (["tune", "--max-batch", "--memory-limit", "much"], "memory_limit='much' is not a size; give one such as 2GiB"),
        (["tune", "--max-batch", "--device", "cpu", "--most", "none"], "most='none' is not possible"),
        (["tune", "--max-batch", "--device", "cpu", "--timeout", "soon"], "timeout='soon' is not possible"),
        (["tune", "--max-batch", "--workload", "own.py:f", "--device", "cpu"], "makes its own batches"),
        (["tune", "--max-batch", "--precision", "fp12"], "precision='fp12' is unknown"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a CUDA device that must not be there")
def test_the_command_refuses_what_a_trial_refuses(capsys):
    assert main(["tune", "--max-batch", "--device", "cuda"]) == 2
    assert "device='cuda' is not available" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31),
        ("800MB", 800 * 10**6),
        ("1.5 GiB", 3 * 2**29),
        ("512m", 2**29),
        ("4096", 4096),
        ("1 tib", 2**40),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 GiX", "0", "1e9"])
def test_text_that_is_not_a_size_is_refused(text):
    with pytest.raises(RunError, match="is not a size; give one such as 2GiB"):
        parse_size(text)


def test_the_answer_ends_with_the_reason():
    assert MaxBatch(None, 1, None, True, (Trial(1, False, "x", None, None, None, 0.0),)).in_words().endswith("x")


def test_the_short_trials_have_no_profile_window():
    tried = []

    def attempt(config, limit_bytes, timeout_s):
        tried.append(config.profile)
        return machine(5)(config, limit_bytes, timeout_s)

    assert largest_batch(dataclasses.replace(CONFIG, profile=(20, 23)), attempt=attempt).largest == 5
    assert set(tried) == {None}
