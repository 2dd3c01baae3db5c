"""What a stage's worker says and does, line by line, from start to end."""

import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lensemble import stage_chunk
from lensemble.ids import SlotIndex
from lensemble.stage_chunk import Chunk, Kind, Sampling
from lensemble_node import signals, stage_signals
from lensemble_node.engine_environment import available
from tests.node.stage_workers import (
    INBOUND,
    OUTBOUND,
    WEIGHTS,
    Chain,
    Cut,
    Model,
    StageProcess,
    tokens_chunk,
)
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

CUT = Cut(ctx=24, sessions=2, rows=4)
GREEDY = Sampling()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels, weights and a model of two layers, for every worker here."""
    return tmp_path_factory.mktemp("stage")


@pytest.fixture(scope="module")
def model(place: Path) -> Model:
    return Model.open(write_tiny(place / "tiny.gguf", layers=2, tied=False))


@pytest.fixture(scope="module")
def first(model: Model, place: Path) -> Iterator[StageProcess]:
    """The first layer, ready."""
    stage = StageProcess(model, (0, 1), place, CUT)
    stage.begin()
    stage.ready()
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def last(model: Model, place: Path) -> Iterator[StageProcess]:
    """The last layer and the head, ready; its weights came over an edge."""
    stage = StageProcess(model, (1, 2), place, CUT)
    weights = stage.lease(WEIGHTS)
    command = stage.attachment(WEIGHTS, "rx", weights)
    stage.tell(stage.host_command(source="edge", weights=WEIGHTS, place=""), command)
    stage.tell(*stage.attachments())
    wants = stage.hear_until(stage_signals.Wants)
    raw = model.path.read_bytes()
    for index, (offset, length) in enumerate(pieces(wants.ranges, stage.capacity - 8)):
        slot = index % stage.slots
        chunk = offset.to_bytes(8, "little") + raw[offset : offset + length]
        weights.slot(SlotIndex(slot))[: len(chunk)] = chunk
        stage.tell(signals.Ready(edge=WEIGHTS, slot=slot, extent=len(chunk)))
        assert stage.hear_until(signals.Consumed) == signals.Consumed(edge=WEIGHTS, slot=slot)
    stage.ready()
    yield stage
    stage.close()


def pieces(ranges: tuple[tuple[int, int], ...], most: int) -> Iterator[tuple[int, int]]:
    for offset, length in ranges:
        for start in range(0, length, most):
            yield offset + start, min(most, length - start)


def activations(
    rows: int = 1, start: int = 0, how: Sampling | None = None, **changes: object
) -> bytes:
    chunk = Chunk(Kind.ACTIVATIONS, 0, rows, start, 9, how)
    chunk = msgspec.structs.replace(chunk, **changes)
    slot = bytearray(chunk.header_bytes)
    stage_chunk.write(chunk, memoryview(slot))
    values = np.linspace(-1, 1, rows * 64, dtype=np.float32)
    return bytes(slot) + values.tobytes()


def tokens(ids: list[int], start: int = 0, how: Sampling | None = None, **changes: object) -> bytes:
    chunk = msgspec.structs.replace(Chunk(Kind.TOKENS, 0, len(ids), start, 7, how), **changes)
    return tokens_chunk(chunk, ids)


def test_it_says_how_far_it_is_and_what_it_took(first: StageProcess, model: Model) -> None:
    hosted = first.hosted
    assert hosted is not None
    held = sum(4 * int(np.prod(tensor.shape)) for tensor in first.host_command().tensors)
    assert hosted.weights_bytes == held
    assert hosted.fetched_bytes == 0
    assert hosted.weights_bytes < hosted.resident_bytes < 1 << 30
    ends = {event.phase: (event.done, event.total) for event in first.phases}
    stored = sum(tensor.nbytes for tensor in first.host_command().tensors)
    assert ends["verifying"] == ends["loading"] == (stored, stored)
    assert ends["compiling"][0] == ends["compiling"][1] > 0


def test_weights_come_over_an_edge(last: StageProcess) -> None:
    assert last.hosted is not None
    stored = sum(tensor.nbytes for tensor in last.host_command().tensors)
    assert stored <= last.hosted.fetched_bytes <= 1.02 * stored


def test_a_chunk_goes_on_under_its_own_header(first: StageProcess) -> None:
    how = Sampling(0.5, 0.9, 10, 1.5, 77, 3, (1, 2, 3))
    out = first.give(tokens([5, 6, 7], 0, how))
    assert out is not None
    chunk, payload = stage_chunk.read(memoryview(out))
    assert chunk.kind == Kind.ACTIVATIONS
    assert (chunk.session, chunk.rows, chunk.start, chunk.step) == (0, 3, 0, 7)
    sent, _ = stage_chunk.read(memoryview(tokens([5, 6, 7], 0, how)))
    assert chunk.sampling == sent.sampling
    values = np.frombuffer(payload, np.float32).reshape(3, 64)
    assert np.isfinite(values).all()
    assert values.std() > 0.01
    computed = first.computed[-1]
    assert (computed.step, computed.rows) == (7, 3)
    assert 0 < computed.began_ns < computed.ended_ns


def test_both_shapes_compute_the_same(first: StageProcess) -> None:
    """Rows one by one, and all at once with padding behind them."""
    singly = [rows_of(first.give(tokens([token], start))) for start, token in enumerate([5, 6, 7])]
    together = rows_of(first.give(tokens([5, 6, 7])))
    assert np.allclose(np.concatenate(singly), together, atol=1e-5)


def test_what_lay_in_a_slot_before_does_not_matter(first: StageProcess, last: StageProcess) -> None:
    """Three rows are computed as four: what is behind them must not be what was there."""
    for stage, raw in ((first, tokens([5, 6, 7])), (last, activations(3, 0, GREEDY))):
        clean = stage.give(raw)
        assert clean is not None
        for region in (stage.inbound, stage.outbound):
            for slot in range(stage.slots):
                # Not numbers, or a token that there is not.
                region.slot(SlotIndex(slot))[:] = b"\xff" * stage.capacity
        assert stage.give(raw) == clean


def rows_of(raw: bytes | None) -> np.ndarray:
    assert raw is not None
    chunk, payload = stage_chunk.read(memoryview(raw))
    return np.frombuffer(payload, np.float32).reshape(chunk.rows, 64)


def test_a_token_comes_only_where_one_is_asked_for(last: StageProcess) -> None:
    assert last.give(activations(4)) is None
    out = last.give(activations(1, 4, GREEDY, session=0))
    assert out is not None
    chunk, payload = stage_chunk.read(memoryview(out))
    assert (chunk.kind, chunk.rows, chunk.start, chunk.step) == (Kind.RESULT, 1, 5, 9)
    token, logprob = stage_chunk.RESULT.unpack(payload)
    assert 0 <= token < last.model.facts.vocabulary
    assert logprob <= 0


def test_two_stages_answer(first: StageProcess, last: StageProcess) -> None:
    chain = Chain([first, last], CUT)
    assert chain.generate([3, 1, 4, 1, 5], 6) == chain.generate([3, 1, 4, 1, 5], 6, session=1)


NOT_OF_FIRST = {
    "kind": activations(),
    "no rows": tokens([]),
    "rows": tokens([1] * 5),
    "session": tokens([1], session=2),
    "ctx": tokens([1] * 4, 21),
    "gap": tokens([1], 23, session=1),
    "short": tokens([1, 2])[:-1],
    "long": tokens([1, 2]) + b"\0\0\0\0",
    "rows lie": tokens([1, 2], rows=3),
    "token": tokens([1, 1 << 31]),
    "header": b"\x01\x01",
    "version": b"\x07" + tokens([1])[1:],
}
NOT_OF_LAST = {
    "kind": tokens([1]),
    "sampling": activations(1, 0, Sampling(temperature=-1.0)),
    "top_p": activations(1, 0, Sampling(top_p=float("nan"))),
    "not finite": activations(1, 0, GREEDY)[:-4] + struct.pack("<f", float("nan")),
}


@pytest.mark.parametrize("which", NOT_OF_FIRST)
def test_a_chunk_that_cannot_be_computed_is_refused(first: StageProcess, which: str) -> None:
    refuses(first, NOT_OF_FIRST[which], tokens([1, 2]))


@pytest.mark.parametrize("which", NOT_OF_LAST)
def test_the_last_stage_refuses_in_order_too(last: StageProcess, which: str) -> None:
    refuses(last, NOT_OF_LAST[which], activations(1, 0, GREEDY))


def refuses(stage: StageProcess, raw: bytes, good: bytes) -> None:
    """``raw`` is refused with a reason, and then ``good`` is computed as before."""
    before = stage.give(good)
    known = len(stage.refused)
    assert stage.give(raw) is None
    assert len(stage.refused) == known + 1
    assert stage.refused[-1].code in {"chunk_refused", "frame"}
    assert stage.refused[-1].message
    assert stage.give(good) == before


def test_a_chunk_waits_for_a_slot_to_leave_in(first: StageProcess) -> None:
    """With both outbound slots filled the third chunk stays where it is."""
    filled: list[signals.Filled] = []
    for slot, start in ((0, 0), (1, 1), (0, 2)):
        raw = tokens([9], start)
        first.inbound.slot(SlotIndex(slot))[: len(raw)] = raw
        first.tell(signals.Ready(edge=INBOUND, slot=slot, extent=len(raw)))
        if len(filled) < 2:
            filled.append(first.hear_until(signals.Filled))
            first.hear_until(signals.Consumed)
    first.tell(signals.Released(edge=OUTBOUND, slot=filled[0].slot))
    third = first.hear_until(signals.Filled)
    assert third.slot == filled[0].slot
    assert first.hear_until(signals.Consumed).slot == 0
    for event in (filled[1], third):
        first.tell(signals.Released(edge=OUTBOUND, slot=event.slot))


def test_an_edge_is_replaced(first: StageProcess) -> None:
    """Detached in the middle; attached again at another place of the arena it goes on."""
    before = rows_of(first.give(tokens([5, 6])))
    first.tell(signals.Detach(edge=OUTBOUND))
    assert first.hear_until(signals.Detached).edge == OUTBOUND
    assert first.give(tokens([5, 6])) is None
    first.outbound = first.lease(OUTBOUND)
    first.tell(first.attachment(OUTBOUND, "tx", first.outbound))
    assert first.hear_until(signals.Attached).edge == OUTBOUND
    assert np.array_equal(rows_of(first.give(tokens([5, 6]))), before)


# ---- its end ----


def test_stop_is_obeyed_while_it_gets_ready(model: Model, place: Path) -> None:
    stage = StageProcess(model, (0, 2), place, CUT)
    try:
        stage.begin()
        while stage.hear_until(stage_signals.Advanced).phase != "compiling":
            pass
        stage.tell(signals.Stop())
        assert stage.end()[0] == 0
        assert stage.hosted is None
    finally:
        stage.close()


def test_stop_is_obeyed_before_anything_else_was_said(model: Model, place: Path) -> None:
    stage = StageProcess(model, (0, 2), place, CUT)
    try:
        assert stage.stop() == (0, "")
    finally:
        stage.close()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"place": "/nowhere/model.gguf"}, "weights_unreachable"),
        ({"model": "{}"}, "contract_violation"),
        ({"tensors": ()}, "unsupported_model"),
    ],
)
def test_what_cannot_be_hosted_is_said_by_name(
    model: Model, place: Path, changes: dict[str, object], code: str
) -> None:
    stage = StageProcess(model, (0, 2), place, CUT)
    try:
        stage.begin(**changes)
        events = [stage.hear() for _ in range(1)]
        while not isinstance(events[-1], stage_signals.StageFailed):
            events.append(stage.hear())
        assert events[-1].code == code
        assert events[-1].message
        status, said = stage.end()
        assert status == 1
        assert said.startswith("fatal: ")
    finally:
        stage.close()


def test_memory_that_is_refused_ends_it_by_name(model: Model, place: Path) -> None:
    stage = StageProcess(model, (0, 2), place, Cut(1 << 20, 64, 4), memory_bytes=2 << 30)
    try:
        stage.begin()
        events: list[stage_signals.Event] = [stage.hear()]
        while not isinstance(events[-1], stage_signals.StageFailed):
            events.append(stage.hear())
        assert events[-1].code == "out_of_memory"
        assert stage.end()[0] == signals.EXIT_NO_MEMORY
    finally:
        stage.close()


def test_it_dies_with_the_daemon(model: Model, place: Path) -> None:
    """SIGKILL of the parent is the end of the worker, whatever it does."""
    program = (
        "import sys, time, os; from pathlib import Path; from tests.node.stage_workers import *\n"
        f"stage = StageProcess(Model.open(Path({str(model.path)!r})), (0, 2), "
        f"Path({str(place)!r}), Cut(24, 2, 4))\n"
        "stage.begin(); stage.hear_until(stage_signals.Advanced)\n"
        "print(stage.process.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        assert parent.wait() == -signal.SIGKILL
    assert select.select([worker], [], [], 10)[0], "the worker outlives its daemon"
    os.close(worker)
