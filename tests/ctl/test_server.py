"""The control socket with real sockets: manners, limits, and what happens to bad clients."""

import contextlib
import os
import random
import socket
import stat
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from lensemble.ctl import replies, requests, server, socket_file
from lensemble.ctl.client import Client, DaemonUnreachable, Declined
from lensemble.errors import ConfigError, InvariantError, StorageError
from tests.ctl import scripted


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name: socket paths are at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ctl") as directory:
        yield Path(directory)


@contextlib.asynccontextmanager
async def serving(
    path: Path, answer: server.Answer = scripted.answer
) -> AsyncGenerator[server.Counts, None]:
    async with trio.open_nursery() as nursery:
        counts = await nursery.start(server.serve, path, answer, scripted.GREETING)
        yield counts
        nursery.cancel_scope.cancel()


async def in_thread(path: Path, *asked: requests.Request) -> list[replies.Reply]:
    def ask() -> list[replies.Reply]:
        with Client(path, version="0.1.0", timeout_s=20) as client:
            return [client.ask(request) for request in asked]

    return await trio.to_thread.run_sync(ask)


async def raw(path: Path, *lines: bytes, greet: bool = True) -> bytes:
    """Say ``lines`` and hear until the daemon closes or has answered the last of them."""
    hello = msgspec.json.encode(requests.Hello(ctl_version=1, version="x")) + b"\n"
    stream = await trio.open_unix_socket(path)
    heard = b""
    async with stream:
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(b"".join([hello] * greet + [line + b"\n" for line in lines]))
        with contextlib.suppress(trio.BrokenResourceError):
            while heard.count(b'"End"') + heard.count(b'"Failed"') < len(lines):
                piece = await stream.receive_some()
                if not piece:
                    break
                heard += piece
    return heard


async def test_a_request_is_answered_by_its_reply(place: Path) -> None:
    path = place / "run" / "ctl.sock"
    async with serving(path) as counts:
        first, second = await in_thread(path, requests.Status(), requests.Round(index=3))
        assert (first, second) == (scripted.STATUS, scripted.DETAIL)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
        assert counts.answered == 2
    assert not path.exists()


async def test_a_refusal_says_why_and_what_to_do(place: Path) -> None:
    path = place / "ctl.sock"
    async with serving(path):
        with pytest.raises(Declined, match="no round 9") as caught:
            await in_thread(path, requests.Round(index=9))
        assert caught.value.reply.code == "operator"
        assert caught.value.remediation == "See `lensemblectl rounds`."


async def test_a_broken_promise_ends_the_daemon(place: Path) -> None:
    async def answer(_: requests.Request) -> AsyncGenerator[replies.Reply, None]:
        raise InvariantError("two owners")
        yield

    with pytest.RaisesGroup(InvariantError, flatten_subgroups=True):
        async with serving(place / "ctl.sock", answer):
            await raw(place / "ctl.sock", b'{"type":"Status"}')
            await trio.sleep_forever()
    assert not (place / "ctl.sock").exists()


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(place: Path) -> None:
    path = place / "ctl.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    async with serving(path):
        await in_thread(path, requests.Status())
        with pytest.raises(StorageError, match="another daemon answers"):
            socket_file.bind(path, 1)
        await in_thread(path, requests.Status())


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_not_a_socket_is_left_alone(place: Path, kind: str) -> None:
    path = place / "ctl.sock"
    target = place / "precious"
    target.write_text("precious")
    match kind:
        case "file":
            path.write_text("precious")
        case "directory":
            path.mkdir()
        case _:
            path.symlink_to(target)
    with pytest.raises(StorageError, match="not a socket"):
        socket_file.bind(path, 1)
    assert path.exists()
    assert target.read_text() == "precious"


def test_a_path_that_cannot_be_a_socket(place: Path) -> None:
    with pytest.raises(ConfigError, match="over 107 bytes"):
        socket_file.bind(place / ("x" * 200), 1)
    (place / "file").write_text("")
    with pytest.raises(StorageError, match=r"File exists|Not a directory"):
        socket_file.bind(place / "file" / "ctl.sock", 1)


async def test_a_socket_of_somebody_else_is_not_removed(place: Path) -> None:
    path = place / "ctl.sock"
    async with serving(path):
        path.unlink()
        other = socket_file.bind(path, 1)
    assert path.exists()
    other.close()


async def test_a_deleted_socket_is_made_again_and_its_clients_stay(
    place: Path, mock_clock: trio.testing.MockClock
) -> None:
    path = place / "home" / "ctl.sock"
    async with serving(path) as counts:
        early = await trio.open_unix_socket(path)
        while counts.clients < 1:
            await trio.testing.wait_all_tasks_blocked(0.01)
        path.unlink()
        path.parent.rmdir()
        while not path.exists():
            mock_clock.jump(server.LOOK_S)
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(await in_thread(path, requests.Status())) == 1
        while counts.clients > 1:
            await trio.testing.wait_all_tasks_blocked(0.01)
        await early.send_all(b'{"type":"Hello","ctl_version":1,"version":"x"}\n{"type":"Status"}\n')
        assert b"Greeting" in await early.receive_some()
        await early.aclose()
    assert not path.exists()


