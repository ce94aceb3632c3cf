"""`WatchCallback` for Lightning: see `amp_core.record.frameworks.lightning`."""

from amp_core.record.frameworks.lightning import WatchCallback

__all__ = ["WatchCallback"]
