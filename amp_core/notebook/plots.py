"""`run.plot(name)`: the figures of the app's pages, as the pages draw them when nothing else was chosen there.

>>> plot(run, "loss_scale")
>>> plot(run, "ranges", dark=True).write_html("ranges.html")
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from amp_core import analysis
from amp_core.analysis.folding import fold_classes, fold_shares, readable_depth
from amp_core.run import Run
from amp_core.schema import RunError

Draw = Callable[[ModuleType, Run, bool], Any]

_KINDS = {
    "output_grad": "Output gradients",
    "weight_grad": "Weight gradients",
    "activation": "Activations",
    "weight": "Weights",
}


def plot(run: Run, name: str, dark: bool = False) -> Any:
    """The plotly figure `name` of `PLOTS`. A run that did not record what it shows gives a figure that says so.

    Raises `RunError` for another name, and where plotly is missing.
    """
    if name not in PLOTS:
        raise RunError(f"name={name!r} is no plot; choose one of {', '.join(PLOTS)}")
    try:
        from amp_core import figures
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "plotly":
            raise
        raise RunError("plots need plotly; install it with `pip install plotly`") from None
    return PLOTS[name](figures, run, dark)


def _loss(figures: ModuleType, run: Run, dark: bool) -> Any:
    curves = analysis.loss_curves([run], "step", most=4000)
    return _marked(figures.loss_figure(curves, dark=dark), run, dark)


def _marked(figure: Any, run: Run, dark: bool, skips: bool = True) -> Any:
    """With the strip of a run's marks below it; `skips`: skipped steps among them, where the figure has none itself."""
    from amp_core.figures.marks import with_marks

    marks = analysis.step_marks(run)
    return with_marks(figure, marks if skips else marks[marks["kind"] == "change"], dark=dark)


def _loss_scale(figures: ModuleType, run: Run, dark: bool) -> Any:
    trace = analysis.thin(analysis.scale_trace(run), "step", "loss_scale", keep="skipped")
    window = analysis.safe_window_over_time(run)
    return _marked(
        figures.scale_figure(trace, analysis.skip_episodes(run), dark, window=window), run, dark, skips=False
    )


def _grad_norm(figures: ModuleType, run: Run, dark: bool) -> Any:
    trace = analysis.thin(analysis.scale_trace(run), "step", "grad_norm", keep="skipped")
    return _marked(figures.grad_norm_figure(trace, dark=dark), run, dark, skips=False)


def _phases(figures: ModuleType, run: Run, dark: bool) -> Any:
    figure = figures.phase_figure(analysis.phase_times(run), dark=dark)
    return _marked(figure, run, dark)


def _memory(figures: ModuleType, run: Run, dark: bool) -> Any:
    trace = analysis.thin(analysis.memory_trace(run), "step", "allocated_bytes")
    figure = figures.memory_figure(trace, dark=dark, what=analysis.what_memory(run))
    return _marked(figure, run, dark)


def _memory_parts(figures: ModuleType, run: Run, dark: bool) -> Any:
    found = analysis.memory_breakdown(run)
    on_cpu = found.reserved_bytes is None
    parts = found.parts[found.parts["category"] != "other"] if on_cpu else found.parts
    title = "Held in tensors, at most" if on_cpu else "Memory at the peak"
    return figures.memory_parts_figure(parts.assign(run=run.name), dark, title)


def _device(figures: ModuleType, run: Run, dark: bool) -> Any:
    samples = analysis.thin(analysis.device_samples(run), "time_s", "gpu_util_frac")
    return figures.device_figure(samples, dark=dark)


def _ranges(figures: ModuleType, run: Run, dark: bool) -> Any:
    kind = _kind(run)
    shares, classes = analysis.exponent_shares(run, kind), analysis.class_shares(run, kind)
    depth = readable_depth(classes["name"].tolist())
    return figures.exponent_heatmap(
        fold_shares(shares, depth),
        ("fp16",),
        dark,
        title=f"{_KINDS[kind]} by tensor and exponent",
        values="value as stored",
        classes=fold_classes(classes, depth),
    )


def _classes(figures: ModuleType, run: Run, dark: bool) -> Any:
    classes = analysis.class_shares(run, _kind(run))
    return figures.class_bars(fold_classes(classes, readable_depth(classes["name"].tolist())), dark=dark)


def _kind(run: Run) -> str:
    present = analysis.kinds_present(run)
    return next((kind for kind in _KINDS if kind in present), "weight_grad")


def _tensor_cores(figures: ModuleType, run: Run, dark: bool) -> Any:
    return figures.answer_figure(analysis.answer_shares(run), dark)


def _kernels(figures: ModuleType, run: Run, dark: bool) -> Any:
    title = "Where operator time goes" if analysis.tensor_core_use(run).on_cpu else "Where kernel time goes"
    return figures.kernel_figure(analysis.kernel_table(run), dark, title)


def _step_cost(figures: ModuleType, run: Run, dark: bool) -> Any:
    cost = analysis.step_cost(run)
    unit = "step" if cost.steps else "window"
    return figures.step_cost_figure(cost.parts.assign(per=unit), dark, f"Where the time of a {unit} goes")


def _precision_map(figures: ModuleType, run: Run, dark: bool) -> Any:
    phases = analysis.precision_map(run).ops["phase"]
    title = f"Modules by operators{', forward' if phases.notna().any() else ''}"
    return figures.precision_figure(analysis.precision_cells(run), dark, title)


PLOTS: dict[str, Draw] = {
    "loss": _loss,
    "loss_scale": _loss_scale,
    "grad_norm": _grad_norm,
    "ranges": _ranges,
    "classes": _classes,
    "phases": _phases,
    "step_cost": _step_cost,
    "memory": _memory,
    "memory_parts": _memory_parts,
    "device": _device,
    "tensor_cores": _tensor_cores,
    "kernels": _kernels,
    "precision_map": _precision_map,
}
"""What `plot` can draw, by name."""
