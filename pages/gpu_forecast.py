"""What would mixed precision give on a GPU that is not here?"""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import traced_steps
from amp_core.analysis.steps import emulated
from amp_core.figures import forecast_figure
from amp_core.forecast import Forecast, forecast, gpu_names, step_time_changes, traces_of_run
from amp_core.forecast import measured_factor as measured
from pages.parts import address, baseline, charts, empty, head, loaders, tables, words

HOW = (
    "Trace one with `watch(…, trace_ops=2)` in your own loop or `ampscope train … --trace-ops`; a CPU is enough. "
    "Built-in workloads need no run: `ampscope forecast --workload text-bert --size large --gpu A100,H100`."
)
GPUS = ["V100", "A100", "H100"]
COLUMNS = {
    "gpu": st.column_config.TextColumn("GPU", pinned=True, width=60),
    "recipe": st.column_config.TextColumn("Recipe", width=65),
    "speed": st.column_config.TextColumn("Over FP32", help="Speed-up over FP32 with TF32 off, and its range"),
    "tf32": st.column_config.TextColumn("Over TF32", help="Speed-up over FP32 with TF32 on, and its range"),
    "bf16": st.column_config.TextColumn("Over BF16", help="Speed-up of 8 and 4 bits over BF16, and its range"),
    "time": st.column_config.TextColumn("Step", help="Time of a step, and its range", width=130),
    "bound": st.column_config.TextColumn("Bound by", width=80, help="What most of the time goes to"),
    "memory": st.column_config.TextColumn("Memory", help="At the peak of a step of the same batch"),
    "batch": st.column_config.TextColumn("Largest batch", help="Samples: lower and upper estimate"),
    "source": st.column_config.TextColumn("Peaks from", help="Where the GPU's rates were read"),
}


def made(run: Run, gpus: tuple[str, ...], fp8_frac: float | None, fp4_frac: float | None) -> Forecast:
    """The forecast from the run's traced step, corrected if the run was recorded on a listed GPU."""
    known = measured(run)
    factor = known[1] if known else None
    return forecast(traces_of_run(run), gpus, factor=factor, fp8_frac=fp8_frac, fp4_frac=fp4_frac)


def share(bits: int) -> float | None:
    """The share of operations in so many bits that the page's field holds; None for none."""
    name = f"forecast.fp{bits}"
    address.take(f"fp{bits}", name, lambda text: int(text) if text.isdecimal() and int(text) <= 100 else None, 0)
    help_ = f"Share of the operations of matrix products that may take {bits} bits. 0: not forecast."
    percent = int(st.number_input(f"In {bits} bits (%)", 0, 100, step=5, key=name, width=130, help=help_))
    address.keep(f"fp{bits}", name, str(percent) if percent else "")
    return percent / 100 if percent else None


def headline(table: pd.DataFrame) -> str:
    """The page's answer: the best recipe for each GPU."""
    known = table[~table["recipe"].isin(["fp32", "tf32"]) & (table["why_not"] == "")]
    best_of = []
    for gpu, rows in known.groupby("gpu", sort=False):
        best = rows.sort_values("speedup", ascending=False, kind="stable").iloc[0]
        span = f"{words.number(best['speedup_low'], digits=2)}–{words.number(best['speedup_high'], digits=2)}"
        best_of.append(
            f"{gpu}: {best['recipe'].upper()} {words.number(best['speedup'], digits=2)} × the speed of FP32 ({span})"
        )
    sentence = f"Forecast, not measured. {'; '.join(best_of)}."
    if (known["bound_by"] == "launches").any():
        sentence += " Launch-bound steps wait for Python: larger batches or `torch.compile` help more."
    return sentence


