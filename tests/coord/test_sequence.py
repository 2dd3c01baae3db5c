"""One request against a scripted ring: what is sent, what comes back, and when it ends."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lensemble.errors import ContextLengthExceeded, InvalidTransition, OperatorError
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.stage_chunk import MAX_RECENT, Sampling
from lensemble_coord.inference import sequence

VOCABULARY = 50
EOS = 0


def model(tokens: list[int]) -> int:
    """The next token after ``tokens``: every one of them and their order count."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 1) % 7919
    return state % VOCABULARY


def solo(prompt: tuple[int, ...], most: int, ctx: int) -> tuple[list[int], str]:
    """What an unsplit model answers."""
    tokens, drawn = list(prompt), []
    while True:
        token = model(tokens)
        drawn.append(token)
        if token == EOS:
            return drawn, "stop"
        if len(drawn) >= most or len(tokens) >= ctx:
            return drawn, "length"
        tokens.append(token)


class ScriptedRing:
    """Computes chunks in order of arrival, with a KV cache for each slot."""

    def __init__(self, ctx: int, rows: int) -> None:
        self.ctx, self.rows, self.step = ctx, rows, 0
        self.caches: dict[int, list[int]] = {}
        self.chunks: deque[tuple[int, sequence.SendChunk]] = deque()

    def accept(self, chunk: sequence.SendChunk) -> int:
        assert 1 <= len(chunk.tokens) <= self.rows
        assert chunk.start + len(chunk.tokens) <= self.ctx
        self.step += 1
        self.chunks.append((self.step, chunk))
        return self.step

    def compute(self) -> sequence.Drawn | None:
        step, chunk = self.chunks.popleft()
        cache = self.caches.setdefault(chunk.slot, [])
        assert chunk.start <= len(cache), "a hole in the cache"
        cache[chunk.start :] = chunk.tokens
        return sequence.Drawn(step, model(cache)) if chunk.sampling else None


class Player:
    """One request on a ring: performs its actions, at once or when it is told to."""

    def __init__(self, ring: ScriptedRing, ask: sequence.Ask) -> None:
        self.ring, self.state = ring, sequence.Queued(ask)
        self.waiting: deque[sequence.SendChunk] = deque()
        self.drawn: list[int] = []
        self.samplings: list[Sampling] = []
        self.released: list[int] = []
        self.finished: list[sequence.Finished] = []
        self.looked: list[str] = []
        self.armed = False

    def feed(self, event: sequence.Event) -> None:
        self.state, actions = sequence.transition(self.state, event)
        for action in actions:
            self.perform(action)

    def perform(self, action: sequence.Action) -> None:
        match action:
            case sequence.SendChunk():
                self.waiting.append(action)
                if action.sampling:
                    self.samplings.append(action.sampling)
            case sequence.ReleaseSlot(slot):
                self.released.append(slot)
            case sequence.Finished():
                self.finished.append(action)
            case sequence.LookAround(phase):
                self.looked.append(phase)
            case ArmTimer() | CancelTimer():
                self.armed = isinstance(action, ArmTimer)

    def send(self) -> None:
        self.feed(sequence.Accepted(self.ring.accept(self.waiting.popleft())))

    def run(self) -> None:
        while not self.finished:
            while self.waiting:
                self.send()
            self.compute()

    def compute(self) -> None:
        if (drawn := self.ring.compute()) is not None:
            self.drawn.append(drawn.token)
            self.feed(drawn)

    def move(self) -> None:
        """One step: a chunk that waits is sent, or else one is computed."""
        if self.finished:
            return
        if self.waiting:
            self.send()
        elif self.ring.chunks:
            self.compute()

    def interrupt(self, ring: ScriptedRing) -> None:
        self.ring = ring
        self.waiting.clear()
        self.feed(sequence.Interrupted(tuple(self.drawn)))


