"""What inspections of operators report: at once, or once a value that is still on the device is known.

    reports = OpReports(write)
    reports.write("narrow sum", "cumsum", "encoder", 500.0, 256.0, torch.bfloat16)
    reports.later("narrow sum", "index_add", "encoder", torch.bfloat16, most_terms, 255.0)   # if it is above 255
    reports.send()                  # starts the copies to the host
    reports.finish()                # writes, once the values are there

`write(kind, op, name, value, limit, dtype)` writes an event; the kinds are in `schema.EVENT_KINDS`.
"""

from collections.abc import Callable

import torch

from amp_core.record.stats.host_transfer import HostTransfer

Write = Callable[[str, str, str, float, float, torch.dtype], None]
"""Takes the kind of event, the operator, the module, the value, its limit and the dtype."""
Module = Callable[[], str]
"""Names the module that runs."""


class OpReports:
    """The reports on the operators of one step."""

    def __init__(self, write: Write) -> None:
        self.write = write
        self.transfer = HostTransfer()
        """Carries values to the host; an inspection may put its own on it before `send`."""
        self._pending: list[tuple[str, str, str, torch.dtype, torch.Tensor, float]] = []

    def later(self, kind: str, op: str, module: str, dtype: torch.dtype, value: torch.Tensor, limit: float) -> None:
        """Report `value`, a tensor of one number, if it turns out to be above `limit`."""
        self._pending.append((kind, op, module, dtype, value, limit))

    def send(self) -> None:
        """Start the copies of all values to the host."""
        for place, (*_, value, _) in enumerate(self._pending):
            self.transfer.put(str(place), value)
        self.transfer.send()

    def finish(self, wait: bool = False) -> bool:
        """Write what depended on values; False, and nothing is written, while they are not on the host yet."""
        if not self.transfer.ready(wait):
            return False
        for place, (kind, op, module, dtype, _, limit) in enumerate(self._pending):
            if (size := float(self.transfer.values(str(place))[0])) > limit:
                self.write(kind, op, module, -size if kind == "constant overflow" else size, limit, dtype)
        self._pending = []
        return True
