"""What a sender that was never idle tells of its path."""

from lensemble_coord.inference.busy import LEAST_BYTES, LEAST_S, Busy

MIB = 1 << 20


def send(
    busy: Busy, count: int, every_s: float, begin: float = 0.0, *, waited: bool = True
) -> None:
    for index in range(count):
        busy.acquired(begin + index * every_s, waited=waited)
        busy.filled(MIB)


def test_the_rate_is_that_of_what_left_while_it_waited() -> None:
    busy = Busy(4)
    send(busy, 4, 0.0, waited=False)
    assert busy.bytes_per_s is None
    send(busy, 11, 0.1)
    assert busy.bytes_per_s == 10 * MIB


def test_a_sender_that_was_idle_for_a_moment_tells_nothing_of_that_window() -> None:
    busy = Busy(2)
    send(busy, 2, 0.0, waited=False)
    for begin in range(20):
        send(busy, 3, 0.1, begin)
        busy.acquired(begin + 0.5, waited=False)
        busy.filled(MIB)
    assert busy.bytes_per_s is None


def test_the_window_that_carried_most_counts() -> None:
    busy = Busy(2)
    send(busy, 2, 0.0, waited=False)
    send(busy, 6, 0.1)
    assert busy.bytes_per_s == 10 * MIB
    send(busy, 1, 0.0, 2.0, waited=False)
    send(busy, 21, 0.2, 3.0)
    assert busy.bytes_per_s == 5 * MIB
    send(busy, 1, 0.0, 20.0, waited=False)
    send(busy, 6, 0.01, 21.0)
    assert busy.bytes_per_s == 5 * MIB


def test_too_little_or_too_short_is_nothing() -> None:
    few = Busy(2)
    send(few, 2, 0.0, waited=False)
    send(few, LEAST_BYTES // MIB, 1.0)
    assert few.bytes_per_s is None
    short = Busy(2)
    send(short, 2, 0.0, waited=False)
    send(short, 20, LEAST_S / 30)
    assert short.bytes_per_s is None


def test_pieces_of_different_sizes_are_counted_as_they_leave() -> None:
    busy = Busy(2)
    for size in (5 * MIB, 1):
        busy.acquired(0.0, waited=False)
        busy.filled(size)
    busy.acquired(1.0, waited=True)
    busy.filled(1)
    busy.acquired(2.0, waited=True)
    assert busy.bytes_per_s is None, "the large one had left when it began"
