"""Interleaved trainings, a block of steps each, so that load on the machine affects all of them alike.

>>> members = [Member(config, out / config.precision) for config in configs]
>>> interleave(members, block_steps=10, on_progress=print)
[0, 0, 0]

Each recipe trains in its own process (`amp_core.train.turns.participant`): none inherits another's memory peak, backend
flags, cuDNN choices or allocator, and it is idle while it waits. The order within a round is drawn from the seed, and
every second round reverses the one before, so that a drift of the machine cancels. Imports no torch.
"""

import random
import signal
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from amp_core.settings.training import TrainConfig
from amp_core.train.turns.member import Member
from amp_core.train.turns.worker_pool import Worker, WorkerPool

__all__ = ["MAX_BLOCK", "Member", "default_block", "interleave", "order_of", "turns_of"]

MAX_BLOCK = 10
"""Steps per block in a run that is long enough for twenty blocks."""


def default_block(steps: int) -> int:
    """Steps per block, at most `MAX_BLOCK`, so that a run has twenty blocks."""
    return max(1, min(MAX_BLOCK, steps // 20))


def turns_of(config: TrainConfig, block_steps: int) -> list[int]:
    """Steps of each turn. None begins just before or within the profiled steps: waiting would count as idle time."""
    first, stop = config.profile or (0, 0)
    ends = [n for n in range(block_steps, config.steps, block_steps) if not first <= n < stop]
    return [end - begin for begin, end in zip([0, *ends], [*ends, config.steps], strict=True)]


def order_of(count: int, rounds: int, seed: int) -> list[list[int]]:
    """Order of the members in each round: a random one, then its reverse, and so on."""
    draw = random.Random(seed)
    orders: list[list[int]] = []
    while len(orders) < rounds:
        order = draw.sample(range(count), count)
        orders += [order, order[::-1]]
    return orders[:rounds]


def interleave(
    members: Sequence[Member],
    block_steps: int,
    on_progress: Callable[[int], None],
    keep: Callable[[int], Collection[int]] | None = None,
    pool: WorkerPool | None = None,
) -> list[int]:
    """Train all members interleaved. Returns the exit code of each, or 130 alone if a signal stopped them.

    All have the same number of steps and the same seed. Each trains in a process of its own, or in the process of
    `pool` that trained its recipe before. After each round, `on_progress` gets the number of steps made, and `keep`, if
    given, returns the indices of the members that continue; the others end as stopped. If a member fails, the others
    continue; if one refuses its settings (2), all end before their first step. SIGTERM and Ctrl-C are passed on to all
    members, and each ends its run properly.
    """
    first = members[0].config
    about = {
        "id": uuid.uuid4().hex,
        "recipes": [member.config.precision for member in members],
        "block_steps": block_steps,
        "turn_order": "drawn from the seed for each round of two, the second turned round",
    }
    with ExitStack() as stack:
        pool = pool if pool is not None else stack.enter_context(WorkerPool())
        children: list[Worker] = []
        signals = stack.enter_context(_forward_signals(children))
        for member in members:
            if signals:
                return [130]
            child = pool.take(member)
            stack.callback(pool.give_back, member, child)
            stack.callback(child.end)
            children.append(child)
            child.begin(member, about)
            if (
                len(children) == 1 and not child.wait_for_turn()
            ):  # it has reported the error, which the others would meet too
                return [child.end()]
        for child in children[1:]:
            child.wait_for_turn()
        if any(child.code == 2 for child in children):
            return [child.end() for child in children]
        turns = turns_of(first, block_steps)
        done = 0
        going = set(range(len(children)))
        for steps, order in zip(turns, order_of(len(children), len(turns), first.seed), strict=True):
            for place in order:
                if not signals and place in going:
                    children[place].train(steps)
            if signals:
                break
            done += steps
            on_progress(done)
            if keep is not None:
                kept = going & set(keep(done))
                for place in going - kept:
                    children[place].end()
                going = kept
                if not going:
                    break
        codes = [child.end() for child in children]
        return [130] if signals else codes


@contextmanager
def _forward_signals(children: Sequence[Worker]) -> Iterator[list[int]]:
    """Within the context SIGTERM and Ctrl-C are sent on to all `children`; yields the list of signals received."""
    signals: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
