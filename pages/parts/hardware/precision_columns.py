"""Columns of the tables on the precision map: what ran where, what was cast, and why."""

import streamlit as st

from pages.parts import tables

CALLS = tables.count("Calls", width=60)
MFLOP = tables.measured("Work (MFLOP)", width=95, help_="Million operations of matrix products")
CAST_KIB = tables.measured("Cast for it (KiB)", width=100)
MODULE_COUNT = tables.count("Modules", width=70)
STAYED = {
    "module": st.column_config.TextColumn("Module", pinned=True, help="With \\* for all that differ in that number"),
    "modules": MODULE_COUNT,
    "op": st.column_config.TextColumn("Operator"),
    "why": st.column_config.TextColumn("Why", width="large"),
    "count": CALLS,
    "flops_frac": tables.share("Of GEMM/conv", help_="Of all operations of the step"),
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
    "count": tables.count("Casts per step"),
    "kib": tables.measured("Written (KiB)"),
    "repeated": tables.count("Repeated", help_="The same tensor had already been cast to that dtype"),
    "undone": tables.count("Reversed", help_="Cast back to the original dtype"),
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
    "ran": st.column_config.TextColumn("Ran in", width=60),
    "phase": st.column_config.TextColumn("Phase", width=75),
    "policy": st.column_config.TextColumn("Policy", width=135),
    "in_dtypes": st.column_config.TextColumn("Inputs", width=80),
    "out_dtype": st.column_config.TextColumn("Output", width=60),
    "count": CALLS,
    "modules": MODULE_COUNT,
    "mflop": MFLOP,
    "kib": CAST_KIB,
    "on_cuda": st.column_config.TextColumn("Policy on CUDA", width=135),
}
MODULES = {
    "module": st.column_config.TextColumn("Module", pinned=True, width="medium"),
    "layer_class": st.column_config.TextColumn("Class"),
    "narrow_frac": tables.share("GEMM/conv in 16 bits", width=150),
    "mflop": MFLOP,
    "count": CALLS,
    "casts": tables.count("Casts for it"),
    "kib": CAST_KIB,
}
SETTINGS = {
    "stage": st.column_config.TextColumn("Stage", pinned=True, help="Weights: those that the optimizer updates"),
    "asked": st.column_config.TextColumn("Asked for"),
    "source": st.column_config.TextColumn("By", width=320),
    "seen": st.column_config.TextColumn("Seen", help="Dtypes in the first step, that of most elements first"),
}
