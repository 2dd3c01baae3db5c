import itertools
import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from lensemble.errors import ContractViolation, Response
from lensemble.secagg.faults import Cause, MaskingFault
from lensemble.secagg.keys import Context
from lensemble.secagg.masks import MaskStream
from lensemble.secagg.participant import Answer, Bound, Drawn, UnmaskDuty, unmask_payload
from lensemble.secagg.roster import Roster
from lensemble.secagg.shares import Dealing, Kind, envelopes_for
from lensemble.secagg.shares import deal as deal_shares
from lensemble.secagg.unmask import Recovery, leftover
from tests.library.masked_attempt import CONTEXT, FEDERATION, Attempt, Masked, nodes, plain_sum

NAMES = sorted(nodes(5))
A, B, C, D, E = NAMES
WORDS = 6
MASKED = Masked(Attempt(NAMES, 3), WORDS)
ROSTER = MASKED.attempt.roster


def bound(node: str = A) -> Bound:
    return Bound(MASKED.bound[node]._secrets, ROSTER, MASKED.bound[node]._pairs)


def recovery(*survivors: str) -> Recovery:
    return Recovery(ROSTER, MASKED.attempt.dealings, survivors)


def answers(survivors: list[str]) -> dict[str, Answer]:
    return {node: MASKED.answer(node, survivors) for node in survivors}


# ---- steps ----


def test_each_step_is_taken_once() -> None:
    attempt = Attempt(NAMES, 3)
    with pytest.raises(ContractViolation, match="has dealt"):
        attempt.drawn[A].deal(attempt.roster)
    attempt.bind()
    with pytest.raises(ContractViolation, match="has received"):
        attempt.dealt[A].receive({})


def test_only_a_roster_with_the_own_keys_is_dealt_for() -> None:
    drawn = Drawn(CONTEXT, A)
    with pytest.raises(ContractViolation, match="does not carry the keys"):
        drawn.deal(ROSTER)
    with pytest.raises(ContractViolation, match="for keys of"):
        Drawn(Context(FEDERATION, 7, 1), A).deal(ROSTER)
    keys = {node: Drawn(CONTEXT, node).public for node in NAMES} | {A: drawn.public}
    drawn.deal(Roster(CONTEXT, keys, 3, 0))


def test_shares_of_strangers_are_refused() -> None:
    attempt = Attempt(NAMES, 3)
    envelopes = envelopes_for(attempt.roster, attempt.dealings, A)
    with pytest.raises(ContractViolation, match="not its neighbours"):
        attempt.dealt[A].receive(envelopes | {nodes(6)[5]: envelopes[B]})


def test_a_refused_envelope_may_be_left_out() -> None:
    attempt = Attempt(NAMES, 3)
    envelopes = envelopes_for(attempt.roster, attempt.dealings, A)
    with pytest.raises(MaskingFault):
        attempt.dealt[A].receive(envelopes | {B: envelopes[C]})
    del envelopes[B]
    assert attempt.dealt[A].receive(envelopes).dealers == (A, C, D, E)


def test_a_retry_has_independent_masks() -> None:
    words = 1 << 12
    attempts = [Attempt(NAMES, 3, context=Context(FEDERATION, 7, index)) for index in range(3)]
    seen = []
    for attempt in attempts:
        mask = np.zeros(words, dtype=np.uint32)
        attempt.bind()[A].mask().add(0, mask)
        seen.append(mask)
    for one, two in itertools.combinations(seen, 2):
        # Two uniform words are equal once in 2**32.
        assert np.count_nonzero(one == two) <= 1


# ---- duty ----


def test_a_survivor_gets_its_seed_revealed_and_a_dropout_its_key() -> None:
    kinds = UnmaskDuty(ROSTER, A, NAMES).kinds(CONTEXT, [A, C, E])
    assert kinds == {A: Kind.SELF, B: Kind.MASK, C: Kind.SELF, D: Kind.MASK, E: Kind.SELF}
    pairs = MASKED.bound[A]._pairs
    assert bound().answer(CONTEXT, [A, C, E]).shares == b"".join(
        pairs[node].of(kinds[node]) for node in NAMES
    )


def test_one_set_is_answered_for_and_no_other() -> None:
    one = bound()
    assert one.answered_for is None
    first = one.answer(CONTEXT, [A, B, C])
    assert one.answered_for == (A, B, C)
    assert one.answer(CONTEXT, [A, B, C]) == first
    for other in ([A, B, C, D], [A, B, D], NAMES):
        with pytest.raises(MaskingFault, match="another set") as caught:
            one.answer(CONTEXT, other)
        assert caught.value.cause is Cause.UNMASK_REFUSED
    assert one.answer(CONTEXT, [A, B, C]) == first


