"""A few rounds of one small model, and the blobs by which a node comes to the state of each."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lensemble import blob
from lensemble.ids import Digest, FederationId
from lensemble.outer_step import OuterStep, step_terms
from lensemble.packing import pack
from lensemble.params import FlatParameters, layout_of, parameter_digest
from lensemble.secagg.plan import FieldPlan
from lensemble.wire.steps import MAX_STEPS, TakenStep
from lensemble.workload import Workload
from lensemble_node.worker.state_store import Goal

FEDERATION = FederationId("f" * 32)
LAYOUT = layout_of({"encoder.weight": (45,), "predictor.weight": (55,)})
WORKLOAD = Workload()
CHUNK = 64
NARROW = bytes([64 + 12, 0])
"""The first tensor has words of 16 bits."""


@dataclass(frozen=True)
class State:
    """What a round starts from; before the first one, momentum is nought."""

    parameters: FlatParameters
    velocity: FlatParameters
    goal: Goal


@dataclass(frozen=True)
class Round:
    step: TakenStep
    plan: FieldPlan
    total: bytes


def _state(parameters: FlatParameters, velocity: FlatParameters, *, first: bool) -> State:
    momentum = None if first else parameter_digest(LAYOUT, velocity)
    return State(parameters, velocity, Goal(parameter_digest(LAYOUT, parameters), momentum))


def _round(index: int, before: State) -> tuple[Round, State]:
    plan = FieldPlan(LAYOUT, WORKLOAD.room, NARROW if index % 2 else b"")
    drawn = np.random.default_rng(index).integers(-1000, 1000, plan.nbytes // 2)
    total = drawn.astype(np.int16).tobytes()
    parameters, velocity = before.parameters.copy(), before.velocity.copy()
    step = OuterStep(step_terms(WORKLOAD, 2))
    step.apply_planned(parameters, velocity, plan, 0, memoryview(total))
    after = _state(parameters, velocity, first=False)
    running = blob.SumDigest(plan)
    running.update(total)
    taken = TakenStep(
        start=before.goal.state,
        start_momentum=before.goal.momentum,
        end=after.goal.state,
        end_momentum=after.goal.momentum,
        total=running.hexdigest(),
        contributors=2,
        plan=plan.code,
    )
    return Round(taken, plan, total), after


def history(rounds: int = 5) -> tuple[list[State], list[Round]]:
    """States 0 to ``rounds``, and the rounds that lead from each to the next."""
    flat = np.linspace(-1, 1, LAYOUT.size).astype(np.float32)
    states, taken = [_state(flat, np.zeros_like(flat), first=True)], []
    for index in range(rounds):
        made, after = _round(index, states[-1])
        taken.append(made)
        states.append(after)
    return states, taken


STATES, ROUNDS = history()


def steps_to(which: int) -> tuple[TakenStep, ...]:
    """The last steps that lead to state ``which``."""
    return tuple(each.step for each in ROUNDS[max(0, which - MAX_STEPS) : which])


def _chunks(
    at: tuple[int, int],
    kind: blob.Kind,
    shape: FieldPlan | None,
    raw: bytes,
    place: tuple[Digest, int],
) -> Iterator[bytes]:
    digest, offset = place
    header = blob.BlobHeader(
        kind=kind,
        federation=FEDERATION,
        round=at[0],
        attempt=at[1],
        total_bytes=len(raw),
        offset=offset,
        chunk_bytes=blob.packed_chunk_bytes(CHUNK) if kind == "sum" else CHUNK,
        layout_digest=LAYOUT.digest if shape is None else shape.digest,
        digest_hint=digest,
    )
    room = memoryview(bytearray(blob.ENVELOPE_BYTES))
    yield bytes(room[: blob.header_chunk(header, room)])
    for start, length in blob.data_ranges(header):
        piece = raw[start : start + length]
        yield pack(memoryview(piece)) if kind == "sum" else piece
    yield bytes(room[: blob.trailer_chunk(digest, b"", room)])


def whole(at: tuple[int, int], which: int, held: int = 0) -> list[bytes]:
    """State ``which`` from byte ``held`` on, its momentum behind it."""
    state, size = STATES[which], LAYOUT.nbytes
    made: list[bytes] = []
    if held < size:
        raw = state.parameters.tobytes()
        made += _chunks(at, "state", None, raw, (state.goal.state, held))
    if state.goal.momentum is not None:
        raw = state.velocity.tobytes()
        made += _chunks(at, "momentum", None, raw, (state.goal.momentum, max(0, held - size)))
    return made


def sums(at: tuple[int, int], which: int, follows: int, held: int = 0) -> list[bytes]:
    """The sums of the last ``follows`` rounds before state ``which``, the first from ``held``."""
    made: list[bytes] = []
    chunk = blob.packed_chunk_bytes(CHUNK)
    for each in ROUNDS[which - follows : which]:
        place = (each.step.total, held - held % chunk)
        made += _chunks(at, "sum", each.plan, each.total, place)
        held = 0
    return made
