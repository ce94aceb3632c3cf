"""`WatchCallback` for Transformers: see `amp_core.record.frameworks.transformers`."""

from amp_core.record.frameworks.transformers import WatchCallback

__all__ = ["WatchCallback"]
