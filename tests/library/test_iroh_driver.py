import gc
import importlib.metadata
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from iroh import iroh_ffi

from lensemble.errors import ConfigError, LinkLost
from lensemble.identity import Identity
from lensemble.ids import EdgeId, NodeId
from lensemble.transport import iroh_loop
from lensemble.transport.driver import PeerAddress
from lensemble.transport.iroh_driver import IrohConnection, IrohDriver, IrohEndpoint
from tests.library.driver_suite import at, linked, suite

pytestmark = pytest.mark.iroh

globals().update(suite())

LOOPBACK = ("127.0.0.1:0",)
UNAIDED_S = 25.0
"""The binding alone notices a dead peer after 30 s."""

ROOT = Path(__file__).parents[2]


def identity(index: int) -> Identity:
    return Identity(bytes([index + 1]) * 32)


class IrohRig:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.endpoints: list[IrohEndpoint] = []

    def node(self, index: int) -> NodeId:
        return identity(index).node

    async def start(
        self, index: int, bind: tuple[str, ...] = LOOPBACK, **settings: float
    ) -> IrohDriver:
        driver = IrohDriver(identity(index), bind, **settings)
        await self._nursery.start(driver.run)
        return driver

    async def raw_dial(self, index: int, peer: PeerAddress) -> IrohConnection:
        endpoint = IrohEndpoint(identity(index), LOOPBACK)
        await endpoint.start()
        self.endpoints.append(endpoint)
        return await endpoint.connect(peer)


@pytest.fixture
async def rig(nursery: trio.Nursery) -> AsyncIterator[IrohRig]:
    rig = IrohRig(nursery)
    yield rig
    for endpoint in rig.endpoints:
        await endpoint.close()


# ---- where it listens ----


def bound_hosts() -> set[str]:
    """Hosts of every UDP socket of this network namespace, as the kernel writes them."""
    lines = []
    for name in ("udp", "udp6"):
        lines += Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    return {line.split()[1].partition(":")[0] for line in lines}


V4, V6 = "0100007F", "00000000000000000000000001000000"


@pytest.mark.parametrize(
    ("bind", "hosts"),
    [
        (("127.0.0.1:0",), ["127.0.0.1"]),
        (("[::1]:0",), ["[::1]"]),
        (("127.0.0.1:0", "[::1]:0"), ["127.0.0.1", "[::1]"]),
    ],
)
async def test_it_binds_what_it_is_told_and_no_wildcard(
    rig: IrohRig, bind: tuple[str, ...], hosts: list[str]
) -> None:
    driver = await rig.start(0, bind)
    assert sorted(a.rpartition(":")[0] for a in driver.addresses()) == sorted(hosts)
    assert bound_hosts() == {V4, V6}


async def test_it_is_reached_over_ipv6_and_by_name(rig: IrohRig) -> None:
    listener = await rig.start(0, ("[::1]:0",))
    dialler = await rig.start(1, ("[::1]:0",))
    link = await dialler.dial(at(listener))
    assert link.facts().path == "direct"
    named = await rig.start(2)
    port = named.addresses()[0].rpartition(":")[2]
    await dialler.dial(PeerAddress(named.node, (f"localhost:{port}",)))