def asked(prompt: tuple[int, ...], **terms: object) -> sequence.Ask:
    given_terms = {"sampling": Sampling(), "ctx": 64, "rows": 8, "max_tokens": 10} | terms
    return sequence.Ask(prompt=prompt, eos=frozenset({EOS}), **given_terms)


def come_round(ring: ScriptedRing, players: list[Player]) -> None:
    """Compute the oldest chunk and show its result to everybody, as if it were theirs."""
    drawn = ring.compute()
    for player in players if drawn is not None else ():
        before = player.state
        player.feed(drawn)
        if player.state is not before:
            player.drawn.append(drawn.token)


PROMPTS = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=40).map(tuple)


@given(prompt=PROMPTS, rows=st.integers(1, 9), most=st.integers(1, 30), room=st.integers(0, 20))
def test_an_answer_is_that_of_the_unsplit_model(
    prompt: tuple[int, ...], rows: int, most: int, room: int
) -> None:
    ctx = len(prompt) + room
    player = Player(ScriptedRing(ctx, rows), asked(prompt, rows=rows, max_tokens=most, ctx=ctx))
    player.feed(sequence.Granted(3))
    player.run()
    drawn, finish = solo(prompt, most, ctx)
    assert player.drawn == drawn
    usage = sequence.Usage(len(prompt), len(drawn))
    assert player.finished == [sequence.Finished(finish, usage)]
    assert player.released == [3]
    assert [each.index for each in player.samplings] == list(range(len(drawn)))
    assert not player.armed


@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=4),
    data=st.data(),
    cancelled=st.integers(0, 3),
)
def test_interleaved_requests_answer_as_if_alone_and_a_cancelled_one_harms_nobody(
    prompts: list[tuple[int, ...]], data: st.DataObject, cancelled: int
) -> None:
    ring = ScriptedRing(64, 4)
    players = [Player(ring, asked(each, rows=4, max_tokens=6)) for each in prompts]
    for slot, player in enumerate(players):
        player.feed(sequence.Granted(slot))
    victim = players[cancelled] if cancelled < len(players) else None
    heir = None
    while not all(each.finished for each in players):
        able = [each for each in players if each.waiting and not each.finished]
        if victim is not None and heir is None and data.draw(st.booleans()):
            victim.feed(sequence.CancelAsked())
            assert victim.finished
            victim.waiting.clear()
            heir = Player(ring, asked(prompts[0], rows=4, max_tokens=6))
            players.append(heir)
            heir.feed(sequence.Granted(cancelled))
            continue
        if able and (not ring.chunks or data.draw(st.booleans())):
            data.draw(st.sampled_from(able)).send()
        elif ring.chunks:
            come_round(ring, players)
    for player, prompt in zip(players, [*prompts, prompts[0]], strict=False):
        if player is not victim or heir is None:
            assert player.drawn == solo(prompt, 6, 64)[0]


@given(
    prompt=PROMPTS,
    rows=st.integers(1, 9),
    most=st.integers(1, 20),
    room=st.integers(0, 20),
    losses=st.lists(st.integers(0, 30), max_size=4),
)
def test_an_answer_that_is_interrupted_is_that_of_one_that_is_not(
    prompt: tuple[int, ...], rows: int, most: int, room: int, losses: list[int]
) -> None:
    ctx = len(prompt) + room
    hot = Sampling(temperature=1.0, repeat_penalty=1.3, seed=9)
    terms = {"rows": rows, "max_tokens": most, "ctx": ctx, "sampling": hot}
    undisturbed = Player(ScriptedRing(ctx, rows), asked(prompt, **terms))
    undisturbed.feed(sequence.Granted(3))
    undisturbed.run()
    player = Player(ScriptedRing(ctx, rows), asked(prompt, **terms))
    player.feed(sequence.Granted(0))
    for moves in losses:
        for _ in range(moves):
            player.move()
        if player.finished:
            break
        # Another plan: a ring whose caches are empty, and nothing of the old one comes back.
        player.interrupt(ScriptedRing(ctx, rows))
        assert isinstance(player.state, sequence.Queued)
        assert not player.armed
        player.feed(sequence.Granted(1))
    player.run()
    assert player.drawn == undisturbed.drawn
    assert player.finished == undisturbed.finished
    asked_for = {each.index: each for each in player.samplings}
    assert list(asked_for.values()) == undisturbed.samplings


