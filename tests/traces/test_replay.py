"""What shorter work changes while the host launches as it did."""

import numpy as np
import pytest

from amp_core.traces.replay import Replay, reach_fracs


def replay_of(*work, waits=(), long=()):
    """Work as start, end, launch, stream, and anything more for a copy; launches return at once. Waits as start and
    end of calls that only wait, `long` of others."""
    starts, ends, launched = (np.array([one[place] for one in work], dtype=float) for place in range(3))
    streams = np.array([one[3] if len(one) > 3 else 7 for one in work])
    calls = np.array((*waits, *long), dtype=float).reshape(-1, 2)
    copies = np.array([len(one) > 4 for one in work])
    only_wait = np.arange(len(calls)) < len(waits)
    waits_us = (calls[:, 0], calls[:, 1])
    return Replay.of(starts, ends, launched, launched + 1, streams, waits_us, copies, only_wait=only_wait)


def lost(replay, *shorter):
    return sum(shorter) - replay.sooner_us(np.array(shorter, dtype=float))


QUEUED = ((10, 110, 0), (110, 210, 2), (210, 310, 4))
JUST_IN_TIME = ((10, 110, 0), (150, 210, 148), (250, 310, 248))


def test_what_a_queue_holds_begins_sooner():
    assert lost(replay_of(*QUEUED), 30, 20, 10) == 0
    assert reach_fracs(replay_of(*QUEUED))[0] == 1


def test_what_is_gained_before_a_late_launch_is_lost():
    assert lost(replay_of(*JUST_IN_TIME), 30, 20, 10) == 50
    assert reach_fracs(replay_of(*JUST_IN_TIME))[0] == pytest.approx(60 / 220)


def test_work_begins_no_sooner_than_it_was_launched():
    """The second is launched 40 us before the first ends, and so begins no more than 39 us sooner."""
    assert lost(replay_of((10, 110, 0), (110, 210, 70)), 60, 0) == 60 - 39


def test_what_the_host_launches_after_a_wait_comes_sooner():
    waited = replay_of((10, 110, 0), (150, 210, 148), waits=[(20, 112)])
    assert lost(waited, 30, 0) == 0
    short = replay_of((10, 110, 0), (150, 210, 148), waits=[(102, 112)])  # the host waits for 10 us only
    assert lost(short, 30, 0) == 20


def test_a_host_that_does_not_wait_launches_ahead():
    """After each wait it needs 40 us to launch, in which the device is idle."""
    work = [(150 * step + 50, 150 * step + 150, 150 * step + 48) for step in range(3)]
    waits = [(150 * step + 52, 150 * step + 152) for step in range(3)]
    assert replay_of(*work, waits=waits).unwaited_us() == pytest.approx(2 * 50, abs=2)
    before = replay_of(*work, waits=[(-500, 20)])  # before the first launch it delays nothing that is here
    assert before.unwaited_us() == 0 == replay_of(*work).unwaited_us()
    unknown = ((-900, -800, -np.inf), *work)  # launched before the trace began
    assert replay_of(*unknown, waits=[(-500, 20)]).unwaited_us() == 0


def test_a_wait_that_follows_another_takes_its_place():
    """Two waits for the same work: without one of them the host waits as long in the other."""
    work = [(150 * step + 50, 150 * step + 150, 150 * step + 48) for step in range(3)]
    waits = [(150 * step + at, 150 * step + at + 2 + 98 * (at == 52)) for step in range(3) for at in (52, 153)]
    replay = replay_of(*work, waits=waits)
    first = np.arange(len(waits)) % 2 == 0
    assert replay.unwaited_us() > 0 == replay.unwaited_us(np.zeros(len(waits), dtype=bool))
    assert replay.unwaited_us(first) < replay.unwaited_us() / 2


def test_long_calls_hold_up_nothing_that_waited_for_work_which_had_ended_before():
    """After each wait the launch of a graph takes 40 us."""
    work = [(150 * step + 50, 150 * step + 150, 150 * step + 48) for step in range(3)]
    waits = [(150 * step + 52, 150 * step + 152) for step in range(3)]
    launches = [(150 * step + 157, 150 * step + 197) for step in range(2)]
    assert replay_of(*work, waits=waits, long=launches).unwaited_us() == pytest.approx(2 * 50, abs=2)


def test_a_wait_for_work_that_had_ended_before_leaves_the_host_its_head_start():
    """The host waits 30 us after the end of what it waits for: with work 20 us shorter it launches no sooner."""
    late = replay_of((10, 110, 0), (200, 260, 198), waits=[(140, 142)])
    assert late.wait_slack_us == pytest.approx([30])
    assert late.sooner_us(np.array([20.0, 0])) == 0


def test_streams_do_not_hold_up_one_another():
    """Copies on a stream of their own are launched just in time, beside kernels that a queue holds."""
    beside = replay_of((10, 110, 0), (60, 80, 58, 9), (110, 210, 2), (160, 180, 158, 9), (210, 310, 4))
    assert lost(beside, 30, 0, 20, 0, 10) == 0


def test_a_stream_begins_sooner_with_the_one_that_it_waited_for():
    """A library's layers on streams of their own, then a copy on the first stream, for which the host waits."""
    layers = ((10, 110, 0, 21), (12, 108, 2, 22), (110, 210, 4, 21), (108, 208, 6, 22))
    passes = replay_of(*layers, (212, 215, 8, 7, "copy"), (300, 400, 298, 21), waits=[(9, 216)])
    assert lost(passes, 30, 30, 20, 20, 0, 0) == 100 - 50
    assert reach_fracs(passes)[0] == pytest.approx(1, rel=0.01)  # two of the layers run at a time


def test_work_of_another_stream_that_ended_earlier_holds_back_what_is_left_of_it():
    """The last work waited for stream 9, which ended 20 us after its own stream."""
    waited = replay_of((10, 110, 0), (10, 130, 1, 9), (132, 200, 2))
    assert lost(waited, 0, 50, 0) == 50 - 20
    assert lost(waited, 10, 50, 0) == 60 - 30


def test_work_on_many_streams_ends_with_the_busiest():
    spread = replay_of(*((10 + n, 110 + n, n, n) for n in range(30)))
    assert lost(spread, *[20] * 30) == 29 * 20


def test_work_whose_launch_is_not_known_holds_nothing_up():
    unknown = Replay.of(
        np.array([10.0, 150.0]),
        np.array([110.0, 210.0]),
        np.array([-np.inf, 150.0]),
        np.array([-np.inf, 150.0]),
        np.array([7, 7]),
        (np.zeros(0), np.zeros(0)),
    )
    assert lost(unknown, 30, 0) == 0


def test_nothing_is_lost_of_nothing():
    assert lost(replay_of(*QUEUED), 0, 0, 0) == 0
    empty = Replay.of(*(np.zeros(0) for _ in range(5)), (np.zeros(0), np.zeros(0)))
    assert empty.sooner_us(np.zeros(0)) == 0 and set(reach_fracs(empty)) == {1.0}
