"""Kernel time by use of tensor cores.

>>> tensor_core_figure(tensor_core_shares(run))
>>> kernel_figure(kernel_table(run))

Yes, no and unknown differ in hatching as well as in colour; kernels that multiply no matrices
are a category of their own.
"""

import html

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.axes import percent, share_axis, shorten
from amp_core.figures.colours import PARTS, UNKNOWN_PART, bar_marker, colour
from amp_core.figures.figure_spec import FigureSpec
from amp_core.figures.style import empty_figure, finish, set_layout
from amp_core.hardware.gpus import core_names
from amp_core.text.formatting import number, without_arguments

MAX_BARS = 15
"""Most kernels that are drawn; the table has all."""
MAX_NAME_CHARS = 170
"""Characters of a name that fit beside each other on a typical page."""

_ANSWERS = {  # answer: words with the names of the cores, meaning, hatching
    "yes": ("on {matrix}", "tensor_yes", ""),
    "unknown": ("unclassified", "tensor_unknown", "/"),
    "no": ("GEMM/conv on {others}", "tensor_no", ""),
    "none": ("no GEMM/conv", "no_matrix", ""),
}

_INK = {"yes": ("#FFFFFF", "#FFFFFF"), "unknown": ("#FFFFFF", "#11181B"), "no": ("#FFFFFF", "#11181B")}
_INK["none"] = ("#11181B", "#FFFFFF")


def tensor_core_figure(
    shares: pd.DataFrame, dark: bool = False, title: str = "", cores: tuple[str, str] = core_names("")
) -> go.Figure:
    """The time of all kernels, and of those that multiply matrices, by use of tensor cores; from
    `tensor_core_shares`. `cores`: what the GPU's vendor calls them and the others, from `core_names`."""
    title = title or f"Time on {cores[0]}"
    if not len(shares):
        return empty_figure(title, "No GPU kernels were recorded.")
    names = list(dict.fromkeys(shares["of"]))
    figure = FigureSpec()
    for answer, (text, meaning, hatch) in _ANSWERS.items():
        words = _words(text, cores)
        part = shares[shares["answer"] == answer].set_index("of")["frac"].reindex(names).fillna(0.0)
        if answer == "none" and not (part > 0).any():
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
    summary = "; ".join(f"{of}: {_in_words(shares[shares['of'] == of], cores)}" for of in names)
    return finish(figure, title, f"{title}. {summary}.", 250, barmode="stack", bargap=0.3)


def kernel_figure(table: pd.DataFrame, dark: bool = False, title: str = "Where kernel time goes") -> go.Figure:
    """The kernels of most time as bars below their names, grouped by the part of the step's cost that they belong to;
    from `kernel_table(run)`. A group's share is that of all its kernels, also of those that are not drawn."""
    if not len(table):
        return empty_figure(title, "No kernels were recorded.")
    shown = table.iloc[:MAX_BARS]
    shares = table.groupby("label", sort=False)["time_frac"].sum().sort_values(ascending=False, kind="stable")
    figure = FigureSpec()
    rows: list[str] = []
    for label, share in shares.items():
        kernels = shown[shown["label"] == label]
        if not len(kernels):
            continue
        rows.append(f"group {label}")
        _add_text(figure, rows[-1:], [f"<b>{label}</b> · {percent(float(share))}"], 13)
        names, bars = ([f"{what} {i}" for i in kernels.index] for what in ("name", "bar"))
        rows += [row for pair in zip(names, bars, strict=True) for row in pair]
        texts = [html.escape(short_kernel(name, MAX_NAME_CHARS), quote=False) for name in kernels["name"]]
        _add_text(figure, names, texts, 11)  # plotly would take <float> for a tag
        part = kernels["part"].iloc[0]
        light, night, _, hatch = PARTS.get(part, UNKNOWN_PART)
        values = kernels["time_frac"].to_numpy(dtype=np.float64)
        figure.add_bar(
            x=values.astype(np.float32),
            y=bars,
            name=label,
            ids=kernels["name"].tolist(),
            showlegend=False,
            marker=bar_marker(night if dark else light, hatch, dark, 6, 0.5),
            customdata=np.stack(
                [
                    kernels["name"].str.slice(0, 160),
                    [percent(part) for part in values],
                    [f"{n:,.0f}" for n in kernels["count"]],
                ],
                axis=1,
            ),
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} of the time, %{customdata[2]} calls<extra></extra>",
        )
        figure.add_labels(
            values,
            bars,
            [f"  {percent(s)} · {number(us / 1e3, 'ms')}" for s, us in zip(values, kernels["total_us"], strict=True)],
        )
    padding = 1.25 * float(shown["time_frac"].max())  # for the numbers beside the bars
    set_layout(figure, xaxis=share_axis("share of time", min(1.0, padding), padding))
    figure.yaxis(
        type="category", categoryorder="array", categoryarray=rows[::-1], showgrid=False, showticklabels=False,
        range=[-0.5, len(rows) - 0.5],
    )  # fmt: skip
    drawn = f"the {len(shown)} of {len(table):,} with the most time" if len(table) > len(shown) else f"all {len(shown)}"
    first = shown.iloc[0]
    groups = "; ".join(f"{label} {percent(float(share))}" for label, share in shares.items())
    alt = f"{title}: {groups}; {drawn}; first {short_kernel(first['name'])} with {percent(first['time_frac'])}."
    return finish(figure, title, alt, 110 + 17 * len(rows), barmode="overlay", bargap=0.15, margin={"l": 24, "t": 44})


def _add_text(figure: FigureSpec, rows: list[str], texts: list[str], size: int) -> None:
    """Texts at the left edge of these rows."""
    left = np.zeros(len(rows), dtype=np.float32)
    figure.add_labels(left, rows, texts, textfont={"size": size})


def short_kernel(name: str, max_chars: int = 46) -> str:
    """`without_arguments`, and without its middle if it is long."""
    return shorten(without_arguments(name), max_chars)


def _words(text: str, cores: tuple[str, str]) -> str:
    return text.format(matrix=cores[0], others=cores[1])


def _in_words(shares: pd.DataFrame, cores: tuple[str, str]) -> str:
    """The answers for one kind of time, in words."""
    pairs = zip(shares["answer"], shares["frac"], strict=True)
    return ", ".join(f"{percent(share)} {_words(_ANSWERS[answer][0], cores)}" for answer, share in pairs)
