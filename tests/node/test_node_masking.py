"""The secrets of a node against rosters, shares and requests that no honest coordinator sends."""

import msgspec
import pytest
from msgspec.structs import replace

from lensemble import identity, seeds
from lensemble.errors import ContractViolation, LensembleError, SecureAggregationError
from lensemble.ids import Digest, NodeId
from lensemble.secagg.faults import MaskingFault
from lensemble.secagg.keys import Context, PublicKeys
from lensemble.secagg.participant import Answer, Drawn
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import Dealing, envelopes_for
from lensemble.wire import messages
from lensemble_node.masking import Secrets
from tests.node.node_play import EPOCH, FEDERATION, ROOT, WORKLOAD, round_open

OPEN = round_open()
PEOPLE = sorted((identity.generate() for _ in range(4)), key=lambda who: who.node)
ME, *OTHERS = PEOPLE
THRESHOLD = 3


def signed(
    who: identity.Identity, keys: messages.MaskKeys, attempt: int = 0
) -> messages.RosterEntry:
    payload = messages.commitment_payload(FEDERATION, 0, attempt, ROOT, WORKLOAD.digest, keys=keys)
    return messages.RosterEntry(
        node=who.node, dataset_root=ROOT, keys=keys, signature=who.sign(payload)
    )


def wired(keys: PublicKeys) -> messages.MaskKeys:
    return messages.MaskKeys(
        mask_key=keys.mask_key, share_key=keys.share_key, self_commitment=keys.self_commitment
    )


class Federation:
    """``secrets`` among others who follow the protocol."""

    def __init__(self) -> None:
        self.secrets = Secrets(ME.node, OPEN)
        self.context = Context(FEDERATION, 0, 0)
        self.drawn = {who.node: Drawn(self.context, who.node) for who in OTHERS}
        members = [signed(ME, self.secrets.keys)]
        members += [signed(who, wired(self.drawn[who.node].public)) for who in OTHERS]
        self.members = tuple(members)
        self.dealings: dict[NodeId, Dealing] = {}

    def message(
        self, members: tuple[messages.RosterEntry, ...] | None = None, threshold: int = THRESHOLD
    ) -> messages.Roster:
        return messages.Roster(
            federation=FEDERATION,
            epoch=EPOCH,
            round=0,
            attempt=0,
            rows=messages.rows_of(self.members if members is None else members),
            threshold=threshold,
        )

    def roster(self) -> Roster:
        keys = {
            each.node: PublicKeys(
                each.keys.mask_key, each.keys.share_key, each.keys.self_commitment
            )
            for each in self.members
        }
        return Roster(self.context, keys, THRESHOLD, seeds.sketch(WORKLOAD.root_seed, 0))

    def dealt(self) -> "Federation":
        self.dealings = {
            node: drawn.deal(self.roster()).dealing for node, drawn in self.drawn.items()
        }
        self.dealings[ME.node] = self.secrets.deal(self.message())
        return self

    def envelopes(self) -> tuple[messages.Envelope, ...]:
        found = envelopes_for(self.roster(), self.dealings, ME.node)
        return tuple(
            messages.Envelope(dealer=dealer, sealed=each.sealed, commitments=each.commitments)
            for dealer, each in found.items()
        )

    def opened(self) -> "Federation":
        self.dealt().secrets.open(self.envelopes())
        return self


EVERYBODY = tuple(who.node for who in PEOPLE)


def test_an_honest_roster_is_dealt_once() -> None:
    federation = Federation()
    assert len(federation.secrets.deal(federation.message()).sealed) == 3
    with pytest.raises(ContractViolation, match="has dealt"):
        federation.secrets.deal(federation.message())


def altered(entry: messages.RosterEntry, field: str) -> messages.RosterEntry:
    value: bytes = getattr(entry.keys, field)
    keys = replace(entry.keys, **{field: bytes([value[0] ^ 1]) + value[1:]})
    return replace(entry, keys=keys)


