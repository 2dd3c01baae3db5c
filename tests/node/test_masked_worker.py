"""Masks in the worker: nothing bare in a slot, and nothing sent twice that was summed."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lensemble import blob
from lensemble.errors import WorkerFault
from lensemble.ids import Digest, SlotIndex
from lensemble.secagg.masks import MaskStream, Term
from lensemble_node import signals
from tests.node.worker_process import (
    FEDERATION,
    UPDATE_EDGE,
    WorkerProcess,
    noop,
    warm_start,
    worker,
)

KEYS = [bytes(range(first, first + 32)) for first in (1, 50, 99)]
TERMS = tuple(Term(key, negative=place == 1) for place, key in enumerate(KEYS))


def terms() -> tuple[signals.MaskTerm, ...]:
    return tuple(signals.MaskTerm(term.key.hex(), term.negative) for term in TERMS)


def mask(w: WorkerProcess, at: tuple[int, int]) -> signals.Masked:
    w.tell(signals.Mask(round=at[0], attempt=at[1], terms=terms()))
    event = w.hear_until(signals.Masked)
    assert isinstance(event, signals.Masked)
    return event


def failed(w: WorkerProcess) -> signals.Failed:
    event = w.hear()
    assert isinstance(event, signals.Failed), event
    return event


def trained(w: WorkerProcess, at: tuple[int, int] = (0, 0)) -> Digest:
    w.configure(masked=True)
    w.attach()
    digest = w.fetch(at, warm_start(w.workload))
    assert w.train(at, digest).digest is None
    return digest


def bare(w: WorkerProcess, round_index: int = 0) -> NDArray[np.uint32]:
    return np.fromfile(w.state_dir / "release" / f"round-{round_index}.u32", dtype="<u4")


def words(w: WorkerProcess, chunks: list[bytes], digest: str) -> NDArray[np.uint32]:
    reader = blob.BlobReader(
        blob.Expected("update", FEDERATION, 0, 0, w.layout, Digest(digest)),
        verify=lambda _, signature: signature == b"\xab" * 64,
    )
    raw = bytearray()
    for chunk in chunks:
        event = reader.feed(memoryview(chunk))
        if isinstance(event, blob.Data):
            raw += event.view
    assert reader.complete
    return np.frombuffer(bytes(raw), dtype="<u4")


# A slot whose size is no multiple of a word is filled with whole words only.
@pytest.mark.parametrize("capacity", [1 << 16, (1 << 13) + 3])
def test_the_blob_is_the_release_under_its_masks(tmp_path: Path, capacity: int) -> None:
    with worker(tmp_path, noop(100_000), capacity_bytes=capacity) as w:
        trained(w)
        masked = mask(w, (0, 0))
        sent = words(w, w.send((0, 0)), masked.digest).copy()
        MaskStream(TERMS).subtract(0, sent)
        assert np.array_equal(sent, bare(w))


def test_no_slot_ever_holds_bare_words(tmp_path: Path) -> None:
    with worker(tmp_path, noop(100_000)) as w:
        trained(w)
        mask(w, (0, 0))
        release = bare(w).tobytes()
        probes = [release[start : start + 16] for start in range(0, len(release) - 16, 4096)]
        w.tell(signals.Send(edge=UPDATE_EDGE, round=0, attempt=0, signature="ab" * 64))
        while not isinstance(event := w.hear(), signals.Sent):
            assert isinstance(event, signals.Filled)
            # The whole ring, also what is being filled just now.
            for index in range(2):
                slot = bytes(w.update.slot(SlotIndex(index)))
                assert not any(probe in slot for probe in probes)
            w.tell(signals.Released(edge=event.edge, slot=event.slot))


def test_without_masks_nothing_is_sent(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        trained(w)
        send = signals.Send(edge=UPDATE_EDGE, round=0, attempt=0, signature="ab" * 64)
        w.tell(send)
        assert "nothing is sent without" in failed(w).message
        # Those of another attempt do not serve.
        mask(w, (0, 1))
        w.tell(send)
        assert "nothing is sent without" in failed(w).message


@pytest.mark.parametrize(
    "ending",
    [
        signals.Abandon(round=0, attempt=0),
        signals.Bind(round=0, attempt=1, prior_digest="4" * 64),
        signals.Close(round=0, digest="3" * 64, adopt=False),
    ],
)
def test_masks_are_forgotten_with_their_attempt(tmp_path: Path, ending: signals.Command) -> None:
    with worker(tmp_path) as w:
        trained(w)
        mask(w, (0, 0))
        w.tell(ending)
        if not isinstance(ending, signals.Abandon):
            assert isinstance(w.hear(), signals.Bound | signals.Closed)
        w.tell(signals.Send(edge=UPDATE_EDGE, round=0, attempt=0, signature="ab" * 64))
        assert failed(w).code == "artifact"


def test_masks_serve_once(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        trained(w)
        mask(w, (0, 0))
        w.send((0, 0))
        w.tell(signals.Send(edge=UPDATE_EDGE, round=0, attempt=0, signature="ab" * 64))
        assert "nothing is sent without" in failed(w).message


def test_a_retry_masks_the_same_release_until_it_is_spent(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        digest = trained(w)
        mask(w, (0, 0))
        w.send((0, 0))
        first = bare(w)
        assert w.train((0, 1), digest).reused
        assert np.array_equal(bare(w), first)
        mask(w, (0, 1))
        w.send((0, 1))
        w.tell(signals.Spend(round=0, attempt=1))
        assert w.hear() == signals.Spent(round=0, attempt=1)
        w.tell(signals.Mask(round=0, attempt=1, terms=terms()))
        assert "no release of round 0 is at hand" in failed(w).message
        w.process.kill()
    # It is spent for a later process, too.
    with worker(tmp_path) as w:
        w.configure(masked=True)
        w.attach()
        w.fetch((0, 2), warm_start(w.workload))
        assert not w.train((0, 2), digest).reused
        assert not np.array_equal(bare(w), first)


def test_a_release_that_another_nodes_answer_revealed_is_not_sent_again(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        digest = trained(w)
        first = bare(w)
        # A sum of attempt 1 may be known, though this node was never asked for a share of it.
        assert not w.train((0, 2), digest, spent_before=2).reused
        again = bare(w)
        assert not np.array_equal(again, first)
        # What was trained since is not in that sum.
        assert w.train((0, 3), digest, spent_before=2).reused
        assert np.array_equal(bare(w), again)


def test_what_is_spent_still_counts_when_the_round_closes(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        trained(w)
        mask(w, (0, 0))
        w.send((0, 0))
        w.tell(signals.Spend(round=0, attempt=0))
        assert w.hear() == signals.Spent(round=0, attempt=0)
        w.tell(signals.Close(round=0, digest="3" * 64, adopt=True))
        assert w.hear() == signals.Closed(round=0, adopted=True)


def test_masking_without_a_release_fails_and_the_worker_goes_on(tmp_path: Path) -> None:
    with worker(tmp_path) as w:
        w.configure(masked=True)
        w.tell(signals.Mask(round=0, attempt=0, terms=terms()))
        event = failed(w)
        assert (event.round, event.attempt, event.fatal) == (0, 0, False)
        assert all(key.hex() not in event.message for key in KEYS)


def test_the_keys_of_masks_are_in_no_text() -> None:
    command = signals.Mask(round=0, attempt=0, terms=terms())
    line = signals.line(command)
    assert signals.parse_command(line) == command
    texts = [repr(command), str(command.terms)]
    for place in range(0, len(line), 7):
        damaged = line[:place] + b"\x00" + line[place + 1 :]
        try:
            texts.append(repr(signals.parse_command(damaged)))
        except WorkerFault as error:
            texts.append(error.message)
    for key in KEYS:
        assert not any(key.hex()[:16] in text for text in texts)
