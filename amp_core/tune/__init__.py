"""Search: the fastest recipe that keeps FP32's learning (`search`), and the largest batch that fits (`max_batch`).

options (what to try) -> race -> confirm (over seeds) -> evidence -> answer, result (tune.json); budget, state
codegen/: the code for the recipe that was found
"""
