"""`RunError`, raised by every part of AMPscope for what it cannot read, write or start; `DamageError` for damage."""


class RunError(ValueError):
    """What cannot be read, written or started, in one sentence: which argument, what value, what would be right."""


class DamageError(RunError):
    """A file of a run, or a table, holds something else than the schema promises; it will not be readable later either.

    `Run.salvaged` reads the other tables.
    """
