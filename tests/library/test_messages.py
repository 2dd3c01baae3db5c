"""Every message there and back, and nothing but refusals for anything else."""

import struct
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeAlias, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lensemble.edge.spec import MAX_CAPACITY_BYTES, MAX_EDGE_ID, MAX_SLOTS, EdgeSpec
from lensemble.errors import ContractViolation, FrameError
from lensemble.ids import EdgeId, NodeId
from lensemble.wire import circle, codec, fence, stages
from lensemble.wire import messages as m

Decode: TypeAlias = Callable[[bytes], msgspec.Struct]

A, B = "a" * 64, "b" * 64
FENCE = {"federation": "f" * 32, "epoch": 3}
OF_ROUND = {**FENCE, "round": 7, "attempt": 1}
SIGNATURE = bytes(64)
KEYS = m.MaskKeys(mask_key=bytes(32), share_key=b"1" * 32, self_commitment=b"2" * 32)
MEMBER = m.RosterEntry(node=A, dataset_root=B, keys=KEYS, signature=SIGNATURE)
SEALED = m.Envelope(dealer=B, sealed=bytes(92), commitments=bytes(64))
STATE = EdgeSpec(EdgeId(1), NodeId(A), NodeId(B), 1 << 20)
UPDATE = EdgeSpec(EdgeId(MAX_EDGE_ID), NodeId(B), NodeId(A), MAX_CAPACITY_BYTES, MAX_SLOTS)

OF_RUN: dict[str, Any] = {**FENCE, "run": "0f" * 8, "run_epoch": 2, "stage": 1}
TENSOR = stages.TensorPart(
    name="blk.3.attn_q.weight", ggml_type=2, shape=(576, 576), offset=1 << 33, nbytes=9, digest=A
)
PROVISION: dict[str, Any] = {
    **OF_RUN,
    "stages": 2,
    "build": "1.0",
    "protocol": stages.STAGE_PROTOCOL,
    "engine": "tinygrad 0.14.0",
    "model": b"{}",
    "manifest_digest": A,
    "tokenizer_digest": B,
    "first": 12,
    "last": 30,
    "tensors": (TENSOR,),
    "inbound": STATE,
    "outbound": UPDATE,
    "upstream": stages.Address(node=A, addresses=("192.0.2.7:7707",)),
    "downstream": stages.Address(node=B),
    "ctx": 1024,
    "sessions": 4,
    "rows": 32,
}