def test_who_may_ask() -> None:
    assert socket_file.may_ask(0, 0)
    assert socket_file.may_ask(os.geteuid(), 12345)
    assert not socket_file.may_ask(4_000_000_000, 4_000_000_000)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_another_user_is_refused_by_its_credentials(place: Path) -> None:
    path = place / "ctl.sock"

    def ask_as_nobody() -> int:
        os.chmod(path, 0o666)
        os.chmod(place, 0o755)
        child = os.posix_spawn(
            "/usr/bin/env",
            ["env", "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups",
             "/usr/bin/env", "python3", "-c", ASK, os.fspath(path)],
            os.environ,
        )  # fmt: skip
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    if os.access("/usr/bin/setpriv", os.X_OK) is False:
        pytest.skip("no setpriv")
    async with serving(path) as counts:
        assert await trio.to_thread.run_sync(ask_as_nobody) == 42
        assert counts.refused["ctl:not_permitted"] == 1


ASK = """
import socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
sys.exit(42 if b"not_permitted" in s.recv(4096) else 1)
"""


async def test_another_version_is_refused_by_name(place: Path) -> None:
    path = place / "ctl.sock"
    async with serving(path) as counts:
        heard = await raw(path, b'{"type":"Hello","ctl_version":9,"version":"9.0"}', greet=False)
        assert b"lensemblectl 9.0 speaks version 9" in heard
        assert b"Upgrade the daemon" in heard
        assert b"no_hello" in await raw(path, b'{"type":"Status"}', greet=False)
        assert counts.refused == {"ctl:contract_violation": 1, "ctl:no_hello": 1}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"{}",
        b'{"type":"Nonsense"}',
        b'{"type":"Run"}',
        b'{"type":"Run","rounds":0}',
        b'{"type":"Run","rounds":5,"extra":1}',
        b'{"type":"Run","rounds":"5"}',
        b'{"type":"Status","watch":true,"interval_s":0}',
        b'{"type":"Abort","reason":"' + b"x" * 5000 + b'"}',
        b"\xff\xfe\x00",
        b"[" * 5000,
    ],
)
async def test_a_malformed_request_is_refused_and_the_next_is_answered(
    place: Path, line: bytes
) -> None:
    path = place / "ctl.sock"
    async with serving(path) as counts:
        heard = await raw(path, line, b'{"type":"Status"}')
        assert b'"malformed"' in heard
        assert heard.endswith(b'{"type":"End"}\n')
        assert counts.refused["ctl:malformed"] == 1


async def test_garbage_in_any_amount_leaves_the_daemon_as_it_was(place: Path) -> None:
    path = place / "ctl.sock"
    draw = random.Random(7)
    valid = [msgspec.json.encode(each) for each in (requests.Run(rounds=2), requests.Status())]
    async with serving(path) as counts:
        for _ in range(40):
            lines = []
            for _ in range(20):
                line = bytearray(draw.choice(valid) if draw.random() < 0.7 else draw.randbytes(60))
                for _ in range(draw.randrange(4)):
                    line[draw.randrange(len(line))] = draw.randrange(256)
                lines.append(bytes(line).replace(b"\n", b" "))
            with trio.fail_after(30):
                await raw(path, *lines, greet=draw.random() < 0.9)
        assert counts.refused["ctl:malformed"] > 300
        assert await in_thread(path, requests.Status()) == [scripted.STATUS]


async def test_an_oversized_request_ends_its_connection_only(place: Path) -> None:
    path = place / "ctl.sock"
    async with serving(path) as counts:
        heard = await raw(path, b'{"type":"Join","ticket":"' + b"x" * requests.MAX_REQUEST_BYTES)
        assert b'"oversized"' in heard
        assert counts.refused["ctl:oversized"] == 1
        await in_thread(path, requests.Status())


async def test_a_client_that_leaves_ends_its_answer(place: Path) -> None:
    left = trio.Event()

    async def answer(_: requests.Request) -> AsyncGenerator[replies.Reply, None]:
        try:
            yield replies.Done(message="begun")
            await trio.sleep_forever()
        finally:
            left.set()

    path = place / "ctl.sock"
    async with serving(path, answer) as counts:
        stream = await trio.open_unix_socket(path)
        await stream.send_all(
            b'{"type":"Hello","ctl_version":1,"version":"x"}\n{"type":"Attach"}\n'
        )
        while b"begun" not in await stream.receive_some():
            pass
        await stream.aclose()
        with trio.fail_after(20):
            await left.wait()
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert counts.clients == 0


