from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble import blob
from lensemble.blob import (
    ENVELOPE_BYTES,
    BlobHeader,
    BlobReader,
    Complete,
    Data,
    Expected,
    Header,
    SumDigest,
    UpdateDigest,
    data_ranges,
    header_chunk,
    packed_chunk_bytes,
    trailer_chunk,
    update_digest,
)
from lensemble.errors import ContractViolation, FrameError, PeerError
from lensemble.ids import Digest, FederationId
from lensemble.packing import pack
from lensemble.params import layout_of, parameter_digest
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import Workload

LAYOUT = layout_of({"encoder.weight": (5, 7), "predictor.weight": (3,)})
FLAT = np.linspace(-1, 1, LAYOUT.size).astype(np.float32)
STATE = FLAT.tobytes()
STATE_DIGEST = parameter_digest(LAYOUT, FLAT)
UPDATE = np.arange(LAYOUT.size, dtype=np.uint32).tobytes()
UPDATE_DIGEST = update_digest(LAYOUT, [memoryview(UPDATE)])
FEDERATION = FederationId("f" * 32)
SIGNATURE = b"s" * 64


def header(kind: blob.Kind = "state", /, **changes: object) -> BlobHeader:
    sound = BlobHeader(
        kind=kind,
        federation=FEDERATION,
        round=3,
        attempt=1,
        total_bytes=LAYOUT.nbytes,
        chunk_bytes=64,
        layout_digest=LAYOUT.digest,
        digest_hint=STATE_DIGEST if kind == "state" else UPDATE_DIGEST,
    )
    return msgspec.structs.replace(sound, **changes)


def expected(kind: blob.Kind = "state") -> Expected:
    return Expected(kind, FEDERATION, 3, 1, LAYOUT, header(kind).digest_hint)


def chunks(head: BlobHeader, payload: bytes, signature: bytes = b"") -> list[bytes]:
    slot = memoryview(bytearray(ENVELOPE_BYTES))
    made = [bytes(slot[: header_chunk(head, slot)])]
    made += [payload[at : at + size] for at, size in data_ranges(head)]
    return [*made, bytes(slot[: trailer_chunk(head.digest_hint, signature, slot)])]


def signed_by_s(digest: Digest, signature: bytes) -> bool:
    return signature == SIGNATURE and digest == UPDATE_DIGEST


def read(reader: BlobReader, made: Iterable[bytes]) -> list[blob.Event]:
    events = [reader.feed(memoryview(chunk)) for chunk in made]
    reader.close()
    return events


@pytest.mark.parametrize("chunk_bytes", [1, 4, 64, 1000])
def test_a_state_arrives(chunk_bytes: int) -> None:
    head = header(chunk_bytes=chunk_bytes)
    reader = BlobReader(expected())
    first, *data, last = read(reader, chunks(head, STATE))
    assert first == Header(head)
    assert last == Complete(STATE_DIGEST, b"")
    arrived = b""
    for event in data:
        assert isinstance(event, Data)
        assert event.offset == len(arrived)
        arrived += event.view
    assert arrived == STATE
    assert reader.complete


def test_an_update_arrives_with_its_signature() -> None:
    reader = BlobReader(expected("update"), verify=signed_by_s)
    events = read(reader, chunks(header("update"), UPDATE, SIGNATURE))
    assert events[-1] == Complete(UPDATE_DIGEST, SIGNATURE)


@pytest.mark.parametrize("held", [0, 4, 76, LAYOUT.nbytes])
def test_a_transfer_resumes_where_the_prefix_ends(held: int) -> None:
    prefix = [memoryview(STATE[:held])[at : at + 8] for at in range(0, held, 8)]
    reader = BlobReader(expected(), prefix=prefix)
    events = read(reader, chunks(header(offset=held), STATE))
    assert events[-1] == Complete(STATE_DIGEST, b"")
    assert sum(len(e.view) for e in events if isinstance(e, Data)) == LAYOUT.nbytes - held


def test_a_sender_may_start_anew_whatever_is_held() -> None:
    reader = BlobReader(expected(), prefix=[memoryview(bytes(8))])
    assert read(reader, chunks(header(), STATE))[-1] == Complete(STATE_DIGEST, b"")


