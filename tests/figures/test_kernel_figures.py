"""The figures of kernels and of a step's cost: the numbers that are sent to the browser."""

import html

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from amp_core import Run
from amp_core.analysis import compare_step_cost, kernel_table, step_cost, tensor_core_shares
from amp_core.analysis.performance.step_cost import PARTS, PHASE_LABELS
from amp_core.figures import agreement_figure, kernel_figure, step_cost_figure, tensor_core_figure
from amp_core.figures import colours as figure_colours
from amp_core.figures.axes import percent
from amp_core.figures.kernels import MAX_BARS, MAX_NAME_CHARS, short_kernel
from amp_core.hardware.gpus import core_names
from tests.figures.test_style import contrast


def bar(figure: go.Figure, name: str) -> go.Bar:
    return next(trace for trace in figure.data if trace.name == name)


def test_tensor_core_classes_fill_the_whole_bar_and_differ_in_hatching(runs: dict[str, Run]) -> None:
    shares = tensor_core_shares(runs["profiled"])
    figure = tensor_core_figure(shares)
    assert [trace.name for trace in figure.data] == [
        "on tensor cores", "unclassified", "GEMM/conv on CUDA cores", "no GEMM/conv",
    ]  # fmt: skip
    assert np.sum([trace.x for trace in figure.data], axis=0) == pytest.approx([1.0, 1.0], rel=1e-6)
    assert len({(trace.marker.color, trace.marker.pattern.shape) for trace in figure.data}) == 4
    assert [bar(figure, n).marker.pattern.shape for n in ("on tensor cores", "unclassified")] == ["", "/"]
    yes = shares.set_index(["answer", "of"]).loc["yes", "frac"]
    assert bar(figure, "on tensor cores").x.tolist() == pytest.approx(yes.tolist(), rel=1e-6)
    assert figure.layout.meta["alt"].startswith(
        "Time on tensor cores. all kernels: 61.9 % on tensor cores, 1.85 % unclassified"
    )


def test_the_chart_takes_the_vendors_names_for_its_cores(runs: dict[str, Run]) -> None:
    figure = tensor_core_figure(tensor_core_shares(runs["profiled"]), cores=core_names("AMD Instinct MI300X"))
    assert [trace.name for trace in figure.data][:3] == ["on matrix cores", "unclassified", "GEMM/conv on vector units"]
    assert figure.layout.meta["alt"].startswith("Time on matrix cores. all kernels: 61.9 % on matrix cores")


def rows_of(figure: go.Figure) -> list[str]:
    """The texts at the left edge, from the top down."""
    labels = [t for t in figure.data if t.type == "scatter"]
    texts = {row: t.text[i] for t in labels for i, row in enumerate(t.y) if t.x[i] == 0}
    return [html.unescape(texts[row]) for row in reversed(figure.layout.yaxis.categoryarray) if row in texts]


def test_kernels_have_their_full_names_and_are_grouped_by_part_of_the_step(runs: dict[str, Run]) -> None:
    table = kernel_table(runs["profiled"])
    figure = kernel_figure(table)
    shares = table.groupby("label")["time_frac"].sum().sort_values(ascending=False)
    texts = rows_of(figure)
    assert [t for t in texts if t.startswith("<b>")] == [f"<b>{n}</b> · {percent(s)}" for n, s in shares.items()]
    for label, rows in table.groupby("label"):
        first = texts.index(f"<b>{label}</b> · {percent(shares[label])}") + 1
        assert texts[first : first + len(rows)] == [short_kernel(name, MAX_NAME_CHARS) for name in rows["name"]]
        drawn = bar(figure, label)
        assert drawn.x == pytest.approx(rows["time_frac"].to_numpy(), rel=1e-6) and list(drawn.ids) == list(
            rows["name"]
        )
    assert "…" not in "".join(texts)


def test_kernels_have_the_parts_and_colours_of_the_steps_cost(runs: dict[str, Run]) -> None:
    """What Step cost calls GEMM/conv on CUDA cores is called so among the kernels, in the same colour."""
    figure = kernel_figure(kernel_table(runs["profiled"]))
    cost = step_cost_figure(step_cost(runs["profiled"]).parts)
    for trace in (t for t in figure.data if t.type == "bar"):
        assert trace.marker.color == bar(cost, trace.name).marker.color


