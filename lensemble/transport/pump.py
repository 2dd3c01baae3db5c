"""The two loops that move a payload between a slot and its stream."""

from collections.abc import AsyncIterable, Callable

import msgspec

from lensemble.edge.arena import Region
from lensemble.ids import SlotIndex
from lensemble.transport.driver import EdgeReceiver, EdgeSender


class Chunk(msgspec.Struct, frozen=True):
    """A payload by reference: the first ``extent`` bytes of ``slot``."""

    slot: SlotIndex
    extent: int


async def send_chunks(
    sender: EdgeSender,
    region: Region,
    filled: AsyncIterable[Chunk],
    sent: Callable[[SlotIndex], None],
) -> None:
    """Send each of ``filled`` as a frame, in order; end the stream when ``filled`` ends.

    Raises:
        EdgeFault: the stream is torn.
    """
    async for chunk in filled:
        await sender.send_frame(region.slot(chunk.slot)[: chunk.extent])
        sent(chunk.slot)
    await sender.finish()


async def receive_chunks(
    receiver: EdgeReceiver,
    region: Region,
    offered: AsyncIterable[SlotIndex],
    landed: Callable[[Chunk], None],
) -> None:
    """Fill each of ``offered`` with a frame, in order, until the stream ends.

    Raises:
        EdgeFault: the stream is torn, or a frame does not fit into its slot.
    """
    async for slot in offered:
        extent = await receiver.receive_frame(region.slot(slot))
        if extent is None:
            return
        landed(Chunk(slot, extent))
