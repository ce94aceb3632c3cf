"""A tensor of one's own in 8 and 4 bits: one block of it value by value, and what each recipe does to it."""

import pandas as pd
import streamlit as st

from amp_core import RunError
from amp_core.analysis.format_lab.blocks import block_size, parse_values, quantized_values, recipe_effects
from amp_core.figures import block_figure
from amp_core.quantization import RECIPES
from pages.parts import address, charts, tables, words

_SMALL = [round(0.02 * (-1) ** i * (1 + 7 * i % 11), 2) for i in range(64)]
EXAMPLES = {
    "An outlier": [*_SMALL[:20], 30_000.0, *_SMALL[21:]],
    "No outlier": _SMALL,
    "A wide range": [round(2.0 ** (-i / 3), 6) for i in range(64)],
}
COLUMNS = {
    "recipe": st.column_config.TextColumn("Recipe", pinned=True),
    "scale": st.column_config.TextColumn("Shared scale"),
    "size": st.column_config.NumberColumn("Values in it", help="Values that share this scale"),
    "lost": st.column_config.TextColumn("Become 0 in it", help="Nonzero values of the block that become 0"),
    "error": st.column_config.TextColumn(
        "Error in it", help="Without the largest value: root of squared error over squared values"
    ),
    "other_lost": st.column_config.TextColumn("Become 0 elsewhere"),
    "other_error": st.column_config.TextColumn("Error elsewhere"),
    "scaling": st.column_config.TextColumn("How the scale follows", width="large"),
}
WHAT = {"zero": "zero", "underflow": "becomes 0", "saturated": "saturated", "exact": "exact", "rounded": "rounded"}
WHY = (
    "The values of a block share one scale, and the largest of them sets it: values far below it become 0. So an "
    "outlier hurts its own block of 16 or 32 values and no other; with one scale for the tensor it hurts all values. "
    "NVFP4 has both: its scale of the tensor brings the scales of the blocks into FP8's range, so a block suffers from "
    "an outlier elsewhere only where its own largest value is some 30,000 times smaller."
)


def show() -> None:
    """Draw the values, one block in one recipe, and the table of all recipes."""
    st.header("A block in 8 or 4 bits", anchor=False)
    answer = st.container()
    left, right = charts.grid("block")
    left.pills("For example", list(EXAMPLES), key="lab.values_example", on_change=_take_example)
    st.session_state.setdefault("lab.values", _text(EXAMPLES["An outlier"]))
    typed = left.text_area(
        "Values of a tensor, along the contraction: paste your own",
        key="lab.values",
        height=150,
        persist_state="session",
    )
    try:
        values = parse_values(typed)
    except RunError as error:
        answer.error(words.escape(words.sentence(error)))
        return
    with left.container(horizontal=True, vertical_alignment="bottom"):
        address.take("recipe", "lab.recipe", lambda name: name if name in RECIPES else None, "mxfp8-e4m3")
        name = st.selectbox(
            "Recipe", list(RECIPES), key="lab.recipe", format_func=lambda r: RECIPES[r].label, width=230
        )
        address.keep("recipe", "lab.recipe", name if name != "mxfp8-e4m3" else "")
        size = block_size(name, len(values))
        blocks = -(-len(values) // size)
        at = int(st.number_input("Block", 1, blocks, min(blocks, 1), key="lab.block", width=110)) - 1
    frame = quantized_values(values, name)
    block = frame[frame["block"] == at]
    answer.markdown(sentence(block, RECIPES[name].label))
    with right:
        charts.show(block_figure(block, RECIPES[name].label, charts.dark()), "lab.block_figure", half=True)
    st.markdown(WHY)
    with st.expander("Value by value"):
        tables.show(by_value(block), height=320, alt="The values of the block before and after.")
    effects = recipe_effects(values, int(block.index[int(block["value"].abs().argmax())]))
    tables.show(
        table(effects),
        column_config=COLUMNS,
        height="content",
        alt="What each recipe does to the block and to the rest.",
    )


def sentence(block: pd.DataFrame, label: str) -> str:
    """The largest value of a block, its scale, and what becomes of the others."""
    nonzero, lost = int((block["value"] != 0).sum()), int((block["what"] == "underflow").sum())
    if not nonzero:
        return f"All {len(block)} values of the block are 0, and stay 0 in {label}."
    first = block.iloc[0]
    largest, scale, smallest = (words.number(float(first[name])) for name in ("amax", "scale", "smallest"))
    return (
        f"In {label} the largest of {words.plural(len(block), 'value')}, {largest}, sets the scale to {scale}; the "
        f"least magnitude beside 0 is {smallest}. **{lost} of {nonzero}** values that are not 0 become 0."
    )


def by_value(block: pd.DataFrame) -> pd.DataFrame:
    """The values of a block, before and after."""
    return pd.DataFrame(
        {
            "Before": [f"{v:.7g}" for v in block["value"]],
            "Element": [f"{v:.7g}" for v in block["element"]],
            "× scale": [f"{v:.7g}" for v in block["scale"]],
            "After": [f"{v:.7g}" for v in block["held"]],
            "Relative error": [words.percent(v) if v == v else words.NONE for v in block["rel_error"].astype(float)],
            "What happens": block["what"].map(WHAT).tolist(),
        },
        index=block.index,
    )


def table(effects: pd.DataFrame) -> pd.DataFrame:
    """`recipe_effects` as text."""

    def share(row: pd.Series, prefix: str) -> str:
        count = int(row[f"{prefix}nonzero"])
        return f"{int(row[f'{prefix}underflow'])} of {count}" if count else words.NONE

    def error(value: float) -> str:
        return words.percent(value) if value == value else words.NONE

    rows = [
        {
            "recipe": row["label"],
            "scale": words.number(row["scale"]),
            "size": row["size"],
            "lost": share(row, ""),
            "error": error(row["beside_rel_error"]),
            "other_lost": share(row, "other_"),
            "other_error": error(row["other_rel_error"]),
            "scaling": row["scaling"],
        }
        for _, row in effects.iterrows()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _text(values: list[float]) -> str:
    return ", ".join(f"{v:g}" for v in values)


def _take_example() -> None:
    """Callback of the examples."""
    if chosen := st.session_state["lab.values_example"]:
        st.session_state["lab.values"] = _text(EXAMPLES[chosen])
        st.session_state["lab.block"] = 1
