"""What is malformed, unknown, stale or twice, on every entry of live daemons."""

import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import trio

from lensemble import identity, ticket
from lensemble.ctl import replies, requests
from lensemble.errors import LinkLost
from lensemble.ids import EdgeId
from lensemble.transport.driver import Link, PeerAddress
from lensemble.transport.iroh_driver import IrohDriver
from lensemble.wire import codec, messages
from tests.e2e.federation import COORDINATOR, QUICK, Federation, federation, participant

pytestmark = pytest.mark.e2e
ADMITTED = identity.generate()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    root = tmp_path_factory.mktemp("garbage")
    rules = {"admission": {"allow": [ADMITTED.node]}}
    with federation(root, 2, coordinator=rules) as made:
        made.run(1)
        made.wait_closed(0)
        yield made


@pytest.fixture(autouse=True)
def unmoved(members: Federation) -> Iterator[None]:
    """Whatever a test says to the daemons: they live, nothing moved, and rounds still close."""
    pids = [process.pid for process in members.processes()]
    before = members.status()
    yield
    after = members.status()
    assert (after.round.index, after.digest) == (before.round.index, before.digest)
    assert [process.pid for process in members.processes() if process.serves()] == pids
    members.run(1)
    closed = members.wait_closed(after.round.index + 1)
    assert sorted(closed.contributors) == ["node-0", "node-1"]
    assert not any("Traceback" in process.log.read_text() for process in members.processes())


def _refused(members: Federation, name: str) -> dict[str, int]:
    return members[name].ask(requests.Status()).refused


# ---- the control socket ----

HELLO = msgspec.json.encode(requests.Hello(ctl_version=requests.CTL_VERSION, version="0")) + b"\n"
LINES = {
    "random bytes": (os.urandom(300).replace(b"\n", b"x") + b"\n", "malformed"),
    "not utf-8": (b'{"type": "Hello", "version": "\xff"}\n', "malformed"),
    "another protocol": (b"GET / HTTP/1.1\r\n", "malformed"),
    "deeply nested": (b"[" * 50_000 + b"\n", "malformed"),
    "oversized": (b"[" * (requests.MAX_REQUEST_BYTES + 1), "oversized"),
    "another version": (
        b'{"type":"Hello","ctl_version":99,"version":"9.0"}\n',
        "contract_violation",
    ),
    "no hello": (b'{"type":"Status"}\n', "no_hello"),
    "unknown request": (HELLO + b'{"type":"Reboot"}\n', "malformed"),
    "unknown field": (HELLO + b'{"type":"Status","deep":true}\n', "malformed"),
    "out of range": (HELLO + b'{"type":"Run","rounds":0}\n', "malformed"),
}