@pytest.mark.parametrize(
    ("survivors", "cause"),
    [
        ([], Cause.UNMASK_REFUSED),
        ([B, C, D], Cause.UNMASK_REFUSED),
        ([A, C, B], Cause.UNMASK_REFUSED),
        ([A, B, B], Cause.UNMASK_REFUSED),
        ([A, B, C, "f" * 64], Cause.UNMASK_REFUSED),
        ([A, B], Cause.BELOW_THRESHOLD),
    ],
)
def test_a_request_that_could_reveal_too_much_is_refused_and_spends_nothing(
    survivors: list[str], cause: Cause
) -> None:
    one = bound()
    with pytest.raises(MaskingFault) as caught:
        one.answer(CONTEXT, survivors)
    assert caught.value.cause is cause
    assert one.answered_for is None
    one.answer(CONTEXT, [A, B, C])


@pytest.mark.parametrize("context", [Context(FEDERATION, 7, 1), Context(FEDERATION, 6, 0)], ids=str)
def test_a_request_of_another_attempt_is_refused(context: Context) -> None:
    with pytest.raises(MaskingFault) as caught:
        bound().answer(context, NAMES)
    assert caught.value.cause is Cause.UNMASK_REFUSED


def test_a_survivor_that_never_dealt_is_refused() -> None:
    with pytest.raises(MaskingFault, match="dealt no shares"):
        UnmaskDuty(ROSTER, A, [A, B, C, D]).kinds(CONTEXT, NAMES)


@given(st.lists(st.lists(st.sampled_from(NAMES), unique=True).map(sorted), max_size=6))
def test_no_series_of_requests_reveals_both_kinds_of_anybody(requests: list[list[str]]) -> None:
    duty = UnmaskDuty(ROSTER, A, NAMES)
    revealed: dict[str, set[Kind]] = {node: set() for node in NAMES}
    for survivors in requests:
        try:
            kinds = duty.kinds(CONTEXT, survivors)
        except MaskingFault:
            continue
        for node, kind in kinds.items():
            revealed[node].add(kind)
    assert all(len(kinds) <= 1 for kinds in revealed.values())


def test_the_signed_bytes_cover_survivors_shares_and_attempt() -> None:
    later = Attempt(NAMES, 3).roster
    payloads = {
        unmask_payload(ROSTER, [A, B, C], b"x"),
        unmask_payload(ROSTER, [A, B, D], b"x"),
        unmask_payload(ROSTER, [A, B, C], b"y"),
        unmask_payload(later, [A, B, C], b"x"),
    }
    assert len(payloads) == 4
    assert unmask_payload(ROSTER, [C, B, A], b"x") in payloads


# ---- recovery ----


def test_wrong_shares_are_named_and_the_sum_is_had_without_them() -> None:
    survivors = NAMES
    right = answers(survivors)
    gathering = recovery(*survivors)
    for liar, place in ((B, 0), (D, 4)):
        shares = bytearray(right[liar].shares)
        shares[32 * place + 7] ^= 1
        with pytest.raises(MaskingFault) as caught:
            gathering.accept(liar, Answer(bytes(shares)))
        assert (caught.value.cause, caught.value.nodes) == (Cause.WRONG_SHARE, (liar,))
        assert f"share of {NAMES[place]}" in str(caught.value)
    for honest in (A, C):
        gathering.accept(honest, right[honest])
    assert not gathering.ready
    with pytest.raises(MaskingFault) as caught:
        gathering.reveal()
    assert (caught.value.present, caught.value.threshold) == (2, 3)
    gathering.accept(E, right[E])
    assert gathering.ready
    assert gathering.answered == {A, C, E}
    total = np.zeros(WORDS, dtype=np.uint32)
    for node in survivors:
        np.add(total, MASKED.updates[node], out=total)
    MaskStream(leftover(ROSTER, gathering.reveal())).subtract(0, total)
    assert total.view(np.int32).tolist() == plain_sum(survivors, WORDS)


def test_an_answer_for_another_set_or_of_another_node_is_a_wrong_share() -> None:
    gathering = recovery(A, B, C, D)
    for holder, answer in (
        (A, MASKED.answer(A, [A, B, C])),
        (B, MASKED.answer(C, [A, B, C, D])),
        (C, MASKED.answer(C, NAMES)),
    ):
        with pytest.raises(MaskingFault) as caught:
            gathering.accept(holder, answer)
        assert (caught.value.cause, caught.value.nodes) == (Cause.WRONG_SHARE, (holder,))


