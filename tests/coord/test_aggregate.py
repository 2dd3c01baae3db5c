import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lensemble.errors import (
    AggregationError,
    ContractViolation,
    NonDeterministicAggregation,
    StorageError,
)
from lensemble.files import PIECE_BYTES
from lensemble.ids import NodeId
from lensemble.params import layout_of
from lensemble.secagg.field import limit
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import FieldTerms
from lensemble_coord.training.aggregate import (
    check_update,
    derive_sum,
    fold,
    sum_digest,
    sum_parts,
    sum_pieces,
    summed_pieces,
)
from lensemble_coord.training.spool import Spool, SpoolFile

LAYOUT = layout_of({"encoder.weight": (300, 1000)})
FIELD = FieldTerms(k=24, n_max=8)
PLAN = FieldPlan(LAYOUT, FIELD)


def node(index: int) -> NodeId:
    return NodeId(f"{index:064x}")


def spooled(spool: Spool, index: int, words: NDArray[np.uint32]) -> SpoolFile:
    one = spool.open(node(index), words.nbytes)
    one.pwrite(0, words.data.cast("B"))
    return one


def small_updates(count: int) -> list[NDArray[np.uint32]]:
    generator = np.random.default_rng(count)
    bound = limit(FIELD)
    return [
        generator.integers(-bound, bound, LAYOUT.size, dtype=np.int32).view(np.uint32)
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_sum_is_the_integer_sum_in_any_order(tmp_path: Path, count: int) -> None:
    updates = small_updates(count)
    due = np.sum([u.view(np.int32).astype(np.int64) for u in updates], axis=0)
    spool = Spool(tmp_path / "spool", 2 * LAYOUT.nbytes, LAYOUT.nbytes)
    spools = [spooled(spool, index, words) for index, words in enumerate(updates)]
    facts = derive_sum(spools, PLAN, FIELD, tmp_path / "sums")
    assert facts.count == count
    assert facts.largest == int(abs(due).max())
    assert facts.path.name == facts.field_sum_digest + ".u32"
    stored = np.frombuffer(b"".join(map(bytes, sum_pieces(facts.path, PLAN))), dtype=np.int32)
    assert np.array_equal(stored, due)
    for order in itertools.islice(itertools.permutations(spools), 6):
        assert sum_digest(order, PLAN) == facts.field_sum_digest
    spool.close()
    assert [p.name for p in (tmp_path / "sums").iterdir()] == [facts.path.name]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 40))
def test_pieces_of_any_size_sum_modulo_two_to_the_32(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, count: int, size: int
) -> None:
    words = st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size)
    updates = [np.array(data.draw(words), dtype=np.uint32) for _ in range(count)]
    spool = Spool(tmp_path_factory.mktemp("spool"), 1 << 20, 4 * size)
    spools = [spooled(spool, index, u) for index, u in enumerate(updates)]
    piece_bytes = 4 * data.draw(st.integers(1, 50))
    plan = FieldPlan(layout_of({"encoder.weight": (size,)}), FIELD)
    found = np.concatenate([p.copy() for p in summed_pieces(spools, plan, piece_bytes)])
    due = [sum(int(u[at]) for u in updates) % 2**32 for at in range(size)]
    assert found.tolist() == due
    spool.close()


class Unsteady:
    """An addend whose memory fails at the reads whose numbers are in ``wrong``, from 0."""

    def __init__(self, sound: SpoolFile, wrong: set[int]) -> None:
        self.sound, self.wrong, self.reads = sound, wrong, itertools.count()
        self.participant, self.total_bytes = sound.participant, sound.total_bytes
        self.complete = True

    updates = 1

    def read_into(self, offset: int, into: memoryview) -> None:
        self.sound.read_into(offset, into)
        into[0] ^= next(self.reads) in self.wrong


def test_one_disagreement_is_summed_again_and_told(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 1 << 30, LAYOUT.nbytes)
    sound = spooled(spool, 0, small_updates(1)[0])
    told: list[int] = []
    facts = derive_sum([Unsteady(sound, {3})], PLAN, FIELD, tmp_path, told.append)
    assert facts.field_sum_digest == sum_digest([sound], PLAN)
    assert told == [PIECE_BYTES]