async def test_a_client_that_does_not_read_delays_nobody(
    place: Path, mock_clock: trio.testing.MockClock
) -> None:
    asked = 0

    async def answer(request: requests.Request) -> AsyncGenerator[replies.Reply, None]:
        nonlocal asked
        if isinstance(request, requests.Status):
            yield scripted.STATUS
            return
        while True:
            asked += 1
            yield replies.Done(message="x" * 10_000)

    path = place / "ctl.sock"
    async with serving(path, answer) as counts:
        stuck = await trio.open_unix_socket(path)
        await stuck.send_all(b'{"type":"Hello","ctl_version":1,"version":"x"}\n{"type":"Attach"}\n')
        await trio.testing.wait_all_tasks_blocked(0.05)
        seen = asked
        await in_thread(path, requests.Status())
        assert asked == seen < 1000
        mock_clock.jump(server.SEND_TIMEOUT_S + 1)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert counts.clients == 0
        assert counts.refused["ctl:slow_client"] >= 1
        await stuck.aclose()


async def test_a_silent_answer_is_kept_alive(
    place: Path, mock_clock: trio.testing.MockClock
) -> None:
    path = place / "ctl.sock"
    async with serving(path):
        stream = await trio.open_unix_socket(path)
        async with stream:
            await stream.send_all(
                b'{"type":"Hello","ctl_version":1,"version":"x"}\n{"type":"Run","rounds":99}\n'
            )
            heard = b""
            while heard.count(b"Alive") < 3:
                await trio.testing.wait_all_tasks_blocked(0.01)
                mock_clock.jump(server.ALIVE_S)
                heard += await stream.receive_some()


async def test_a_client_that_never_says_hello_is_dropped(
    place: Path, mock_clock: trio.testing.MockClock
) -> None:
    path = place / "ctl.sock"
    async with serving(path) as counts:
        stream = await trio.open_unix_socket(path)
        async with stream:
            while not counts.clients:
                await trio.testing.wait_all_tasks_blocked(0.01)
            await trio.testing.wait_all_tasks_blocked(0.05)
            mock_clock.jump(server.HELLO_TIMEOUT_S + 1)
            assert await stream.receive_some() == b""
        assert counts.refused["ctl:no_hello"] == 1


async def test_more_clients_than_allowed_are_told_so(place: Path) -> None:
    path = place / "ctl.sock"
    async with serving(path), contextlib.AsyncExitStack() as stack:
        for _ in range(server.MAX_CLIENTS):
            stream = await stack.enter_async_context(await trio.open_unix_socket(path))
            await stream.send_all(b'{"type":"Hello","ctl_version":1,"version":"x"}\n')
            await stream.receive_some()
        with pytest.raises(Declined, match="32 clients"):
            await in_thread(path, requests.Status())


async def test_many_clients_at_once(place: Path) -> None:
    path = place / "ctl.sock"
    async with serving(path), trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(in_thread, path, requests.Status(), requests.Rounds(limit=3))


def test_nobody_there_is_told_with_the_path(place: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="no such socket") as caught:
        Client(place / "none.sock")
    assert "--socket" in caught.value.remediation
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(place / "dead.sock"))
    with pytest.raises(DaemonUnreachable, match="is gone"):
        Client(place / "dead.sock")


@pytest.mark.parametrize(
    ("said", "part"),
    [
        (b"", "closed the connection"),
        (b"SSH-2.0-OpenSSH\n", "does not speak this protocol"),
        (b'{"type":"End"}\n', "instead of a greeting"),
        (b'{"type":"Greeting"}\n', "missing required field"),
        (b"\xff\n", "does not speak"),
    ],
)
def test_something_else_that_answers(place: Path, said: bytes, part: str) -> None:
    listener = socket_file.bind(place / "x.sock", 1)
    listener.setblocking(True)
    client = partial(Client, place / "x.sock", timeout_s=5)
    with listener, pytest.raises(DaemonUnreachable, match=part):
        _with_peer(listener, said, client)


def _with_peer(listener: socket.socket, said: bytes, client: partial[Client]) -> None:
    """Run ``client`` while a thread accepts it, says ``said`` and closes."""

    def peer() -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(4096)
            accepted.sendall(said)

    thread = threading.Thread(target=peer)
    thread.start()
    try:
        client()
    finally:
        thread.join()


def test_a_daemon_that_says_nothing_is_given_up(place: Path) -> None:
    with (
        socket_file.bind(place / "x.sock", 1),
        pytest.raises(DaemonUnreachable, match=r"no answer within 0\.05 s"),
    ):
        Client(place / "x.sock", timeout_s=0.05)


REQUESTS = msgspec.json.Decoder(requests.Request)
REPLIES = msgspec.json.Decoder(replies.Reply)
NAMES = [kind.__name__ for kind in requests.Request.__args__ + replies.Reply.__args__]
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TAGGED = st.builds(
    lambda name, fields: msgspec.json.encode({**fields, "type": name}),
    st.sampled_from(NAMES),
    st.dictionaries(
        st.sampled_from(["rounds", "limit", "reason", "which", "watch", "uses", "ticket", "index"]),
        TREES,
    ),
)


@given(line=st.binary(max_size=300) | TAGGED)
def test_any_line_decodes_or_is_refused(line: bytes) -> None:
    for decoder in (REQUESTS, REPLIES):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            decoder.decode(line)
