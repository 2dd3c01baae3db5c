"""The HTTP server: what clients may do to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from lensemble import loop_lag
from lensemble.errors import ConfigError
from lensemble.web import serving
from lensemble.web.serving import Receive, Scope, Send

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Answers with a word, or with bytes that never end; counts who is being answered."""

    def __init__(self, *, endless: bool = False) -> None:
        self.endless = endless
        self.now = 0
        self.answered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.now += 1
        try:
            if scope["path"] == "/fault":
                raise ValueError("a fault of the application")
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while self.endless:
                await send(
                    {"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": True}
                )
            await send({"type": "http.response.body", "body": b"word"})
            self.answered += 1
        finally:
            self.now -= 1

    async def until(self, now: int) -> None:
        with trio.fail_after(20):
            while self.now != now:
                await trio.testing.wait_all_tasks_blocked(0.002)


@asynccontextmanager
async def served(app: App) -> AsyncIterator[tuple[str, int]]:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(serving.serve, app, "127.0.0.1:0", "http.address")
        host, _, port = address.partition(":")
        yield host, int(port)
        nursery.cancel_scope.cancel()


async def everything(client: trio.SocketStream) -> bytes:
    said = bytearray()
    with trio.fail_after(serving.LINGER_S / 2):
        while piece := await client.receive_some():
            said += piece
    return bytes(said)


async def test_a_client_that_takes_nothing_holds_up_nobody() -> None:
    app = App(endless=True)
    async with served(app) as (host, port):
        client = await trio.open_tcp_stream(host, port)
        await client.send_all(ASK)
        await app.until(1)
        # Until the kernel's buffers are full too, which it finds out in steps of 0.2 s.
        await trio.testing.wait_all_tasks_blocked(0.6)
        began = trio.current_time()
    assert trio.current_time() - began < 2
    assert app.now == 0
    await client.aclose()


async def test_who_leaves_ends_its_answer() -> None:
    app = App(endless=True)
    async with served(app) as (host, port):
        client = await trio.open_tcp_stream(host, port)
        await client.send_all(ASK)
        await client.receive_some(1)
        await app.until(1)
        await client.aclose()
        await app.until(0)


async def test_who_says_its_last_word_is_not_kept_for_another() -> None:
    async with served(App()) as (host, port), await trio.open_tcp_stream(host, port) as client:
        await client.send_all(ASK)
        await client.receive_some(1)
        await client.send_eof()
        with trio.fail_after(serving.LINGER_S / 2):
            while await client.receive_some():
                pass


async def test_who_has_left_is_not_answered_for_ever() -> None:
    app = App(endless=True)
    async with served(app) as (host, port), await trio.open_tcp_stream(host, port) as client:
        await client.send_all(ASK)
        await client.send_eof()
        with trio.fail_after(2 * serving.LINGER_S):
            try:
                while await client.receive_some():
                    pass
            except trio.BrokenResourceError:
                pass
        await app.until(0)


async def test_one_connection_has_several_answers_and_offers_of_http2_are_passed_over() -> None:
    app = App()
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    async with served(app) as (host, port), await trio.open_tcp_stream(host, port) as client:
        await client.send_all(ASK + ASK[:-2] + offer + b"\r\n")
        await client.send_eof()
        said = await everything(client)
    assert said.count(b"HTTP/1.1 200") == 2
    assert b"101" not in said.partition(b"date")[0]


async def test_a_fault_of_the_application_is_an_answer_with_status_500() -> None:
    app = App()
    async with served(app) as (host, port), await trio.open_tcp_stream(host, port) as client:
        await client.send_all(ASK.replace(b"/ ", b"/fault ", 1))
        await client.send_eof()
        assert b"HTTP/1.1 500" in await everything(client)


async def test_headers_have_a_limit() -> None:
    async with served(App()) as (host, port), await trio.open_tcp_stream(host, port) as client:
        await client.send_all(b"GET / HTTP/1.1\r\nx: " + b"y" * (serving.MAX_HEADER_BYTES + 9000))
        assert b"HTTP/1.1 431" in await everything(client)


async def test_clients_beyond_the_limit_wait_for_a_place() -> None:
    app = App()
    async with served(app) as (host, port):
        idle = [await trio.open_tcp_stream(host, port) for _ in range(serving.MAX_CONNECTIONS)]
        async with await trio.open_tcp_stream(host, port) as late:
            await late.send_all(ASK)
            with trio.move_on_after(0.2) as waits:
                await late.receive_some(1)
            assert waits.cancelled_caught
            await idle[0].aclose()
            with trio.fail_after(20):
                assert await late.receive_some(1)
        for each in idle:
            await each.aclose()


async def test_an_address_in_use_is_a_sentence() -> None:
    async with served(App()) as (host, port):
        with pytest.raises(ConfigError, match=rf'http.address = "{host}:{port}" cannot be bound'):
            await serving.serve(App(), f"{host}:{port}", "http.address")


async def test_passes_of_the_loop_are_seen_and_cost_nothing_when_idle() -> None:
    with loop_lag.watching() as lag:
        for _ in range(5):
            await trio.sleep(0.001)
        end = trio.lowlevel.current_clock().current_time() + 0.03
        while trio.lowlevel.current_clock().current_time() < end:
            pass
        await trio.sleep(0.001)
        seen = lag.seconds.count
        await trio.sleep(0.3)
        assert lag.seconds.count <= seen + 3
    slow = dict(lag.seconds.buckets())
    assert slow["0.025"] < slow["+Inf"]
    assert lag.seconds.total >= 0.03