FROM_NODE: list[m.FromNode] = [
    m.Join(speaks=(1, 1), build="1.0", name="north", boot="0" * 16),
    m.Join(speaks=(1, 9), build="", name="", boot="f" * 16, federation="0" * 32, invite=bytes(64)),
    m.Join(
        speaks=(1, 1),
        build="",
        name="",
        boot="f" * 16,
        gossips=True,
        addresses=("192.0.2.7:7707", "[2001:db8::7]:7707"),
    ),
    circle.MemberNote(**FENCE, note=bytes(1233)),
    m.Leave(**FENCE, reason="SIGTERM"),
    m.Provisioned(**FENCE, edges=(1, 2)),
    m.TornDown(**FENCE, edges=()),
    m.EdgeLost(**FENCE, edge=MAX_EDGE_ID, reason="the stream was reset"),
    m.Commitment(**OF_ROUND, dataset_root=A, episodes=12, holds_bytes=0, signature=SIGNATURE),
    m.Commitment(
        **OF_ROUND,
        dataset_root=A,
        episodes=0,
        holds_bytes=1 << 40,
        keys=KEYS,
        signature=SIGNATURE,
    ),
    m.Shares(**OF_ROUND, commitments=bytes(128), sealed=(bytes(92),)),
    m.UnmaskAnswer(**OF_ROUND, shares=bytes(96), signature=SIGNATURE),
    m.Progress(**OF_ROUND, phase="training", done=3, total=50),
    m.Update(**OF_ROUND, digest=A, nbytes=4, dataset_root=B, reused=False, signature=SIGNATURE),
    m.Update(
        **OF_ROUND,
        digest=A,
        nbytes=4,
        dataset_root=B,
        reused=True,
        l2_norm=1.5,
        loss=-0.25,
        signature=SIGNATURE,
    ),
    m.Fault(**OF_ROUND, code="dataset", reason="file gone", remediation="Put it back."),
    stages.Inventory(
        **FENCE,
        memory_bytes=1 << 40,
        taken_bytes=0,
        device="CPU",
        engine="tinygrad 0.14.0",
        weights="float32",
        addresses=("127.0.0.1:9",),
        linked=(B,),
        rtts_us=(20_500,),
    ),
    stages.StageWants(**OF_RUN, ranges=((0, 24), (1 << 40, 9))),
    stages.StageProgress(**OF_RUN, phase="compiling", done=1, total=2),
    stages.StageReady(
        **OF_RUN, weights_bytes=1 << 30, resident_bytes=1 << 31, fetched_bytes=9, seconds=8.5
    ),
    stages.StageOpened(**OF_RUN),
    stages.StageSeen(**OF_RUN, computed=7, held=1, recent=((3, 5_000), (4, 4_900))),
    stages.StageSeen(**OF_RUN, computed=7, held=1, timeline=((3, 1, 90_000, 20, 5_000, 0),)),
    stages.StageRefused(**OF_RUN, field="engine", have="tinygrad 0.13", want="tinygrad 0.14"),
    stages.StageFault(**OF_RUN, code="worker", reason="killed by SIGKILL", stderr=("a", "b")),
    stages.StageTornDown(**OF_RUN, outcome="clean"),
    stages.BurstReady(**FENCE, burst=3),
    stages.BurstTaken(**FENCE, burst=3, landed_bytes=1 << 20, microseconds=9_000),
    stages.BurstTaken(**FENCE, burst=3, landed_bytes=0, microseconds=2_000_000, rtt_us=20_500),
    stages.BurstRefused(**FENCE, burst=3, reason="a stage is live on this node"),
]
FIGURES = circle.Figures(
    name="wan",
    interval_s=2.0,
    probe_s=1.5,
    probe_rtts=4.0,
    helpers=2,
    suspicion_s=10.0,
    revive_intervals=4,
)
LAST = m.LastRecord(round=-1, digest=A, contributors=())
OPENING = m.RoundOpen(
    **OF_ROUND,
    prior_digest=A,
    layout_digest=A,
    config_hash=B,
    roster_digest=B,
    sketch_seed=(1 << 63) - 1,
    inner_steps=50,
    global_step=350,
    state_bytes=1 << 30,
    field=m.FieldParams(k=24, n_max=64),
    answer_within_s=60.0,
)
FROM_COORDINATOR: list[m.FromCoordinator] = [
    m.Welcome(
        **FENCE,
        build="1.0",
        coordinator="hub",
        workload=b"{}",
        config_hash=A,
        layout_digest=B,
        aggregation="plain",
        last=LAST,
    ),
    m.Refused(code="unknown", reason="not on the list", remediation="Ask.", final=True),
    m.Leave(**FENCE, reason="SIGTERM"),
    m.Provision(**FENCE, state=STATE, update=UPDATE),
    m.Teardown(**FENCE, edges=(1,)),
    OPENING,
    replace(OPENING, probe_hash=A),
    m.Roster(**OF_ROUND, rows=m.rows_of((MEMBER, replace(MEMBER, node=B))), threshold=2),
    m.Collect(**OF_ROUND, roster=(A, B), send_within_s=600.0),
    m.Collect(**OF_ROUND, roster=(A, B), send_within_s=600.0, envelopes=(SEALED,)),
    m.UnmaskRequest(**OF_ROUND, survivors=(A, B)),
    m.RoundClose(**OF_ROUND, outcome="closed", digest=A, contributors=(A, B)),
    m.RoundClose(**OF_ROUND, outcome="aborted", digest=A, code="x", reason="y", retries=True),
    stages.StageProvision(**PROVISION, source=stages.FromPath(path="/models/a.gguf")),
    stages.StageProvision(**PROVISION, source=stages.FromUrl(url="https://example.org/a.gguf")),
    stages.StageProvision(**PROVISION, source=stages.FromEdge(edge=STATE)),
    stages.StageOpen(**OF_RUN),
    stages.StageLook(**OF_RUN),
    stages.StageLook(**OF_RUN, timeline=True),
    stages.StageTeardown(**OF_RUN, reason="stopped by the operator"),
    stages.BurstExpect(**FENCE, burst=3, edge=STATE, far=stages.Address(node=B)),
    stages.BurstSend(
        **FENCE, burst=3, edge=STATE, far=stages.Address(node=B, addresses=("192.0.2.7:7707",))
    ),
    circle.Circle(**FENCE, figures=FIGURES, gone=(B,)),
    circle.Circle(
        **FENCE,
        figures=FIGURES,
        fresh=True,
        more=True,
        members=(
            circle.Acquaintance(node=A, name="north", addresses=("192.0.2.7:7707",)),
            circle.Acquaintance(node=B, name=""),
        ),
    ),
    circle.MemberNote(**FENCE, note=b""),
]
SAMPLES = [
    *((message, codec.decode_from_node) for message in FROM_NODE),
    *((message, codec.decode_from_coordinator) for message in FROM_COORDINATOR),
]
DECODERS = [codec.decode_from_node, codec.decode_from_coordinator]