def test_a_cpu_has_matrix_products_and_other_operators(runs: dict[str, Run]) -> None:
    figure = kernel_figure(kernel_table(runs["profiled-cpu"]))
    assert {"GEMM/conv", "memory-bound"} <= {trace.name for trace in figure.data if trace.type == "bar"}


def test_the_longest_of_many_kernels_are_drawn(runs: dict[str, Run]) -> None:
    table = pd.concat([kernel_table(runs["profiled"])] * 3, ignore_index=True)
    table = table.sort_values("total_us", ascending=False, ignore_index=True)
    figure = kernel_figure(table)
    assert sum(len(t.y) for t in figure.data if t.type == "bar") == MAX_BARS
    assert f"the {MAX_BARS} of {len(table)} with the most time" in figure.layout.meta["alt"]


def test_the_largest_part_of_a_step_has_no_hatching(runs: dict[str, Run]) -> None:
    """A hatched bar reads as "other"."""
    for name in ("profiled", "profiled-cpu"):
        figure = step_cost_figure(step_cost(runs[name]).parts)
        longest = max(figure.data, key=lambda trace: float(trace.x[0]))
        assert longest.name.startswith("GEMM/conv") and longest.marker.pattern.shape == ""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float*)",
         "vectorized_element…<4, CUDAFunctor_add<float>>"),
        ("void (anonymous namespace)::softmax_warp_forward<float>(float*, int)", "softmax_warp_forward<float>"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        ("void ", "void "),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ],
)  # fmt: skip
def test_kernel_names_are_shortened_by_their_common_parts(name: str, shown: str) -> None:
    assert short_kernel(name).strip() == shown.strip()


def test_parts_of_a_step_stack_to_its_time(runs: dict[str, Run]) -> None:
    for name in ("profiled", "profiled-cpu", "healthy"):
        cost = step_cost(runs[name])
        figure = step_cost_figure(cost.parts)
        assert sum(float(trace.x[0]) for trace in figure.data) == pytest.approx(cost.step_us / 1e3, rel=1e-5)
        assert all(trace.x[0] > 0 for trace in figure.data)
        assert figure.layout.xaxis.title.text == "time of a step (ms)"


def test_only_long_parts_have_a_label(runs: dict[str, Run]) -> None:
    figure = step_cost_figure(step_cost(runs["profiled"]).parts)
    assert bar(figure, "GEMM/conv, on tensor cores").text[0] == "GEMM/conv, on tensor cores<br>48.8 %"
    assert bar(figure, "waiting for data").text[0] == "6 %"
    assert bar(figure, "copies and fills").text[0] == ""


def test_two_runs_are_two_bars_on_one_axis(runs: dict[str, Run]) -> None:
    table = compare_step_cost([runs["profiled-fp32"], runs["profiled"]])
    figure = step_cost_figure(table)
    casts = bar(figure, "casts")
    assert list(casts.y) == list(dict.fromkeys(table["run"])) and casts.x[0] == 0.0 and casts.x[1] > 0
    lengths = np.sum([trace.x for trace in figure.data], axis=0)
    assert lengths == pytest.approx((table.groupby("run", sort=False)["us"].sum() / 1e3).tolist(), rel=1e-5)


def test_every_part_has_a_colour_and_a_readable_label() -> None:
    assert set(figure_colours.PARTS) == set(PARTS) | set(PHASE_LABELS)
    for part, (light, dark, ink, _) in figure_colours.PARTS.items():
        assert contrast(light, ink[0]) >= 3.0 and contrast(dark, ink[1]) >= 3.0, part


def test_a_part_that_only_a_later_run_has_keeps_its_position():
    rows = [("a", "data", 1.0), ("a", "optimizer", 1.0), ("a", "watch", 1.0), ("b", "data", 1.0), ("b", "tensor", 2.0)]
    parts = pd.DataFrame(rows, columns=["run", "part", "us"]).assign(frac=0.5)
    figure = step_cost_figure(parts.assign(label=parts["part"], per="step"))
    assert [bar.name for bar in figure.data] == ["data", "tensor", "optimizer", "watch"]


def test_the_axis_of_gradient_errors_has_ticks_only_at_powers_of_ten():
    errors = [3e-4, 2e-2]
    result = pd.DataFrame({"run": "a", "precision": "fp16", "name": ["x", "y"], "rel_error": errors, "cosine": 1.0})
    axis = agreement_figure(result).layout.xaxis
    assert axis.range == (-4, -1) and axis.dtick == 1
