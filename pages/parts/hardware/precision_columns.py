"""Columns of the tables on the precision map: what ran where, what was cast, and why."""

import streamlit as st

FRACTION = {"format": "percent", "min_value": 0.0, "max_value": 1.0}
CALLS = st.column_config.NumberColumn("Calls", format="localized", width=70)
MFLOP = st.column_config.NumberColumn(
    "Work (MFLOP)", format="localized", width=100, help="Million operations of matrix products"
)
CAST_KIB = st.column_config.NumberColumn("Cast for it (KiB)", format="localized", width=100)
MODULE_COUNT = st.column_config.NumberColumn("Modules", format="localized", width=70)
STAYED = {
    "module": st.column_config.TextColumn("Module", pinned=True, help="With \\* for all that differ in that number"),
    "modules": MODULE_COUNT,
    "op": st.column_config.TextColumn("Operator"),
    "why": st.column_config.TextColumn("Why", width="large"),
    "count": CALLS,
    "flops_frac": st.column_config.ProgressColumn("Of matrix work", help="Of all operations of the step", **FRACTION),
}
ELSEWHERE = {
    "op": st.column_config.TextColumn("Operator", pinned=True),
    "ran": st.column_config.TextColumn("Ran in, on this CPU"),
    "would_run": st.column_config.TextColumn("Would run in, on CUDA"),
    "here": st.column_config.TextColumn("Policy here"),
    "on_cuda": st.column_config.TextColumn("Policy on CUDA"),
    "count": CALLS,
}
CASTS = {
    "cause": st.column_config.TextColumn("Made by", pinned=True, width="medium"),
    "cast_of": st.column_config.TextColumn("Of"),
    "way": st.column_config.TextColumn("Cast"),
    "phase": st.column_config.TextColumn("Phase"),
    "count": st.column_config.NumberColumn("Casts a step", format="localized"),
    "kib": st.column_config.NumberColumn("Written (KiB)", format="localized"),
    "repeated": st.column_config.NumberColumn("Made before", help="The same tensor had been cast to that dtype before"),
    "undone": st.column_config.NumberColumn("Undone", help="Cast back to the dtype that the value came from"),
}
ISLANDS = {
    "module": st.column_config.TextColumn("Module", pinned=True, help="With \\* for all that differ in that number"),
    "modules": MODULE_COUNT,
    "why": st.column_config.TextColumn("Why", width="medium"),
    "ops": st.column_config.TextColumn("Operators", width="medium"),
    "count": CALLS,
    "kib": CAST_KIB,
}
OPS = {
    "op": st.column_config.TextColumn("Operator", pinned=True, width=150),
    "ran": st.column_config.TextColumn("Ran in", width=70),
    "phase": st.column_config.TextColumn("Phase", width=80),
    "policy": st.column_config.TextColumn("Policy", width=130),
    "in_dtypes": st.column_config.TextColumn("Inputs", width=90),
    "out_dtype": st.column_config.TextColumn("Output", width=70),
    "count": CALLS,
    "modules": MODULE_COUNT,
    "mflop": MFLOP,
    "kib": CAST_KIB,
    "on_cuda": st.column_config.TextColumn("Policy on CUDA"),
}
MODULES = {
    "module": st.column_config.TextColumn("Module", pinned=True, width="medium"),
    "layer_class": st.column_config.TextColumn("Class"),
    "narrow_frac": st.column_config.ProgressColumn("Matrix work in 16 bits", **FRACTION),
    "mflop": MFLOP,
    "count": CALLS,
    "casts": st.column_config.NumberColumn("Casts for it", format="localized"),
    "kib": CAST_KIB,
}
