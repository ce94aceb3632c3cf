"""Phases with a fake clock: exact numbers."""

from amp_core.record.step_phases import HostClock, Phases, called, calling, count_calls


class FakeTime:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_ms(self, ms):
        self.now += ms / 1e3


def test_phases_add_up_to_the_time_of_the_step():
    time = FakeTime()
    phases = Phases(HostClock(time))
    for phase, ms in (("forward", 1), ("backward", 5), ("after_backward", 9)):
        time.pass_ms(ms)
        phases.enter(phase)
    time.pass_ms(2)
    phases.enter("forward")  # another micro-batch: the time after backward went into loading it
    time.pass_ms(5)
    phases.enter("backward")
    time.pass_ms(9)
    phases.enter("after_backward")
    time.pass_ms(3)
    phases.enter("optimizer")  # no further micro-batch: the time belongs to the optimizer
    time.pass_ms(4)
    totals = {k: round(v, 9) for k, v in phases.totals(phases.take()).items()}
    assert totals == {"data": 3.0, "forward": 10.0, "backward": 18.0, "optimizer": 7.0, "watch": 0.0}


def test_watching_does_not_count_for_the_phase_it_interrupts():
    time = FakeTime()
    phases = Phases(HostClock(time))
    phases.enter("forward")
    time.pass_ms(4)
    with phases.watching():
        time.pass_ms(1)
        with phases.watching():
            time.pass_ms(1)
        time.pass_ms(1)
    time.pass_ms(6)
    totals = {k: round(v, 9) for k, v in phases.totals(phases.take()).items()}
    assert totals["forward"] == 10.0 and totals["watch"] == 3.0
    assert phases.present == "forward"


def test_take_starts_a_new_step():
    time = FakeTime()
    phases = Phases(HostClock(time))
    time.pass_ms(1)
    phases.take()
    time.pass_ms(2)
    assert round(phases.totals(phases.take())["data"], 9) == 2.0


def test_excluded_time_belongs_to_no_phase_even_if_phases_are_entered_meanwhile():
    time = FakeTime()
    phases = Phases(HostClock(time))
    time.pass_ms(2)
    with phases.left_out():
        time.pass_ms(50)
        with phases.watching():  # another training calls a patched function
            time.pass_ms(7)
        time.pass_ms(50)
    time.pass_ms(3)
    totals = {k: round(v, 9) for k, v in phases.totals(phases.take()).items()}
    assert totals == {"data": 5.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0, "watch": 0.0}


def test_what_listeners_take_counts_as_watching_once_whatever_they_do():
    time = FakeTime()
    phases = Phases(HostClock(time))
    count_calls(phases)
    phases.enter("forward")
    time.pass_ms(4)
    begun = calling()
    time.pass_ms(1)
    assert phases.present == "forward"
    with phases.watching():
        time.pass_ms(3)
        within = calling()  # a listener calls what is listened to
        time.pass_ms(1)
        called(within)
    phases.enter("backward")
    time.pass_ms(2)
    called(begun)
    time.pass_ms(6)
    totals = {k: round(v, 9) for k, v in phases.totals(phases.take()).items()}
    assert totals == {"data": 0.0, "forward": 4.0, "backward": 6.0, "optimizer": 0.0, "watch": 7.0}
    count_calls(phases, count=False)
    assert calling() == []


def test_a_listener_that_ends_the_step_takes_nothing_from_the_next_one():
    time = FakeTime()
    phases = Phases(HostClock(time))
    count_calls(phases)
    phases.enter("optimizer")
    time.pass_ms(3)
    begun = calling()
    time.pass_ms(5)
    phases.take()
    phases.enter("data")
    time.pass_ms(2)
    called(begun)
    time.pass_ms(1)
    phases.enter("optimizer")
    time.pass_ms(1)
    totals = {k: round(v, 9) for k, v in phases.totals(phases.take()).items()}
    assert totals == {"data": 1.0, "forward": 0.0, "backward": 0.0, "optimizer": 1.0, "watch": 2.0}
    count_calls(phases, count=False)
