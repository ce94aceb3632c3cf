"""TensorBoard logs become runs without guessed values."""

import math
from pathlib import Path

import numpy as np
import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.__main__ import main
from amp_core.interop import import_tensorboard
from amp_core.interop.event_files import Histogram
from amp_core.interop.import_tensorboard import tensor_facts
from amp_core.interop.tags import column_of, tensor_of

pytest.importorskip("tensorboard", reason="needs TensorBoard's package: pip install '.[tensorboard]'")

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 20 steps written by torch's SummaryWriter."""
    torch = pytest.importorskip("torch")
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path_factory.mktemp("tb") / "log"
    generator = torch.Generator().manual_seed(0)
    with SummaryWriter(str(folder)) as writer:
        for step in range(20):
            writer.add_scalar("train/loss", 2.0 / (step + 1), step)
            writer.add_scalar("train/learning_rate", 1e-3, step)
            writer.add_scalar("amp/scale", 65536.0, step)
            if step % 2 == 0:
                writer.add_scalar("grad_norm", math.nan if step == 4 else 1.5, step)
            writer.add_scalar("val/loss", 3.0, step)
            writer.add_scalar("accuracy", 0.5, step)
            if step % 10 == 0:
                grad = torch.randn(1000, generator=generator) * 1e-3
                writer.add_histogram("gradients/head.weight", grad, step)
                writer.add_histogram("head.weight", grad * 100, step)
                writer.add_histogram("mystery", grad, step)
        writer.add_text("notes", "hello")
    return folder


@pytest.mark.parametrize(
    ("tag", "column"),
    [
        ("loss", "loss"), ("Loss/train", "loss"), ("train/loss", "loss"), ("train_loss_step", "loss"),
        ("train_loss_epoch", None), ("epoch_loss", None), ("val/loss", None), ("Loss/val", None), ("eval_loss", None),
        ("test_loss", None), ("validation/epoch_loss", None), ("lm loss", "loss"), ("aux_loss", None),
        ("train/grad_norm", "grad_norm"), ("grad-norm", "grad_norm"), ("grad-norm vs samples", None),
        ("lr", "lr"), ("train/learning_rate", "lr"), ("learning-rate", "lr"), ("lr-AdamW", "lr"),
        ("lr-AdamW/pg1", "lr"),
        ("loss-scale", "loss_scale"), ("amp/scale", "loss_scale"), ("scale", None), ("image/scale", None),
        ("amp/step_ms", "step_ms"), ("amp/skipped", "skipped"), ("accuracy", None), ("", None),
    ],
)  # fmt: skip
def test_tags_are_imported_only_if_they_are_certain(tag: str, column: str | None) -> None:
    assert column_of(tag) == column


@pytest.mark.parametrize(
    ("tag", "tensor"),
    [
        ("gradients/head.weight", ("weight_grad", "head.weight")),
        ("train/grads/blocks.0.fc.bias", ("weight_grad", "blocks.0.fc.bias")),
        ("head.weight.grad", ("weight_grad", "head.weight")),
        ("head.weight", ("weight", "head.weight")),
        ("parameters/head.weight", ("weight", "head.weight")),
        ("dense/kernel/histogram", ("weight", "dense/kernel")),
        ("activations/relu", ("activation", "relu")),
        ("mystery", None),
    ],
)
def test_histograms_are_imported_only_if_their_tensor_is_certain(tag: str, tensor: tuple[str, str] | None) -> None:
    assert tensor_of(tag) == tensor


def test_a_log_becomes_a_run(log: Path, tmp_path: Path) -> None:
    imported = import_tensorboard(log, tmp_path / "run")
    assert imported.understood == {
        "grad_norm": "grad_norm",
        "loss": "train/loss",
        "loss_scale": "amp/scale",
        "lr": "train/learning_rate",
    }
    assert imported.tensors == {"weight_grad": ["gradients/head.weight"], "weight": ["head.weight"]}
    assert imported.not_understood == ["accuracy", "mystery", "notes/text_summary", "val/loss"]
    run = load_run(tmp_path / "run")
    run.validate(full=True)
    steps = run.table("steps").to_pylist()
    assert [row["step"] for row in steps] == list(range(20)) and steps[0]["loss"] == 2.0
    assert steps[1]["grad_norm"] is None and math.isnan(steps[4]["grad_norm"])  # not logged, and logged as NaN
    assert all(row["skipped"] is None and row["step_ms"] is None for row in steps)
    assert steps[-1]["loss_scale"] == 65536.0 and steps[-1]["lr"] == pytest.approx(1e-3)
    assert steps[0]["time_s"] >= 0 and run.head.created_at.startswith("20")
    assert run.head.config["source"] == "import" and run.head.config["tags"]["loss"] == "train/loss"
    grad, weight = sorted(run.table("tensors").to_pylist()[:2], key=lambda row: row["kind"], reverse=True)
    assert (grad["kind"], grad["name"], grad["step"]) == ("weight_grad", "head.weight", 0)
    assert grad["numel"] == 1000 and grad["rms"] == pytest.approx(1e-3, rel=0.1)
    assert weight["absmax"] == pytest.approx(100 * grad["absmax"], rel=1e-5)
    for unknown in ("dtype", "loss_scale", "subnormal", "normal", "exp_min", "exp_counts", "absmin", "abs_sum"):
        assert grad[unknown] is None, unknown  # torch's buckets span powers of two
    # The buckets around 0 are empty, and the extremes finite.
    assert (grad["zero"], grad["inf"], grad["nan"]) == (0, 0, 0)


