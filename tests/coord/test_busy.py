"""What a sender that was never idle tells of its path."""

from lensemble_coord.inference.busy import LEAST_BYTES, LEAST_S, Busy

MIB = 1 << 20


def begun(slots: int) -> Busy:
    """A sender whose slots are all full."""
    busy = Busy(slots)
    for index in range(slots):
        busy.filled(MIB, idle=index == 0)
    return busy


def send(busy: Busy, count: int, every_s: float, begin: float = 0.0) -> None:
    for index in range(count):
        busy.waited(begin + index * every_s)
        busy.filled(MIB, idle=False)


def test_the_rate_is_that_of_what_left_while_it_was_never_idle() -> None:
    busy = begun(4)
    assert busy.bytes_per_s is None
    send(busy, 11, 0.1)
    assert busy.bytes_per_s == 10 * MIB


def test_a_slot_that_was_not_waited_for_does_not_end_a_window() -> None:
    busy = begun(4)
    send(busy, 3, 0.1)
    for _ in range(2):
        busy.filled(MIB, idle=False)
    send(busy, 6, 0.1, 0.5)
    assert busy.bytes_per_s == 10 * MIB


def test_a_sender_that_was_idle_for_a_moment_tells_nothing_of_that_window() -> None:
    busy = begun(2)
    for begin in range(20):
        send(busy, 3, 0.1, begin)
        busy.filled(MIB, idle=True)
        busy.filled(MIB, idle=False)
    assert busy.bytes_per_s is None


def test_the_window_that_carried_most_counts() -> None:
    busy = begun(2)
    send(busy, 6, 0.1)
    assert busy.bytes_per_s == 10 * MIB
    busy.filled(MIB, idle=True)
    send(busy, 21, 0.2, 3.0)
    assert busy.bytes_per_s == 5 * MIB
    busy.filled(MIB, idle=True)
    send(busy, 6, 0.01, 21.0)
    assert busy.bytes_per_s == 5 * MIB


def test_too_little_or_too_short_is_nothing() -> None:
    few = begun(2)
    send(few, LEAST_BYTES // MIB, 1.0)
    assert few.bytes_per_s is None
    short = begun(2)
    send(short, 20, LEAST_S / 30)
    assert short.bytes_per_s is None


def test_pieces_of_different_sizes_are_counted_as_they_leave() -> None:
    busy = Busy(2)
    busy.filled(5 * MIB, idle=True)
    busy.filled(1, idle=False)
    busy.waited(1.0)
    busy.filled(1, idle=False)
    busy.waited(2.0)
    assert busy.bytes_per_s is None, "the large one had left when it began"


def test_a_piece_that_is_still_under_way_does_not_count() -> None:
    busy = Busy(2)
    busy.filled(1, idle=True)
    busy.filled(1, idle=False)
    busy.waited(1.0)
    busy.filled(5 * MIB, idle=False)
    busy.waited(2.0)
    assert busy.bytes_per_s is None
    busy.filled(1, idle=False)
    busy.waited(6.0)
    assert busy.bytes_per_s == (5 * MIB + 1) // 5
