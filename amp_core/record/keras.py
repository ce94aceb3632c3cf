"""`WatchCallback` for Keras: see `amp_core.record.frameworks.keras`."""

from amp_core.record.frameworks.keras import WatchCallback

__all__ = ["WatchCallback"]
