import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from lensemble.transport.framing import PREFIX, FrameReader, TooLong
from lensemble.transport.raw import NOTHING, RawLost

LIMIT = 40


class Pieces:
    """A stream that arrives in given pieces, and makes its reader wait before each."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]

    async def read_into(self, into: memoryview, beyond: memoryview = NOTHING) -> int:
        await trio.sleep(1)
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        count = min(len(piece), len(into) + len(beyond))
        first = min(count, len(into))
        into[:first] = piece[:first]
        beyond[: count - first] = piece[first:count]
        if count < len(piece):
            self._pieces.insert(0, piece[count:])
        return count

    async def stop(self) -> None:
        self._pieces.clear()


def framed(frames: list[bytes]) -> bytes:
    return b"".join(PREFIX.pack(len(frame)) + frame for frame in frames)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(stream) + 1) for place in places} | {len(stream)})
    return [stream[a:b] for a, b in zip([0, *ends], ends, strict=False)]


FRAMES = st.lists(st.binary(max_size=LIMIT), max_size=8)
PLACES = st.lists(st.integers(0, 400), max_size=30)


@given(frames=FRAMES, places=PLACES, patience=st.lists(st.sampled_from([0.5, 1.5, 9]), min_size=1))
def test_frames_survive_any_cut_and_any_cancel(
    frames: list[bytes], places: list[int], patience: list[float]
) -> None:
    async def main() -> None:
        reader = FrameReader(Pieces(cut(framed(frames), places)))
        slot = memoryview(bytearray(LIMIT))
        received: list[bytes] = []
        for wait in (patience[i % len(patience)] + i // 50 for i in range(10_000)):
            with trio.move_on_after(wait):
                extent = await reader.receive_into(slot)
                if extent is None:
                    break
                received.append(bytes(slot[:extent]))
        assert received == frames
        assert await reader.receive_into(slot) is None

    trio.run(main, clock=MockClock(autojump_threshold=0))


@given(frames=FRAMES, places=PLACES)
def test_frames_can_also_be_had_as_bytes(frames: list[bytes], places: list[int]) -> None:
    async def main() -> None:
        reader = FrameReader(Pieces(cut(framed(frames), places)))
        for frame in frames:
            assert await reader.receive(LIMIT) == frame
        assert await reader.receive(LIMIT) is None

    trio.run(main, clock=MockClock(autojump_threshold=0))


@given(stream=st.binary(max_size=200), places=PLACES)
def test_any_bytes_are_frames_or_a_named_fault(stream: bytes, places: list[int]) -> None:
    async def main() -> None:
        reader = FrameReader(Pieces(cut(stream, places)))
        slot = memoryview(bytearray(LIMIT))
        rebuilt: list[bytes] = []
        try:
            while (extent := await reader.receive_into(slot)) is not None:
                rebuilt.append(bytes(slot[:extent]))
        except RawLost as lost:
            with pytest.raises(RawLost, match=lost.reason):
                await reader.receive_into(slot)
            assert stream.startswith(framed(rebuilt))
        else:
            assert framed(rebuilt) == stream

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_frame_over_the_limit_takes_no_memory(autojump_clock: MockClock) -> None:
    reader = FrameReader(Pieces([b"\xff\xff\xff\xff"]))
    with pytest.raises(TooLong, match="4294967295 bytes exceeds the limit of 40"):
        await reader.receive(LIMIT)
