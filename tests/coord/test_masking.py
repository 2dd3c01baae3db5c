"""The coordinator's half of the masks with more participants than mask with each other."""

import numpy as np

from lensemble import identity
from lensemble.ids import FederationId
from lensemble.params import layout_of
from lensemble.secagg.keys import Context
from lensemble.secagg.participant import Bound, Drawn, unmask_payload
from lensemble.secagg.plan import FieldPlan
from lensemble.secagg.shares import Envelope
from lensemble.wire import messages
from lensemble.workload import FieldTerms
from lensemble_coord.training.masking import Leftover, Masking

AT = (FederationId("0" * 32), 3, 1)
FIELDS = {"federation": AT[0], "epoch": 1, "round": AT[1], "attempt": AT[2]}
MEMBERS = 40
WORDS = 1000
PLAN = FieldPlan(layout_of({"encoder.weight": (WORDS,)}), FieldTerms())


def _entry(me: identity.Identity, drawn: Drawn) -> messages.RosterEntry:
    public = drawn.public
    keys = messages.MaskKeys(
        mask_key=public.mask_key,
        share_key=public.share_key,
        self_commitment=public.self_commitment,
    )
    return messages.RosterEntry(
        node=me.node, dataset_root="5" * 64, keys=keys, signature=me.sign(b"checked elsewhere")
    )


def test_a_sparse_graph_loses_dealers_and_senders_and_keeps_the_sum() -> None:
    people = {me.node: me for me in (identity.generate() for _ in range(MEMBERS))}
    drawn = {node: Drawn(Context(*AT), node) for node in people}
    entries = [_entry(people[node], each) for node, each in drawn.items()]
    masking = Masking(AT, entries, MEMBERS // 2 + 1, 7)
    assert masking.roster.degree < MEMBERS - 1

    names = sorted(people)
    dealers = names[2:]
    dealt = {node: drawn[node].deal(masking.roster) for node in dealers}
    for node, each in dealt.items():
        message = messages.Shares(
            **FIELDS, commitments=each.dealing.commitments, sealed=each.dealing.sealed
        )
        masking.take(node, message)
    masking.start(dealers)
    bound: dict[str, Bound] = {}
    for node in dealers:
        told = {
            each.dealer: Envelope(each.sealed, each.commitments) for each in masking.envelopes(node)
        }
        bound[node] = dealt[node].receive(told)

    survivors = tuple(dealers[3:])
    total = np.zeros(WORDS, dtype=np.uint32)
    wanted = np.zeros(WORDS, dtype=np.uint32)
    for number, node in enumerate(survivors):
        update = np.arange(WORDS, dtype=np.uint32) * np.uint32(number + 1)
        wanted += update
        bound[node].mask().add(0, update)
        total += update
    assert not np.array_equal(total, wanted)

    masking.freeze(survivors)
    for node in survivors:
        answer = bound[node].answer(Context(*AT), survivors)
        payload = unmask_payload(masking.roster, survivors, answer.shares)
        signature = people[node].sign(payload)
        masking.take(
            node, messages.UnmaskAnswer(**FIELDS, shares=answer.shares, signature=signature)
        )
    left = Leftover(masking.reveal(), PLAN)
    taken = bytearray(4 * WORDS)
    # In two reads, the second first: the masks are had from any offset.
    left.read_into(1600, memoryview(taken)[1600:])
    left.read_into(0, memoryview(taken)[:1600])
    assert np.array_equal(total + np.frombuffer(taken, dtype=np.uint32), wanted)

    kept = masking.transcript()
    assert len(kept.members) == MEMBERS
    assert kept.dealers == tuple(dealers)
    assert kept.roster_digest == masking.roster.digest
