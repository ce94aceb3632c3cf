"""`RunError`: raised by every part of AMPscope for what it cannot read, write or start."""


class RunError(ValueError):
    """What cannot be read, written or started, in one sentence: which argument, what value, what would be right."""