def name(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, msgspec.Struct) else None


def members(union: UnionType) -> set[type]:
    return set(get_args(union))


def tree(message: msgspec.Struct) -> dict[str, Any]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def payload(fields: object) -> bytes:
    return struct.pack("<H", m.WIRE_VERSION) + msgspec.msgpack.encode(fields)


# ---- there and back ----


def test_the_samples_are_every_message() -> None:
    assert {type(message) for message in FROM_NODE} == members(m.FromNode)
    assert {type(message) for message in FROM_COORDINATOR} == members(m.FromCoordinator)


@pytest.mark.parametrize(("message", "decode"), SAMPLES, ids=name)
def test_there_and_back(message: msgspec.Struct, decode: Decode) -> None:
    encoded = codec.encode(message)
    assert decode(encoded) == message
    assert codec.encode(decode(encoded)) == encoded


@given(st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_valid_message_there_and_back(data: st.DataObject) -> None:
    message, decode = data.draw(st.sampled_from(SAMPLES))
    drawn = replace(
        message,
        **{
            field: data.draw(strategy)
            for field, strategy in VALID.items()
            if field in message.__struct_fields__
        },
    )
    assert decode(codec.encode(drawn)) == drawn


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=64)
HASHES = st.binary(min_size=32, max_size=32).map(bytes.hex)
COUNTS = st.integers(0, 1 << 62)
VALID: dict[str, st.SearchStrategy[Any]] = {
    "epoch": COUNTS,
    "round": COUNTS,
    "attempt": COUNTS,
    "reason": TEXT,
    "remediation": TEXT,
    "code": TEXT,
    "build": TEXT,
    "digest": HASHES,
    "dataset_root": HASHES,
    "contributors": st.lists(HASHES, max_size=5).map(tuple),
    "roster": st.lists(HASHES, max_size=5).map(tuple),
    "edges": st.lists(st.integers(0, MAX_EDGE_ID), max_size=256).map(tuple),
    "l2_norm": st.none() | st.floats(allow_nan=False),
    "loss": st.none() | st.floats(allow_nan=False),
    "epsilon": st.none() | st.floats(0.0, allow_nan=False),
    "signature": st.binary(min_size=64, max_size=64),
    "commitments": st.binary(max_size=64),
    "shares": st.binary(max_size=64),
    "survivors": st.lists(HASHES, max_size=5).map(tuple),
    "workload": st.binary(max_size=4096),
    "done": COUNTS,
    "speaks": st.tuples(st.integers(0, 99), st.integers(0, 99)),
}


@pytest.mark.parametrize(
    "message",
    [
        m.Collect(**OF_ROUND, roster=(A,) * m.MAX_PARTICIPANTS, send_within_s=1.0),
        m.Provisioned(**FENCE, edges=(MAX_EDGE_ID,) * m.MAX_EDGES_PER_NODE),
        replace(FROM_COORDINATOR[0], workload=bytes(m.MAX_WORKLOAD_BYTES)),
        m.RoundClose(
            **OF_ROUND,
            outcome="closed",
            digest=A,
            contributors=(A,) * m.MAX_PARTICIPANTS,
            reason="\U0001f980" * fence.MAX_SENTENCE_CHARS,
        ),
    ],
    ids=name,
)
def test_the_largest_messages_that_are_allowed_can_be_sent(message: msgspec.Struct) -> None:
    decode = DECODERS[type(message) in members(m.FromCoordinator)]
    assert decode(codec.encode(message)) == message


