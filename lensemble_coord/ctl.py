"""Answers to what ``lensemblectl`` asks of the coordinator."""

import json
import secrets
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from functools import partial

import trio

from lensemble import ticket
from lensemble.ctl import replies, requests, server
from lensemble.errors import OperatorError
from lensemble.transport.driver import Driver
from lensemble.version import VERSION
from lensemble_coord import roster
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.draining import Draining
from lensemble_coord.inference.answers import ModelAnswers
from lensemble_coord.members import Members
from lensemble_coord.training import outer_round
from lensemble_coord.training.coordinator import RoundEnded, Rounds, RunEnded
from lensemble_coord.training.reception import Reception
from lensemble_coord.training.rows import Run
from lensemble_coord.training.status import Observer, warnings
from lensemble_coord.training.store import Store, unix_now

WATCH_PAUSE_S = 0.1
"""Shortest pause between two statuses of one watcher."""

FOLLOW_BATCH = 500
WILDCARD = (
    "the ticket names a wildcard address, which no node can dial; "
    "set listen.advertise to the addresses nodes reach this host at"
)


class Answers:
    """One method for each request; ``answer`` is what the control socket calls."""

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        driver: Driver,
        rounds: Rounds,
        reception: Reception,
    ) -> None:
        self._config = config
        self._store = store
        self._driver = driver
        self._rounds = rounds
        self._reception = reception
        self.observer = Observer(config, store, driver, rounds, reception)

    @property
    def greeting(self) -> replies.Greeting:
        return replies.Greeting(
            daemon="coordinator",
            name=self._config.name,
            version=VERSION,
            ctl_version=requests.CTL_VERSION,
        )

    def answer(self, request: requests.Request) -> AsyncGenerator[replies.Reply, None]:
        """The replies to ``request``, one after the other."""
        match request:
            case requests.Status():
                return self._status(request)
            case requests.Run():
                return self._run(request)
            case requests.Attach():
                return self._attach()
            case requests.Events():
                return self._events(request)
            case _:
                return self._once(request)

    async def _once(self, request: requests.Request) -> AsyncGenerator[replies.Reply, None]:
        match request:
            case requests.Abort():
                yield await self._abort(request)
            case requests.Rounds():
                yield await trio.to_thread.run_sync(self.observer.rounds, request.limit)
            case requests.Round():
                yield await self._round(request.index)
            case requests.Invite():
                yield await self._invite(request)
            case requests.Revoke():
                yield await self._revoke(request)
            case requests.Checkpoints():
                yield await trio.to_thread.run_sync(self.observer.checkpoints)
            case requests.CheckpointExport():
                yield await self._export(request.which)
            case _:
                raise OperatorError(
                    f"{type(request).__name__} is for a node; this is the coordinator",
                    "Name the node's socket with --socket.",
                )

    async def _status(self, request: requests.Status) -> AsyncGenerator[replies.Reply, None]:
        while True:
            changed = self._rounds.changed
            yield self.observer.status()
            if not request.watch:
                return
            await _pause(changed, request.interval_s)

    async def _revoke(self, request: requests.Revoke) -> replies.Done:
        node = self._store.find(request.node)
        name = self._store.name(node)
        if request.undo:
            taken = await self._reception.revocations.remove(node)
            said = "may join again" if taken else "was not revoked"
            return replies.Done(message=f"{name} {said}")
        await self._reception.revoke(node, request.reason)
        return replies.Done(message=f"{name} ({node[:12]}) is revoked; its past updates stay")

    # ---- runs ----

    async def _run(self, request: requests.Run) -> AsyncGenerator[replies.Reply, None]:
        number = self._rounds.published
        run = await self._rounds.ask(request.rounds, request.open_timeout_s)
        yield self._started(run, already=False)
        if not request.detach:
            async for reply in self._follow(run, number):
                yield reply

    async def _attach(self) -> AsyncGenerator[replies.Reply, None]:
        run = self._store.run
        if run is None:
            raise OperatorError("no run goes on", "Start one with `lensemblectl run --rounds N`.")
        number = self._rounds.published
        yield self._started(run, already=True)
        async for reply in self._follow(run, number):
            yield reply

    def _started(self, run: Run, *, already: bool) -> replies.RunStarted:
        return replies.RunStarted(
            run=run.run,
            rounds=run.requested,
            first_round=self._rounds.state.ground.round - run.done,
            already=already,
            warnings=warnings(self._store),
        )

    async def _follow(self, run: Run, number: int) -> AsyncGenerator[replies.Reply, None]:
        """Statuses and news from ``number`` on, until ``run`` has ended."""
        while True:
            changed = self._rounds.changed
            news = self._rounds.news_since(number)
            number = self._rounds.published
            for each in news:
                match each:
                    case RoundEnded(closed=True):
                        yield replies.RoundClosed(round=self.observer.closed(each))
                    case RoundEnded():
                        yield self.observer.aborted(each)
                    case RunEnded():
                        yield self.observer.ended(each)
                        if each.run == run.run:
                            return
            yield self.observer.status()
            await _pause(changed, 1.0)

    async def _abort(self, request: requests.Abort) -> replies.Reply:
        if self._store.run is None:
            return replies.Done(message="No run goes on; nothing to abort.")
        where = self._rounds.state.ground.round
        committing = isinstance(self._rounds.state, outer_round.Committing)
        await self._rounds.hear(outer_round.AbortAsked(request.reason))
        if committing:
            message = f"Round {where} is being committed; the run ends behind it."
        else:
            message = f"Round {where} is aborted and the run ends; what is committed stays."
        return replies.Done(message=message)

    # ---- history ----

    async def _round(self, index: int) -> replies.Reply:
        detail = await trio.to_thread.run_sync(self.observer.round, index)
        if detail is None:
            newest = self._rounds.state.ground.round - 1
            raise OperatorError(
                f"round {index} is not committed",
                f"Rounds 0 to {newest} are." if newest >= 0 else "No round is committed yet.",
            )
        return detail

    async def _export(self, which: str) -> replies.Reply:
        kept = (await trio.to_thread.run_sync(self.observer.checkpoints)).checkpoints
        if which == "latest":
            found = [each for each in kept if each.digest == self._rounds.state.ground.digest]
        elif which.isdigit() and len(which) < 10:
            found = [each for each in kept if each.round == int(which)]
        else:
            found = [each for each in kept if which and each.digest.startswith(which)]
        if not found:
            raise OperatorError(
                f"no checkpoint {which!r} is kept", "List them with `lensemblectl checkpoint ls`."
            )
        if len({each.digest for each in found}) > 1:
            raise OperatorError(
                f"{len(found)} checkpoints begin with {which!r}", "Give more of the digest."
            )
        return replies.CheckpointLocation(checkpoint=found[-1])

    async def _events(self, request: requests.Events) -> AsyncGenerator[replies.Reply, None]:
        newest = await trio.to_thread.run_sync(self._store.newest_event)
        after = max(0, newest - request.limit)
        while True:
            written = self._rounds.journal.written
            batch = await trio.to_thread.run_sync(self._store.events, after, FOLLOW_BATCH)
            for each in batch:
                fields = json.loads(each.event)
                yield replies.EventRow(
                    sequence=each.seq,
                    unix_s=datetime.fromisoformat(each.at).timestamp(),
                    event=str(fields.pop("event", "")),
                    fields=fields,
                )
                after = each.seq
            if batch:
                continue
            if not request.follow:
                return
            await written.wait()

    # ---- invites ----

    async def _invite(self, request: requests.Invite) -> replies.Reply:
        if not self._reception.admission.invites:
            raise OperatorError(
                "this coordinator admits by allow-list only (admission.invites = false)",
                "Add the node id to admission.allow, or allow invites.",
            )
        secret = secrets.token_bytes(ticket.SECRET_BYTES)
        expires = int(unix_now() + request.ttl_s)
        addresses = self._config.listen.advertise or self._driver.addresses()
        invite = ticket.Ticket(
            coordinator=self._driver.node,
            federation=self._store.federation,
            addresses=addresses,
            secret=secret,
            expires=expires,
        )
        remember = partial(
            self._store.add_invite, roster.invite_hash(secret), float(expires), request.uses
        )
        await trio.to_thread.run_sync(remember)
        return replies.Invited(
            ticket=ticket.encode(invite),
            uses=request.uses,
            expires_in_s=request.ttl_s,
            warnings=_address_warnings(addresses),
        )


