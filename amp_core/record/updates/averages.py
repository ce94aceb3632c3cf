"""Observer that fills the table `averages`: what is lost to rounding in averaged copies of the weights (EMA, SWA).

An average moves by (1 - decay) · (weight - average) per step. In 16 bits that is soon below half a unit in the last
place, and the average stops changing. The decay is estimated from the elements that moved far enough to show it.
"""

import sys
import time
from dataclasses import dataclass

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.own import without_torch_function
from amp_core.record.model.parameters import has_values, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.updates.copies import Copy, reachable_copies
from amp_core.record.updates.held import even_limit, local, spaced
from amp_core.record.updates.losses import ulps
from amp_core.store.writer import RunWriter

MAX_ELEMENTS = 2**18
"""Elements that are compared per step, evenly spaced ones of large tensors."""
MAX_TIME_FRAC = 0.005
MIN_STEPS = 3
"""Steps that are compared even if that takes more of the time."""
MIN_ULPS = 4.0
"""Units in the last place by which an element has to move to show the decay within an eighth."""
MIN_SHOWING = 16
"""Fewest such elements from which the decay is estimated."""
MAX_LOST_FRAC = 1.1
"""A tensor whose changes differ from those of an average by more than their size is not an average."""
MIN_COSINE = 0.5
"""Cosine to the weights below which tensors that do not change are no average of them, but sums of gradients, say, that
were cleared."""


@dataclass
class _Pair:
    """One parameter and its average: the average before the step, the weight after it."""

    name: str
    copy: Copy
    average: torch.Tensor
    parameter: torch.Tensor
    taken: int
    before: torch.Tensor
    version: int
    address: int
    weight: torch.Tensor | None = None


