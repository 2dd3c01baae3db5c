import threading

import pytest

from lensemble.errors import StorageError
from lensemble_coord.training.lanes import Lanes


def test_each_lane_takes_its_calls_in_order_and_no_further_behind_than_said() -> None:
    gate = threading.Semaphore(0)
    seen: tuple[list[int], list[int]] = ([], [])
    with Lanes(2, "test", behind=2) as lanes:

        def slow(piece: int) -> None:
            assert gate.acquire(timeout=10)
            seen[0].append(piece)

        for piece in range(2):
            lanes.give(lambda piece=piece: slow(piece), lambda piece=piece: seen[1].append(piece))
        assert seen[0] == []
        for piece in range(2, 20):
            gate.release()
            lanes.give(lambda piece=piece: slow(piece), lambda piece=piece: seen[1].append(piece))
            # The caller may write over a piece ``kept`` after it: that one must be done with.
            assert seen[0][-1] >= piece + 1 - lanes.kept
        gate.release(2)
        lanes.finish()
    assert seen == (list(range(20)), list(range(20)))


def test_what_a_call_raises_comes_out_and_nothing_runs_afterwards() -> None:
    ran: list[int] = []

    def refuse() -> None:
        raise StorageError("no")

    def all_pieces() -> None:
        with Lanes(1, "test", behind=1) as lanes:
            lanes.give(refuse)
            for piece in range(5):
                lanes.give(lambda piece=piece: ran.append(piece))

    with pytest.raises(StorageError):
        all_pieces()
    assert len(ran) <= 1
    assert not [each for each in threading.enumerate() if each.name.startswith("test-0")]
