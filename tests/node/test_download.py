"""States coming in whole, cut short, damaged and again, against the bytes they should be."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lensemble import blob
from lensemble.errors import CheckpointIntegrityError, PeerError
from lensemble.ids import FederationId
from lensemble.params import layout_of, parameter_digest
from lensemble_node.worker.download import Inbound
from lensemble_node.worker.state_store import StateStore

FEDERATION = FederationId("f" * 32)
LAYOUT = layout_of({"encoder.weight": (100,)})
CHUNK = 64
STATES = [np.full(100, value, dtype=np.float32) for value in (1.0, 2.0)]
DIGESTS = [parameter_digest(LAYOUT, flat) for flat in STATES]


def chunks(at: tuple[int, int], which: int, offset: int) -> list[bytes]:
    header = blob.BlobHeader(
        kind="state",
        federation=FEDERATION,
        round=at[0],
        attempt=at[1],
        total_bytes=LAYOUT.nbytes,
        offset=offset,
        chunk_bytes=CHUNK,
        layout_digest=LAYOUT.digest,
        digest_hint=DIGESTS[which],
    )
    room = memoryview(bytearray(blob.ENVELOPE_BYTES))
    first = bytes(room[: blob.header_chunk(header, room)])
    raw = STATES[which].tobytes()
    data = [raw[start : start + length] for start, length in blob.data_ranges(header)]
    return [first, *data, bytes(room[: blob.trailer_chunk(DIGESTS[which], b"", room)])]


class Downloads(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.attempt = 0
        self.coming: list[bytes] = []
        self.damaged = False
        """Something on the disk may not be what was sent."""
        self.start()

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule()
    def start(self) -> None:
        """The worker begins, or is killed and begins again."""
        self.store = StateStore(self.directory, LAYOUT)
        self.inbound = Inbound(self.store, FEDERATION, LAYOUT)
        self.coming = []

    @rule(which=st.integers(0, 1))
    def bind(self, which: int) -> None:
        self.attempt += 1
        at = (0, self.attempt)
        if self.coming:
            # A coordinator replaces the edge before it sends another state.
            self.inbound.reset()
        held = self.inbound.expect(at, DIGESTS[which])
        assert held % 4 == 0
        assert 0 <= held <= LAYOUT.nbytes
        self.coming = [] if held == LAYOUT.nbytes else chunks(at, which, held)
        if held == LAYOUT.nbytes:
            assert np.array_equal(self.store.read(DIGESTS[which]), STATES[which])

    @rule(count=st.integers(1, 10))
    def receive(self, count: int) -> None:
        for _ in range(min(count, len(self.coming))):
            try:
                done = self.inbound.feed(memoryview(self.coming.pop(0)))
            except PeerError:
                # The trailer tells, and all of it is fetched again.
                assert self.damaged
                assert not self.coming
                self.inbound.reset()
                return
            if done is not None:
                assert not self.coming
                which = DIGESTS.index(done)
                assert np.array_equal(self.store.read(done), STATES[which])
            else:
                assert self.coming

    @rule()
    def lose_the_edge(self) -> None:
        self.inbound.reset()
        self.coming = []

    @rule(data=st.data())
    def receive_damaged(self, data: st.DataObject) -> None:
        if not self.coming:
            return
        chunk = bytearray(self.coming[0])
        position = data.draw(st.integers(0, len(chunk) - 1))
        chunk[position] ^= data.draw(st.integers(1, 255))
        self.coming = []
        self.damaged = True
        try:
            done = self.inbound.feed(memoryview(bytes(chunk)))
        except PeerError:
            done = None
        assert done is None
        self.inbound.reset()

    @rule(data=st.data())
    def rot(self, data: st.DataObject) -> None:
        """A bit flips on the disk while no worker runs."""
        self.damaged = True
        for path in self.directory.iterdir():
            raw = bytearray(path.read_bytes())
            if raw:
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1
                path.write_bytes(raw)
        self.start()
        # What rotted is either found out, or fetched again over what is held.
        for which, digest in enumerate(DIGESTS):
            if self.store.held_bytes(digest) == LAYOUT.nbytes:
                assert np.array_equal(self.store.read(digest), STATES[which])

    @invariant()
    def little_lies_on_the_disk(self) -> None:
        assert sum(path.stat().st_size for path in self.directory.iterdir()) <= 3 * LAYOUT.nbytes


TestDownloads = Downloads.TestCase
TestDownloads.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_state_that_rotted_under_way_is_fetched_from_its_start(tmp_path: Path) -> None:
    store = StateStore(tmp_path, LAYOUT)
    inbound = Inbound(store, FEDERATION, LAYOUT)
    inbound.expect((0, 0), DIGESTS[0])
    for chunk in chunks((0, 0), 0, 0)[:4]:
        inbound.feed(memoryview(chunk))
    inbound.reset()
    part = tmp_path / f"{DIGESTS[0]}.f32.part"
    raw = bytearray(part.read_bytes())
    raw[5] ^= 1
    part.write_bytes(raw)
    held = inbound.expect((0, 1), DIGESTS[0])
    assert held == 3 * CHUNK
    *most, last = chunks((0, 1), 0, held)
    for chunk in most:
        inbound.feed(memoryview(chunk))
    with pytest.raises(PeerError, match="digest"):
        inbound.feed(memoryview(last))
    assert inbound.expect((0, 2), DIGESTS[0]) == 0


def test_a_blob_for_a_state_completed_meanwhile_is_read_and_kept_nowhere(tmp_path: Path) -> None:
    store = StateStore(tmp_path, LAYOUT)
    inbound = Inbound(store, FEDERATION, LAYOUT)
    inbound.expect((0, 0), DIGESTS[0])
    first = chunks((0, 0), 0, 0)
    for chunk in first[:3]:
        inbound.feed(memoryview(chunk))
    # The retry binds while the first blob is still on its way, so a second one follows it.
    held = inbound.expect((0, 1), DIGESTS[0])
    assert held == 2 * CHUNK
    done = [inbound.feed(memoryview(chunk)) for chunk in first[3:]]
    assert done[-1] == DIGESTS[0]
    assert [inbound.feed(memoryview(chunk)) for chunk in chunks((0, 1), 0, held)] == [None] * 7
    assert np.array_equal(store.read(DIGESTS[0]), STATES[0])


def test_a_state_that_is_not_held_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointIntegrityError):
        StateStore(tmp_path, LAYOUT).read(DIGESTS[0])
