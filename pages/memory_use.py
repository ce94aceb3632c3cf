"""Where did the memory go, and how much does a recipe save?"""

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import (
    MemoryBreakdown,
    memory_breakdown,
    memory_difference,
    memory_modules,
    memory_phases,
    memory_steps,
    not_recorded_reasons,
)
from amp_core.views import MEMORY, MEMORY_COMPARISON, MEMORY_MOMENTS, MEMORY_PARTS
from pages.parts import address, baseline, cards, charts, empty, head, loaders, tables, words
from pages.parts.hardware import memory


def headline(breakdown: MemoryBreakdown, attempted: int) -> str:
    """The page's answer; if nothing was sampled, the reason, which follows from the number of attempted steps."""
    if breakdown.total_bytes is None:
        why = "it has fewer than two steps" if attempted < 2 else "another program wrote it, or an older AMPscope"
        return f"No memory breakdown recorded: {why}."
    if not breakdown.categories_known:
        told = breakdown.phase in (None, "forward")  # the moment names forward itself
        place = words.escape(breakdown.moment) + ("" if told else f" in {breakdown.phase}")
        peak = words.size(breakdown.total_bytes)
        return f"Peak memory {peak}, {place}. A trace records how much is allocated, not for what."
    largest = breakdown.named.nlargest(2, "bytes")
    named = " and ".join(f"{part.label} ({words.size(part.bytes)})" for part in tables.rows(largest) if part.bytes)
    if breakdown.on_cpu:
        held = breakdown.named["bytes"].sum()
        return (
            f"Peak tensor memory {words.size(held)}, {words.escape(breakdown.moment)}: mostly {named}. "
            f"The process used {words.size(breakdown.total_bytes)}."
        )
    return f"Peak memory {words.size(breakdown.total_bytes)}, {words.escape(breakdown.moment)}: mostly {named}."


def numbers(breakdown: MemoryBreakdown, phases: pd.DataFrame) -> None:
    """The row of cards: the peak of each phase; on a GPU after the peak of all, on a CPU before the process."""
    on_cpu = breakdown.on_cpu
    column = "tensors_bytes" if on_cpu else "peak_bytes"
    beside = "in tensors" if on_cpu else "allocated"
    drawn = [
        (f"Peak of {row.phase}", words.size(getattr(row, column)), beside, memory.PHASES) for row in tables.rows(phases)
    ]
    whole = words.size(breakdown.total_bytes)
    if on_cpu:
        drawn.append(("Process", whole, "resident set", memory.CPU))
    else:
        reserved = f"{words.size(breakdown.reserved_bytes)} reserved" if breakdown.reserved_bytes else breakdown.what
        drawn.insert(0, ("Peak", whole, reserved, memory.RESERVED))
    pair = cards.pairs()
    for number, (label, value, text, help_) in enumerate(drawn):
        with pair[2 * number >= len(drawn)]:
            cards.card(label, value, text, help_=help_)


def pick_step(steps: list[int]) -> int:
    """A field for one of the sampled steps."""
    if len(steps) == 1:
        return steps[0]
    key = f"memory.step.{len(steps)}"
    return address.choose("step", "Step", steps, steps[-1], key, format_func=lambda n: f"{n:,}")


def explanation(run: Run, breakdown: MemoryBreakdown, step: int) -> None:
    """What the peak consisted of, and how it built up."""
    for note in breakdown.notes:
        st.markdown(note)
    if breakdown.categories_known:
        left, right = charts.grid("memory.parts")
        with left:
            parts(run, step)
        with right:
            charts.view(MEMORY_MOMENTS, run, "memory.moments", step=step, half=True)
        with left:
            over_time(run, half=True)
        with st.expander("Parts in numbers"):
            tables.show(memory.table(breakdown), column_config=memory.TABLE, alt="Memory by category.")
    else:
        charts.view(MEMORY_MOMENTS, run, "memory.moments", step=step)
        over_time(run)
    if not breakdown.categories_known:
        shown = memory.modules(loaders.analysed(memory_modules, run, step))
        tables.show(shown, column_config=memory.MODULES, alt="Memory by module or operator.")
    for reason in [r for r in loaders.analysed(not_recorded_reasons, run) if "in memory" in r]:
        st.caption(f"Not recorded: {words.escape(words.sentence(reason))}")
    if batch := memory.larger_batch(run):
        st.caption(batch)


def over_time(run: Run, half: bool = False) -> None:
    """Memory at each step, if it was measured."""
    frame = MEMORY.frame(run, loaders.analysed)
    if not MEMORY.absent(frame):
        charts.show(MEMORY.figure(frame, charts.dark()), "memory.trace", half=half)


def parts(run: Run, step: int) -> None:
    """The categories at the peak; beside those of the baseline, if it measured them."""
    other = baseline.run()
    if other is None or loaders.analysed(memory_breakdown, other).total_bytes is None:
        charts.view(MEMORY_PARTS, run, "memory.parts", step=step, half=True)
        return
    beside = MEMORY_COMPARISON.frame([other, run], loaders.analysed)
    figure = MEMORY_COMPARISON.figure(beside, charts.dark(), title="Memory at the peak, side by side")
    charts.show(figure, "memory.beside", half=True)


def difference(run: Run) -> None:
    """Which categories shrank or grew against the baseline, and why."""
    other = baseline.run()
    if other is None:
        return
    st.header("Difference from the baseline", anchor=False)
    if loaders.analysed(memory_breakdown, other).total_bytes is None:
        st.info(f"{words.escape(other.name)} has no memory breakdown.")
        return
    tables.show(
        memory.changes(loaders.analysed(memory_difference, [other, run])),
        column_config=memory.CHANGES,
        column_order=[name for name in memory.CHANGES if name != "Run"],
        alt="Difference by category.",
    )


head.title("Memory")
run = head.run(table="memory")
steps = loaders.analysed(memory_steps, run)
answer = st.container()
step = pick_step(steps) if steps else None
breakdown = loaders.analysed(memory_breakdown, run, step)
with answer:
    unreadable = "The memory breakdown of this run cannot be read."
    head.headline(unreadable if run.damaged("memory") else headline(breakdown, len(run.steps)))
if step is not None and breakdown.total_bytes is not None:
    with answer:
        numbers(breakdown, loaders.analysed(memory_phases, run, step))
    explanation(run, breakdown, step)
    difference(run)
elif MEMORY.missing(run, loaders.analysed):
    empty.nothing("Memory was not measured at any step of this run.", sample=True, run=run, tables=("memory",))
else:
    over_time(run)
