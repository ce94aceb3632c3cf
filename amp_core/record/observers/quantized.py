"""The casts to 8 and 4 bits that a training makes, into the table `quantized`.

    QuantizedWatch(writer, model, due=sampling.due, wanted=lambda name: True)        # an observer: see `observers`

On a sampled step, the cast functions of the libraries in use are patched (`amp_core.record.casts`). The first cast of
each operand of each linear layer is measured, from the values before and after; the others are counted. A model in
which nothing is quantized costs nothing after its first sampled steps.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from amp_core.quantization import ELEMENTS
from amp_core.record.casts import products, torchao, transformer_engine
from amp_core.record.casts.cast import NUMBERS, Cast, Key, Library, Pass, Source, cast_losses, measure_cast
from amp_core.record.model import own
from amp_core.record.model.modules import is_compiled, is_linear, tensors_in
from amp_core.record.model.parameters import named_modules, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.observers.quantized_layers import report_empty_histories, report_layers, report_unseen
from amp_core.record.observers.storages import storage_of
from amp_core.record.observers.time_cap import TimeCap
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name, measurable
from amp_core.record.torch_internals.module_calls import Switches
from amp_core.record.torch_internals.patches import Patches
from amp_core.record.torch_internals.tensor_hooks import TensorHooks
from amp_core.store.writer import RunWriter

LIBRARIES: tuple[Callable[[], Iterator[Library]], ...] = (torchao.libraries, products.libraries)

MAX_WAITING = 8
"""Sampled steps whose numbers may still be on the device."""
FIRST_SAMPLES = 3
"""Sampled steps without any cast after which the model is taken not to be quantized."""


class _Row(NamedTuple):
    """A measured cast without its tensors; its numbers are in the host transfer."""

    name: str
    layer: str
    cast: Cast
    dtype: str | None
    numel: int | None


class _Layer:
    """What one linear layer did in the present step."""

    def __init__(self) -> None:
        self.calls = 0
        self.casts: dict[Key, int] = {}
        self.rows = 0  # rows of the input of its first call


class QuantizedWatch(Observer):
    """Writes rows of `quantized` for the sampled steps of one training loop, and once which layers are quantized.

    `due(step)` says whether a step is sampled, `wanted(name)` whether a module or parameter of that name is. With
    `all_sampled`, no sampled step is left out.
    """

    def __init__(
        self,
        writer: RunWriter,
        model: torch.nn.Module,
        due: Callable[[int], bool],
        wanted: Callable[[str], bool],
        all_sampled: bool = False,
    ) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._due = due
        self._wanted = wanted
        self._cap = TimeCap(writer, "quantized", all_sampled)
        self._samples = 0
        self._ever = self._layers_written = False
        self._step = 0
        self._patches = Patches()
        self._switches: Switches | None = None
        self._engine_modules: list[tuple[str, torch.nn.Module]] | None = None  # Transformer Engine's
        self._on_tensors = TensorHooks()
        self._names: dict[int, str] = {}
        self._pending: list[tuple[Pass | None, Key, Source, tuple[Any, ...], dict[str, Any], Any]] = []
        self._passes: list[Pass] = []  # forwards of the layer that runs now
        self._current: Pass | None = None
        self._inside_cast = False
        self._layers: dict[str, _Layer] = {}
        self._measured: list[_Row] = []
        self._transfer = HostTransfer()
        self._sent: list[tuple[int, list[_Row], dict[str, _Layer], HostTransfer]] = []
        self._scales: dict[tuple[str, Key], tuple[float, int]] = {}
        self._compiled = False
        if next(torchao.libraries(), None) is not None:
            self._compile()

    # moments of the loop

    def step_began(self, step: int) -> None:
        self._detach()
        sampled = self._due(step) and (self._ever or self._samples < FIRST_SAMPLES)
        self.awake = sampled and self._attach(step)

    def step_ended(self, step: int) -> None:
        with self._cap:
            self._detach()
            self._samples += 1
            if self._measured:
                self._write_layers(step)
                self._transfer.send()
                self._sent.append((self._step, self._measured, self._layers, self._transfer))
                self._measured = []
            elif not self._ever and self._samples == FIRST_SAMPLES:
                report_unseen(self._writer, self._model, step, "the casts are made within fused kernels")
            self._write(MAX_WAITING)

    def close(self) -> None:
        self._detach()
        self._on_tensors.remove()
        self._write(0)
        self._cap.report(self._step)

    # attaching

    def _attach(self, step: int) -> bool:
        libraries = [library for loaded in LIBRARIES for library in loaded()]
        if self._engine_modules is None:
            self._engine_modules = [(n, m) for n, m in named_modules(self._model) if transformer_engine.is_module(m)]
            report_empty_histories(self._writer, self._engine_modules, step)
        if not libraries:
            return False
        if is_compiled(self._model):
            self._samples = FIRST_SAMPLES
            report_unseen(self._writer, self._model, step, "hooks do not reach into a compiled graph")
            return False
        if not self._cap.allows(step):
            return False
        if self._switches is None:
            self._names = {data: n for n, p in named_parameters(self._model) for data in _addresses(p)}
            layers = [(n, m, self._listener(n)) for n, m in named_modules(self._model) if is_linear(m)]
            layers += [(n, m, self._engine_listener(n)) for n, m in self._engine_modules]
            self._switches = Switches((m, listener) for _, m, listener in layers)
        self._step, self._layers, self._measured = step, {}, []
        self._pending, self._passes, self._transfer = [], [], HostTransfer()
        self._switches.on()
        for library in libraries:
            for product in library.products:
                self._patches.wrap(product, "forward", self._forward)
                self._patches.wrap(product, "backward", self._backward)
            for source in library.sources:
                self._patches.wrap(source.owner, source.attribute, self._casting(source))
        return True

    def _detach(self) -> None:
        if self._patches:
            self._patches.restore()
            assert self._switches is not None
            self._switches.off()
        self._on_tensors.detach_leaves()
        self._pending, self._passes = [], []

    # patched functions: they run as the training's own, and ours comes after

    def _forward(self, original: Callable[..., Any]) -> Any:
        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            made = Pass()
            before, self._current = self._current, made
            try:
                result = original(ctx, *args, **kwargs)
            finally:
                self._current = before
            ctx.amp_core_pass = made
            self._passes.append(made)
            return result

        return staticmethod(forward)

    def _backward(self, original: Callable[..., Any]) -> Any:
        def backward(ctx: Any, *grads: Any) -> Any:
            made = getattr(ctx, "amp_core_pass", None)
            before, self._current = self._current, made
            if made is not None:
                made.inside, made.casts = "backward", 0
            try:
                return original(ctx, *grads)
            finally:
                self._current = before

        return staticmethod(backward)

    def _casting(self, source: Source) -> Callable[[Callable[..., Any]], Any]:
        def around(original: Callable[..., Any]) -> Any:
            def cast(*args: Any, **kwargs: Any) -> Any:
                if self._inside_cast:  # a cast function that calls another
                    return original(*args, **kwargs)
                self._inside_cast = True
                try:
                    result = original(*args, **kwargs)
                finally:
                    self._inside_cast = False
                if not self.at_own_work():
                    with self.watching():
                        self._saw(source, args, kwargs, result)
                return result

            return staticmethod(cast) if isinstance(source.owner, type) else cast

        return around

    def _saw(self, source: Source, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        made = self._current
        key = source.key_of(made, args, kwargs)
        if made is not None:
            made.casts += 1
        if key is None:
            return
        entry = made, key, source, args, kwargs, result
        if made is None:  # FSDP gathers a weight before its layer runs
            self._take(_name_of(args[0], self._names).rpartition(".")[0], [entry])
        elif made.inside == "forward":
            self._pending.append(entry)
        elif made.name is not None:
            self._take(made.name, [entry])

    # as layers run

    def _listener(self, name: str) -> Callable[..., None]:
        def after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            pending, self._pending = self._pending, []
            passes, self._passes = self._passes, []
            if self.at_own_work() or not torch.is_grad_enabled():
                return
            with self.watching():
                layer = self._layers.setdefault(name, _Layer())
                layer.calls += 1
                if layer.calls == 1:
                    given = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
                    layer.rows = given.numel() // max(given.shape[-1], 1) if given is not None and given.dim() else 0
                for made in passes:
                    made.name = name
                self._take(name, pending)

        return after_forward

    def _engine_listener(self, name: str) -> Callable[..., None]:
        def after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.at_own_work() or not torch.is_grad_enabled():
                return
            with self.watching():
                layer = self._layers.setdefault(name, _Layer())
                layer.calls += 1
                if layer.calls > 1 or not transformer_engine.is_quantized(module):
                    return
                weight = own.parameter(module, "weight")
                with self._cap:
                    for cast in transformer_engine.forward_casts(module, (*args, *kwargs.values()), weight):
                        self._count_and_measure(name, cast)
                first = next(tensors_in(output), None)
                if first is not None and first.requires_grad:
                    self._on_tensors.attach(first, name, on_grad(module))

        def on_grad(module: torch.nn.Module) -> Callable[[torch.Tensor], None]:
            def hook(grad: torch.Tensor) -> None:
                with self.watching():
                    if self.awake:
                        with self._cap:
                            self._count_and_measure(name, transformer_engine.gradient_cast(module, grad))

            return hook

        return after_forward

    def _compile(self) -> None:
        """Compile the kernel before its first use, so that its compilation does not count as the time of measuring."""
        if not self._compiled:
            self._compiled = True
            one = torch.ones(1, device="cpu")
            with contextlib.suppress(Exception):  # it comes again when a cast is measured, and is reported then
                measure_cast(Cast("weight", None, None, "", ELEMENTS["fp8-e4m3"], "tensor", one, one, one, one))

    def _count_and_measure(self, layer: str, cast: Cast) -> None:
        known = self._layers[layer].casts
        known[cast.kind, cast.product] = known.get((cast.kind, cast.product), 0) + 1
        if known[cast.kind, cast.product] == 1:
            self._measure(layer, cast)

    def _take(self, layer: str, entries: Sequence[Any]) -> None:
        """Measure the first cast of each operand of a layer, and count the others."""
        for _, key, source, args, kwargs, result in entries:
            known = self._layers.setdefault(layer, _Layer()).casts
            known[key] = known.get(key, 0) + 1
            if known[key] == 1:
                self._compile()
                with self._cap:
                    self._measure(layer, source.read(key, args, kwargs, result))

    def _measure(self, layer: str, cast: Cast) -> None:
        name = f"{layer}.weight" if cast.kind == "weight" else layer
        values = cast.values
        if not self._wanted(name) or (values is not None and not (measurable(values) and values.numel())):
            return
        if values is None and cast.scales is None:
            return
        self._transfer.put(str(len(self._measured)), measure_cast(cast))
        without = cast._replace(values=None, held=None, data=None, scales=None, amax=None)
        dtype, numel = (dtype_name(values.dtype), values.numel()) if values is not None else (None, None)
        self._measured.append(_Row(name, layer, without, dtype, numel))

    # what was seen

    def _write_layers(self, step: int) -> None:
        """Once: which linear layers are quantized, and which are not."""
        self._ever = True
        if self._layers_written:
            return
        self._layers_written = True
        ran = [name for name, layer in self._layers.items() if layer.calls]
        converted = {name for name, layer in self._layers.items() if layer.casts}
        rows = {name: layer.rows for name, layer in self._layers.items()}
        engine = [name for name, _ in self._engine_modules or ()]
        report_layers(self._writer, self._model, step, ran, converted, rows, engine)

    def _write(self, max_waiting: int) -> None:
        """Write what has arrived, and wait for the oldest while too many are pending."""
        while self._sent and self._sent[0][3].ready(wait=len(self._sent) > max_waiting):
            step, measured, layers, transfer = self._sent.pop(0)
            columns: dict[str, list[Any]] = {}
            for i, row in enumerate(measured):
                numbers = dict(zip(NUMBERS, transfer.values(str(i)).tolist(), strict=True))
                for column, value in self._row(step, row, layers[row.layer], numbers).items():
                    columns.setdefault(column, []).append(value)
            self._writer.append("quantized", columns)

    def _row(self, step: int, row: _Row, layer: _Layer, numbers: dict[str, float]) -> dict[str, Any]:
        cast = row.cast
        key = cast.kind, cast.product
        age: int | None = int(numbers["scale_age"]) if isinstance(cast.scale_age, torch.Tensor) else cast.scale_age
        if age is None:
            last, since = self._scales.get((row.name, key), (None, step))
            since = since if last == numbers["scale"] else step
            self._scales[row.name, key] = numbers["scale"], since
            age = step - since
        return {
            "step": step,
            "name": row.name,
            "kind": cast.kind,
            "product": cast.product,
            "recipe": cast.recipe,
            "library": cast.library,
            "element": cast.element.name,
            "block": cast.block,
            "dtype": row.dtype,
            "numel": row.numel,
            "scale_age": age,
            "casts": layer.casts.get(key, 1),
            "calls": layer.calls or None,
        } | cast_losses(list(numbers.values()))


def _addresses(parameter: torch.Tensor) -> Iterator[int]:
    """Where the values of a parameter are, also inside of a DTensor and of torchao's wrapper of a weight."""
    inner: Any = parameter
    for attribute in ("_local_tensor", "_tensor"):
        inner = getattr(inner, attribute, inner)
    if (storage := storage_of(inner, inner.device)) is not None:
        yield storage[0]


def _name_of(tensor: Any, names: dict[int, str]) -> str:
    return next((names[a] for a in _addresses(tensor) if a in names), "")
