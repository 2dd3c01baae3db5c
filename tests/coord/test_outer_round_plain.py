"""A round without masks: whatever configuration says about masks, it lives the very same life."""

import random

from msgspec.structs import replace

from lensemble.errors import Response
from lensemble.machine import ArmTimer, TimerExpired
from lensemble_coord.training import outer_round as r
from tests.coord import round_play as play

EVENTS = 120
NODES = (play.A, play.B, play.C, play.D)


def likely(chance: random.Random, state: r.State) -> r.Event:
    """An event of the plain protocol, more often than not one that brings ``state`` on."""
    at = (state.ground.round, state.ground.attempt)
    node = chance.choice(NODES)
    if chance.random() < 0.08:
        return chance.choice(
            [
                r.RoundsAsked(chance.randint(1, 2)),
                r.MemberReady(node),
                play.lost(node),
                play.declined(node, at, chance.choice(["dataset", "dp_budget_exceeded"])),
                play.announced(node, at, dataset_root=play.root(play.STRANGER)),
                play.committed(node, (at[0], at[1] + 1)),
                r.AbortAsked("enough"),
                TimerExpired(chance.choice(list(r.Timer))),
                *([] if play.at_rest(state) else [play.failed(at, chance.choice(list(Response)))]),
            ]
        )
    match state:
        case r.Open():
            return chance.choice([r.MemberReady(node), play.committed(node, at)])
        case r.Collecting():
            return chance.choice([play.announced(node, at), play.arrived(node, at)])
        case r.Aggregating():
            return play.summed(at)
        case r.Aligning():
            return play.diagnosed(at)
        case r.Committing():
            return play.advanced(at)
        case _:
            return chance.choice([r.RoundsAsked(1), TimerExpired(r.Timer.RETRY)])


def test_rules_for_masks_change_nothing_of_a_plain_round() -> None:
    closes = 0
    for seed in range(60):
        chance = random.Random(seed)
        start = play.closed(*NODES, quorum=chance.randint(1, 3))
        with_rules = replace(
            start.ground.rules, threshold=9, share_timeout_s=1.0, unmask_timeout_s=1.0
        )
        audit = play.RoundAudit(start)
        other: r.State = replace(start, ground=replace(start.ground, rules=with_rules))
        for _ in range(EVENTS):
            event = likely(chance, audit.state)
            actions = audit.step(event)
            other, same = r.transition(other, event)
            assert same == actions
            assert type(other) is type(audit.state)
            assert not isinstance(other, r.Sharing | r.Unmasking)
            armed = {action.timer for action in actions if isinstance(action, ArmTimer)}
            assert not armed & {r.Timer.SHARE, r.Timer.UNMASK}
            if isinstance(other, r.Committing):
                assert not other.reason, "a plain commit that fails is collected for again"
            at = (other.ground.round, other.ground.attempt)
            for word in (play.shares(play.A, at), play.unmasks(play.A, at)):
                unmoved, refusal = r.transition(other, word)
                assert unmoved == other
                assert play.only(refusal, r.Refuse).code == "misplaced"
        closes += len(audit.closes)
    assert closes > 30, "the lives get somewhere"