def test_a_wrong_prefix_shows_in_the_digest() -> None:
    reader = BlobReader(expected(), prefix=[memoryview(bytes(8))])
    with pytest.raises(ContractViolation, match="digest"):
        read(reader, chunks(header(offset=8), STATE))


def test_a_resumption_elsewhere_is_refused() -> None:
    reader = BlobReader(expected(), prefix=[memoryview(STATE[:8])])
    with pytest.raises(ContractViolation, match="resumes at byte 12; 8 are held"):
        read(reader, chunks(header(offset=12), STATE))
    with pytest.raises(ContractViolation):
        BlobReader(expected(), prefix=[memoryview(STATE + b"1234")])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "update"),
        ("federation", "e" * 32),
        ("round", 2),
        ("attempt", 0),
        ("total_bytes", LAYOUT.nbytes + 4),
        ("layout_digest", "0" * 64),
        ("digest_hint", "0" * 64),
        ("schema", 2),
        ("chunk_bytes", blob.MAX_CHUNK_BYTES),
    ],
)
def test_another_blob_is_refused_by_the_term_that_differs(field: str, value: object) -> None:
    terms = msgspec.structs.replace(expected(), max_chunk_bytes=1 << 20)
    word = "chunks of" if field == "chunk_bytes" else field
    with pytest.raises(ContractViolation, match=word):
        read(BlobReader(terms), chunks(header(**{field: value}), STATE))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("total_bytes", blob.MAX_BLOB_BYTES + 4),
        ("chunk_bytes", 0),
        ("digest_hint", "zz"),
        ("federation", "F" * 32),
    ],
)
def test_a_header_out_of_its_limits_is_not_a_header(field: str, value: object) -> None:
    slot = memoryview(bytearray(ENVELOPE_BYTES))
    extent = header_chunk(header(**{field: value}), slot)
    with pytest.raises(FrameError, match="LNSBLOBH"):
        BlobReader(expected()).feed(slot[:extent])


MADE = chunks(header(), STATE)
OUT_OF_PLACE = {
    "no header": MADE[1:],
    "header twice": [MADE[0], *MADE],
    "short chunk": [MADE[0], MADE[1][:-1], *MADE[2:]],
    "long chunk": [MADE[0], MADE[1] + b"x", *MADE[2:]],
    "a chunk missing": [*MADE[:-2], MADE[-1]],
    "data for trailer": [*MADE[:-1], MADE[1]],
    "trailer twice": [*MADE, MADE[-1]],
    "data after trailer": [*MADE, MADE[1]],
    "no trailer": MADE[:-1],
    "an empty chunk": [MADE[0], b"", *MADE[1:]],
    "nothing": [],
    "an overlong header": [MADE[0] + bytes(ENVELOPE_BYTES)],
    "a header and more": [MADE[0] + b"\0", *MADE[1:]],
}


@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_chunks_out_of_place_are_refused(name: str) -> None:
    with pytest.raises(FrameError):
        read(BlobReader(expected()), OUT_OF_PLACE[name])


def test_after_an_error_nothing_is_taken() -> None:
    made = chunks(header(), STATE)
    reader = BlobReader(expected())
    reader.feed(memoryview(made[0]))
    with pytest.raises(FrameError):
        reader.feed(memoryview(b"short"))
    with pytest.raises(FrameError, match="refused"):
        reader.feed(memoryview(made[1]))
    assert not reader.complete


@pytest.mark.parametrize("signature", [b"", b"s" * 63, b"t" * 64])
def test_an_update_without_its_senders_signature_is_refused(signature: bytes) -> None:
    reader = BlobReader(expected("update"), verify=signed_by_s)
    with pytest.raises(ContractViolation, match="signature"):
        read(reader, chunks(header("update"), UPDATE, signature))


def test_signatures_belong_to_updates_only() -> None:
    with pytest.raises(ContractViolation, match="signature"):
        read(BlobReader(expected()), chunks(header(), STATE, SIGNATURE))
    with pytest.raises(ContractViolation, match="signature"):
        BlobReader(expected("update"))


def test_one_flipped_bit_anywhere_is_refused() -> None:
    made = chunks(header("update"), UPDATE, SIGNATURE)
    for index, chunk in enumerate(made):
        for at in range(len(chunk)):
            bad = bytearray(chunk)
            bad[at] ^= 4
            reader = BlobReader(expected("update"), verify=signed_by_s)
            with pytest.raises(PeerError):
                read(reader, [*made[:index], bytes(bad), *made[index + 1 :]])


