"""A profiler window on some steps of a training: which kernels ran, for which operator and module, in which phase.

    watch(model, optimizer, scaler=scaler, into="runs/a", profile=(50, 53))      # profiles steps 50, 51 and 52

While the window is open, torch's profiler records, and the forward of every module, the phases and the steps are marked
in its trace. At the end `amp_core.traces` reads the trace, as it reads imported ones, into the tables `kernels` and
`windows`. Profiled steps take longer; their results are the same bit for bit, and all hooks are detached afterwards.
AMPscope's own kernels are in phase `watch`.
"""

import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from amp_core.hardware.host import cpu_name
from amp_core.record.backends import accelerators, backend_of
from amp_core.record.backends.base import Backend
from amp_core.record.model import own
from amp_core.record.model.modules import is_compiled
from amp_core.record.model.parameters import named_modules, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.torch_internals.module_calls import after_call, before_call
from amp_core.schema import RunError
from amp_core.store.writer import RunWriter
from amp_core.text.errors import in_one_line
from amp_core.traces.marks import MODULE, PHASE
from amp_core.traces.read import read_trace


class ProfileWindow(Observer):
    """Profiles the steps from `first` up to, not including, `last`."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, first: int, last: int) -> None:
        if not 0 <= first < last:
            raise RunError(
                f"profile=({first}, {last}) is not a window of steps; profile=(50, 53) profiles steps 50 to 52"
            )
        self._writer = writer
        self._model = model
        self._first = first
        self._last = last
        self._profiler: profile | None = None
        self._step: record_function | None = None
        self._modules = _ModuleMarks()
        self._over = False

    def step_began(self, step: int) -> None:
        """A window that begins with the first step opens here; others open at the end of the step before, to include
        data loading."""
        if self._profiler is None and not self._over and step >= self._first:
            self._open(step)

    def phase_entered(self, phase: str) -> None:
        """Mark the phase in the trace, on the present thread."""
        if self._profiler is not None:
            _mark(phase)

    def step_ended(self, step: int) -> None:
        """Open before the first step, mark the steps in between, and write after the last."""
        if self._over:
            return
        if self._profiler is None:
            if step >= self._first - 1:
                self._open(step + 1)
            return
        self._end_step()
        if step >= self._last - 1:
            self._finish()
        else:
            self._begin_step(step + 1)

    def close(self) -> None:
        """The run ends: write the part of the window that was profiled."""
        if self._profiler is not None:
            self._end_step()
            self._finish()
        elif not self._over:
            self._over = True
            self._not_recorded(f"the run ended before step {self._first}")

    # inside

    def _open(self, step: int) -> None:
        if step >= self._last:
            self._over = True
            return
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # torch.profiler checks it the same way
            self._over = True
            self._not_recorded("another profiler is running")
            return
        activities = [ProfilerActivity.CPU]
        for backend in _in_use():
            if backend.profiler_activity is not None:
                activities.append(backend.profiler_activity)
                backend.synchronize()  # otherwise kernels of the step before would run within the window
        for device in {parameter.device for parameter in own.parameters(self._model)}:  # not only on the current one
            with backend_of(device).selected():
                backend_of(device).synchronize()
        profiler = profile(activities=activities, record_shapes=True)
        try:
            profiler.prepare_trace()
            profiler.start_trace()
        except Exception as error:
            self._over = True
            self._not_recorded(in_one_line(error))
            return
        self._profiler = profiler
        hindrance = "hooks do not reach into a compiled graph" if is_compiled(self._model) else None
        if hindrance is None:
            try:
                self._modules.attach(unwrapped(self._model))
            except Exception as error:  # a module that accepts no hooks: kernels without module names are still useful
                self._modules.detach()
                hindrance = in_one_line(error)
        if hindrance is not None:
            self._writer.event("warning", name="not recorded", detail=f"modules of kernels: {hindrance}")
        self._begin_step(step)
        _mark("watch")  # the phase while observers are notified of the end of a step

    def _begin_step(self, step: int) -> None:
        self._step = record_function(f"ProfilerStep#{step}")
        self._step.__enter__()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _finish(self) -> None:
        """Stop the profiler, read its trace and write the rows. Errors are reported, never propagated."""
        profiler, self._profiler, self._over = self._profiler, None, True
        self._modules.detach()
        if profiler is None:
            return
        try:
            profiler.stop_trace()
            with tempfile.TemporaryDirectory(prefix="ampscope-profile-") as folder:
                file = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(file))
                trace = read_trace(file, next((backend.type for backend in _in_use()), None))
            names = trace.windows.get("device_name", [])
            trace.windows["device_name"] = [
                cpu_name() if device == "cpu" else name
                for device, name in zip(trace.windows.get("device", []), names, strict=True)
            ]
            trace.write(self._writer, tables=("kernels", "windows", "collectives", "timeline"))
        except Exception as error:
            self._not_recorded(in_one_line(error))

    def _not_recorded(self, reason: str) -> None:
        what = f"kernels of steps {self._first} to {self._last - 1}: {reason}"
        self._writer.event("warning", name="not recorded", detail=what)


def _in_use() -> list[type[Backend]]:
    """Accelerators that the process uses: to ask another one would take memory of it."""
    return [backend for backend in accelerators() if backend.in_use()]


def _mark(phase: str) -> None:
    """Mark in the trace that this thread enters `phase`."""
    with record_function(PHASE + phase):
        pass


class _ModuleMarks:
    """Listeners that mark the forward of every module in the trace, by its name in `named_modules()`."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._here = threading.local()  # checkpointing reruns forward on an autograd thread

    def attach(self, model: torch.nn.Module) -> None:
        for name, module in named_modules(model):
            self._handles.append(before_call(module, self._enter(name), first=True))
            # `always`: also after a forward that raises.
            self._handles.append(after_call(module, self._leave(name), always=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, name: str) -> Any:
        def before_forward(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            mark = record_function(MODULE + name)
            mark.__enter__()
            self._open().append((name, mark))

        return before_forward

    def _leave(self, name: str) -> Any:
        def after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            marks = self._open()
            if not any(name == opened for opened, _ in marks):
                return
            while marks:
                opened, mark = marks.pop()
                mark.__exit__(None, None, None)
                if opened == name:
                    return

        return after_forward

    def _open(self) -> list[tuple[str, record_function]]:
        if not hasattr(self._here, "marks"):
            self._here.marks = []
        marks: list[tuple[str, record_function]] = self._here.marks
        return marks
