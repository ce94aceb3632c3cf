"""The command line: exit codes, one-line errors, one JSON document, and the files of each command."""

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from amp_core import diagnose, load_run, watch
from amp_core.__main__ import main
from amp_core.cli import train as train_command
from amp_core.cli.diagnose import in_words
from amp_core.cli.settings import flags
from amp_core.train import RECIPES, TrainConfig
from tests.file_modes import restricted
from tests.paths import SAMPLE_RUNS


def train(folder, *more):
    quick = ["--workload", "digits-cnn", "--steps", "3", "--device", "cpu"]
    return main(["train", "--out", os.fspath(folder), *quick, *more])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "argument COMMAND: invalid choice: 'trian' (choose from"),
        (["train"], "the following arguments are required: --out"),
        (["train", "--out", "x", "--stepz", "3"], "unrecognized arguments: --stepz 3"),
        (["train", "--out", "x", "--step", "3"], "unrecognized arguments: --step 3"),
        (["train", "--out", "x", "--steps"], "argument --steps: expected one argument"),
        (["train", "--out", "x", "--workload", "nope"], "workload='nope' is unknown; choose one of digits-cnn"),
        (["train", "--out", "x", "--size", "huge"], "size='huge' is unknown; choose one of tiny, mini"),
        (["train", "--out", "x", "--precision", "fp12"], "precision='fp12' is unknown; choose one of fp32"),
        (["train", "--out", "x", "--batch-size", "-4"], "batch_size=-4 is not possible; give a whole number of 1"),
        (["train", "--out", "x", "--profile", "500:503"], "profile='500:503' starts at step 500, but steps=200"),
        (["train", "--out", "x", "--steps", "ten"], "steps='ten' is not possible; give a whole number"),
        (["train", "--out", "x", "--loss-scale", "static"], "loss_scale='static' is unknown; give dynamic or"),
        (["train", "--out", "x", "--workload", "no.py:f"], "the file no.py does not exist"),
        (["train", "--out", "x", "--config", "no.json"], "config='no.json' cannot be read"),
        (["compare", "--out", "x", "--precisions", "fp32,fp9"], "precisions='fp9' is unknown; choose one of fp32"),
        (["compare", "--out", "x", "--precisions", "fp32,fp32"], "precisions='fp32,fp32' lists fp32 twice"),
        (["compare", "--out", "x", "--workload", "no.py:f"], "the file no.py does not exist"),
        (
            ["compare", "--out", "x", "--precisions", "fp32,bf16", "--loss-scale", "128"],
            "loss_scale=128.0 has no effect",
        ),
        (["tune", "no.py:f", "--device", "cpu"], "the file no.py does not exist"),
        (["pack", "no-run"], "path='no-run' does not exist"),
        (["unpack", "no.zip", "--out", "x"], "no.zip"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ampscope: ") and err.count("\n") == 1 and err.endswith("\n")
    assert expected in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"workload": "text-lstm", "size": "logistic", "precision": "bf16", "lr": 3e-05, "device": "cpu", "nproc": 2},
        {"loss_scale": 128.0, "profile": (20, 23), "trace_ops": 2, "audit_every": 50, "clip_norm": 0.5},
        {"islands": ("blocks.0",)},
        {"islands": ("head", "norm"), "tf32": False, "evaluate": False, "fused": True, "growth_factor": 1.5},
    ],
)
def test_the_flags_of_a_training_reproduce_its_settings(settings):
    config = TrainConfig(**settings)
    parser = argparse.ArgumentParser()
    train_command.add(parser.add_subparsers())
    arguments = parser.parse_args(["train", "--out", "x", *flags(config)])
    again = train_command.settings(arguments) | ({"nproc": arguments.nproc} if hasattr(arguments, "nproc") else {})
    assert TrainConfig.from_dict(again) == config


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a CUDA device that must not be there")
def test_a_missing_cuda_device_is_exit_code_2(tmp_path, capsys):
    assert train(tmp_path / "r", "--device", "cuda") == 2
    assert "device='cuda' is not available" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_an_unusable_folder_is_exit_code_2(tmp_path, capsys):
    (tmp_path / "file").write_text("a file, not a folder")
    assert train(tmp_path / "file" / "r") == 2
    assert "ampscope: out=" in capsys.readouterr().err
    assert train(tmp_path / "r") == 0
    assert train(tmp_path / "r") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert len(load_run(tmp_path / "r").steps) == 3