@pytest.mark.parametrize(
    "bind",
    [("localhost:1",), ("127.0.0.1",), ("127.0.0.1:70000",), (), ("127.0.0.1:0", "127.0.0.2:0")],
)
def test_an_address_that_is_none_is_refused(bind: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        IrohDriver(identity(0), bind)


async def test_a_port_in_use_is_named(rig: IrohRig) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        driver = IrohDriver(identity(0), (where,))
        with pytest.raises(ConfigError, match=where):
            await driver.run()


async def test_nobody_there_is_given_up_after_the_dial_timeout(rig: IrohRig) -> None:
    dialler = await rig.start(0, dial_timeout_s=0.5)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{deaf.getsockname()[1]}"
        with (
            trio.fail_after(UNAIDED_S),
            pytest.raises(LinkLost, match="no answer within") as caught,
        ):
            await dialler.dial(PeerAddress(rig.node(1), (where,)))
    assert where in str(caught.value)


async def test_a_name_that_does_not_resolve_is_named(rig: IrohRig) -> None:
    dialler = await rig.start(0)
    with pytest.raises(LinkLost, match="cannot resolve no-such-host"):
        await dialler.dial(PeerAddress(rig.node(1), ("no-such-host.invalid:1",)))


# ---- peers that die ----

PEER = """
import sys, trio
from lensemble.identity import Identity
from lensemble.transport.driver import PeerAddress
from lensemble.transport.iroh_driver import IrohDriver

async def main(seed: int, node: str, *addresses: str) -> None:
    driver = IrohDriver(Identity(bytes([seed]) * 32), ("127.0.0.1:0",))
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        link = await driver.dial(PeerAddress(node, addresses))
        await link.send(b"here")
        await trio.sleep_forever()

trio.run(main, int(sys.argv[1]), *sys.argv[2:])
"""


@asynccontextmanager
async def peer_process(index: int, driver: IrohDriver) -> AsyncIterator[trio.Process]:
    command = [sys.executable, "-c", PEER, str(index + 1), driver.node, *driver.addresses()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await trio.lowlevel.open_process(command, env=environment)
    try:
        yield process
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_peer_is_lost_within_the_heartbeat_timeout(
    rig: IrohRig, how: signal.Signals
) -> None:
    listener = await rig.start(0)
    async with peer_process(1, listener) as process:
        link = await listener.accept()
        assert await link.receive() == b"here"
        process.send_signal(how)
        with trio.fail_after(UNAIDED_S):
            await link.lost.wait()
        assert "no heartbeat for 3 s" in link.lost_reason()
        with pytest.raises(LinkLost):
            await link.receive()


async def test_a_killed_and_restarted_peer_is_back_within_seconds(rig: IrohRig) -> None:
    listener = await rig.start(0)
    async with peer_process(1, listener) as process:
        old = await listener.accept()
        process.kill()
        await process.wait()
        async with peer_process(1, listener):
            with trio.fail_after(UNAIDED_S):
                new = await listener.accept()
                assert await new.receive() == b"here"
            assert new.peer == old.peer
            assert old.lost.is_set()


async def test_many_streams_at_once_are_allowed(rig: IrohRig) -> None:
    pair = await linked(rig)
    inbounds = [pair.far.expect_edge(pair.near.node, EdgeId(i)) for i in range(400)]
    senders = [await pair.near.open_edge(pair.far.node, EdgeId(i)) for i in range(400)]
    for inbound, sender in zip(inbounds, senders, strict=True):
        await inbound.accept()
        await sender.send_frame(memoryview(b"x"))


# ---- the binding's private surface ----


def test_the_installed_binding_is_the_one_this_was_written_for() -> None:
    iroh_loop.install()


def test_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"iroh 1\.3\.0 is installed"):
        iroh_loop.check("1.3.0", iroh_ffi, iroh_ffi._UniffiLib)


def test_a_missing_name_is_named() -> None:
    with pytest.raises(ConfigError, match="_uniffi_check_call_status"):
        iroh_loop.check("1.2.9", SimpleNamespace(), iroh_ffi._UniffiLib)


def test_another_contract_is_refused() -> None:
    library = SimpleNamespace(**dict.fromkeys(iroh_loop._LIBRARY_NAMES))
    library.ffi_iroh_ffi_uniffi_contract_version = lambda: 29
    with pytest.raises(ConfigError, match="contract 29"):
        iroh_loop.check(importlib.metadata.version("iroh"), iroh_ffi, library)


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """Collect garbage as often as can be, also inside the binding's callbacks."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


async def test_collections_inside_callbacks_do_not_hang_the_network_thread(
    rig: IrohRig, eager_collector: None
) -> None:
    pair = await linked(rig)
    slot = memoryview(bytearray(16))
    with trio.fail_after(60):
        for index in range(30):
            async with pair.edge(EdgeId(index)) as (sender, receiver):
                cycle = [sender, receiver]
                cycle.append(cycle)  # type: ignore[arg-type]  # garbage that only a collection finds
                await sender.send_frame(memoryview(b"x"))
                assert await receiver.receive_frame(slot) == 1
        await pair.there.send(b"alive")
        assert await pair.back.receive() == b"alive"