def test_an_answer_of_another_attempt_is_a_wrong_share() -> None:
    later = Masked(Attempt(NAMES, 3, context=Context(FEDERATION, 7, 1)), WORDS)
    with pytest.raises(MaskingFault) as caught:
        recovery(*NAMES).accept(A, later.answer(A, NAMES))
    assert caught.value.nodes == (A,)


def test_only_survivors_answer_and_a_second_answer_changes_nothing() -> None:
    gathering = recovery(A, B, C)
    with pytest.raises(MaskingFault, match="not among the survivors"):
        gathering.accept(D, MASKED.answer(D, NAMES))
    right = answers([A, B, C])
    gathering.accept(A, right[A])
    gathering.accept(A, Answer(bytes(160)))
    for node in (B, C):
        gathering.accept(node, right[node])
    gathering.reveal()


@given(st.binary(max_size=200) | st.binary(min_size=160, max_size=160))
def test_any_bytes_for_an_answer_are_refused(shares: bytes) -> None:
    with pytest.raises(MaskingFault) as caught:
        recovery(*NAMES).accept(A, Answer(shares))
    assert caught.value.nodes == (A,)


def test_survivors_below_the_threshold_or_without_a_dealing_are_refused() -> None:
    with pytest.raises(MaskingFault) as caught:
        recovery(A, B)
    assert (caught.value.cause, caught.value.present, caught.value.threshold) == (
        Cause.BELOW_THRESHOLD,
        2,
        3,
    )
    assert caught.value.response is Response.RETRY
    dealings = {node: MASKED.attempt.dealings[node] for node in (A, B, C)}
    with pytest.raises(ContractViolation, match=D):
        Recovery(ROSTER, dealings, [A, B, C, D])


@pytest.mark.parametrize("kind", list(Kind))
def test_a_dealer_of_another_secret_is_named(kind: Kind) -> None:
    drawn = {node: Drawn(CONTEXT, node) for node in NAMES}
    roster = Roster(CONTEXT, {node: each.public for node, each in drawn.items()}, 3, 11)
    dealt = {node: drawn[node].deal(roster) for node in NAMES if node != B}
    dealings: dict[str, Dealing] = {node: each.dealing for node, each in dealt.items()}
    secrets = drawn[B]._secrets
    if kind is Kind.SELF:
        secrets.self_seed = os.urandom(32)
    else:
        secrets.mask_private = X25519PrivateKey.generate()
    dealings[B], _ = deal_shares(secrets, roster)
    holding = {
        node: each.receive(envelopes_for(roster, dealings, node)) for node, each in dealt.items()
    }
    survivors = NAMES if kind is Kind.SELF else [A, C, D, E]
    gathering = Recovery(roster, dealings, survivors)
    for node, each in holding.items():
        gathering.accept(node, each.answer(CONTEXT, survivors))
    with pytest.raises(MaskingFault) as caught:
        gathering.reveal()
    assert (caught.value.cause, caught.value.nodes) == (Cause.RECONSTRUCTION, (B,))


def test_what_is_revealed_is_one_kind_for_each_and_gives_the_same_sum_again() -> None:
    survivors = [A, B, D]
    gathering = recovery(*survivors)
    for node, answer in answers(survivors).items():
        gathering.accept(node, answer)
    revealed = gathering.reveal()
    assert sorted(revealed.self_seeds) == survivors
    assert sorted(revealed.mask_keys) == [C, E]
    assert revealed == gathering.reveal()
    assert revealed.digest(ROSTER) == gathering.reveal().digest(ROSTER)
    assert leftover(ROSTER, revealed) == leftover(ROSTER, gathering.reveal())
    assert len(leftover(ROSTER, revealed)) == 3 + 2 * 3


def test_a_dropout_without_a_surviving_neighbour_needs_no_key() -> None:
    names = nodes(200)
    roster = Roster(CONTEXT, {node: Drawn(CONTEXT, node).public for node in names}, 101, 11)
    lonely, *rest = names
    gone = {lonely, *roster.neighbours(lonely)}
    gathering = Recovery(
        roster, dict.fromkeys(names, Dealing(b"", ())), [n for n in rest if n not in gone]
    )
    assert set(names) - set(gathering._shares) == {lonely}