def test_no_training_is_written_into_an_existing_run(tmp_path, capsys):
    run = tmp_path / "r"
    assert train(run) == 0
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    (tmp_path / "file").write_text("a file, not a folder")
    for argv, output in (
        (["train", "--out", run / "again"], "is inside the run"),
        (["compare", "--out", run], "is a run; give a folder that does not exist yet"),
        (["compare", "--out", run / "steps"], "is inside the run"),
        (["tune", "--out", run / "tune", "--device", "cpu"], "is inside the run"),
        (["compare", "--out", tmp_path / "file"], "is a file, or inside one"),
        (["tune", "--out", tmp_path / "file", "--device", "cpu"], "is a file, or inside one"),
    ):
        assert main([os.fspath(part) for part in argv]) == 2
        err = capsys.readouterr().err
        assert err.startswith("ampscope: out=") and output in err and err.count("\n") == 1
    assert sorted(p for p in tmp_path.rglob("*") if p.name != "file") == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "does not hold JSON"),
        ("[1]", "holds a JSON list"),
        ('{"stepz": 1}', "setting='stepz' is unknown"),
        ('{"steps": -1}', "steps=-1 is not possible"),
    ],
)
def test_a_damaged_settings_file_is_exit_code_2(tmp_path, capsys, text, expected):
    (tmp_path / "c.json").write_text(text)
    assert main(["train", "--config", os.fspath(tmp_path / "c.json"), "--out", os.fspath(tmp_path / "r")]) == 2
    assert expected in capsys.readouterr().err


def test_train_uses_flags_and_file_and_prints_the_end(tmp_path, capsys):
    (tmp_path / "c.json").write_text(json.dumps({"seed": 5, "steps": 900, "precision": "bf16"}))
    assert train(tmp_path / "r", "--config", os.fspath(tmp_path / "c.json"), "--lr", "1e-3", "--no-evaluate") == 0
    run = load_run(tmp_path / "r")
    config = run.head.config
    assert (config["seed"], config["steps"], config["precision"], config["lr"]) == (5, 3, "bf16", 1e-3)
    assert run.head.results == {}
    out = capsys.readouterr().out
    assert f"{tmp_path / 'r'}: finished after 3 steps" in out
    assert f"loss {run.steps['loss'].iloc[0]:.4g} → {run.steps['loss'].iloc[2]:.4g}" in out
    assert "0 steps skipped, final loss scale 1" in out


def test_train_prints_progress_as_plain_lines_without_a_terminal(tmp_path, capsys):
    assert train(tmp_path / "r", "--precision", "fp16") == 0
    last = capsys.readouterr().err.splitlines()[-1]
    loss = load_run(tmp_path / "r").steps["loss"].iloc[-1]
    assert last.startswith(f"step 3 of 3 | loss {loss:.4g} | loss scale 65536 | 0 skipped | ")