class AverageLedger(Observer):
    """Compares averages before and after steps that are multiples of `every`, and finds them in the loop's variables.

    Only averages of less than 32 bits are compared, and not while that has taken more than `MAX_TIME_FRAC` of the time.
    """

    def __init__(self, writer: RunWriter, model: torch.nn.Module, every: int) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._every = every
        self._pairs: list[_Pair] = []
        self._named: dict[str, torch.Tensor] = {}  # the parameters that they are of
        self._sent: list[tuple[int, list[_Pair], HostTransfer]] = []
        self._step = 0  # at whose beginning the averages were held
        self._compared = 0
        self._began = time.perf_counter()
        self._spent_s = 0.0

    def step_began(self, step: int) -> None:
        begun = time.perf_counter()
        affordable = self._spent_s <= MAX_TIME_FRAC * (begun - self._began)
        due = step % self._every == 0 and (affordable or self._compared < MIN_STEPS)
        if due or self._pairs:
            with torch.no_grad(), without_torch_function():
                self._compare()
                if due:
                    self._step = step
                    self._hold()
            self._spent_s += time.perf_counter() - begun
        self.awake = bool(self._pairs or self._sent)

    def step_ended(self, step: int) -> None:
        with without_torch_function():
            for pair in self._pairs:
                pair.weight = spaced(local(pair.parameter), pair.taken).detach().clone()
        self._write(wait=False)

    def close(self) -> None:
        with torch.no_grad(), without_torch_function():
            self._compare()
        self._write(wait=True)

    def _hold(self) -> None:
        named = {n: p for n, p in named_parameters(self._model) if p.requires_grad and has_values(p) and p.numel()}
        self._named = dict(named)
        copies = reachable_copies(named, sys._getframe(1))
        averages = [(c, n, a) for c in copies for n, a in c.tensors(named).items()]
        narrow = [(c, n, a) for c, n, a in averages if a.dtype in NARROW and has_values(a)]
        narrow = [(c, n, a) for c, n, a in narrow if local(a).shape == local(named[n]).shape]  # not of a sharded weight
        limit = even_limit([local(a).numel() for _, _, a in narrow], MAX_ELEMENTS)
        for copy, name, average in narrow:
            taken = min(limit, local(average).numel())
            before = spaced(local(average), taken).clone()
            self._pairs.append(
                _Pair(name, copy, average, named[name], taken, before, average._version, local(average).data_ptr())
            )
        self._compared += 1

    def _compare(self) -> None:
        pairs, self._pairs = self._pairs, []
        now = {id(pair.copy): pair.copy.tensors(self._named) for pair in pairs}
        written: set[int] = set()  # copies, by id
        for pair in pairs:
            # A loop may create a new average in each step, or new memory for it (`average.data = …`). Writing the same
            # values again changes the version: that distinguishes an average that stopped changing from a teacher. But
            # writing through `.data` changes values alone.
            average = now[id(pair.copy)].get(pair.name, pair.average)
            known = average is pair.average and average._version == pair.version
            pair.average = average
            if not known or local(average).data_ptr() != pair.address or not _is_as_before(pair):
                written.add(id(pair.copy))
        for copy in written:  # a loop may keep several averages, each with a decay of its own
            kept = [pair for pair in pairs if pair.weight is not None and id(pair.copy) == copy]
            if not kept:
                continue
            transfer = HostTransfer()
            moves = [_move(pair) for pair in kept]
            shown = torch.stack(
                [_decay_sums(change, distance, pair) for (change, distance), pair in zip(moves, kept, strict=True)]
            )
            products, squares, showing = shown.sum(dim=0)
            rate = torch.where(showing >= MIN_SHOWING, products / squares, torch.nan)
            transfer.put("rate", rate)
            transfer.put("sums", torch.stack([_sums(*move, rate) for move in moves]))
            transfer.put("likeness", torch.stack([_likeness(pair) for pair in kept]))
            transfer.send()
            self._sent.append((self._step, kept, transfer))

    def _write(self, *, wait: bool) -> None:
        while self._sent and self._sent[0][2].ready(wait):
            step, pairs, transfer = self._sent.pop(0)
            rate = transfer.value("rate")
            assert rate is not None
            sums = transfer.values("sums").reshape(len(pairs), -1)
            apart, unchanged, mass, lost = sums.sum(axis=0)
            known = 0 < rate <= 1
            product, *squares = transfer.values("likeness").reshape(len(pairs), -1).sum(axis=0)
            alike = product > 0 and product**2 >= MIN_COSINE**2 * squares[0] * squares[1]
            is_average = alike if unchanged >= apart / 2 else known and lost <= MAX_LOST_FRAC * mass
            if not apart or not is_average:
                continue
            self._writer.append(
                "averages",
                {
                    "step": [step] * len(pairs),
                    "name": [pair.name for pair in pairs],
                    "dtype": [dtype_name(pair.average.dtype) for pair in pairs],
                    "elements": [pair.taken for pair in pairs],
                    "unchanged_frac": [float(u / a) if a else None for a, u in sums[:, :2]],
                    "lost_mass_frac": [float(min(x / m, 1.0)) if known and m else None for m, x in sums[:, 2:]],
                    "decay": [1 - rate if known else None] * len(pairs),
                },
            )


def _is_as_before(pair: _Pair) -> bool:
    return torch.equal(spaced(local(pair.average), pair.taken), pair.before)


def _move(pair: _Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the average moved, and how far the weight was away from it."""
    assert pair.weight is not None
    before = pair.before.to(torch.float64)
    after = spaced(local(pair.average), pair.taken).to(torch.float64)
    return after - before, pair.weight.to(before.device, torch.float64).reshape(before.shape) - before


def _likeness(pair: _Pair) -> torch.Tensor:
    """For the cosine between average and weight: their product, and the square of each."""
    assert pair.weight is not None
    average = pair.before.to(torch.float64).reshape(-1)
    weight = pair.weight.to(average.device, torch.float64).reshape(-1)
    return torch.stack([average @ weight, average @ average, weight @ weight])


def _decay_sums(change: torch.Tensor, distance: torch.Tensor, pair: _Pair) -> torch.Tensor:
    """For a least-squares fit of 1 - decay: products, squares and number of the elements that show it."""
    info = torch.finfo(pair.before.dtype)
    ulp = ulps(pair.before.to(torch.float64), info.eps, info.tiny)
    showing = change.abs() >= MIN_ULPS * ulp
    d = torch.where(showing, distance, 0.0)
    return torch.stack([(change * d).sum(), d.square().sum(), showing.sum().to(torch.float64)])


def _sums(change: torch.Tensor, distance: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    apart = distance != 0
    wanted = distance * rate
    counts = [apart.sum(), (apart & (change == 0)).sum()]
    return torch.stack([*(c.to(torch.float64) for c in counts), wanted.abs().sum(), (change - wanted).abs().sum()])
