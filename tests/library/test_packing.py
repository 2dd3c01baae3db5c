import numpy as np
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import ContractViolation
from lensemble.packing import OVERHEAD_BYTES, pack, unpack

CHUNK_WORDS = 1 << 16


def restored(chunk: bytes, size: int) -> bytes:
    into = memoryview(bytearray(size))
    unpack(memoryview(chunk), into)
    return bytes(into)


def noise(dtype: type[np.int16] | type[np.int32], spread: float) -> bytes:
    drawn = np.random.default_rng(5).standard_normal(CHUNK_WORDS) * spread
    return drawn.astype(dtype).tobytes()


@given(st.binary(max_size=1000))
def test_any_bytes_come_back(raw: bytes) -> None:
    chunk = pack(memoryview(raw))
    assert len(chunk) <= len(raw) + OVERHEAD_BYTES
    assert restored(chunk, len(raw)) == raw


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=20), st.booleans())
def test_words_of_either_width_come_back(words: list[int], narrow: bool) -> None:
    wide = np.array(words * 20, dtype=np.int64)
    raw = (wide.astype(np.int16) if narrow else wide.astype(np.int32)).tobytes()
    assert restored(pack(memoryview(raw)), len(raw)) == raw


@pytest.mark.parametrize(
    ("dtype", "spread", "width", "most"),
    [
        (np.int16, 1000, 2, 1.55),
        (np.int16, 300, 2, 1.4),
        (np.int16, 20, 2, 0.9),
        (np.int32, 1000, 4, 1.55),
        (np.int32, 30_000, 4, 2.3),
    ],
)
def test_normal_words_are_packed_to_so_many_bytes_each(
    dtype: type[np.int16] | type[np.int32], spread: float, width: int, most: float
) -> None:
    chunk = pack(memoryview(noise(dtype, spread)))
    assert chunk[0] == width
    assert len(chunk) <= most * CHUNK_WORDS


def test_noise_is_sent_as_it_is() -> None:
    raw = np.random.default_rng(5).bytes(1 << 16)
    assert pack(memoryview(raw)) == b"\0" + raw


def test_a_chunk_of_two_widths_comes_back() -> None:
    raw = noise(np.int16, 20) + noise(np.int32, 20)
    chunk = pack(memoryview(raw))
    assert len(chunk) < len(raw)
    assert restored(chunk, len(raw)) == raw


def test_a_frame_that_unpacks_to_more_is_refused_before_it_does() -> None:
    bomb = b"\4" + zstd.compress(bytes(1 << 28))
    assert len(bomb) < 1 << 16
    with pytest.raises(ContractViolation, match=r"holds 4097 bytes where 4096|not zstd"):
        restored(bomb, 4096)


def test_a_frame_that_asks_for_a_large_window_is_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=options)
    frame = compressor.compress(bytes(1 << 20)) + compressor.flush()
    with pytest.raises(ContractViolation, match="not zstd"):
        restored(b"\2" + frame, 1 << 16)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (b"", "empty"),
        (b"\0abc", "holds 3 bytes where 8"),
        (b"\3" + zstd.compress(bytes(8)), "in words of 3"),
        (b"\4" + zstd.compress(bytes(4)), "holds 4 bytes where 8"),
        (b"\4" + zstd.compress(bytes(8))[:-1], "one whole zstd frame|not zstd"),
        (b"\4" + zstd.compress(bytes(8)) + b"x", "one whole zstd frame"),
        (b"\4nonsense", "not zstd"),
    ],
)
def test_a_chunk_of_another_size_or_form_is_refused(chunk: bytes, reason: str) -> None:
    with pytest.raises(ContractViolation, match=reason):
        restored(chunk, 8)