def test_whoever_is_cancelled_between_two_plans_has_had_what_was_given() -> None:
    player = Player(ScriptedRing(64, 8), asked((5, 6)))
    player.feed(sequence.Granted(0))
    for _ in range(6):
        player.move()
    given = len(player.drawn)
    assert given > 0
    player.interrupt(ScriptedRing(64, 8))
    assert player.released == [0]
    player.feed(sequence.Interrupted(tuple(player.drawn)))
    player.feed(sequence.CancelAsked())
    assert player.finished == [sequence.Finished("cancelled", sequence.Usage(2, given))]
    assert player.released == [0]


def test_over_length_prompts_are_refused_with_both_numbers() -> None:
    sequence.check(64, 64)
    with pytest.raises(ContextLengthExceeded) as caught:
        sequence.check(65, 64)
    assert (caught.value.have, caught.value.most) == (65, 64)
    with pytest.raises(OperatorError):
        sequence.check(0, 64)


def test_a_stop_string_ends_the_answer() -> None:
    player = Player(ScriptedRing(64, 8), asked((5,)))
    player.feed(sequence.Granted(0))
    player.send()
    drawn = player.ring.compute()
    assert drawn is not None
    player.feed(replace(drawn, stops=True))
    assert [each.finish for each in player.finished] == ["stop"]


def test_the_repeat_penalty_sees_the_latest_tokens_and_nothing_else_sends_them() -> None:
    prompt = tuple(range(1, 41))
    hot = Sampling(temperature=1.0, repeat_penalty=1.3, seed=9)
    player = Player(ScriptedRing(128, 8), asked(prompt, sampling=hot, ctx=128, max_tokens=40))
    player.feed(sequence.Granted(0))
    player.run()
    everything = [*prompt, *player.drawn]
    for index, each in enumerate(player.samplings):
        assert each.recent == tuple(everything[: len(prompt) + index][-MAX_RECENT:])
        assert each.seed == 9
    plain = Player(ScriptedRing(128, 8), asked(prompt, ctx=128))
    plain.feed(sequence.Granted(0))
    plain.run()
    assert all(each.recent == () for each in plain.samplings)


def test_an_overdue_result_is_looked_for_and_a_slow_ring_is_waited_for() -> None:
    player = Player(ScriptedRing(64, 8), asked(tuple(range(1, 12))))
    player.feed(sequence.Granted(0))
    player.feed(TimerExpired(sequence.STEP))
    assert player.looked == ["prefilling"]
    player.armed = False
    player.feed(sequence.StillMoving())
    assert player.armed
    player.send()
    player.send()
    player.feed(TimerExpired(sequence.STEP))
    assert player.looked == ["prefilling", "decoding"]
    player.feed(sequence.Failed())
    assert [each.finish for each in player.finished] == ["faulted"]
    player.feed(TimerExpired(sequence.STEP))
    assert player.released == [0]


def test_cancel_in_the_queue_holds_no_slot() -> None:
    player = Player(ScriptedRing(64, 8), asked((1, 2)))
    player.feed(sequence.CancelAsked())
    assert player.released == []
    assert player.finished == [sequence.Finished("cancelled", sequence.Usage(2, 0))]


@pytest.mark.parametrize("event", [sequence.Accepted(1), sequence.Drawn(1, 1)])
def test_a_queued_request_has_nothing_on_its_way(event: sequence.Event) -> None:
    with pytest.raises(InvalidTransition):
        sequence.transition(sequence.Queued(asked((1,))), event)
