"""Watching Keras 3, on the torch backend and on TensorFlow.

    from amp_core.record.keras import WatchCallback

    keras.mixed_precision.set_global_policy("mixed_float16")
    model.compile("adam", loss="sparse_categorical_crossentropy")    # Keras scales the loss by itself
    model.fit(x, y, callbacks=[WatchCallback("runs/a")])

Recorded are loss, loss scale, skipped steps, gradient norm and times of each step, and histograms of the gradient of
each variable on sampled steps. Outputs of layers are not recorded. The gradients are read in `optimizer.apply`, of
every optimizer that is an attribute of the model: a custom `train_step` may have several. On TensorFlow they leave the
graph through `tf.numpy_function`, which XLA does not support: if Keras compiles with it (`jit_compile`, on a GPU the
default), only the loss scale and the skipped steps are recorded, which an event reports.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.frameworks.keras_run import KerasRun, Seen
from amp_core.record.frameworks.keras_values import as_torch, rows, with_gradients
from amp_core.record.frameworks.requirements import needing
from amp_core.record.model.parameters import in_backward
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.patches import Patches
from amp_core.schema import RunError
from amp_core.store import shutdown

with needing("keras"):
    import keras

BACKENDS = ("torch", "tensorflow")


class WatchCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Records each `fit` of a model into `into`, further ones into `into`-2, `into`-3, …

    Args:
        into: folder of the run; it must not hold a run yet.
        every: gradients are measured variable by variable on every such step.
        config: your own settings to store in the head of the run.

    Raises `RunError` for another backend than torch and TensorFlow.
    """

    def __init__(
        self, into: str | os.PathLike[str], every: int = 10, *, config: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if keras.backend.backend() not in BACKENDS:
            raise RunError(f"KERAS_BACKEND={keras.backend.backend()} cannot be watched; use {' or '.join(BACKENDS)}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise RunError(f"every={every!r} is not a whole number from 1; every=10 measures every tenth step")
        self._into = os.fspath(into)
        self._every = every
        self._config = dict(config or {})
        self._trainings = 0
        self._patches = Patches()
        self._run: KerasRun | None = None
        self._unseen = False
        self._trackers: list[Any] = []
        self._optimizers: list[Any] = []
        self._samples: Any = None  # of the current batch
        self._loss: Any = None  # since the last step of an optimizer
        self._before: Seen | None = None  # with XLA, which hides steps: the state before the current one

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin the run, and patch the optimizers."""
        self._end()
        self._trainings += 1
        into = self._into if self._trainings == 1 else f"{self._into}-{self._trainings}"
        self._optimizers = _optimizers(self.model)
        self._run = KerasRun(
            into, self.model, self._optimizers, self._every, self._config, background=self._on_tensorflow
        )
        for tracker in self._trackers:
            self._run.mirror(tracker)
        self._before = self._loss = self._samples = None
        self._unseen = self._on_tensorflow and bool(self.model.jit_compile)
        if self._unseen:
            self._run.not_seen("loss and gradients: XLA does not expose them; compile with jit_compile=False")
        else:
            for index, optimizer in enumerate(self._optimizers):
                self._patches.wrap(optimizer, "scale_loss", self._around_scale_loss)
                self._patches.wrap(optimizer, "apply", functools.partial(self._around_apply, optimizer, index))
            self._patches.wrap(self.model, "train_step", self._around_train_step)
            if self._on_tensorflow:
                import tensorflow as tf

                self._patches.wrap(tf.GradientTape, "gradient", self._around_gradient)
                self.model.make_train_function(force=True)  # one that was traced before does not call the patches
            else:
                patched_functions.backward.listen(self._on_backward)
        self._patches.wrap(self.model, "train_function", self._guarded)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """On torch the data is loaded by now; on TensorFlow it is loaded within the step."""
        if self._run is not None and self._on_tensorflow:
            self._run.send()  # now, since the step that begins runs outside of Python
        elif self._run is not None:
            self._run.enter("forward")
        if self._unseen:
            self._before = self._outside()

    def on_test_end(self, logs: Any = None) -> None:
        """Record the results of an evaluation."""
        if self._run is not None and logs:
            self._run.evaluated({f"eval_{name}": value for name, value in logs.items()})

    def on_train_end(self, logs: Any = None) -> None:
        """End the run."""
        self._end()

    def mirror(self, tracker: Any) -> None:
        """Send the headline numbers of every step to `tracker` too, of trainings to come as well: a run of wandb, or
        anything with `log(dict, step=)`. As `Recorder.mirror`."""
        self._trackers.append(tracker)
        if self._run is not None:
            self._run.mirror(tracker)

    @property
    def _on_tensorflow(self) -> bool:
        return bool(keras.backend.backend() == "tensorflow")

    def _end(self, error: BaseException | None = None) -> None:
        if self._run is None:
            return
        self._patches.restore()
        patched_functions.backward.unlisten(self._on_backward)
        if self._on_tensorflow:
            self.model.train_function = None  # the traced function still refers to this callback
        run, self._run = self._run, None
        run.close(*(shutdown.describe(type(error), error) if error is not None else ()))

    def _guarded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train_function(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except (StopIteration, GeneratorExit):
                raise
            except BaseException as error:
                if type(error).__name__ != "OutOfRangeError":  # TensorFlow's exception at the end of the data
                    self._end(error)
                raise
            self._batch_ended()
            return result

        return train_function

    def _batch_ended(self) -> None:
        """Not `on_train_batch_end`: with a callback that has one, Keras waits for each step's numbers."""
        if self._run is None:
            return
        self._run.batch_ended()
        if self._before is not None:  # with XLA: the state after the step
            before = self._before
            self._run.began(lambda: before)
            self._run.made(self._outside().iterations)

    def _around_scale_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale_loss(loss: Any) -> Any:
            self._loss = loss
            result = original(loss)
            if self._run is not None and not self._on_tensorflow:
                self._run.enter("backward")
            return result

        return scale_loss

    def _on_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A custom `train_step` calls backward itself, perhaps without `scale_loss`."""
        roots = [t for t in tree_leaves(kwargs.get("tensors", args[:1])) if isinstance(t, torch.Tensor)]
        if self._run is None or in_backward():
            return
        if self._loss is None and len(roots) == 1 and roots[0].numel() == 1:
            self._loss = roots[0]
        self._run.enter("backward")

    def _around_gradient(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same on TensorFlow, where a tape computes gradients of the loss."""

        @functools.wraps(original)
        def gradient(tape: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if self._loss is None and getattr(target, "shape", None) == ():
                self._loss = target
            return original(tape, target, *args, **kwargs)

        return gradient

    def _around_train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            self._loss = None
            self._samples = rows(args)
            return original(*args, **kwargs)

        return train_step

    def _around_apply(self, optimizer: Any, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            run = self._run
            variables = list(trainable_variables) if trainable_variables is not None else None
            if run is None:
                return original(grads, variables)
            seen: Callable[[], None] | None = None
            if self._on_tensorflow:
                with run.watching():
                    seen = self._see_in_graph(with_gradients(optimizer, grads, variables), optimizer, index)
            else:
                run.began(lambda: self._seen(with_gradients(optimizer, grads, variables), optimizer, index))
            self._loss = None
            result = original(grads, variables)
            if seen is not None:
                with run.watching():
                    seen()
            elif not self._on_tensorflow:
                run.made(optimizer.iterations.value)
            return result

        return apply

    def _outside(self) -> Seen:
        """The optimizer's state between two steps."""
        optimizer = self.model.optimizer
        own = [getattr(optimizer, name, None) for name in ("dynamic_scale", "step_counter")]
        scale, tracker = (
            torch.tensor(float(keras.ops.convert_to_numpy(v)), device="cpu") if v is not None else None for v in own
        )
        iterations = torch.tensor(int(keras.ops.convert_to_numpy(optimizer.iterations)), device="cpu")
        return Seen([], [], None, scale, tracker, iterations, lambda: float(optimizer.learning_rate))

    def _seen(self, given: list[tuple[str, Any]], optimizer: Any, index: int) -> Seen:
        scale, count = getattr(optimizer, "dynamic_scale", None), getattr(optimizer, "step_counter", None)
        return Seen(
            names=[name for name, _ in given],
            grads=[grad.detach() for _, grad in given],
            loss=self._loss.detach().clone().reshape(()) if self._loss is not None else None,
            scale=scale.value.detach().clone() if scale is not None else None,
            tracker=count.value.detach().clone() if count is not None else None,
            iterations=optimizer.iterations.value.detach().clone(),
            rate=lambda: float(optimizer.learning_rate),
            samples=int(self._samples) if self._samples is not None else 0,
            optimizer=index,
        )

    def _see_in_graph(self, given: list[tuple[str, Any]], optimizer: Any, index: int) -> Callable[[], None]:
        """Like `_seen`, but traced once into the graph. The returned function is to be called after the optimizer, in
        the graph too.

        All values of a step pass through one `tf.numpy_function`, since the graph waits for Python.
        """
        import tensorflow as tf

        dense = [tf.convert_to_tensor(g.values if isinstance(g, tf.IndexedSlices) else g) for _, g in given]
        with tf.control_dependencies(dense):
            values = {"at": tf.timestamp(), "rate": optimizer.learning_rate, "iterations": optimizer.iterations}
        if hasattr(optimizer, "dynamic_scale"):
            values |= {"scale": optimizer.dynamic_scale, "tracker": optimizer.step_counter}
        values |= {"loss": self._loss} if self._loss is not None else {}
        fixed = self._samples if isinstance(self._samples, int) else 0
        values |= {"samples": self._samples} if tf.is_tensor(self._samples) else {}
        names, keys = [name for name, _ in given], list(values)
        before = [tf.convert_to_tensor(value) for value in values.values()]

        def arrived(after: Any, *arrays: Any) -> None:
            run = self._run
            if run is None:
                return
            by_name = dict(zip(keys, arrays, strict=False))
            run.began(
                lambda: Seen(
                    names=names,
                    grads=[as_torch(grad) for grad in arrays[len(keys) :]],
                    loss=float(by_name["loss"]) if "loss" in by_name else None,
                    scale=float(by_name["scale"]) if "scale" in by_name else None,
                    tracker=int(by_name["tracker"]) if "tracker" in by_name else None,
                    iterations=int(by_name["iterations"]),
                    rate=lambda: float(by_name["rate"]),
                    samples=int(by_name.get("samples", fixed)),
                    optimizer=index,
                ),
                max(0.0, time.time() - float(by_name["at"])),
            )
            run.made(int(after))

        def seen() -> None:
            tf.numpy_function(arrived, [tf.convert_to_tensor(optimizer.iterations), *before, *dense], [])

        return seen


def _optimizers(model: Any) -> list[Any]:
    """The model's optimizers: its attributes, and last the one it was compiled with, possibly by default."""
    own = [o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer) and o is not model.optimizer]
    return [*{id(o): o for o in own}.values(), model.optimizer]
