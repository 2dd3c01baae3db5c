import itertools
import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import ContractViolation
from lensemble.secagg.faults import Cause, MaskingFault
from lensemble.secagg.keys import Context
from lensemble.secagg.participant import Drawn
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import (
    PAIR_BYTES,
    SEALED_BYTES,
    Dealing,
    Envelope,
    Kind,
    check_dealing,
    combine,
    commitment,
    envelopes_for,
    split,
)
from tests.library.masked_attempt import CONTEXT, FEDERATION, Attempt, nodes

NAMES = sorted(nodes(4))
DEALER, HOLDER, OTHER, _ = NAMES
ATTEMPT = Attempt(NAMES, 3)

# ---- Shamir ----


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(2, 9), st.data())
def test_any_quorum_of_shares_gives_the_secret(
    secret: bytes, holders: int, data: st.DataObject
) -> None:
    quorum = data.draw(st.integers(1, holders))
    shares = dict(enumerate(split(secret, holders, quorum), 1))
    assert {len(share) for share in shares.values()} == {32}
    for indices in itertools.combinations(shares, quorum):
        assert combine({index: shares[index] for index in indices}) == secret


def test_shares_of_known_polynomials() -> None:
    # Over GF(2**128) with x**128 + x**7 + x**2 + x + 1: secret + 2 * x, the high half alike.
    def at(index: int, secret: int) -> bytes:
        return (secret ^ (index << 1)).to_bytes(16, "big")

    secret = (1 << 127) | 5
    shares = {index: at(index, secret) * 2 for index in (1, 2, 3)}
    for pair in itertools.combinations(shares, 2):
        assert combine({index: shares[index] for index in pair}) == secret.to_bytes(16, "big") * 2


@pytest.mark.parametrize(("holders", "quorum"), [(3, 2), (5, 3), (7, 4)])
def test_one_share_less_than_a_quorum_fits_every_secret(holders: int, quorum: int) -> None:
    shares = split(os.urandom(32), holders, quorum)
    known = dict(enumerate(shares[: quorum - 1], 1))
    for claimed in (bytes(32), b"\xff" * 32, os.urandom(32), os.urandom(32)):
        # In a field where + is xor, moving every index by the missing one makes that one the zero.
        moved = {index ^ quorum: share for index, share in known.items()} | {quorum: claimed}
        missing = combine(moved)
        assert combine(known | {quorum: missing}) == claimed


def test_sharing_twice_gives_unrelated_shares() -> None:
    secret = os.urandom(32)
    assert not set(split(secret, 9, 5)) & set(split(secret, 9, 5))


# ---- envelopes ----


def envelope(attempt: Attempt = ATTEMPT, dealer: str = DEALER, holder: str = HOLDER) -> Envelope:
    return envelopes_for(attempt.roster, attempt.dealings, holder)[dealer]


def refused(attempt: Attempt, dealer: str, holder: str, sent: Envelope) -> None:
    envelopes = envelopes_for(attempt.roster, attempt.dealings, holder)
    with pytest.raises(MaskingFault) as caught:
        attempt.dealt[holder].receive(envelopes | {dealer: sent})
    assert (caught.value.cause, caught.value.nodes) == (Cause.BAD_DEALING, (dealer,))


def test_wire_sizes() -> None:
    dealing = ATTEMPT.dealings[DEALER]
    assert (PAIR_BYTES, SEALED_BYTES) == (64, 92)
    assert len(dealing.commitments) == 4 * 64
    assert [len(each) for each in dealing.sealed] == [92] * 3
    assert (len(envelope().sealed), len(envelope().commitments)) == (92, 64)


def test_what_was_dealt_arrives() -> None:
    attempt = Attempt(NAMES, 3)
    bound = attempt.bind()
    secrets = attempt.drawn[DEALER]._secrets
    private = secrets.mask_private.private_bytes_raw()
    for kind, secret in ((Kind.SELF, secrets.self_seed), (Kind.MASK, private)):
        shares = {
            index: bound[holder]._pairs[DEALER].of(kind)
            for index, holder in enumerate(attempt.roster.holders(DEALER), 1)
        }
        for indices in itertools.combinations(shares, 3):
            assert combine({index: shares[index] for index in indices}) == secret


def test_an_envelope_of_another_dealer_is_refused() -> None:
    refused(ATTEMPT, DEALER, HOLDER, envelope(dealer=OTHER))


def test_an_envelope_for_another_holder_is_refused() -> None:
    refused(ATTEMPT, DEALER, HOLDER, envelope(holder=OTHER))


def test_ones_own_envelope_is_not_taken_back() -> None:
    refused(ATTEMPT, DEALER, HOLDER, envelope(dealer=HOLDER, holder=DEALER))


@pytest.mark.parametrize(
    "context", [Context(FEDERATION, 7, 1), Context(FEDERATION, 8, 0), CONTEXT], ids=str
)
def test_an_envelope_of_another_attempt_is_refused(context: Context) -> None:
    refused(ATTEMPT, DEALER, HOLDER, envelope(Attempt(NAMES, 3, context=context)))


