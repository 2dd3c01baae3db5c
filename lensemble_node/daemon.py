"""The node daemon, from the state directory's lock to the control socket."""

from collections.abc import Callable
from functools import partial

import msgspec
import trio

from lensemble import identity, state_dir
from lensemble.ctl import server
from lensemble.errors import ConfigError
from lensemble.identity import Identity
from lensemble.logs import logger
from lensemble.ticket import Membership
from lensemble.transport.driver import Driver
from lensemble_node import metrics
from lensemble_node.config import NodeConfig
from lensemble_node.ctl import Answers
from lensemble_node.participant import Member
from lensemble_node.stage_process import Engine

FAREWELL_S = 1.5
STOP_WITHIN_S = 4.0
"""From the cancelling of ``serve`` to its end, whatever peer, worker and clients do."""


class Serving(msgspec.Struct, frozen=True):
    """A daemon that serves, for those who run one inside their own process."""

    config: NodeConfig
    driver: Driver
    member: Member
    answers: Answers
    metrics: str = ""
    """Where figures are told, if anywhere."""

    @staticmethod
    def adopt(_: NodeConfig) -> frozenset[str]:
        """The keys that need no restart, beside how it logs: none."""
        return frozenset()

    @property
    def headline(self) -> str:
        """The link to the coordinator and what this node does, in a line."""
        here = self.answers.status()
        link = f"{here.link.state}: {here.link.reason}" if here.link.reason else here.link.state
        if here.round is None:
            return link
        return f"{link}; round {here.round.index} {here.round.activity}: {here.round.reason}"


async def serve(
    config: NodeConfig,
    driver: Driver,
    belongs: Membership | None = None,
    *,
    engine: Engine | None = None,
    task_status: trio.TaskStatus[Serving] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; then say farewell, end the worker, remove the socket.

    ``belongs`` is the federation to take part in where neither configuration nor ticket says so,
    ``engine`` computes stages in place of the one that is installed.

    Raises:
        OperatorError: the state directory, the identity or the socket is not usable.
    """
    stop = trio.Event()
    with state_dir.held(config.state_dir):
        async with trio.open_nursery() as nursery:
            make = partial(Member, config, driver=driver, belongs=belongs, engine=engine)
            task_status.started(await nursery.start(_serve, config, driver, make, stop))
            try:
                await trio.sleep_forever()
            finally:
                stop.set()


async def _serve(
    config: NodeConfig,
    driver: Driver,
    make: Callable[[Identity], Member],
    stop: trio.Event,
    *,
    task_status: trio.TaskStatus[Serving],
) -> None:
    log = logger("node")
    with trio.CancelScope(shield=True) as last:
        who = identity.load_or_create(config.state_dir / state_dir.IDENTITY_NAME)
        if who.node != driver.node:
            raise ConfigError(
                f"the endpoint is {driver.node}, the identity in {config.state_dir} {who.node}",
                "Give the driver the identity of the state directory.",
            )
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            member = make(who)
            await nursery.start(member.run)
            answers = Answers(member)
            counts = await nursery.start(
                server.serve, config.socket_path, answers.answer, answers.greeting
            )
            answers.refused_by_socket = counts.refused
            told = await nursery.start(metrics.serve, answers.status, config.metrics.address)
            log.info("node.serving", node=who.node, name=config.name)
            task_status.started(Serving(config, driver, member, answers, told))
            await stop.wait()
            last.deadline = trio.current_time() + STOP_WITHIN_S
            log.info("node.stopping")
            with trio.move_on_after(FAREWELL_S):
                await member.leave("the node shuts down")
            nursery.cancel_scope.cancel()