def test_bytes_that_every_build_must_agree_on() -> None:
    """The wire is a contract: whoever changes it changes ``WIRE_VERSION``."""
    assert codec.encode(m.Leave(federation="0" * 32, epoch=1, reason="bye")) == (
        b"\x01\x00\x84\xa4type\xa5Leave\xaafederation\xd9\x20" + b"0" * 32 + b"\xa5epoch\x01"
        b"\xa6reason\xa3bye"
    )


# ---- what is refused ----


@pytest.mark.parametrize(("message", "decode"), SAMPLES, ids=name)
def test_an_unknown_field_is_refused(message: msgspec.Struct, decode: Decode) -> None:
    with pytest.raises(FrameError, match="unknown field `extra`"):
        decode(payload({**tree(message), "extra": 1}))


@pytest.mark.parametrize(
    ("message", "inner", "decode"),
    [
        (FROM_COORDINATOR[3], "state", codec.decode_from_coordinator),
        (FROM_COORDINATOR[0], "last", codec.decode_from_coordinator),
        (OPENING, "field", codec.decode_from_coordinator),
    ],
)
def test_an_unknown_field_within_is_refused(
    message: msgspec.Struct, inner: str, decode: Decode
) -> None:
    fields = tree(message)
    fields[inner]["extra"] = 1
    with pytest.raises(FrameError, match="unknown field `extra`"):
        decode(payload(fields))


@pytest.mark.parametrize(("message", "decode"), SAMPLES, ids=name)
def test_a_field_that_is_missing_or_of_another_type_is_refused(
    message: msgspec.Struct, decode: Decode
) -> None:
    fields = tree(message)
    required = {f.name for f in msgspec.structs.fields(type(message)) if f.required}
    for field in fields:
        for wrong in ({"a": 1}, [[[]]], msgspec.msgpack.Ext(1, b"x")):
            with pytest.raises(FrameError):
                decode(payload({**fields, field: wrong}))
        if field in required:
            with pytest.raises(FrameError, match=f"required field `{field}`"):
                decode(payload({k: v for k, v in fields.items() if k != field}))


@pytest.mark.parametrize(("message", "decode"), SAMPLES, ids=name)
def test_the_other_side_does_not_take_it(message: msgspec.Struct, decode: Decode) -> None:
    (other,) = (each for each in DECODERS if each is not decode)
    if isinstance(message, m.Leave | circle.MemberNote):
        assert other(codec.encode(message)) == message
        return
    with pytest.raises(FrameError, match="Invalid value"):
        other(codec.encode(message))