async def _pause(changed: trio.Event, longest_s: float) -> None:
    await trio.sleep(WATCH_PAUSE_S)
    with trio.move_on_after(max(0.0, longest_s - WATCH_PAUSE_S)):
        await changed.wait()


async def _watch(
    members: Members, listing: Callable[[], replies.MemberList], request: requests.Members
) -> AsyncGenerator[replies.Reply, None]:
    while True:
        changed = members.changed
        yield listing()
        if not request.watch:
            return
        await _pause(changed, request.interval_s)


def routed(
    answers: Answers, models: ModelAnswers, draining: Draining, members: Members
) -> server.Answer:
    """What answers every request: of models, drained nodes and members there, all else here."""

    def answer(request: requests.Request) -> AsyncGenerator[replies.Reply, None]:
        if isinstance(request, requests.Drain):
            return draining.answer(request)
        if isinstance(request, requests.OfModels):
            return models.answer(request)
        if isinstance(request, requests.Members):
            listing = partial(draining.marked, partial(members.listing, answers.greeting.name))
            return _watch(members, listing, request)
        return answers.answer(request)

    return answer


def _address_warnings(addresses: tuple[str, ...]) -> tuple[str, ...]:
    if any(each.startswith(("0.0.0.0:", "[::]:")) for each in addresses):
        return (WILDCARD,)
    if all(each.startswith(("127.", "[::1]:")) for each in addresses):
        return ("the ticket names loopback addresses only: nodes on this machine can use it",)
    return ()