def span(row: pd.Series, column: str, unit: str) -> str:
    """A value with its range if it has one (the baseline has none), to two digits: it is a forecast."""
    if pd.isna(row[column]):
        return words.NONE
    value, low, high = (words.number(row[name], digits=2) for name in (column, f"{column}_low", f"{column}_high"))
    return f"{value} {unit}" if low == high else f"{value} {unit} ({low}–{high})"


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The recipes that run on each GPU, as text."""
    rows = []
    for _, row in table[table["why_not"] == ""].iterrows():
        memory = pd.notna(row.get("memory_bytes_low"))
        low, high = (words.size(row[f"memory_bytes_{side}"]) if memory else "" for side in ("low", "high"))
        rows.append(
            {
                "gpu": row["gpu"],
                "recipe": row["recipe"].upper(),
                "time": span(row, "step_ms", "ms"),
                "speed": span(row, "speedup", "×"),
                "tf32": span(row, "over_tf32", "×"),
                "bf16": span(row, "over_bf16", "×") if "over_bf16" in row else words.NONE,
                "bound": row["bound_by"],
                "memory": f"{low} – {high}" if memory else words.NONE,
                "batch": words.whole_range(row["batch_low"], row["batch_high"]) if memory else words.NONE,
                "source": row["source"],
            }
        )
    return pd.DataFrame(rows, columns=[name for name in COLUMNS if name != "bf16" or "over_bf16" in table])


def left_out(table: pd.DataFrame) -> list[str]:
    """The recipes that do not run there, each with its reason."""
    without = table[table["why_not"] != ""]
    return [f"{row.recipe.upper()} is not forecast for {row.gpu}: {row.why_not}." for row in tables.rows(without)]


def changes(pair: Sequence[Run], gpus: tuple[str, ...]) -> pd.DataFrame:
    """The run's forecast step time over that of its baseline, the first of the `pair`."""
    base, run = pair
    return step_time_changes(base, run, gpus)


def against_baseline(run: Run, gpus: tuple[str, ...]) -> str:
    """How the step time differs from the baseline's on each GPU, with its range; empty without a baseline."""
    base = baseline.run("ops")
    if base is None:
        return ""
    name = words.escape(base.name)
    try:
        rows = loaders.analysed(changes, [base, run], gpus)
    except RunError as error:
        return f"A forecast against **{name}** is not possible: {words.escape(words.sentence(error))}"
    parts = []
    for row in tables.rows(rows):
        ratio, low, high = (words.number(value, digits=2) for value in (row.ratio, row.low, row.high))
        times = f"{words.number(row.value, 'ms', 2)} instead of {words.number(row.baseline, 'ms', 2)}"
        parts.append(f"{row.gpu} **{ratio} ×** its step time ({low}–{high}; {times})")
    unknown = [gpu for gpu in gpus if gpu not in set(rows["gpu"])]
    parts += [f"{', '.join(unknown)} unknown: not all of both recipes run there"] if unknown else []
    return words.unbroken(f"Forecast against **{name}**: {'; '.join(parts)}.")


head.title("Forecast")
run = head.run(table="ops")
if not loaders.analysed(traced_steps, run):
    sentence = f"A forecast is computed from a traced step, and this run has no traced step. {HOW}"
    empty.nothing(sentence, sample=True, run=run, tables=("ops",))
answer = st.container()
address.take("gpu", "forecast.gpus", address.several(gpu_names()), GPUS)
choices = st.empty()
with choices.container(horizontal=True, vertical_alignment="bottom"):
    asked = st.multiselect("GPUs", gpu_names(), key="forecast.gpus", persist_state="session", width=520)
    fp8_frac, fp4_frac = share(8), share(4)
address.keep("gpu", "forecast.gpus", ",".join(asked) if asked != GPUS else "")
if not asked:
    empty.nothing("Choose at least one GPU.")
try:
    result = loaders.analysed(made, run, tuple(asked), fp8_frac, fp4_frac)
except RunError as error:  # a profiler trace has operators, but not autocast's decisions
    choices.empty()
    if emulated(run):
        empty.nothing(words.escape(words.sentence(error)))
    empty.nothing(f"A forecast needs a step that AMPscope traced, and this run has none. {HOW}", sample=True)
with answer:
    head.headline(headline(result.table))
    if beside := against_baseline(run, tuple(asked)):
        st.markdown(beside)
dark = charts.dark()
left, right = charts.grid("forecast")
with left:
    charts.show(forecast_figure(result.table, "speedup", dark), "forecast.speedup", half=True)
with right:
    charts.show(forecast_figure(result.table, "step_ms", dark), "forecast.time", half=True)
alt = "Forecast by GPU and recipe."
tables.show(shown(result.table), column_config=COLUMNS, height="content", alt=alt)
with st.expander("What this forecast assumes"):
    st.markdown("\n".join(f"- {words.escape(note)}" for note in [*left_out(result.table), *result.notes]))
