"""One step traced operator by operator: dtypes, autocast policy, casts, FLOPs.

observer (which step) -> op_counter (a dispatch mode) -> call_sites (module, autocast region, line of code)
"""
