"""A driver that lets everything through and keeps a copy of every byte that comes in."""

import trio

from lensemble.ids import EdgeId, NodeId
from lensemble.transport.driver import Driver, EdgeReceiver, InboundEdge, Link


class TappedDriver:
    """``heard`` are control payloads, ``frames`` the payloads of edges, in order of arrival."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.heard: list[bytes] = []
        self.frames: dict[EdgeId, list[bytes]] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._driver, name)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._driver.run(task_status=task_status)

    async def accept(self) -> "TappedLink":
        return TappedLink(await self._driver.accept(), self.heard)

    def expect_edge(self, peer: NodeId, edge: EdgeId, *, ahead: bool = False) -> "TappedEdge":
        kept = self.frames.setdefault(edge, [])
        return TappedEdge(self._driver.expect_edge(peer, edge, ahead=ahead), kept)


class TappedLink:
    def __init__(self, link: Link, heard: list[bytes]) -> None:
        self._link = link
        self._heard = heard

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    async def receive(self) -> bytes:
        payload = await self._link.receive()
        self._heard.append(payload)
        return payload


class TappedEdge:
    def __init__(self, inbound: InboundEdge, kept: list[bytes]) -> None:
        self._inbound = inbound
        self._kept = kept

    async def accept(self) -> "TappedReceiver":
        return TappedReceiver(await self._inbound.accept(), self._kept)

    def close(self) -> None:
        self._inbound.close()


class TappedReceiver:
    def __init__(self, receiver: EdgeReceiver, kept: list[bytes]) -> None:
        self._receiver = receiver
        self._kept = kept

    async def receive_frame(self, into: memoryview) -> int | None:
        extent = await self._receiver.receive_frame(into)
        if extent is not None:
            self._kept.append(bytes(into[:extent]))
        return extent

    async def stop(self) -> None:
        await self._receiver.stop()
