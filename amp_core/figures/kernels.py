"""Kernel time by use of tensor cores.

>>> tensor_core_figure(tensor_core_shares(run))
>>> kernel_figure(kernel_table(run))

Yes, no and unknown differ in hatching as well as in colour; kernels that multiply no matrices
are a category of their own.
"""

import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import percent, share_axis, shorten
from amp_core.figures.colours import bar_marker, colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.style import empty_figure, finish, set_layout
from amp_core.text.formatting import number

MAX_BARS = 15
"""Most kernels that are drawn; the table has all."""

_ANSWERS = {  # answer: words, meaning, hatching
    "yes": ("on tensor cores", "tensor_yes", ""),
    "unknown": ("unclassified", "tensor_unknown", "/"),
    "no": ("GEMM/conv not on tensor cores", "tensor_no", "x"),
    "none": ("no GEMM/conv", "no_matrix", ""),
    "matrix": ("GEMM/conv", "tensor_yes", ""),
}
"""Operators of a CPU are `matrix` or `none`."""

_INK = {"yes": ("#FFFFFF", "#FFFFFF"), "unknown": ("#FFFFFF", "#11181B"), "no": ("#FFFFFF", "#FFFFFF")}
_INK["none"] = ("#11181B", "#FFFFFF")


def tensor_core_figure(shares: pd.DataFrame, dark: bool = False, title: str = "Time on tensor cores") -> go.Figure:
    """The time of all kernels, and of those that multiply matrices, by use of tensor cores; from
    `tensor_core_shares`."""
    if not len(shares):
        return empty_figure(title, "No GPU kernels were recorded.")
    names = list(dict.fromkeys(shares["of"]))
    figure = FigureSpec()
    for answer, (words, meaning, hatch) in _ANSWERS.items():
        part = shares[shares["answer"] == answer].set_index("of")["frac"].reindex(names).fillna(0.0)
        if answer == "matrix" or (answer == "none" and not (part > 0).any()):
            continue
        figure.add_bar(
            x=part.to_numpy(dtype=np.float32),
            y=names,
            name=words,
            marker=bar_marker(colour(meaning, dark), hatch, dark, 6, 0.5),
            text=[percent(share) if share >= 0.055 else "" for share in part],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            textfont={"color": _INK[answer][dark], "size": 14},
            customdata=[percent(share) for share in part],
            hovertemplate=f"%{{y}}: %{{customdata}} {words}<extra></extra>",
        )
    set_layout(figure, xaxis=share_axis("share of kernel time"))
    figure.yaxis(autorange="reversed", type="category", showgrid=False)
    summary = "; ".join(f"{of}: {_in_words(shares[shares['of'] == of])}" for of in names)
    return finish(figure, title, f"{title}. {summary}.", 250, barmode="stack", bargap=0.3)


def kernel_figure(table: pd.DataFrame, dark: bool = False, title: str = "Where kernel time goes") -> go.Figure:
    """The kernels of most time as bars, by whether they use tensor cores; from `kernel_table(run)`."""
    if not len(table):
        return empty_figure(title, "No kernels were recorded.")
    shown = table.iloc[:MAX_BARS]
    rows = [str(i) for i in range(len(shown))]
    share = shown["time_frac"].to_numpy(dtype=np.float64)
    kinds = pd.Series(
        np.where(shown["tensor_core"].isin(["yes", "unknown"]), shown["tensor_core"],
                 np.where(shown["matrix_frac"] <= 0, "none", np.where(shown["tensor_core"] == "no", "no", "matrix"))),
        index=shown.index,
    )  # fmt: skip
    figure = FigureSpec()
    for answer, (words, meaning, hatch) in _ANSWERS.items():
        chosen = (kinds == answer).to_numpy()
        if not chosen.any():
            continue
        figure.add_bar(
            x=share[chosen].astype(np.float32),
            y=[row for row, drawn in zip(rows, chosen, strict=True) if drawn],
            name=words,
            ids=shown.loc[chosen, "name"].tolist(),
            marker=bar_marker(colour(meaning, dark), hatch, dark, 6, 0.5),
            customdata=np.stack(
                [
                    shown.loc[chosen, "name"].str.slice(0, 160),
                    [percent(part) for part in share[chosen]],
                    [f"{n:,.0f}" for n in shown.loc[chosen, "count"]],
                ],
                axis=1,
            ),
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} of the time, %{customdata[2]} calls<extra></extra>",
        )
    figure.add_labels(
        share,
        rows,
        [f"  {percent(s)} · {number(us / 1e3, 'ms')}" for s, us in zip(share, shown["total_us"], strict=True)],
    )
    padding = 1.7 * float(share.max())  # for the numbers beside the bars
    set_layout(figure, xaxis=share_axis("share of their time", min(1.0, padding), padding))
    figure.yaxis(
        type="category", categoryorder="array", categoryarray=rows[::-1], showgrid=False,
        tickvals=rows, ticktext=[short_kernel(name, 36) for name in shown["name"]],
    )  # fmt: skip
    drawn = f"the {len(shown)} of {len(table):,} with the most time" if len(table) > len(shown) else f"all {len(shown)}"
    first = shown.iloc[0]
    alt = f"{title}: {drawn}; first {short_kernel(first['name'])} with {percent(first['time_frac'])}."
    return finish(figure, title, alt, 150 + 26 * len(rows), barmode="overlay", bargap=0.25)


def short_kernel(name: str, max_chars: int = 46) -> str:
    """A kernel's name without return type, torch's namespaces and arguments."""
    text = re.sub(r"^void |at::native::|at::cuda::|at::detail::|\(anonymous namespace\)::|<unnamed>::", "", name)
    text = re.sub(r"\((?!anonymous).*", "", text) if "<" in text or text.endswith(")") else text
    text = text or name
    return shorten(text, max_chars)


def _in_words(shares: pd.DataFrame) -> str:
    """The answers for one kind of time, in words."""
    pairs = zip(shares["answer"], shares["frac"], strict=True)
    return ", ".join(f"{percent(share)} {_ANSWERS[answer][0]}" for answer, share in pairs)
