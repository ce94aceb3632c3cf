"""Several interleaved trainings, a block of steps each, so that load on the machine affects all of them alike.

interleave (whose turn) -> worker_pool (processes kept alive) -> participant (one process) -> the engine
"""
