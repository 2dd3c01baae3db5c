import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble import stage_chunk
from lensemble.errors import FrameError
from lensemble.stage_chunk import ALIGNMENT, Chunk, Kind, Sampling

U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
F32 = st.floats(width=32, allow_nan=False)
SAMPLING = st.builds(
    Sampling,
    temperature=F32,
    top_p=F32,
    top_k=U32,
    repeat_penalty=F32,
    seed=U64,
    index=st.integers(0, (1 << 32) - 2),
    recent=st.lists(U32, max_size=stage_chunk.MAX_RECENT).map(tuple),
)
CHUNK = st.builds(
    Chunk,
    kind=st.sampled_from(Kind),
    session=U16,
    rows=U16,
    start=U32,
    step=U64,
    sampling=st.none() | SAMPLING,
)


@given(CHUNK, st.binary(max_size=64))
def test_what_is_written_is_read_and_its_payload_is_aligned(chunk: Chunk, payload: bytes) -> None:
    slot = bytearray(b"\xff" * stage_chunk.capacity_bytes(8, 16))
    begin = stage_chunk.write(chunk, memoryview(slot))
    assert begin == chunk.header_bytes <= stage_chunk.MAX_HEADER_BYTES
    assert begin % ALIGNMENT == 0
    slot[begin : begin + len(payload)] = payload
    read, rest = stage_chunk.read(memoryview(slot)[: begin + len(payload)])
    assert read == chunk
    assert bytes(rest) == payload


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused_in_order(raw: bytes) -> None:
    try:
        stage_chunk.read(memoryview(raw))
    except FrameError:
        return


@pytest.mark.parametrize("extent", range(0, stage_chunk.MAX_HEADER_BYTES, 7))
def test_a_chunk_cut_inside_its_header_is_refused(extent: int) -> None:
    recent = tuple(range(stage_chunk.MAX_RECENT))
    slot = bytearray(stage_chunk.capacity_bytes(1, 2))
    stage_chunk.write(Chunk(Kind.TOKENS, 0, 1, 0, 0, Sampling(recent=recent)), memoryview(slot))
    with pytest.raises(FrameError):
        stage_chunk.read(memoryview(slot)[:extent])
