"""Search: the fastest recipe that keeps parity with FP32 (`search`), and the largest batch that fits (`max_batch`).

options (what to try) -> race -> confirm (over seeds) -> evidence -> answer, result (tune.json); budget, state
codegen/: code for a recipe
"""
