"""Runs the membership machine of one member: the clock, the datagrams, what people see of it."""

from collections.abc import Callable, Mapping

import msgspec
import trio

from lensemble.ctl import replies
from lensemble.errors import ContractViolation, FrameError
from lensemble.ids import NodeId
from lensemble.membership.machine import Membership
from lensemble.membership.outcomes import Action, Changed, Member, Send
from lensemble.membership.profiles import Profile
from lensemble.wire import membership
from lensemble.wire.membership import Message, Standing


class Self(msgspec.Struct, frozen=True):
    """Whose machine it is: ``boot`` is drawn anew at each start, ``seed`` orders its probes."""

    node: NodeId
    boot: str
    seed: int


class Detector:
    """One member's part in finding out who lives.

    Args:
        me: that member.
        profile: the figures that all members go by.
        carry: sends a message to a member if there is a way, once; it returns at once.
        report: hears what changed; it returns at once.
    """

    def __init__(
        self,
        me: Self,
        profile: Profile,
        carry: Callable[[NodeId, Message], None],
        report: Callable[[Changed], None],
    ) -> None:
        self.node = me.node
        self.profile = profile
        self._machine = Membership(me.node, me.boot, profile, me.seed)
        self._carry = carry
        self._report = report
        self._reasons: dict[NodeId, str] = {}
        self._sleep = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Do what is due when it is due, until cancelled."""
        task_status.started()
        while True:
            self._sleep = trio.CancelScope(deadline=self._due())
            with self._sleep:
                await trio.sleep_forever()
            self._perform(self._machine.tick(trio.current_time()))

    def learn(self, node: NodeId) -> None:
        """``node`` belongs to the federation."""
        self._perform(self._machine.learn(node, trio.current_time()))

    def forget(self, node: NodeId) -> None:
        """``node`` does not."""
        self._machine.forget(node)
        self._reasons.pop(node, None)
        self._sleep.deadline = self._due()

    def greet(self, node: NodeId) -> None:
        """There is a way to ``node`` again."""
        self._perform(self._machine.greet(node, trio.current_time()))

    def heard(self, datagram: bytes, sender: NodeId) -> str:
        """Take what ``sender`` said; the code of a refusal, empty if it is a message.

        One of a sender that is no member is ignored.
        """
        try:
            message = membership.decode(datagram)
        except (FrameError, ContractViolation) as error:
            return error.code
        self._perform(self._machine.heard(message, sender, trio.current_time()))
        return ""

    def leave(self) -> None:
        """Say goodbye."""
        self._perform(self._machine.leave(trio.current_time()))

    def member(self, node: NodeId) -> Member | None:
        """What is known of ``node``, if it is a member."""
        return self._machine.member(node)

    def trouble(self, node: NodeId) -> str:
        """Why ``node`` is not to be counted on, as a phrase; empty if it is alive, or no member."""
        member = self._machine.member(node)
        if member is None or member.standing is Standing.ALIVE:
            return ""
        age = trio.current_time() - member.since
        reason = self._reasons.get(node, "")
        return f"{member.standing} for {age:.0f} s" + (f": {reason}" if reason else "")

    def listing(self, name: str, names: Mapping[NodeId, str]) -> replies.MemberList:
        """All that is known, without the paths; ``name`` is this daemon's."""
        return replies.MemberList(
            name=name,
            node=self.node,
            profile=self.profile.name,
            interval_s=self.profile.interval_s,
            incarnation=self._machine.incarnation,
            health=self._machine.health,
            members=tuple(
                self._row(each, names.get(each.node, "")) for each in self._machine.members()
            ),
        )

    def _row(self, member: Member, name: str) -> replies.MemberStatus:
        now = trio.current_time()
        return replies.MemberStatus(
            name=name,
            node=member.node,
            state=str(member.standing),
            since_s=now - member.since,
            incarnation=member.incarnation,
            rtt_ms=None if member.rtt_s is None else 1000 * member.rtt_s,
            heard_s=None if member.heard is None else now - member.heard,
            flaps=member.flaps,
            reason=self._reasons.get(member.node, ""),
        )

    def _due(self) -> float:
        due = self._machine.next_due()
        return float("inf") if due is None else due

    def _perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case Send(to=to, message=message):
                    self._carry(to, message)
                case Changed(node=node, reason=reason):
                    self._reasons[node] = reason
                    self._report(action)
        self._sleep.deadline = self._due()
