"""`fit` with the callback trains as without it, on the torch backend and, if it is installed, on TensorFlow."""

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from amp_core import RunError, load_run
from tests.record.frameworks.healthy import warning_codes

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)
BACKEND = os.environ.setdefault("KERAS_BACKEND", "torch")

import keras  # noqa: E402

from amp_core.record.frameworks import keras_run  # noqa: E402
from amp_core.record.keras import WatchCallback  # noqa: E402

STEPS = 40
WAYS = {"float32": "fp32", "mixed_float16": "fp16", "mixed_bfloat16": "bf16"}


@pytest.fixture(autouse=True)
def float32_afterwards():
    yield
    keras.mixed_precision.set_global_policy("float32")


def train(policy, callbacks, optimizer=None, jit=False, rows=None):
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((24,)),
            keras.layers.Dense(48, activation="relu", name="first"),
            keras.layers.Dense(10, name="second"),
            keras.layers.Activation("softmax", dtype="float32"),
        ],
        name="net",
    )
    model.compile(optimizer or keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", jit_compile=jit)
    r = np.random.default_rng(0)
    x, y = r.normal(size=(320, 24)).astype("float32"), r.integers(0, 10, 320)
    if rows is not None:
        x[rows] = np.inf
    each = Logs()
    checked = (x[:64], y[:64])
    model.fit(x, y, 16, 2, verbose=0, callbacks=[each, *callbacks], validation_data=checked, shuffle=False)
    return [step["loss"] for step in each.steps], model.get_weights()


class Logs(keras.callbacks.Callback):
    """Collects the logs that Keras passes for each step; its loss is the mean since the beginning of the epoch."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append({name: float(value) for name, value in logs.items()})


@pytest.mark.parametrize("policy", WAYS)
def test_a_training_is_unchanged_and_its_run_complete_and_healthy(tmp_path, policy):
    plain, a = train(policy, [])
    watched, b = train(policy, [WatchCallback(tmp_path / "run", every=5)])
    assert plain == watched
    assert all((p == q).all() for p, q in zip(a, b, strict=True))
    run = load_run(tmp_path / "run")
    assert run.status == "finished" and run.steps.step.tolist() == list(range(STEPS))
    means = run.steps.loss.to_numpy().reshape(2, 20).cumsum(1) / np.arange(1, 21)
    assert np.allclose(means.ravel(), watched, rtol=1e-4)
    assert (run.steps.samples == 16).all()
    for column in ("loss", "grad_norm", "lr", "step_ms", "loss_scale"):
        assert run.table("steps").column(column).null_count == 0
    grads = run.tensors(kind="weight_grad")
    assert sorted(grads.step.unique()) == list(range(0, STEPS, 5))
    assert set(grads.name) == {f"net/{layer}/{w}" for layer in ("first", "second") for w in ("kernel", "bias")}
    assert (grads[["zero", "subnormal", "normal", "inf", "nan"]].sum(axis=1) == grads.numel).all()
    assert run.head.config["precision"] == WAYS[policy] and BACKEND in run.head.config["framework"]
    assert run.head.results.keys() == {"eval_loss"} and (run.events.kind == "evaluated").sum() == 2
    assert warning_codes(run) == []
    if policy == "mixed_float16":
        assert (run.steps.loss_scale == 2.0**15).all() and run.steps.growth_tracker.tolist() == list(range(STEPS))
        assert (grads.loss_scale == 2.0**15).all()
        norm = np.sqrt((grads[grads.step == 0].rms ** 2 * grads[grads.step == 0].numel).sum()) / 2.0**15
        assert run.steps.grad_norm.iloc[0] == pytest.approx(norm, rel=1e-6)


def test_keras_passes_on_the_numbers_of_a_step_as_without_the_callback():
    """It does so asynchronously, unless a callback implements `on_train_batch_end`."""
    for name in ("on_train_batch_end", "on_batch_end"):
        assert getattr(WatchCallback, name) is getattr(keras.callbacks.Callback, name)


def scaled(**settings):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), **settings)


def test_the_scale_is_traced_through_skips_and_growth(tmp_path):
    optimizer = scaled(initial_scale=2.0**24, dynamic_growth_steps=10)
    train("mixed_float16", [WatchCallback(tmp_path / "run")], optimizer)
    steps = load_run(tmp_path / "run").steps
    after = steps.loss_scale.shift(-1)[:-1] / steps.loss_scale[:-1]
    assert steps.skipped.iloc[0] and not steps.skipped.all()
    assert (after[steps.skipped[:-1]] == 0.5).all() and set(after[~steps.skipped[:-1]]) == {1.0, 2.0}
    assert (run_events(tmp_path, "skipped").name.str.len() > 0).all()


def run_events(tmp_path, kind):
    events = load_run(tmp_path / "run").events
    return events[events.kind == kind]


def test_a_planted_fault_is_detected(tmp_path):
    """Data that is not finite: every later step is skipped."""
    train("mixed_float16", [WatchCallback(tmp_path / "run")], scaled(initial_scale=4.0), rows=slice(100, 300))
    assert {"loss-nonfinite", "scale-collapse"} <= set(warning_codes(load_run(tmp_path / "run")))


def test_half_precision_without_a_loss_scale_is_detected(tmp_path):
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(), "mse", auto_scale_loss=False, jit_compile=False)
    model.fit(np.ones((8, 4)), np.ones((8, 2)), 2, verbose=0, callbacks=[WatchCallback(tmp_path / "run")])
    assert warning_codes(load_run(tmp_path / "run")) == ["fp16-without-scaler"]


def test_an_exception_ends_the_run_and_restores_the_optimizer(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)

    def rows():
        for n in range(9):
            yield np.ones((2, 5 if n == 5 else 4), "float32"), np.ones((2, 2), "float32")

    callback = WatchCallback(tmp_path / "run")
    with pytest.raises(Exception, match=r"5"):  # each backend has its own message for a batch that is too wide
        model.fit(rows(), verbose=0, callbacks=[callback])
    assert "apply" not in vars(model.optimizer)
    run = load_run(tmp_path / "run")
    assert run.status == "failed" and len(run.steps) == 5
    model.fit(np.ones((8, 4)), np.ones((8, 2)), 2, verbose=0, callbacks=[callback])
    assert load_run(tmp_path / "run-2").status == "finished"


def minimized(optimizer, loss_of, weights):
    """A step in which the loop computes the gradients itself, and Keras scales nothing."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of()
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss
    import torch

    for weight in weights:
        weight.value.grad = None
    loss = loss_of()
    loss.backward()
    with torch.no_grad():
        optimizer.apply([weight.value.grad for weight in weights], weights)
    return loss


class Pair(keras.Model):
    """Two adversarial networks, each with an optimizer, in a model with its own `train_step` and `compile`."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")], name="maker")
        self.judge = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")], name="judge")
        self.built = True

    def compile(self, judging, making):
        super().compile(jit_compile=False)
        self.judging, self.making = judging, making

    def train_step(self, data):
        real, z = data

        def judge_loss(x, target):
            return keras.ops.mean((self.judge(x) - target) ** 2)

        pairs = (
            (
                self.judging,
                self.judge,
                lambda: judge_loss(real, 1.0) + judge_loss(keras.ops.stop_gradient(self.maker(z)), 0.0),
            ),
            (self.making, self.maker, lambda: judge_loss(self.maker(z), 1.0)),
        )
        losses = [minimized(optimizer, loss_of, part.trainable_weights) for optimizer, part, loss_of in pairs]
        return {"judge": losses[0], "maker": losses[1]}


def fit_pair(callbacks):
    keras.utils.set_random_seed(0)
    model = Pair()
    model.compile(keras.optimizers.Adam(1e-2), keras.optimizers.SGD(1e-2))
    r = np.random.default_rng(0)
    rows = [r.normal(size=(96, n)).astype("float32") for n in (3, 4)]
    each = Logs()
    model.fit(*rows, batch_size=32, epochs=4, verbose=0, shuffle=False, callbacks=[each, *callbacks])
    return [step[part] for step in each.steps for part in ("judge", "maker")]


class Tracker:
    def __init__(self):
        self.rows = []

    def log(self, row, step):
        self.rows.append((step, row))


def test_a_custom_train_step_with_two_optimizers(tmp_path):
    plain, tracker = fit_pair([]), Tracker()
    callback = WatchCallback(tmp_path / "run", every=4)
    callback.mirror(tracker)
    watched = fit_pair([callback])
    assert plain == watched and len(plain) == 24
    run = load_run(tmp_path / "run")
    assert run.steps.step.tolist() == np.repeat(range(12), 2).tolist()
    assert run.steps.optimizer.tolist() == [0, 1] * 12
    assert np.allclose(run.steps.loss, watched, rtol=1e-6) and (run.steps.samples == 32).all()
    assert run.head.config["optimizers"][:2] == ["Adam", "SGD"]
    grads = run.tensors(kind="weight_grad")
    assert sorted(grads.step.unique()) == [0, 4, 8]
    assert set(grads.name) == {f"{part}/dense/{w}" for part in ("maker", "judge") for w in ("kernel", "bias")}
    assert warning_codes(run) == []
    if BACKEND == "torch":  # on TensorFlow a batch is reported only from within its graph
        for column in ("data_ms", "forward_ms", "backward_ms", "optimizer_ms"):
            assert run.table("steps").column(column).null_count == 0
        assert (run.steps.forward_ms > 0).all() and (run.steps.data_ms[1::2] == 0).all()
    assert [step for step, _ in tracker.rows] == run.steps.step.tolist()
    assert [row["amp/loss/optimizer1"] for _, row in tracker.rows[1::2]] == run.steps.loss[1::2].tolist()


def test_gradients_may_be_applied_without_naming_the_variables(tmp_path):
    class Halved(keras.Sequential):
        """Only its second layer is trained, by an optimizer that was built with its weights."""

        def train_step(self, data):
            x, y = data
            weights = self.layers[1].trainable_weights

            class Applying:
                apply = staticmethod(lambda grads, variables: self.optimizer.apply(grads))
                apply_gradients = staticmethod(lambda pairs: self.optimizer.apply([grad for grad, _ in pairs]))

            return {"loss": minimized(Applying, lambda: keras.ops.mean((self(x) - y) ** 2), weights)}

    losses = []
    for callbacks in ([], [WatchCallback(tmp_path / "run")]):
        keras.utils.set_random_seed(0)
        model = Halved(
            [keras.Input((4,)), keras.layers.Dense(3, name="one"), keras.layers.Dense(2, name="two")], name="net"
        )
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        model.optimizer.build(model.layers[1].trainable_weights)
        each = Logs()
        model.fit(np.ones((8, 4)), np.ones((8, 2)), 2, verbose=0, shuffle=False, callbacks=[each, *callbacks])
        losses.append([step["loss"] for step in each.steps])
    assert losses[0] == losses[1] and len(losses[0]) == 4
    run = load_run(tmp_path / "run")
    assert len(run.steps) == 4 and set(run.tensors(kind="weight_grad").name) == {"net/two/kernel", "net/two/bias"}


@pytest.mark.parametrize("where", ["norms", "RowWriter.send"])
def test_errors_of_watching_do_not_end_the_training(tmp_path, monkeypatch, where):
    plain = train("float32", [])

    def full(*args):
        raise MemoryError("no room for the norms")

    monkeypatch.setattr(f"{keras_run.__name__}.{where}", full)
    watched = train("float32", [WatchCallback(tmp_path / "run", every=10**6)])
    assert plain[0] == watched[0]
    detail = run_events(tmp_path, "warning").detail
    assert detail.str.contains("no room for the norms").any() and detail.str.contains("nothing is recorded").any()
    assert load_run(tmp_path / "run").status == "finished"


def test_steps_of_an_optimizer_outside_the_model_are_reported_as_missing(tmp_path):
    elsewhere = [keras.optimizers.SGD()]

    class Hidden(keras.Sequential):
        def train_step(self, data):
            loss = minimized(elsewhere[0], lambda: keras.ops.mean(self(data[0]) ** 2), self.trainable_weights)
            return {"loss": loss}

    model = Hidden([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(jit_compile=False)
    model.fit(np.ones((8, 4)), np.ones((8, 2)), 2, verbose=0, callbacks=[WatchCallback(tmp_path / "run")])
    assert len(load_run(tmp_path / "run").steps) == 0
    assert run_events(tmp_path, "warning").detail.str.contains("none of the model's optimizers").any()


def test_every_must_be_a_number_of_steps(tmp_path):
    with pytest.raises(RunError, match="every=0"):
        WatchCallback(tmp_path / "run", every=0)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow makes several steps in one call")
def test_several_steps_in_one_call_have_a_row_each(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=3)
    model.fit(np.ones((16, 4)), np.ones((16, 2)), 2, verbose=0, callbacks=[WatchCallback(tmp_path / "run", every=4)])
    run = load_run(tmp_path / "run")
    assert run.steps.step.tolist() == list(range(8)) and run.steps.loss.is_monotonic_decreasing
    assert sorted(run.tensors(kind="weight_grad").step.unique()) == [0, 4]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA is TensorFlow's")
def test_under_xla_the_loss_scale_is_recorded_and_the_run_reports_what_is_not(tmp_path):
    plain, _ = train("mixed_float16", [], scaled(initial_scale=2.0**24), jit=True)
    watched, _ = train("mixed_float16", [WatchCallback(tmp_path / "run")], scaled(initial_scale=2.0**24), jit=True)
    assert plain == watched
    run = load_run(tmp_path / "run")
    assert len(run.steps) == STEPS and run.steps.skipped.iloc[0] and not run.steps.skipped.iloc[-1]
    assert run.steps.loss_scale.iloc[1] == 2.0**23
    assert run_events(tmp_path, "warning").detail.str.contains("XLA").any()


@pytest.mark.skipif(BACKEND != "torch" or find_spec("tensorflow") is None, reason="tensorflow is not installed")
def test_the_same_on_tensorflow():
    environment = os.environ | {
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
