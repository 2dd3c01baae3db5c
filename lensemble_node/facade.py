"""``Participant``: one node as a blocking object, for experiments and scripts.

It joins over the driver it is given and trains in this process, with the checks of the daemon and
the trainer and files of the worker; what it releases is what the worker would have sent.
"""

import trio

from lensemble import blob, identity
from lensemble.errors import (
    AdmissionRefused,
    ConfigError,
    ContractViolation,
    GaugeError,
    LensembleError,
    LinkLost,
)
from lensemble.global_state import GlobalState, PseudoGradient
from lensemble.ids import NodeId
from lensemble.params import FlatParameters, parameter_digest
from lensemble.seeds import sketch
from lensemble.state_dir import IDENTITY_NAME
from lensemble.transport.driver import Driver, PeerAddress
from lensemble.version import BUILD
from lensemble.wire import codec, messages
from lensemble.workload import initial_parameters
from lensemble_node import egress
from lensemble_node.config import NodeConfig
from lensemble_node.participant import configuration
from lensemble_node.terms import Terms, agree
from lensemble_node.worker.work import Desk

ANSWER_TIMEOUT_S = 10.0
_BOOT = "0" * 16


class Participant:
    """Runs local rounds on one node's data.

    Args:
        config: the node's configuration; its state directory must not be a running daemon's.
        participant_id: the node id, which the identity in the state directory must have.
        transport: a driver for that identity, not running yet.

    Raises:
        ConfigError: the identity is another one.
    """

    def __init__(self, config: NodeConfig, *, participant_id: NodeId, transport: Driver) -> None:
        who = identity.load_or_create(config.state_dir / IDENTITY_NAME)
        if not who.node == participant_id == transport.node:
            raise ConfigError(
                f"participant {participant_id} over endpoint {transport.node}; the identity in "
                f"{config.state_dir} is {who.node}",
                "Use the id and the endpoint of that identity.",
            )
        self._config = config
        self._node = who.node
        self._transport = transport
        self._terms: Terms | None = None
        self._desk: Desk | None = None

    def join(self, endpoint: PeerAddress) -> GlobalState:
        """Ask the coordinator at ``endpoint`` for the latest committed state.

        Raises:
            LinkLost: it does not answer.
            AdmissionRefused: it does not admit this node.
            ContractViolation: its workload is not one this build or this configuration accepts.
        """
        return trio.run(self.introduce, endpoint)

    async def introduce(self, endpoint: PeerAddress) -> GlobalState:
        """``join``, for those who have an event loop."""
        answer: GlobalState | LensembleError
        async with trio.open_nursery() as nursery:
            await nursery.start(self._transport.run)
            try:
                answer = await self._ask(endpoint)
            except LensembleError as error:
                # Raised outside of the nursery, which would wrap it in a group.
                answer = error
            nursery.cancel_scope.cancel()
        if isinstance(answer, LensembleError):
            raise answer
        return answer

    async def _ask(self, endpoint: PeerAddress) -> GlobalState:
        link = await self._transport.dial(endpoint)
        join = messages.Join(speaks=codec.SPEAKS, build=BUILD, name=self._config.name, boot=_BOOT)
        await link.send(egress.permit(join))
        with trio.move_on_after(ANSWER_TIMEOUT_S):
            state = self._agree(codec.decode_from_coordinator(await link.receive()))
            await link.close("has what it came for")
            return state
        raise LinkLost(f"{endpoint.node}: no answer to Join within {ANSWER_TIMEOUT_S:g} s")

    def local_round(self, global_state: GlobalState, round_seed: int) -> PseudoGradient:
        """Train from ``global_state`` and release the difference; the same again for a repeat.

        The parameters are those on disk, or the warm start from the seed before round 0.

        Raises:
            GaugeError: ``round_seed`` is not the sketch seed of that round.
            ContractViolation: not joined, or a state of another workload.
            CheckpointIntegrityError: the parameters are not on this node.
        """
        if self._terms is None or global_state.config_hash != self._terms.config_hash:
            raise ContractViolation(
                f"a state of the workload {global_state.config_hash}; this participant joined "
                f"{'none' if self._terms is None else self._terms.config_hash}",
                "Join the coordinator of that state first.",
            )
        if round_seed != global_state.sketch_seed:
            raise GaugeError(
                f"round {global_state.round_index} has the sketch seed "
                f"{global_state.sketch_seed}, not {round_seed}"
            )
        desk = self._desk = self._desk or Desk(configuration(self._config, self._terms, self._node))
        released = desk.trainer.train(
            self._prior(desk, global_state),
            round_index=global_state.round_index,
            attempt=0,
            sketch_seed=round_seed,
            global_step=global_state.round_index * desk.steps,
            progress=lambda _done, _loss: None,
            should_stop=lambda: False,
            prior_digest=global_state.digest,
        )
        return PseudoGradient(
            field=released.vector,
            digest=blob.update_digest(released.plan, [released.vector.data.cast("B")]),
            l2_norm=released.l2_norm,
            dataset_root=desk.trainer.facts.root,
            round_index=global_state.round_index,
        )

    def _agree(self, answer: messages.FromCoordinator) -> GlobalState:
        match answer:
            case messages.Welcome():
                agreed = agree(
                    answer,
                    self._config.expected_config_hash,
                    plain=self._config.share.plain,
                    entry=self._config.task.entry,
                )
                self._terms, self._desk = agreed, None
                following = answer.last.round + 1
                return GlobalState(
                    digest=answer.last.digest,
                    round_index=following,
                    sketch_seed=sketch(agreed.root_seed, following),
                    config_hash=agreed.config_hash,
                    layout_digest=agreed.layout_digest,
                    probe_hash=agreed.probe_hash,
                )
            case messages.Refused(reason=reason, remediation=remediation):
                raise AdmissionRefused(reason, remediation)
            case _:
                raise ContractViolation(f"{type(answer).__name__} in answer to Join")

    def _prior(self, desk: Desk, state: GlobalState) -> FlatParameters:
        if state.round_index == 0:
            start = initial_parameters(desk.workload)
            if parameter_digest(desk.layout, start) == state.digest:
                return start
        return desk.states.read(state.digest)
