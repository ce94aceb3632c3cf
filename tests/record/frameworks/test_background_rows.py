"""Rows that a background thread writes: in order, in bounded number, none lost, and no error in the loop."""

import threading

from amp_core.record.frameworks.background_rows import MAX_WAITING, BackgroundRows


def test_rows_are_sent_in_order_before_the_end():
    sent = []
    rows = BackgroundRows(sent.extend, sent.append)
    for number in range(10):
        rows.take([number, -number])
    rows.finish()
    rows.finish()
    assert sent == [sign * number for number in range(10) for sign in (1, -1)]


def test_a_failure_is_reported_and_later_rows_are_sent():
    sent, failed = [], []

    def send(attempts):
        if attempts == ["bad"]:
            raise OSError("no space")
        sent.extend(attempts)

    rows = BackgroundRows(send, failed.append)
    for one in ("a", "bad", "b"):
        rows.take([one])
    rows.finish()
    assert sent == ["a", "b"] and [str(error) for error in failed] == ["no space"]


def test_a_loop_that_is_far_ahead_waits_for_the_thread():
    sent, go_on, at_work, ahead = [], threading.Event(), threading.Event(), threading.Event()

    def send(attempts):
        at_work.set()
        go_on.wait(300)
        sent.extend(attempts)

    rows = BackgroundRows(send, sent.append)
    rows.take([0])
    assert at_work.wait(300)
    for number in range(1, MAX_WAITING + 1):
        rows.take([number])  # returns: this many may wait

    def one_more():
        rows.take([MAX_WAITING + 1])
        ahead.set()

    loop = threading.Thread(target=one_more)
    loop.start()
    assert not ahead.wait(0.2)
    go_on.set()
    loop.join(300)
    rows.finish()
    assert ahead.is_set() and sent == list(range(MAX_WAITING + 2))
