"""Answers to what ``lensemblectl`` asks of a node."""

from collections import Counter
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

import trio

from lensemble.ctl import replies, requests
from lensemble.errors import OperatorError
from lensemble.version import VERSION
from lensemble_node import home, status
from lensemble_node.participant import Member
from lensemble_node.participation import Joined

WATCH_PAUSE_S = 0.1
"""Shortest pause between two statuses of one watcher."""

_LOOPBACK = "every listen address of this node is on loopback; the coordinator's are not"


class Answers:
    """``answer`` is what the control socket calls; ``refused_by_socket`` come from there."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._began = trio.current_time()
        self.refused_by_socket: Counter[str] = Counter()

    @property
    def greeting(self) -> replies.Greeting:
        return replies.Greeting(
            daemon="node",
            name=self._member.config.name,
            version=VERSION,
            ctl_version=requests.CTL_VERSION,
        )

    def answer(self, request: requests.Request) -> AsyncGenerator[replies.Reply, None]:
        """The replies to ``request``, one after the other."""
        match request:
            case requests.Status():
                return self._status(request)
            case requests.Members():
                return self._members(request)
            case _:
                return self._once(request)

    def status(self) -> replies.NodeStatus:
        """Where the node is now."""
        return status.of(self._member, self._began, self.refused_by_socket)

    async def _status(self, request: requests.Status) -> AsyncGenerator[replies.Reply, None]:
        while True:
            changed = self._member.changed
            yield self.status()
            if not request.watch:
                return
            await trio.sleep(WATCH_PAUSE_S)
            with trio.move_on_after(max(0.0, request.interval_s - WATCH_PAUSE_S)):
                await changed.wait()

    async def _members(self, request: requests.Members) -> AsyncGenerator[replies.Reply, None]:
        others = self._member.others
        while True:
            changed, joined = others.changed, self._member.state.membership
            lead = joined.session.coordinator if isinstance(joined, Joined) else "coordinator"
            yield others.listing(self._member.config.name, lead)
            if not request.watch:
                return
            await trio.sleep(WATCH_PAUSE_S)
            with trio.move_on_after(max(0.0, request.interval_s - WATCH_PAUSE_S)):
                await changed.wait()

    async def _once(self, request: requests.Request) -> AsyncGenerator[replies.Reply, None]:
        match request:
            case requests.Join():
                yield await self._join(request.ticket)
            case requests.Leave():
                yield await self._leave(request.reason)
            case _:
                raise OperatorError(
                    f"{type(request).__name__} is for a coordinator; this is a node",
                    "Name the coordinator's socket with --socket.",
                )

    async def _join(self, text: str) -> replies.Joined:
        config = self._member.config
        now = datetime.now(tz=UTC).timestamp()
        invite = home.usable_ticket(text, config, now)
        await self._member.assign(invite.membership())
        return replies.Joined(
            coordinator=invite.coordinator,
            addresses=invite.addresses,
            federation=invite.federation,
            warnings=_warnings(config.listen.addresses, invite.addresses),
        )

    async def _leave(self, reason: str) -> replies.Done:
        config = self._member.config
        if self._member.membership is None:
            return replies.Done(message="this node belongs to no federation")
        await self._member.resign(reason)
        if config.coordinator.id:
            return replies.Done(
                message="left until the next start: the configuration names this coordinator"
            )
        return replies.Done(message="left; `lensemblectl join TICKET` joins again")


def _warnings(listen: tuple[str, ...], coordinator: tuple[str, ...]) -> tuple[str, ...]:
    here = ("127.", "[::1]")
    if all(address.startswith(here) for address in listen) and not any(
        address.startswith(here) for address in coordinator
    ):
        return (_LOOPBACK,)
    return ()