def test_a_run_of_a_log_can_be_analysed(log: Path, tmp_path: Path) -> None:
    import_tensorboard(log, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert not [f for f in diagnose(run) if f.severity == "error" and f.code != "loss-nonfinite"]
    from amp_core.analysis import compare, loss_curves, overview, scale_summary

    assert overview(run).loss_last == pytest.approx(0.1)
    assert scale_summary(run).last == 65536.0
    assert len(loss_curves([run])) == 20 and len(compare([run, run]).table) == 2


def test_scalars_and_histograms_of_tensorflow_2(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path / "tf" / "train"))
    for step in range(3):
        summary = scalar_pb("loss", 1.0 + step)
        summary.value.extend(histogram_pb("dense/kernel/histogram", np.linspace(-1.0, 3.0, 100)).value)
        if step:  # TensorFlow writes the metadata of a tag only with its first value
            for value in summary.value:
                value.ClearField("metadata")
        writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=summary))
    writer.close()
    imported = import_tensorboard(tmp_path / "tf", tmp_path / "run")
    assert imported.understood == {"loss": "train/loss"}
    run = load_run(tmp_path / "run")
    assert run.steps.loss.tolist() == [1.0, 2.0, 3.0] and run.steps.time_s.tolist() == [0.0, 1.0, 2.0]
    rows = run.table("tensors").to_pylist()
    assert [row["numel"] for row in rows] == [100] * 3
    assert rows[0]["absmax"] == 3.0 and rows[0]["rms"] is None and rows[0]["name"] == "train/dense/kernel"


def test_a_step_without_a_time_has_none(tmp_path: Path) -> None:
    writer = EventFileWriter(str(tmp_path / "log"))
    for step, wall_s in enumerate((1.7e9, math.nan, 1.7e9 + 2)):
        writer.add_event(Event(step=step, wall_time=wall_s, summary=scalar_pb("loss", 1.0)))
    writer.close()
    import_tensorboard(tmp_path / "log", tmp_path / "run")
    assert load_run(tmp_path / "run").table("steps").column("time_s").to_pylist() == [0.0, None, 2.0]


def histogram(edges: list[tuple[float, float]], counts: list[float], numel: int | None = None) -> Histogram:
    return Histogram(
        0, 0.0, np.array(edges), np.array(counts), int(sum(counts)) if numel is None else numel, None,
        edges[0][0], edges[-1][1],
    )  # fmt: skip


def test_exponents_and_zeros_are_imported_only_if_buckets_determine_them() -> None:
    exact = tensor_facts(histogram([(-2.5, -2.0), (0.0, 0.0), (0.5, 1.0), (1.0, 2.0), (2.0, 3.0)], [1, 7, 2, 3, 4]))
    assert (exact["zero"], exact["exp_min"], exact["exp_counts"]) == (7, -1, [2, 3, 5])
    assert exact["numel"] == 17 and exact["absmax"] == 3.0
    spanning = tensor_facts(histogram([(0.9, 1.1), (1.1, 1.3)], [5, 5]))
    assert spanning["zero"] == 0 and spanning["exp_counts"] is None
    around_zero = tensor_facts(histogram([(-1e-12, 1e-12), (0.5, 0.6)], [5, 5]))
    assert around_zero["zero"] is None and around_zero["exp_counts"] is None
    facts = tensor_facts(histogram([(0.5, 0.6)], [5], numel=8))  # three values are in no bucket, perhaps NaNs
    assert facts["zero"] is None and facts["numel"] == 8
    infinite = tensor_facts(histogram([(0.5, math.inf)], [5]))
    assert infinite["absmax"] is None and infinite["inf"] is None and infinite["nan"] is None


def test_a_restarted_training_counts_each_step_once(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for start_s, first, value in ((1_700_000_000, 0, 1.0), (1_700_000_100, 5, 9.0)):  # a restart is a later process
        writer = EventFileWriter(str(tmp_path / str(start_s)))
        for step in range(first, first + 8):
            writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=scalar_pb("loss", value)))
        writer.close()
        (written,) = (tmp_path / str(start_s)).iterdir()
        written.rename(tmp_path / "log" / f"events.out.tfevents.{start_s}.host")
    import_tensorboard(tmp_path / "log", tmp_path / "run")
    assert load_run(tmp_path / "run").steps.loss.tolist() == [1.0] * 5 + [9.0] * 8


def test_a_truncated_log_is_read_up_to_its_last_record(log: Path, tmp_path: Path) -> None:
    (source,) = log.glob("*tfevents*")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / source.name).write_bytes(source.read_bytes()[:900])
    import_tensorboard(tmp_path / "torn", tmp_path / "run")
    assert 0 < len(load_run(tmp_path / "run").steps) < 20


def test_an_unusable_log_raises_one_sentence_and_leaves_nothing(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match=r"^logdir='.*none' does not exist"):
        import_tensorboard(tmp_path / "none", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="holds no event files"):
        import_tensorboard(tmp_path / "empty", tmp_path / "run")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "events.out.tfevents.1").write_bytes(b"junk" * 1000)
    with pytest.raises(RunError, match=r"holds nothing that a run can store|is damaged"):
        import_tensorboard(tmp_path / "junk", tmp_path / "run")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(RunError, match="exists already"):
        import_tensorboard(log, tmp_path / "taken")
    assert main(["import-tensorboard", str(log), "--out", "s3://bucket/run"]) == 2
    assert "is an address; give a folder" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "junk", "taken"]


def test_the_command_lists_the_imported_tags(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)  # the memory limit needs its own process
    assert main(["import-tensorboard", str(log), "--out", str(tmp_path / "run"), "--name", "old one"]) == 0
    message = capsys.readouterr().out
    assert "loss: train/loss, 20 values" in message and "weight_grad: 1 histograms, gradients/head.weight" in message
    assert "not recognized and skipped: accuracy, mystery, notes/text_summary, val/loss" in message
    assert load_run(tmp_path / "run").name == "old one"
