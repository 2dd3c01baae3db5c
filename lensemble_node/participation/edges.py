"""The pair of edges of a session: wanted until the worker can attach, provided, usable, or none.

Edges that are lost tear the attempt in hand from its coordinator, and it is told.
"""

from msgspec.structs import replace

from lensemble.machine import Step
from lensemble.wire import messages
from lensemble_node import attempt
from lensemble_node.participation import in_hand
from lensemble_node.participation.actions import Action, Count, Say, Withdraw
from lensemble_node.participation.events import EdgesGone, EdgesLive, EdgesTornDown
from lensemble_node.participation.states import Joined, NoEdges, State, Usable, Wanted
from lensemble_node.provision import Pair


def hear(state: State, event: EdgesLive | EdgesGone | EdgesTornDown) -> Step[State, Action]:
    joined = state.membership
    if not isinstance(joined, Joined):
        return state, ()
    federation, epoch = joined.session.federation, joined.session.epoch
    match event:
        case EdgesTornDown(edges):
            down = messages.TornDown(federation=federation, epoch=epoch, edges=edges)
            return state, (Say(down),)
        case _ if isinstance(joined.edges, NoEdges) or joined.edges.pair != event.pair:
            return state, ()
        case EdgesLive(pair):
            usable = replace(joined, edges=Usable(pair), fresh=True)
            provisioned = messages.Provisioned(federation=federation, epoch=epoch, edges=pair.edges)
            return replace(state, membership=usable), (Say(provisioned),)
        case EdgesGone(_, reason, lost):
            bare = replace(state, membership=replace(joined, edges=NoEdges()))
            after, actions = in_hand.feed(bare, attempt.EdgeTorn(reason))
            if lost is None:
                return after, actions
            said = messages.EdgeLost(
                federation=federation, epoch=epoch, edge=lost, reason=reason[: in_hand.MAX_SENTENCE]
            )
            return after, (Say(said), *actions)


def want(state: State, joined: Joined, message: messages.Provision) -> Step[State, Action]:
    us, them = state.me.node, joined.target.node
    ends = (message.state.producer, message.state.consumer)
    back = (message.update.producer, message.update.consumer)
    if ends != (them, us) or back != (us, them) or message.state.edge == message.update.edge:
        lost = messages.EdgeLost(
            federation=message.federation,
            epoch=message.epoch,
            edge=message.state.edge,
            reason="the edges do not join this node and its coordinator, one each way",
        )
        return state, (Count("foreign_edge", f"edges {ends} and {back}"), Say(lost))
    pair = Pair(message.epoch, message.state, message.update)
    torn = attempt.transition(joined.attempt, attempt.EdgeTorn("replaced by a newer pair"))[0]
    wanted = replace(joined, edges=Wanted(pair), attempt=torn)
    return replace(state, membership=wanted), ()


def teardown(state: State, joined: Joined, edges: tuple[int, ...]) -> Step[State, Action]:
    pair = None if isinstance(joined.edges, NoEdges) else joined.edges.pair
    if isinstance(joined.edges, Wanted) and pair is not None and set(edges) & set(pair.edges):
        joined = replace(joined, edges=NoEdges())
    return replace(state, membership=joined), (Withdraw(edges),)