def test_two_disagreements_stop(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 1 << 30, LAYOUT.nbytes)
    sound = spooled(spool, 0, small_updates(1)[0])
    pieces_of_a_pass = -(-LAYOUT.nbytes // PIECE_BYTES)
    unsteady = Unsteady(sound, {pieces_of_a_pass, 2 * pieces_of_a_pass})
    with pytest.raises(NonDeterministicAggregation, match="differ from byte"):
        derive_sum([unsteady], PLAN, FIELD, tmp_path / "sums")
    assert list((tmp_path / "sums").iterdir()) == []


def test_uniform_words_are_implausible_and_leave_nothing(tmp_path: Path) -> None:
    words = np.random.default_rng(1).integers(0, 2**32, LAYOUT.size, dtype=np.uint32)
    spool = Spool(tmp_path / "spool", 1 << 30, LAYOUT.nbytes)
    with pytest.raises(AggregationError, match="field units"):
        derive_sum([spooled(spool, 0, words)], PLAN, FIELD, tmp_path / "sums")
    assert list((tmp_path / "sums").iterdir()) == []


def test_a_coordinate_over_the_bound_is_named(tmp_path: Path) -> None:
    words = np.zeros(LAYOUT.size, dtype=np.int32)
    spool = Spool(tmp_path / "spool", 1 << 30, LAYOUT.nbytes)
    for at, value in ((0, limit(FIELD)), (299_999, -limit(FIELD))):
        words[at] = value
    check_update(spooled(spool, 0, words.view(np.uint32)), PLAN, FIELD)
    words[270_001] = -limit(FIELD) - 1
    with pytest.raises(ContractViolation, match=r"coordinate 270001 .* is -16"):
        check_update(spooled(spool, 1, words.view(np.uint32)), PLAN, FIELD)


def test_what_cannot_be_summed_is_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 1 << 30, LAYOUT.nbytes)
    half = spool.open(node(0), LAYOUT.nbytes)
    half.pwrite(0, bytes(4))
    with pytest.raises(AggregationError, match="not whole"):
        fold([half], PLAN, tmp_path / "sum")
    with pytest.raises(AggregationError, match="no update"):
        fold([], PLAN, tmp_path / "sum")
    with pytest.raises(AggregationError, match="room for 8"):
        derive_sum([half] * 9, PLAN, FIELD, tmp_path)
    with pytest.raises(StorageError, match="absent"):
        fold([half], PLAN, tmp_path / "absent" / "sum")
    (tmp_path / "short").write_bytes(bytes(8))
    with pytest.raises(AggregationError, match="8 bytes instead of"):
        list(sum_pieces(tmp_path / "short", PLAN))


# ---- words of 16 bits ----

MIXED = layout_of({"encoder.a": (301,), "encoder.b": (7,), "predictor.c": (1000,)})
NARROW = FieldPlan(MIXED, FIELD, bytes([64 + 12, 0, 64 + 9]))


def narrow(value: int, tail: list[int]) -> np.ndarray:
    """An update of ``NARROW`` whose words are all ``value``."""
    words = np.zeros(NARROW.nbytes // 4, dtype=np.uint32)
    for segment in NARROW.segments:
        kind = "<i4" if segment.bits == 32 else "<i2"
        start, count = segment.start, segment.last - segment.first
        words.view(np.uint8)[start : segment.byte_of(segment.last)] = np.full(
            count, value, dtype=kind
        ).view(np.uint8)
    words[NARROW.tail // 4 :] = tail
    return words


def test_narrow_updates_sum_exactly_and_say_of_how_many(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 1 << 20, MIXED.nbytes)
    most = NARROW.limit
    updates = [narrow(most, [1, 301, 0]), narrow(-most, [1, 301, 0]), narrow(5, [1, 0, 9])]
    spools = [spooled(spool, index, words) for index, words in enumerate(updates)]
    facts = derive_sum(spools, NARROW, FIELD, tmp_path / "sums")
    assert (facts.largest, facts.largest_narrow, facts.tail) == (5, 5, (3, 602, 9))
    parts = list(sum_parts(facts.path, NARROW, 100))
    assert [part.first for part in parts] == list(range(0, MIXED.size, 100))
    raw = b"".join(bytes(part.raw) for part in sum_parts(facts.path, NARROW, 100))
    assert raw == facts.path.read_bytes() == b"".join(map(bytes, sum_pieces(facts.path, NARROW)))
    full = [spooled(spool, 3 + index, narrow(most, [1, 0, 0])) for index in range(FIELD.n_max)]
    assert derive_sum(full, NARROW, FIELD, tmp_path / "sums").largest_narrow == 8 * most


@pytest.mark.parametrize(
    "tail", [[2, 0, 0], [0, 0, 0], [1, 302, 0], [1, 0, 1001], [0xFFFFFFFF, 0, 0]]
)
def test_a_narrow_sum_whose_tail_cannot_be_is_refused(tmp_path: Path, tail: list[int]) -> None:
    spool = Spool(tmp_path / "spool", 1 << 20, MIXED.nbytes)
    with pytest.raises(AggregationError, match="the tail of the sum"):
        derive_sum([spooled(spool, 0, narrow(1, tail))], NARROW, FIELD, tmp_path / "sums")


def test_a_mask_left_in_a_sum_of_as_many_as_there_can_be_shows(tmp_path: Path) -> None:
    """With ``n_max`` updates any word of 16 bits is within reach; those of the tail are not."""
    field = FieldTerms(k=24, n_max=1)
    plan = FieldPlan(MIXED, field, NARROW.code)
    for seed in range(20):
        words = np.random.default_rng(seed).integers(0, 1 << 32, plan.nbytes // 4, dtype=np.uint32)
        spool = Spool(tmp_path / "spool", 1 << 20, MIXED.nbytes)
        with pytest.raises(AggregationError):
            derive_sum([spooled(spool, 0, words)], plan, field, tmp_path / "sums")


def test_a_plain_narrow_update_over_the_limit_is_named(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 1 << 20, MIXED.nbytes)
    words = narrow(0, [1, 0, 0])
    check_update(spooled(spool, 0, words), NARROW, FIELD)
    words.view(np.int16)[NARROW.byte_of(700) // 2] = -NARROW.limit - 1
    with pytest.raises(ContractViolation, match=r"coordinate 700 .* is -8"):
        check_update(spooled(spool, 1, words), NARROW, FIELD)