def _answers(path: Path, sent: bytes) -> list[dict[str, str]]:
    """Send ``sent`` to a control socket and hear everything up to the first refusal."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        client.connect(os.fspath(path))
        client.sendall(sent)
        heard = []
        with client.makefile("rb") as lines:
            for line in lines:
                heard.append(json.loads(line))
                if heard[-1]["type"] == "Failed":
                    break
        return heard


@pytest.mark.parametrize("name", [COORDINATOR, "node-0"])
def test_garbage_on_a_control_socket_is_refused_and_counted(members: Federation, name: str) -> None:
    for what, (sent, code) in LINES.items():
        before = _refused(members, name).get(f"ctl:{code}", 0)
        last = _answers(members[name].socket, sent)[-1]
        assert (last["type"], last["code"]) == ("Failed", code), (what, last)
        assert last["message"]
        assert _refused(members, name)[f"ctl:{code}"] == before + 1, what
    for cut in (b"", b"{", HELLO[:-1], HELLO + b'{"type":"Sta'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(os.fspath(members[name].socket))
            client.sendall(cut)
    assert isinstance(
        members[name].ask(requests.Status()), replies.CoordinatorStatus | replies.NodeStatus
    )


# ---- QUIC ----


def _coordinator(members: Federation) -> PeerAddress:
    status = members.status()
    return PeerAddress(status.node, status.addresses)


def _driver(me: identity.Identity) -> IrohDriver:
    return IrohDriver(me, ("127.0.0.1:0", "[::1]:0"), **QUICK)


def _join(**changes: object) -> messages.Join:
    fields = {"speaks": codec.SPEAKS, "build": "test", "name": "stranger", "boot": "0" * 16}
    return messages.Join(**{**fields, **changes})


async def _refusal(link: Link) -> messages.Refused:
    while True:
        heard = codec.decode_from_coordinator(await link.receive())
        if isinstance(heard, messages.Refused):
            return heard


FIRST_WORDS = {
    "random bytes": (b"\x01\x00" + secrets.token_bytes(200), "frame"),
    "nothing": (b"", "frame"),
    "another wire version": (b"\x63\x00" + secrets.token_bytes(20), "contract_violation"),
    "no common version": (codec.encode(_join(speaks=(7, 9))), "contract_violation"),
    "a truncated join": (codec.encode(_join())[:-3], "frame"),
    "a lie about who speaks": (
        codec.encode(messages.Leave(federation="0" * 32, epoch=1, reason="x")),
        "frame",
    ),
    "an unknown node": (codec.encode(_join()), "not_admitted"),
    "an invented invite": (
        codec.encode(_join(invite=b"i" * ticket.SECRET_BYTES)),
        "unknown_invite",
    ),
}


async def test_a_stranger_is_refused_whatever_it_says(members: Federation) -> None:
    before = members.status()
    for what, (payload, code) in FIRST_WORDS.items():
        async with trio.open_nursery() as nursery:
            driver = _driver(identity.generate())
            await nursery.start(driver.run)
            with trio.fail_after(10):
                link = await driver.dial(_coordinator(members))
                await link.send(payload)
                refused = await _refusal(link)
                assert refused.code == code, (what, refused)
                assert refused.reason
                await link.lost.wait()
            nursery.cancel_scope.cancel()
    after = members.status()
    assert after.participants == before.participants or len(after.participants) == 2
    for code in {code for _, code in FIRST_WORDS.values()}:
        times = sum(each == code for _, each in FIRST_WORDS.values())
        assert after.refused[code] == before.refused.get(code, 0) + times, code


async def _open_unknown_edge(driver: IrohDriver, link: Link) -> None:
    stray = await driver.open_edge(link.peer, EdgeId(12345))
    assert "refused by the peer" in await stray.lost()


async def _hear_to_the_end(link: Link) -> None:
    while True:
        await link.receive()


async def test_a_member_that_babbles_is_answered_and_counted(members: Federation) -> None:
    async with trio.open_nursery() as nursery:
        driver = _driver(ADMITTED)
        await nursery.start(driver.run)
        with trio.fail_after(20):
            link = await driver.dial(_coordinator(members))
            await link.send(codec.encode(_join(name="babbler")))
            welcome = codec.decode_from_coordinator(await link.receive())
            assert isinstance(welcome, messages.Welcome)
            fence = {"federation": welcome.federation, "epoch": welcome.epoch}
            place = {"round": 0, "attempt": 0, "phase": "training", "done": 1, "total": 2}
            sent = {
                "stale_epoch": {**fence, "epoch": welcome.epoch - 1, **place},
                "wrong federation": {**fence, "federation": "0" * 32, **place},
            }
            for fields in sent.values():
                await link.send(codec.encode(messages.Progress(**fields)))
                assert (await _refusal(link)).code == "stale_epoch"
            await link.send(codec.encode(_join()))
            assert (await _refusal(link)).code == "misplaced"
            await link.send(b"\x63\x00zz")
            assert (await _refusal(link)).code == "contract_violation"
            now = {"round": len(members.closed()), "attempt": members.status().round.attempt}
            commitment = messages.Commitment(
                **fence, **now, dataset_root="5" * 64, episodes=1, holds_bytes=0,
                signature=bytes(64),
            )  # fmt: skip
            await link.send(codec.encode(commitment))
            assert (await _refusal(link)).code == "signature"
            payload = messages.commitment_payload(
                welcome.federation, 7, 0, "5" * 64, welcome.config_hash
            )
            signed = msgspec.structs.replace(commitment, round=7, signature=ADMITTED.sign(payload))
            await link.send(codec.encode(signed))
            assert (await _refusal(link)).code == "stale"
            counted = participant(members.status(), "babbler").refused
            assert counted == {
                "stale_epoch": 2,
                "misplaced": 1,
                "stale": 1,
                "contract_violation": 1,
                "signature": 1,
            }
            await _open_unknown_edge(driver, link)
            await link.send(b"\x01\x00" + secrets.token_bytes(64))
            with pytest.raises(LinkLost):
                await _hear_to_the_end(link)
        nursery.cancel_scope.cancel()
    assert members.status().refused["transport:unknown_edge"] >= 1
    gone = participant(members.status(), "babbler")
    assert (gone.connected, bool(gone.last_reason)) == (False, True)


async def test_a_node_takes_no_calls_of_strangers(members: Federation) -> None:
    status = members.node_status("node-0")
    driver = _driver(identity.generate())
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        with trio.fail_after(10):
            link = await driver.dial(PeerAddress(status.node, status.addresses))
            await link.send(codec.encode(_join()))
            await link.lost.wait()
        assert "takes calls only from nodes" in link.lost_reason()
        nursery.cancel_scope.cancel()
    before = status.refused.get("uninvited", 0)
    assert members.node_status("node-0").refused["uninvited"] == before + 1


async def test_a_second_holder_of_an_identity_is_refused_and_both_are_named(
    members: Federation,
) -> None:
    key = members["node-0"].place / "state" / "identity.key"
    thief = _driver(identity.load(key))
    before = members.status()
    async with trio.open_nursery() as nursery:
        await nursery.start(thief.run)
        with pytest.raises(LinkLost) as refused:
            await thief.dial(_coordinator(members))
        nursery.cancel_scope.cancel()
    said = refused.value.message
    holder = participant(before, "node-0").path.rpartition(" ")[2]
    assert f"is connected from {holder} and answers there" in said
    assert any(address in said for address in ("127.0.0.1:", "[::1]:")), said
    after = members.status()
    counted = "transport:second_holder"
    assert after.refused[counted] == before.refused.get(counted, 0) + 1
    assert participant(after, "node-0").epoch == participant(before, "node-0").epoch


def test_random_datagrams_reach_nobody(members: Federation) -> None:
    for address in (*members.status().addresses, *members.node_status("node-0").addresses):
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if "[" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            for size in (0, 1, 20, 1200, 9000):
                sender.sendto(os.urandom(size), (host.strip("[]"), int(port)))