SAMPLE = {name(message): message for message, _ in SAMPLES}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("Join", "boot", "0" * 15),
        ("Join", "boot", "0" * 16 + "\n"),
        ("Join", "name", "x" * 65),
        ("Join", "invite", bytes(65)),
        ("Join", "speaks", [1]),
        ("Join", "federation", "F" * 32),
        ("Leave", "federation", "f" * 33),
        ("Leave", "epoch", -1),
        ("Leave", "epoch", (1 << 62) + 1),
        ("Leave", "epoch", True),
        ("Leave", "epoch", 1.5),
        ("Leave", "reason", "x" * 501),
        ("Provisioned", "edges", [1] * 257),
        ("Commitment", "dataset_root", "g" * 64),
        ("Commitment", "dataset_root", "\u0660" * 64),
        ("Commitment", "signature", bytes(63)),
        ("Commitment", "signature", bytes(65)),
        ("Commitment", "keys", {"type": "MaskKeys", "mask_key": bytes(31)}),
        ("Shares", "sealed", [bytes(91)]),
        ("Roster", "threshold", 0),
        ("UnmaskAnswer", "shares", bytes((1 << 13) + 1)),
        ("Commitment", "round", "7"),
        ("Progress", "phase", "sleeping"),
        ("Update", "digest", None),
        ("Welcome", "workload", bytes(m.MAX_WORKLOAD_BYTES + 1)),
        ("Welcome", "aggregation", "tee"),
        ("RoundOpen", "sketch_seed", 1 << 63),
        ("RoundOpen", "inner_steps", 0),
        ("RoundOpen", "answer_within_s", -1.0),
        ("RoundOpen", "answer_within_s", float("nan")),
        ("RoundOpen", "field", {"type": "FieldParams", "k": 31, "n_max": 64}),
        ("RoundOpen", "field", {"type": "FieldParams", "k": 24, "n_max": 0}),
        ("Collect", "roster", [A] * (m.MAX_PARTICIPANTS + 1)),
        ("Collect", "roster", [A, "b"]),
        ("RoundClose", "outcome", "open"),
    ],
)
def test_values_outside_their_limits_are_refused(kind: str, field: str, value: object) -> None:
    message = SAMPLE[kind]
    decode = DECODERS[type(message) not in members(m.FromNode)]
    with pytest.raises(FrameError):
        decode(payload({**tree(message), field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity_bytes", 0),
        ("capacity_bytes", MAX_CAPACITY_BYTES + 1),
        ("slots", 0),
        ("slots", MAX_SLOTS + 1),
        ("edge", -1),
        ("consumer", A),
    ],
)
def test_an_edge_outside_its_limits_is_refused(field: str, value: object) -> None:
    fields = tree(SAMPLE["Provision"])
    fields["state"][field] = value
    with pytest.raises(ContractViolation):
        codec.decode_from_coordinator(payload(fields))


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("version", [0, 2, 255, 65_535])
def test_another_version_is_told_apart_before_anything_else(decode: Decode, version: int) -> None:
    with pytest.raises(ContractViolation, match=f"wire version {version}; this build speaks 1"):
        decode(struct.pack("<H", version) + b"\xc1 not msgpack")


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x01",
        b"\x01\x00",
        b"\x01\x00\xc1",
        b"\x01\x00" + b"\x91" * 100_000,
        b"\x01\x00\xdf\xff\xff\xff\xff",
        b"\x01\x00\xdd\xff\xff\xff\xff",
        b"\x01\x00\xdb\xff\xff\xff\xff",
        b"\x01\x00\x81\xa4type\xa1\xff",
    ],
)
def test_bytes_that_are_no_message(decode: Decode, body: bytes) -> None:
    with pytest.raises(FrameError):
        decode(body)