def test_pack_and_unpack_return_the_same_run(tmp_path, capsys):
    assert train(tmp_path / "r") == 0
    assert main(["pack", os.fspath(tmp_path / "r")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == os.fspath(tmp_path / "r.zip")
    assert main(["pack", os.fspath(tmp_path / "r"), "--out", os.fspath(tmp_path / "o.zip")]) == 0
    assert main(["unpack", os.fspath(tmp_path / "o.zip"), "--out", os.fspath(tmp_path / "again")]) == 0
    assert load_run(tmp_path / "again").steps.equals(load_run(tmp_path / "r").steps)
    assert main(["unpack", os.fspath(tmp_path / "o.zip"), "--out", os.fspath(tmp_path / "again")]) == 2


def test_env_json_is_one_document_and_nothing_else(capsys):
    assert main(["env", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["packages"]["torch"] == torch.__version__
    assert result["cpu"]["cores"] == os.cpu_count()
    assert list(result["recipes"]) == list(RECIPES)
    assert all(recipe["runs"] and recipe["note"] for recipe in result["recipes"].values())


def test_env_names_every_recipe(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in RECIPES)
    assert "GPU" in out or "cuda:0" in out


QUICK = ("--workload", "digits-cnn", "--steps", "8", "--device", "cpu", "--loss-scale", "128")


def test_compare_trains_each_precision_on_the_same_data_and_prints_one_table(tmp_path, capsys):
    out = tmp_path / "cmp"
    assert main(["compare", "--precisions", "fp32,fp16", "--out", os.fspath(out), *QUICK]) == 0
    fp32, fp16 = load_run(out / "fp32"), load_run(out / "fp16")
    assert fp32.head.process["pid"] != fp16.head.process["pid"]
    assert (fp32.head.config["loss_scale"], fp16.head.config["loss_scale"]) == ("dynamic", 128.0)
    assert fp16.steps["loss"].iloc[0] == pytest.approx(fp32.steps["loss"].iloc[0], rel=2e-3)
    settings, _, table = capsys.readouterr().out.partition("\n\n")
    assert settings.splitlines()[0].split() == ["differs", "fp32", "fp16"]  # the differing settings come first
    assert ["loss_scale", "dynamic", "128.0"] in [line.split() for line in settings.splitlines()]
    table = table.splitlines()
    assert [line.split()[0] for line in table[:3]] == ["precision", "fp32", "fp16"]
    assert table[2].split()[-2:] == ["0", "128"]
    assert any(line.startswith("fp16: ") and "fp32" in line for line in table[3:])  # its parity
    assert main(["compare", "--precisions", "fp16", "--out", os.fspath(out), *QUICK]) == 2
    assert "already holds a run fp16" in capsys.readouterr().err


@pytest.mark.whole
def test_compare_prints_the_trained_runs_as_json(tmp_path, capsys):
    as_json = ["compare", "--json", "--precisions", "fp32,fp16", "--out", os.fspath(tmp_path / "json"), *QUICK]
    assert main(as_json) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["baseline"]) == (1, "fp32")
    assert [row["precision"] for row in document["runs"]] == ["fp32", "fp16"] and document["answers"]["fp16"]
    assert {"setting": "loss_scale", "fp32": "dynamic", "fp16": "128.0"} in document["differences"]
    assert main([*as_json, "--on", "slurm"]) == 2


def test_a_comparison_as_text_has_only_measured_columns():
    from amp_core.analysis import compare, gradient_agreement, update_summary
    from amp_core.cli.comparison_text import in_full

    runs = [load_run(SAMPLE_RUNS / name) for name in ("fp32", "fp16-underflow")]
    result = compare(runs)
    updates = update_summary(runs)
    text = in_full(result, gradient_agreement(runs), updates)
    assert text.startswith("differs")
    assert not any(word in text for word in ("updates of weights", "J/sample", "tensor cores"))
    assert "fp16-underflow: gradients deviate from FP32 by 0.1" in text and " in the median layer, " in text
    assert "fp32: gradients" not in text
    result.table["energy_j"], result.table["tensor_frac"] = [0.51, 0.25], [0.0, 0.875]
    updates.loc[1, ["tensors", "still", "lost_mass_frac", "cure"]] = [14, 12, 0.8765, "kahan summation"]
    text = in_full(result, gradient_agreement(runs[:1]), updates)
    assert re.search(r"fp16-underflow +\S+ +87.6 % +– +– +12 of 14 +kahan summation", text)
    assert [word in text for word in ("J/sample", "0.51", "tensor cores", "88%", "gradients are")] == [True] * 4 + [
        False
    ]


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["pack", "nothing-there"], ["--version"]])
def test_commands_that_need_no_torch_do_not_import_it(argv):
    code = f"""
import sys
from pathlib import Path
from amp_core.__main__ import main
try:
    main({argv!r})
except SystemExit:
    pass
sys.exit(3 if "torch" in sys.modules else 0)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("sample", "level", "code"),
    [
        ("fp16-healthy", "warning", 0),
        ("fp16-healthy", "info", 1),
        ("fp16-overflow", "error", 0),
        ("fp16-overflow", "warning", 1),
        ("fp16-underflow", "error", 1),
        ("fp16-underflow", None, 0),
    ],
)
def test_diagnose_fails_on_findings_at_or_above_the_level(sample, level, code, capsys):
    assert main(["diagnose", str(SAMPLE_RUNS / sample), *(["--fail-on", level] if level else [])]) == code
    assert "[" in capsys.readouterr().out


def test_diagnose_reports_why_a_run_failed(tmp_path, capsys):
    """The reason contains no terminal control characters."""
    model = torch.nn.Linear(2, 2)
    recorder = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "r")
    recorder.close("failed", "ValueError: too many values\x1b[2J")
    assert main(["diagnose", os.fspath(tmp_path / "r")]) == 0
    output = capsys.readouterr().out
    assert output.startswith("the run failed before its first step: ValueError: too many values?[2J\n\n"), output
    assert main(["diagnose", os.fspath(tmp_path / "r"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["status"], record["end_reason"]) == ("failed", "ValueError: too many values\x1b[2J")


def test_a_closed_pipe_is_not_an_error():
    """As in `ampscope … | head -1`."""
    command = [sys.executable, "-m", "amp_core", "diagnose", os.fspath(SAMPLE_RUNS / "fp16-overflow")]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_diagnose_prints_one_json_document(capsys):
    assert main(["diagnose", str(SAMPLE_RUNS / "fp16-underflow"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["run"] == "fp16-underflow" and record["findings"][0]["code"] == "fp16-without-scaler"
    assert "GradScaler" in record["findings"][0]["snippet"]


def test_diagnose_compares_a_run_with_a_baseline(capsys):
    against = ["--against", str(SAMPLE_RUNS / "fp32")]
    assert main(["diagnose", str(SAMPLE_RUNS / "fp16-healthy"), *against, "--fail-on", "warning"]) == 0
    assert main(["diagnose", str(SAMPLE_RUNS / "fp16-healthy"), "--against", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_muted_finding_is_omitted_and_does_not_fail(tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE_RUNS / "fp16-underflow", folder)
    assert main(["diagnose", str(folder), "--fail-on", "error", "--mute", "fp16-without-scaler"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "nothing wrong was found" and "muted: fp16-without-scaler" in out
    assert main(["diagnose", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["muted"] == ["fp16-without-scaler"]
    assert main(["diagnose", str(folder), "--fail-on", "error", "--unmute", "fp16-without-scaler"]) == 1
    assert main(["diagnose", str(folder), "--mute", "oops"]) == 2


def test_a_consequence_refers_to_its_cause_and_repeats_no_advice():
    first = diagnose(load_run(SAMPLE_RUNS / "fp16-underflow"))[0]
    cause, effect = in_words([first, dataclasses.replace(first, code="effect", follows=first.code)]).split(
        "\n\nerror: "
    )
    assert first.advice[:60] in cause and first.snippet.splitlines()[0] in cause and "follows" not in cause
    assert effect.splitlines()[-1] == f"  follows from {first.code}" and first.advice[:60] not in effect


def test_diagnose_distinguishes_a_healthy_run_from_one_without_steps(tmp_path, capsys):
    assert main(["diagnose", str(SAMPLE_RUNS / "fp32")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "nothing wrong was found"
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ("unpack", "a.zip", "--out", "private/a"),
        ("pack", str(SAMPLE_RUNS / "fp32"), "--out", "private/a.zip"),
        ("report", str(SAMPLE_RUNS / "fp32"), "--out", "private/a.html"),
        ("tune", "--workload", "digits-cnn", "--out", "private/a"),
        ("tune", "--max-batch", "--workload", "digits-cnn", "--out", "private/a"),
        ("import-trace", "private/a.json", "--out", "a"),
        ("import-te", "private/a", "--out", "a"),
    ],
)
def test_a_folder_of_another_user_is_one_line_and_exit_code_2(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private").mkdir(mode=0)
    with restricted():
        assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "private" in err and "Permission denied" in err
    (tmp_path / "private").chmod(0o755)
    assert list((tmp_path / "private").iterdir()) == []


def test_a_training_that_may_not_read_its_own_data_keeps_its_traceback(monkeypatch, tmp_path):
    def denied(arguments):
        raise PermissionError(13, "Permission denied", "/data/of/others.bin")

    monkeypatch.setattr(train_command, "run", denied)
    with pytest.raises(PermissionError):
        main(["train", "--workload", "digits-cnn", "--out", str(tmp_path / "a")])