def test_even_equal_keys_do_not_carry_an_envelope_into_another_attempt() -> None:
    later = Attempt(NAMES, 3, context=Context(FEDERATION, 7, 1))
    for node in NAMES:  # what nobody does: use the keys of attempt 0 again
        old, new = ATTEMPT.drawn[node]._secrets, later.dealt[node]._secrets
        new.share_private, new.mask_private = old.share_private, old.mask_private
    later.roster.keys = ATTEMPT.roster.keys
    refused(later, DEALER, HOLDER, envelope())


def test_participants_who_were_shown_different_rosters_cannot_go_on() -> None:
    drawn = {node: Drawn(CONTEXT, node) for node in NAMES}
    keys = {node: each.public for node, each in drawn.items()}
    seen = {node: Roster(CONTEXT, keys, 3 if node == HOLDER else 4, 11) for node in NAMES}
    dealt = {node: each.deal(seen[node]) for node, each in drawn.items()}
    dealings = {node: each.dealing for node, each in dealt.items()}
    with pytest.raises(MaskingFault, match="do not open"):
        dealt[HOLDER].receive(envelopes_for(seen[HOLDER], dealings, HOLDER))


def test_shares_other_than_those_committed_to_name_their_dealer() -> None:
    drawn = {node: Drawn(CONTEXT, node) for node in NAMES}
    roster = Roster(CONTEXT, {node: each.public for node, each in drawn.items()}, 3, 11)
    other = Attempt(NAMES, 3)
    dealt = {node: each.deal(roster) for node, each in drawn.items()}
    dealings = {node: each.dealing for node, each in dealt.items()}
    dealings[DEALER] = Dealing(other.dealings[DEALER].commitments, dealings[DEALER].sealed)
    with pytest.raises(MaskingFault) as caught:
        dealt[HOLDER].receive(envelopes_for(roster, dealings, HOLDER))
    assert caught.value.nodes == (DEALER,)


@given(st.binary(max_size=200), st.binary(max_size=80))
def test_any_bytes_for_an_envelope_are_refused(sealed: bytes, commitments: bytes) -> None:
    refused(ATTEMPT, DEALER, HOLDER, Envelope(sealed, commitments))


@given(st.integers(0, (SEALED_BYTES + PAIR_BYTES) * 8 - 1))
def test_one_flipped_bit_is_refused(bit: int) -> None:
    whole = bytearray(envelope().sealed + envelope().commitments)
    whole[bit // 8] ^= 1 << bit % 8
    changed = Envelope(bytes(whole[:SEALED_BYTES]), bytes(whole[SEALED_BYTES:]))
    refused(ATTEMPT, DEALER, HOLDER, changed)


@given(st.integers(0, SEALED_BYTES - 1))
def test_a_shortened_envelope_is_refused(length: int) -> None:
    sent = envelope()
    refused(ATTEMPT, DEALER, HOLDER, Envelope(sent.sealed[:length], sent.commitments))


@given(st.binary(max_size=300), st.lists(st.binary(max_size=100), max_size=5))
def test_a_dealing_of_other_sizes_is_refused(commitments: bytes, sealed: list[bytes]) -> None:
    if len(commitments) == 4 * 64 and [len(each) for each in sealed] == [92] * 3:
        return
    with pytest.raises(MaskingFault) as caught:
        check_dealing(ATTEMPT.roster, DEALER, Dealing(commitments, tuple(sealed)))
    assert caught.value.nodes == (DEALER,)


def test_a_dealing_of_a_stranger_is_refused() -> None:
    with pytest.raises(ContractViolation):
        check_dealing(ATTEMPT.roster, nodes(5)[4], ATTEMPT.dealings[DEALER])


@given(st.binary(max_size=400))
def test_msgspec_takes_back_only_what_fits(raw: bytes) -> None:
    packed = msgspec.msgpack.encode(ATTEMPT.dealings[DEALER])
    assert msgspec.msgpack.decode(packed, type=Dealing) == ATTEMPT.dealings[DEALER]
    for kind in (Dealing, Envelope):
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(raw, type=kind)


def test_a_commitment_is_bound_to_everything_about_its_share() -> None:
    share = bytes(32)
    later = Context(FEDERATION, 7, 1)
    assert (
        len(
            {
                commitment(CONTEXT, Kind.SELF, DEALER, HOLDER, share),
                commitment(CONTEXT, Kind.MASK, DEALER, HOLDER, share),
                commitment(CONTEXT, Kind.SELF, HOLDER, DEALER, share),
                commitment(CONTEXT, Kind.SELF, DEALER, OTHER, share),
                commitment(later, Kind.SELF, DEALER, HOLDER, share),
                commitment(CONTEXT, Kind.SELF, DEALER, HOLDER, b"\x01" + share[1:]),
            }
        )
        == 6
    )