@pytest.mark.parametrize("decode", DECODERS)
def test_a_message_over_its_size_is_refused_unread(decode: Decode) -> None:
    with pytest.raises(FrameError, match="a message of 1048577 bytes is over 1048576"):
        decode(bytes(codec.MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(("message", "decode"), SAMPLES, ids=name)
def test_truncated_or_with_something_behind_it(message: msgspec.Struct, decode: Decode) -> None:
    encoded = codec.encode(message)
    for end in range(len(encoded)):
        with pytest.raises(FrameError):
            decode(encoded[:end])
    with pytest.raises(FrameError, match="trailing"):
        decode(encoded + b"\x00")


def test_a_complaint_repeats_little_of_what_the_peer_chose_and_is_printable() -> None:
    chosen = "\x1b[2J\n" + "A" * 900_000
    for fields in ({"type": "Leave", chosen: 1}, {"type": chosen}):
        with pytest.raises(FrameError) as refusal:
            codec.decode_from_node(payload(fields))
        assert len(refusal.value.message) < 300
        assert refusal.value.message.isprintable()


# ---- what cannot be sent ----


def test_a_message_over_its_size_is_not_sent() -> None:
    with pytest.raises(FrameError, match=r"Refused of .* bytes is over"):
        codec.encode(m.Refused(code="x", reason="y" * codec.MAX_MESSAGE_BYTES))


def test_what_msgpack_cannot_hold_is_not_sent() -> None:
    with pytest.raises(FrameError, match="a Refused cannot be encoded"):
        codec.encode(m.Refused(code="x", reason="file \udc80 is gone"))
    with pytest.raises(FrameError, match="a Leave cannot be encoded"):
        codec.encode(m.Leave(federation="0" * 32, epoch=1 << 70, reason=""))


@given(st.text())
def test_a_sentence_can_be_sent_whatever_it_was(text: str) -> None:
    refused = m.Refused(code="x", reason=fence.sentence(text * 20))
    assert codec.decode_from_coordinator(codec.encode(refused)) == refused


def test_a_sentence_that_fits_stays_as_it_is() -> None:
    assert fence.sentence("x" * 500) == "x" * 500
    assert fence.sentence("x" * 501) == "x" * 497 + "..."
    assert fence.sentence("file \udc80") == "file ?"


# ---- fuzz ----


@given(st.binary(max_size=400), st.booleans())
def test_random_bytes_end_in_a_refusal(body: bytes, versioned: bool) -> None:
    for decode in DECODERS:
        with pytest.raises((FrameError, ContractViolation)):
            decode(b"\x01\x00" + body if versioned else body)


@given(
    sample=st.sampled_from(SAMPLES),
    cuts=st.lists(
        st.tuples(st.integers(2, 1 << 16), st.integers(0, 3), st.binary(max_size=5)),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=500)
def test_mutated_messages_are_messages_or_refused(
    sample: tuple[msgspec.Struct, Decode], cuts: list[tuple[int, int, bytes]]
) -> None:
    message, _ = sample
    encoded = bytearray(codec.encode(message))
    for position, length, patch in cuts:
        start = position % len(encoded) if encoded else 0
        encoded[start : start + length] = patch
    for decode in DECODERS:
        try:
            heard = decode(bytes(encoded))
        except (FrameError, ContractViolation):
            continue
        assert decode(codec.encode(heard)) == heard or has_nan(heard)


def has_nan(message: msgspec.Struct) -> bool:
    return any(
        value != value  # noqa: PLR0124 - only NaN differs from itself
        for value in msgspec.structs.astuple(message)
    )


LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=70)
    | st.binary(max_size=70)
    | HASHES
)
TREES = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(sample=st.sampled_from(SAMPLES), data=st.data())
@settings(max_examples=300)
def test_fields_with_any_value_are_messages_or_refused(
    sample: tuple[msgspec.Struct, Decode], data: st.DataObject
) -> None:
    message, decode = sample
    fields = tree(message)
    for field in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[field] = data.draw(TREES)
    try:
        body = payload(fields)
    except UnicodeEncodeError:
        return
    try:
        heard = decode(body)
    except (FrameError, ContractViolation):
        return
    assert type(heard).__name__ == fields["type"]


# ---- versions and signatures ----


@pytest.mark.parametrize(
    ("theirs", "answer"), [((1, 1), 1), ((0, 5), 1), ((2, 3), "coordinator"), ((0, 0), "node")]
)
def test_common_version(theirs: tuple[int, int], answer: int | str) -> None:
    if isinstance(answer, int):
        assert codec.common_version(theirs) == answer
        return
    with pytest.raises(ContractViolation) as refusal:
        codec.common_version(theirs)
    assert refusal.value.remediation == f"Upgrade the {answer}."


def test_a_range_that_is_upside_down_has_no_version_in_common() -> None:
    with pytest.raises(ContractViolation):
        codec.common_version((5, 1))


def test_signed_bytes_are_fixed() -> None:
    assert m.commitment_payload("f" * 32, 7, 1, A, B) == (
        b"lensemble/commitment/v1\x00"
        b'{"attempt":1,"config_hash":"' + B.encode() + b'","dataset_root":"' + A.encode() + b'",'
        b'"federation":"' + b"f" * 32 + b'","keys":"","round":7}'
    )
    assert m.update_payload("f" * 32, 7, 1, A, B) == (
        b"lensemble/update/v1\x00"
        b'{"attempt":1,"dataset_root":"' + A.encode() + b'","digest":"' + B.encode() + b'",'
        b'"federation":"' + b"f" * 32 + b'","round":7}'
    )


@given(st.lists(st.tuples(HASHES, st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=2))
def test_signed_bytes_differ_where_anything_does(of: list[tuple[str, int, int]]) -> None:
    (root, round_index, attempt), (other, other_round, other_attempt) = of
    one = m.commitment_payload("f" * 32, round_index, attempt, root, B)
    two = m.commitment_payload("f" * 32, other_round, other_attempt, other, B)
    assert (one == two) == (of[0] == of[1])
    assert one != m.update_payload("f" * 32, round_index, attempt, root, B)


def test_roster_digest_does_not_depend_on_order() -> None:
    assert m.roster_digest([A, B]) == m.roster_digest((B, A))
    assert m.roster_digest([A]) != m.roster_digest([A, B])
    assert m.roster_digest([]) == (
        "d54f65e1e6df926dcfeb2d0909956a6dc1add822b0f7eeb9e8ce5328f0105f3b"
    )