def test_a_slot_too_small_for_the_envelope_is_said_so() -> None:
    with pytest.raises(ContractViolation, match="slot of 16 bytes"):
        header_chunk(header(), memoryview(bytearray(16)))
    with pytest.raises(ContractViolation, match="slot of 16 bytes"):
        trailer_chunk(STATE_DIGEST, b"", memoryview(bytearray(16)))
    with pytest.raises(ContractViolation):
        header_chunk(header(offset=LAYOUT.nbytes + 4), memoryview(bytearray(ENVELOPE_BYTES)))


def test_digests_of_states_and_updates_differ_and_count_their_bytes() -> None:
    zeros = np.zeros(LAYOUT.size, dtype=np.float32)
    assert parameter_digest(LAYOUT, zeros) != update_digest(LAYOUT, [zeros.data.cast("B")])
    running = UpdateDigest(LAYOUT)
    running.update(bytes(4))
    with pytest.raises(ContractViolation):
        running.hexdigest()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from(chunks(header(), STATE)),
            st.binary(max_size=40).map(lambda b: b"LNSBLOBH" + b),
            st.binary(max_size=40).map(lambda b: b"LNSBLOBT" + b),
        ),
        max_size=6,
    )
)
def test_any_chunks_are_read_or_refused_as_a_peers_fault(sequence: list[bytes]) -> None:
    reader = BlobReader(expected())
    try:
        read(reader, sequence)
    except PeerError:
        assert not reader.complete
    else:
        assert sequence == chunks(header(), STATE)


# ---- revealed sums ----

PLAN = FieldPlan(LAYOUT, Workload().field, bytes([64 + 10, 0]))
SUM = np.arange(PLAN.nbytes // 2, dtype=np.int16).tobytes()


def sum_digest(raw: bytes = SUM) -> Digest:
    running = SumDigest(PLAN)
    running.update(raw)
    return running.hexdigest()


def sum_reader(held: int = 0, max_chunk_bytes: int = 64) -> BlobReader:
    due = Expected("sum", FEDERATION, 3, 1, PLAN, sum_digest(), max_chunk_bytes)
    return BlobReader(due, prefix=[memoryview(SUM[:held])] if held else ())


def sum_chunks(**changes: object) -> list[bytes]:
    size = packed_chunk_bytes(64)
    terms = {"total_bytes": len(SUM), "chunk_bytes": size, "digest_hint": sum_digest()}
    head = header("sum", **{**terms, "layout_digest": PLAN.digest, **changes})
    first, *data, last = chunks(head, SUM)
    return [first, *(pack(memoryview(each)) for each in data), last]


@pytest.mark.parametrize("held", [0, 60, len(SUM)])
def test_a_sum_arrives_unpacked(held: int) -> None:
    reader = sum_reader(held)
    arrived = SUM[:held]
    for chunk in sum_chunks(offset=held):
        assert len(chunk) <= max(64, ENVELOPE_BYTES if b"LNSBLOB" in chunk else 0)
        event = reader.feed(memoryview(chunk))
        if isinstance(event, Data):
            assert event.offset == len(arrived)
            arrived += bytes(event.view)
    assert arrived == SUM
    assert event == Complete(sum_digest(), b"")


def test_a_sum_of_another_size_or_digest_is_refused() -> None:
    with pytest.raises(ContractViolation, match=r"total_bytes is 140; expected \d+"):
        read(sum_reader(), sum_chunks(total_bytes=140))
    damaged = sum_chunks()
    damaged[1] = pack(memoryview(bytes(60)))
    with pytest.raises(ContractViolation, match="a blob with the digest"):
        read(sum_reader(), damaged)


def test_a_chunk_of_a_sum_that_is_no_packed_one_is_refused() -> None:
    damaged = sum_chunks()
    damaged[1] = b"\x07" + damaged[1][1:]
    with pytest.raises(ContractViolation, match="packed in words of 7"):
        read(sum_reader(), damaged)
    damaged[1] = pack(memoryview(bytes(56)))
    with pytest.raises(ContractViolation, match="56 bytes where 60 are due"):
        read(sum_reader(), damaged)
