"""Trainings that take turns, a block of steps each, so that whatever slows the machine slows all of them alike.

>>> members = [Member(config, out / config.precision) for config in configs]
>>> interleave(members, block_steps=10, on_progress=print)
[0, 0, 0]

Each recipe trains in a process of its own (`amp_core.train.turns.participant`): none inherits another's memory peak,
backend flags, cuDNN choices or allocator, and while it waits it does nothing. The order within a round is drawn from
the seed, and each second round is the one before turned round, so that a drift of the machine cancels. Imports no
torch.
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
"""Steps per block in a run that is long enough for twenty of them."""


def default_block(steps: int) -> int:
    """Steps per block: so many that a run has twenty blocks, at most `MAX_BLOCK`."""
    return max(1, min(MAX_BLOCK, steps // 20))


def turns_of(config: TrainConfig, block_steps: int) -> list[int]:
    """Steps of each turn. No turn begins just before or within the profiled steps: waiting would pass for idle time."""
    first, stop = config.profile or (0, 0)
    ends = [n for n in range(block_steps, config.steps, block_steps) if not first <= n < stop]
    return [end - begin for begin, end in zip([0, *ends], [*ends, config.steps], strict=True)]


def order_of(count: int, rounds: int, seed: int) -> list[list[int]]:
    """Who comes when: a random order for each round of two, then the same turned round."""
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
    crew: WorkerPool | None = None,
) -> list[int]:
    """Train all members in turns. Returns the exit code of each, or 130 alone if a signal stopped them.

    All have the same number of steps and the same seed. Each trains in a process of its own, or in the process of
    `crew` that trained its recipe before. After each round, `on_progress` gets the number of steps made, and `keep`, if
    given, returns the indices of the members that continue; the others end as stopped. If a member fails, the others
    continue; if one refuses its settings (2), all end before their first step. SIGTERM and Ctrl-C are passed on to all
    members, and each ends its run in order.
    """
    first = members[0].config
    about = {
        "id": uuid.uuid4().hex,
        "recipes": [member.config.precision for member in members],
        "block_steps": block_steps,
        "turn_order": "drawn from the seed for each round of two, the second turned round",
    }
    with ExitStack() as stack:
        crew = crew if crew is not None else stack.enter_context(WorkerPool())
        children: list[Worker] = []
        asked = stack.enter_context(_passing_on(children))
        for member in members:
            if asked:
                return [130]
            child = crew.take(member)
            stack.callback(crew.give_back, member, child)
            stack.callback(child.end)
            children.append(child)
            child.begin(member, about)
            if len(children) == 1 and not child.waits():  # it has said why, and the next would meet the same
                return [child.end()]
        for child in children[1:]:
            child.waits()
        if any(child.code == 2 for child in children):
            return [child.end() for child in children]
        turns = turns_of(first, block_steps)
        done = 0
        going = set(range(len(children)))
        for steps, order in zip(turns, order_of(len(children), len(turns), first.seed), strict=True):
            for place in order:
                if not asked and place in going:
                    children[place].train(steps)
            if asked:
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
        return [130] if asked else codes


@contextmanager
def _passing_on(children: Sequence[Worker]) -> Iterator[list[int]]:
    """Within it SIGTERM and Ctrl-C go to all `children`, which end their runs in order; it gives those that came."""
    asked: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
