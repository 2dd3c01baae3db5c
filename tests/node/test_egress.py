from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import ResidencyViolation
from lensemble.wire import circle, codec, letters, membership, messages, stages
from lensemble_node import egress
from tests.node.node_play import FEDERATION, ROOT, round_open

KINDS = (
    messages.Join,
    messages.Leave,
    messages.Provisioned,
    messages.TornDown,
    messages.EdgeLost,
    messages.Commitment,
    messages.Shares,
    messages.Progress,
    messages.Update,
    messages.UnmaskAnswer,
    messages.Fault,
    *get_args(stages.StageAnswer),
    *get_args(stages.BurstAnswer),
    circle.MemberNote,
)
GOSSIP = membership.Probe(boot="0" * 16, incarnation=1, updates=(), sequence=7)


def progress(**changes: object) -> messages.Progress:
    fields: dict[str, object] = {
        "federation": FEDERATION,
        "epoch": 1,
        "round": 0,
        "attempt": 0,
        "phase": "training",
        "done": 1,
        "total": 2,
    }
    return messages.Progress(**{**fields, **changes})  # type: ignore[arg-type]


hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
counts = st.integers(0, 1 << 62)
key = st.binary(min_size=32, max_size=32)
sentences = st.text(max_size=500)
FIELDS: dict[str, st.SearchStrategy[object]] = {
    "federation": st.text("0123456789abcdef", min_size=32, max_size=32),
    "boot": st.text("0123456789abcdef", min_size=16, max_size=16),
    "speaks": st.tuples(st.integers(0, 9), st.integers(0, 9)),
    "invite": st.binary(max_size=64),
    "signature": st.binary(min_size=64, max_size=64),
    "keys": st.none()
    | st.builds(messages.MaskKeys, mask_key=key, share_key=key, self_commitment=key),
    "commitments": st.binary(max_size=1 << 13),
    "shares": st.binary(max_size=1 << 13),
    "sealed": st.lists(st.binary(min_size=92, max_size=92), max_size=128).map(tuple),
    "edges": st.lists(counts, max_size=256).map(tuple),
    "phase": st.just("fetching"),
    "reused": st.booleans(),
    "l2_norm": st.none() | st.floats(allow_nan=False),
    "loss": st.none() | st.floats(allow_nan=False),
    "epsilon": st.none() | st.floats(0.0, allow_nan=False),
    "digest": hashes,
    "dataset_root": hashes,
    "run": st.text("0123456789abcdef", min_size=16, max_size=16),
    "stage": st.integers(0, 63),
    "follows": st.integers(0, 3),
    "weights": st.sampled_from(["float32", "quantised"]),
    "addresses": st.lists(st.text(max_size=64), max_size=8).map(tuple),
    "landed_bytes": st.integers(0, stages.MAX_BURST_BYTES),
    "linked": st.lists(hashes, max_size=64).map(tuple),
    "rtts_us": st.lists(counts, max_size=64).map(tuple),
    "seconds": st.floats(0.0, allow_nan=False),
    "ranges": st.lists(st.tuples(counts, counts), max_size=400).map(tuple),
    "recent": st.lists(st.tuples(counts, counts), max_size=64).map(tuple),
    "timeline": st.lists(st.tuples(*[counts] * 6), max_size=128).map(tuple),
    "gossips": st.booleans(),
    "note": st.sampled_from(
        [
            letters.seal(membership.encode(GOSSIP)),
            letters.pass_on("a" * 64, membership.encode(GOSSIP)),
        ]
    ),
    "stderr": st.lists(sentences, max_size=200).map(tuple),
    "outcome": st.sampled_from(["clean", "faulted"]),
    "have": sentences,
    "want": sentences,
    "reason": sentences,
    "remediation": sentences,
    **dict.fromkeys(("build", "name", "code", "field", "device", "engine"), st.text(max_size=64)),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_whatever_a_node_may_say_passes_unchanged(
    kind: type[messages.FromNode], data: st.DataObject
) -> None:
    names = [field.name for field in msgspec.structs.fields(kind)]
    message = kind(**{name: data.draw(FIELDS.get(name, counts), name) for name in names})
    assert codec.decode_from_node(egress.permit(message)) == message


def test_what_a_coordinator_says_does_not_leave_a_node() -> None:
    with pytest.raises(ResidencyViolation, match="does not send RoundOpen"):
        egress.permit(round_open())  # type: ignore[arg-type]


smuggled = st.one_of(
    st.binary(min_size=egress.MAX_BYTES + 1, max_size=4096),
    st.text(min_size=egress.MAX_TEXT + 1, max_size=2000),
    st.lists(st.floats(), min_size=1),
    st.tuples(st.floats(), st.floats()),
    st.floats(),
    st.dictionaries(st.text(), st.integers(), min_size=1),
    st.lists(st.integers(0, 9), min_size=1),
    st.builds(lambda n: tuple(range(n)), st.integers(egress.MAX_INTEGERS + 1, 2000)),
    st.integers(min_value=1 << 63),
    st.builds(bytearray, st.binary(min_size=1)),
    st.builds(memoryview, st.binary(min_size=1)),
    st.lists(st.binary(min_size=1, max_size=64), min_size=1).map(tuple),
    st.just(round_open()),
)


@given(value=smuggled, field=st.sampled_from(["federation", "epoch", "phase", "done", "total"]))
def test_nothing_that_could_be_payload_leaves(value: object, field: str) -> None:
    with pytest.raises(ResidencyViolation):
        egress.permit(progress(**{field: value}))


def test_a_subclass_does_not_pass_for_its_parent() -> None:
    class Laden(messages.Progress, frozen=True, kw_only=True, tag="Progress"):
        payload: bytes = b""

    laden = Laden(**{**msgspec.structs.asdict(progress()), "payload": b"x" * 10})
    with pytest.raises(ResidencyViolation):
        egress.permit(laden)


@pytest.mark.parametrize(
    "changes",
    [
        {"stderr": ("x",) * (stages.STDERR_LINES + 1)},
        {"stderr": ("x" * (egress.MAX_TEXT + 1),)},
        {"stderr": (b"x",)},
        {"stderr": ((1, 2),)},
        {"reason": ("x",)},
    ],
)
def test_lines_leave_in_a_stage_fault_only_and_no_more_than_are_due(
    changes: dict[str, object],
) -> None:
    fault = stages.StageFault(
        federation=FEDERATION, epoch=1, run="a" * 16, run_epoch=1, stage=0, code="x", reason="y"
    )
    assert egress.permit(msgspec.structs.replace(fault, stderr=("z" * 500,) * 200))
    with pytest.raises(ResidencyViolation):
        egress.permit(msgspec.structs.replace(fault, **changes))


@pytest.mark.parametrize(
    "ranges", [((1,),), ((1, 2, 3),), ((1, 2.0),), ((1, b"x"),), ((0, 1),) * 4097, ([1, 2],)]
)
def test_pairs_leave_as_pairs_of_integers_only(ranges: object) -> None:
    wants = stages.StageWants(
        federation=FEDERATION, epoch=1, run="a" * 16, run_epoch=1, stage=0, ranges=((0, 1),) * 4096
    )
    assert egress.permit(wants)
    with pytest.raises(ResidencyViolation):
        egress.permit(msgspec.structs.replace(wants, ranges=ranges))


@pytest.mark.parametrize(
    "timeline", [((1,) * 5,), ((1,) * 7,), ((1.0,) * 6,), ((b"x",) * 6,), ((0,) * 6,) * 129]
)
def test_timelines_leave_as_rows_of_six_integers_only(timeline: object) -> None:
    seen = stages.StageSeen(
        federation=FEDERATION, epoch=1, run="a" * 16, run_epoch=1, stage=0, computed=1, held=0,
        timeline=((0,) * 6,) * 128,
    )  # fmt: skip
    egress.permit(seen)
    with pytest.raises(ResidencyViolation, match=r"StageSeen.timeline"):
        egress.permit(msgspec.structs.replace(seen, timeline=timeline))


def test_norms_may_leave_where_they_belong() -> None:
    update = messages.Update(
        federation=FEDERATION,
        epoch=1,
        round=0,
        attempt=0,
        digest=ROOT,
        nbytes=4,
        dataset_root=ROOT,
        reused=False,
        l2_norm=1.5,
        loss=0.25,
        signature=b"\x00" * 64,
    )
    assert codec.decode_from_node(egress.permit(update)) == update


def test_only_gossip_leaves_as_gossip() -> None:
    assert membership.decode(egress.permit_gossip(GOSSIP)) == GOSSIP
    smuggling = msgspec.structs.replace(GOSSIP, boot="0.125, 0.25, 0.5")
    with pytest.raises(ResidencyViolation, match="gossip"):
        egress.permit_gossip(smuggling)
    for note in (b"", b"weights", letters.seal(b"weights" * 100), letters.seal(b"")):
        with pytest.raises(ResidencyViolation, match=r"note|gossip"):
            egress.permit(circle.MemberNote(federation=FEDERATION, epoch=1, note=note))
