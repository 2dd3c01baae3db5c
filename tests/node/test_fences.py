"""What a node hears of another session, federation or attempt moves nothing and is counted."""

from typing import get_args

import msgspec
import pytest

from lensemble.wire import fence, messages
from lensemble_node import attempt as attempts
from lensemble_node import participation
from tests.library.message_examples import example
from tests.node.node_play import Play

FENCED = [kind for kind in get_args(messages.FromCoordinator) if kind is not messages.Refused]
OF_ROUND = [kind for kind in FENCED if issubclass(kind, fence.OfRound)]


def counted(actions: tuple[participation.Action, ...]) -> list[str]:
    assert all(isinstance(each, participation.Count) for each in actions), actions
    return [each.reason for each in actions if isinstance(each, participation.Count)]


def at_work() -> Play:
    """In mid-training, where most could be upset."""
    return Play().training()


@pytest.mark.parametrize("kind", FENCED)
@pytest.mark.parametrize("off", [-1, 1])
def test_another_session_is_fenced(kind: type[fence.Fenced], off: int) -> None:
    play = at_work()
    before, session = play.state, play.joined.session
    message = example(kind, federation=session.federation, epoch=session.epoch + off)
    assert counted(play.hear(message)) in (["stale_epoch"], ["second_welcome"])
    assert play.state == before


@pytest.mark.parametrize("kind", FENCED)
def test_another_federation_is_fenced(kind: type[fence.Fenced]) -> None:
    play = at_work()
    before, session = play.state, play.joined.session
    message = example(kind, federation="e" * 32, epoch=session.epoch)
    assert counted(play.hear(message)) in (["other_federation"], ["second_welcome"])
    assert play.state == before


@pytest.mark.parametrize("kind", OF_ROUND)
def test_an_earlier_attempt_is_fenced(kind: type[fence.OfRound]) -> None:
    play = Play().ready()
    opened = {"federation": play.joined.session.federation, "epoch": play.joined.session.epoch}
    first = play.training().joined.attempt
    assert not isinstance(first, attempts.Idle)
    play.hear(msgspec.structs.replace(first.open, attempt=1))
    before = play.state
    outcome = {"outcome": "aborted"} if kind is messages.RoundClose else {}
    message = example(kind, **opened, round=0, attempt=0, **outcome)
    assert counted(play.hear(message)) == ["stale_attempt"]
    assert play.state == before


@pytest.mark.parametrize("code", sorted(participation.PAST))
@pytest.mark.parametrize("place", ["fetching", "training", "sending"])
def test_a_late_refusal_of_an_earlier_word_ends_nothing(code: str, place: str) -> None:
    play = getattr(Play(), place)()
    before = play.state
    refused = messages.Refused(code=code, reason="an UnmaskAnswer of round 0 attempt 0")
    assert counted(play.hear(refused)) == ["refused_by_coordinator"]
    assert play.state == before