@pytest.mark.parametrize("field", ["mask_key", "share_key", "self_commitment"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_changed_keys_are_refused(field: str, place: int) -> None:
    federation = Federation()
    members = list(federation.members)
    members[place] = altered(members[place], field)
    words = "does not carry the keys" if place == 0 else members[place].node
    with pytest.raises(SecureAggregationError, match=words):
        federation.secrets.deal(federation.message(tuple(members)))


def test_keys_signed_by_another_or_for_another_attempt_are_refused() -> None:
    federation = Federation()
    mine, first, *rest = federation.members
    forged = replace(signed(OTHERS[1], first.keys), node=first.node)
    stale = signed(OTHERS[0], first.keys, attempt=1)
    for entry in (forged, stale, replace(first, dataset_root=Digest("0" * 64))):
        with pytest.raises(SecureAggregationError, match=first.node):
            federation.secrets.deal(federation.message((mine, entry, *rest)))


def test_a_roster_without_this_node_or_out_of_order_is_refused() -> None:
    federation = Federation()
    mine, *rest = federation.members
    for members, words in (
        (tuple(rest), "does not carry the keys"),
        (tuple(reversed(federation.members)), "not sorted"),
        ((mine, mine, *rest), "names a node twice"),
        ((mine, *rest, rest[-1]), "names a node twice"),
        ((), "does not carry the keys"),
    ):
        with pytest.raises(SecureAggregationError, match=words):
            federation.secrets.deal(federation.message(members))


@pytest.mark.parametrize("threshold", [1, 2, 5, 4096])
def test_a_threshold_must_be_a_majority_of_those_there_are(threshold: int) -> None:
    federation = Federation()
    with pytest.raises(ContractViolation, match="a threshold of"):
        federation.secrets.deal(federation.message(threshold=threshold))
    # Alone nobody is hidden.
    with pytest.raises(ContractViolation, match="2 to 4096 participants"):
        federation.secrets.deal(federation.message(federation.members[:1], 1))


def test_a_damaged_or_exchanged_envelope_names_its_dealer() -> None:
    for change in (
        {"sealed": b"\x00" * 92},
        {"commitments": b"\x00" * 64},
    ):
        federation = Federation().dealt()
        first, *rest = federation.envelopes()
        with pytest.raises(MaskingFault, match=first.dealer):
            federation.secrets.open((replace(first, **change), *rest))
    federation = Federation().dealt()
    first, second, third = federation.envelopes()
    exchanged = replace(first, sealed=second.sealed), replace(second, sealed=first.sealed), third
    with pytest.raises(MaskingFault, match=first.dealer):
        federation.secrets.open(exchanged)
    federation = Federation().dealt()
    first, *rest = federation.envelopes()
    with pytest.raises(SecureAggregationError, match="two envelopes of one dealer"):
        federation.secrets.open((first, first, *rest))


def test_survivors_that_could_give_an_update_away_are_not_answered_for() -> None:
    federation = Federation().opened()
    secrets = federation.secrets
    for survivors in (
        (),
        EVERYBODY[:1],
        EVERYBODY[:2],
        EVERYBODY[1:],
        tuple(reversed(EVERYBODY)),
        (*EVERYBODY, EVERYBODY[-1]),
        (*EVERYBODY[:2], NodeId("f" * 64)),
    ):
        with pytest.raises(MaskingFault):
            secrets.decide(survivors)
        with pytest.raises(SecureAggregationError, match="left out"):
            secrets.answer()
    secrets.decide(EVERYBODY[:3])
    with pytest.raises(MaskingFault, match="another set"):
        secrets.decide(EVERYBODY)
    shares, payload = secrets.answer()
    assert len(Answer(shares).shares) == 4 * 32
    assert payload


def test_no_step_can_be_left_out() -> None:
    secrets = Secrets(ME.node, OPEN)
    steps = (
        lambda: secrets.open(()),
        secrets.terms,
        lambda: secrets.decide(EVERYBODY),
        secrets.answer,
    )
    for step in steps:
        with pytest.raises(SecureAggregationError, match="left out"):
            step()


def test_no_secret_is_in_a_text_or_a_refusal() -> None:
    federation = Federation().opened()
    secrets = federation.secrets
    keys = [term.key for term in secrets.terms()]
    assert len(keys) == 4
    texts = [repr(secrets), repr(secrets.terms())]
    try:
        secrets.decide(EVERYBODY[:2])
    except LensembleError as error:
        texts.append(error.message)
    for key in keys:
        assert not any(key in text for text in texts)
    # Nothing of it could be written by mistake, either.
    with pytest.raises(TypeError):
        msgspec.json.encode(secrets)


def test_noise_sized_for_more_than_a_sum_may_hold_is_not_dealt_with() -> None:
    whole = Federation()
    for least, fits in ((THRESHOLD, True), (THRESHOLD + 1, False)):
        secrets = Secrets(ME.node, OPEN, least)
        mine = signed(ME, secrets.keys)
        message = whole.message((mine, *whole.members[1:]))
        if fits:
            secrets.deal(message)
            continue
        with pytest.raises(ContractViolation, match="sized for 4 or more"):
            secrets.deal(message)
