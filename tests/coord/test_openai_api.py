"""The HTTP API of a coordinator as the `openai` package sees it, on scripted stages."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from lensemble.ctl import replies, requests
from lensemble_coord.http import keys
from tests.coord.scripted_stage import answer
from tests.coord.test_model_runs import Rig, rig

Got = TypeVar("Got")
MODEL = "tiny"
TALK: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


class Api:
    """A rig with its HTTP address, and clients that live in threads."""

    def __init__(self, here: Rig, address: str) -> None:
        self.here = here
        self.address = address
        self.client = openai.OpenAI(
            base_url=f"http://{address}/v1", api_key="not-needed", max_retries=0, timeout=20
        )

    async def call(self, asked: Callable[[], Got]) -> Got:
        with trio.fail_after(30):
            return await trio.to_thread.run_sync(asked, abandon_on_cancel=True)

    async def complete(self, prompt: Any = "hello there", **terms: Any) -> Any:
        asked = {**GREEDY, "prompt": prompt, "max_tokens": 5, **terms}
        return await self.call(lambda: self.client.completions.create(**asked))

    async def chat(self, **terms: Any) -> Any:
        asked = {**GREEDY, "messages": TALK, "max_tokens": 5, **terms}
        return await self.call(lambda: self.client.chat.completions.create(**asked))

    async def pieces(self, **terms: Any) -> list[Any]:
        """All chunks of a streamed chat."""

        def ask() -> list[Any]:
            asked = {**GREEDY, "messages": TALK, "max_tokens": 5, "stream": True, **terms}
            return list(self.client.chat.completions.create(**asked))

        return await self.call(ask)

    async def raw(self, method: str, path: str, **terms: Any) -> httpx2.Response:
        url = f"http://{self.address}{path}"
        return await self.call(lambda: httpx2.request(method, url, timeout=20, **terms))

    async def figures(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        told = await self.raw("GET", "/metrics")
        assert told.status_code == 200
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(told.text)
            for sample in family.samples
        }

    def text(self, tokens: list[int]) -> str:
        (run, *_) = self.here.orchestrator.runs.values()
        raw = b"".join(run.model.tokenizer.token_bytes(each) for each in tokens)
        return raw.decode(errors="replace")

    def expected(self, prompt: str = "hello there", most: int = 5) -> str:
        return self.text(answer(self.here.tokens(prompt), most))


async def until(met: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not met():
            await trio.testing.wait_all_tasks_blocked(0.001)


@asynccontextmanager
async def api(tmp_path: Path, ready: bool = True, **terms: Any) -> AsyncIterator[Api]:
    sessions = terms.pop("sessions", 2)
    http = {"enabled": True, "address": "127.0.0.1:0", **terms.pop("http", {})}
    async with rig(tmp_path, http=http, **terms) as here:
        if ready:
            await here.provision(sessions=sessions)
        made = Api(here, here.coordinator.serving.surfaces["http"])
        with made.client:
            yield made


async def test_what_there_is(tmp_path: Path) -> None:
    async with api(tmp_path, ready=False) as here:
        assert (await here.raw("GET", "/health")).json() == {"status": "ok"}
        assert (await here.call(here.client.models.list)).data == []
        await here.here.provision()
        (model,) = (await here.call(here.client.models.list)).data
        assert (model.id, model.owned_by) == (MODEL, "lensemble")
        assert (await here.call(lambda: here.client.models.retrieve(MODEL))).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await here.call(lambda: here.client.models.retrieve("a/b"))


async def test_a_completion_is_what_prompt_answers(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        told = await here.complete()
        *tokens, end = await here.here.prompt("hello there", most=5)
        assert told.choices[0].text == here.expected()
        assert told.choices[0].text == "".join(each.text for each in tokens) + end.text
        assert told.choices[0].finish_reason == "length"
        assert told.usage.prompt_tokens == end.prompt_tokens
        assert (told.usage.completion_tokens, told.usage.total_tokens) == (5, 5 + end.prompt_tokens)
        ids = list(here.here.tokens("hello there"))
        assert (await here.complete(ids)).choices[0].text == here.expected()
        assert (await here.complete(["hello there"])).choices[0].text == here.expected()


async def test_a_chat_streams_the_same_as_it_answers_whole(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        whole = await here.chat()
        chunks = await here.pieces(stream_options={"include_usage": True})
        *said, last, usage = chunks
        assert "".join(each.choices[0].delta.content or "" for each in [*said, last]) == (
            whole.choices[0].message.content
        )
        assert said[0].choices[0].delta.role == "assistant"
        assert [each.choices[0].finish_reason for each in said] == [None] * len(said)
        assert last.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
        assert usage.choices == []
        assert usage.usage == whole.usage
        assert len({each.id for each in chunks}) == 1
        without = await here.pieces()
        assert all(each.usage is None for each in without)
        assert without[-1].choices[0].finish_reason == "length"
        list_of_parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        again = await here.chat(messages=list_of_parts, user="me", n=1, metadata={"a": "b"})
        assert again.choices[0].message.content == whole.choices[0].message.content


async def test_a_stop_string_ends_an_answer_before_it(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        full = here.expected(most=12)
        at = full[3:5]
        for stop in (at, [at, "never said"]):
            told = await here.complete(max_tokens=12, stop=stop)
            assert told.choices[0].text == full[: full.index(at)]
            assert told.choices[0].finish_reason == "stop"


async def test_two_clients_at_once_get_what_each_gets_alone(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        for each in here.here.stages:
            each.slow_s = 0.002
        got: dict[str, str] = {}

        async def ask(text: str) -> None:
            got[text] = (await here.complete(text, max_tokens=20)).choices[0].text

        async with trio.open_nursery() as nursery:
            for text in ("first", "second", "third"):
                nursery.start_soon(ask, text)
        assert got == {text: here.expected(text, 20) for text in got}
        assert len(got) == 3


async def test_a_seed_draws_the_same_and_a_default_is_drawn(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        await here.complete(temperature=0.7, top_p=0.9, seed=7, extra_body={"top_k": 5})
        await here.complete(temperature=None)
        (run,) = here.here.orchestrator.runs.values()
        assert run.finished["length"] == 2


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 2}, "unsupported_parameter", "n"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "unsupported_parameter",
        "tools",
    ),
    ({"logit_bias": {"5": 1}}, "unsupported_parameter", "logit_bias"),
    ({"frequency_penalty": 0.5}, "unsupported_parameter", "frequency_penalty"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ({"logprobs": True}, "unsupported_parameter", "logprobs"),
    ({"extra_body": {"mirostat": 2}}, "unknown_parameter", "mirostat"),
    ({"temperature": -1}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"stop": [""]}, "invalid_value", "stop[0]"),
    ({"seed": -1}, "invalid_value", "seed"),
    ({"max_completion_tokens": 9}, "invalid_value", "max_tokens"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "unsupported_parameter",
        "messages[0].content[0]",
    ),
]


async def test_what_is_not_honoured_is_refused_by_name(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        before = [each.landed for each in here.here.stages]
        for terms, code, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await here.chat(**terms)
            assert (caught.value.code, caught.value.param) == (code, param), terms
            assert param.partition("[")[0] in caught.value.message
        assert [each.landed for each in here.here.stages] == before


async def test_too_long_a_prompt_says_both_numbers(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        with pytest.raises(openai.BadRequestError) as caught:
            await here.complete("x" * 65)
        assert caught.value.code == "context_length_exceeded"
        assert "65" in caught.value.message
        assert "64" in caught.value.message
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            await here.complete([1 << 20])


async def test_an_unknown_model_is_not_found_and_one_that_faulted_is_unavailable(
    tmp_path: Path,
) -> None:
    async with api(tmp_path) as here:
        with pytest.raises(openai.NotFoundError) as unknown:
            await here.chat(model="gpt-4")
        assert unknown.value.code == "model_not_found"
        assert f"`{MODEL}`" in unknown.value.message
        (run,) = here.here.orchestrator.runs
        await here.here.stages[1].node.link.close("killed")
        await here.here.until_over(run)
        with pytest.raises(openai.InternalServerError) as faulted:
            await here.chat()
        assert (faulted.value.status_code, faulted.value.code) == (503, "run_faulted")
        assert run in faulted.value.message


async def test_a_model_that_is_not_ready_is_unavailable(tmp_path: Path) -> None:
    async with api(tmp_path, ready=False) as here:
        here.here.stages[0].never_ready = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.here.provision)
            await until(lambda: any(each.orders for each in here.here.stages))
            with pytest.raises(openai.InternalServerError) as caught:
                await here.chat()
            assert (caught.value.status_code, caught.value.code) == (503, "model_not_ready")
            assert "its run is provisioning" in caught.value.message
            assert (await here.call(here.client.models.list)).data == []
            told = await here.figures()
            assert told["lensemble_inference_runs", (("state", "provisioning"),)] == 1
            await here.here.last(requests.StopRun())


async def test_a_fault_in_the_middle_ends_a_stream_with_an_error(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        for each in here.here.stages:
            each.slow_s = 0.01
        said: list[str] = []

        def ask() -> str | None:
            asked = {**GREEDY, "messages": TALK, "max_tokens": 50, "stream": True}
            with pytest.raises(openai.APIError, match="node-1") as caught:
                said.extend(
                    each.choices[0].delta.content or ""
                    for each in here.client.chat.completions.create(**asked)
                )
            return caught.value.code

        async def break_it() -> None:
            (run,) = here.here.orchestrator.runs.values()
            await until(lambda: any(each.drawn > 3 for each in run.requests.values()))
            await here.here.stages[1].node.link.close("killed")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(break_it)
            assert await here.call(ask) == "link_lost"
        assert "".join(said)


async def test_a_stream_goes_on_over_a_replaced_stage(tmp_path: Path) -> None:
    async with api(tmp_path, ready=False, nodes=3) as here:
        await here.here.provision(split="0:2@node-0,2:4@node-1", on_fault="replace")
        for each in here.here.stages:
            each.slow_s = 0.01
        raw: list[str] = []

        def ask() -> None:
            asked = {**GREEDY, "prompt": "hello there", "max_tokens": 25, "stream": True}
            with here.client.completions.with_streaming_response.create(**asked) as told:
                raw.extend(told.iter_lines())

        async def lose() -> None:
            (run,) = here.here.orchestrator.runs.values()
            await until(lambda: any(each.drawn > 5 for each in run.requests.values()))
            await here.here.stages[1].node.link.close("killed")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            await here.call(ask)
        lines = [each.removeprefix("data: ") for each in raw if each.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(each)["choices"][0] for each in lines]
        assert "".join(each["text"] for each in chunks) == here.expected(most=25)
        assert chunks[-1]["finish_reason"] == "length"
        assert [each for each in raw if each.startswith(":")] == [
            ": a stage is replaced; the answer goes on"
        ]


async def test_a_full_queue_says_when_to_ask_again(tmp_path: Path) -> None:
    async with api(tmp_path, sessions=1, max_waiting=1) as here:
        for each in here.here.stages:
            each.moving = trio.Event()
        (run,) = here.here.orchestrator.runs.values()
        async with trio.open_nursery() as nursery:
            for text in ("first", "second"):
                nursery.start_soon(here.complete, text)
                await until(lambda: len(run.requests) > run.waiting)
            await until(lambda: run.waiting == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                await here.complete("third")
            assert caught.value.response.headers["retry-after"] == "2"
            assert caught.value.code == "queue_full"
            for each in here.here.stages:
                each.moving.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_frees_the_session(tmp_path: Path, stream: bool) -> None:
    async with api(tmp_path, sessions=1) as here:
        for each in here.here.stages:
            each.slow_s = 0.01
        (run,) = here.here.orchestrator.runs.values()
        asked = {**GREEDY, "prompt": "hi", "max_tokens": 60, "stream": stream}
        content = json.dumps(asked).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {here.address}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        host, _, port = here.address.partition(":")
        client = await trio.open_tcp_stream(host, int(port))
        await client.send_all(head.encode() + content)
        await until(lambda: any(each.drawn > 2 for each in run.requests.values()))
        await client.aclose()
        before = run.ring.steps
        await until(lambda: not run.requests)
        assert run.ring.steps <= before + 2
        assert run.finished["cancelled"] == 1
        assert (await here.complete(max_tokens=3)).choices[0].finish_reason == "length"


async def test_the_run_with_a_free_session_answers(tmp_path: Path) -> None:
    async with api(tmp_path, sessions=1) as here:
        first = next(iter(here.here.orchestrator.runs.values()))
        second_status = await here.here.provision(sessions=1)
        second = here.here.orchestrator.runs[second_status.run]
        for each in here.here.stages:
            each.slow_s = 0.01
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(here.complete)
        assert (first.finished["length"], second.finished["length"]) == (1, 1)
        assert len((await here.call(here.client.models.list)).data) == 1


async def test_bodies_hosts_and_methods_are_limited(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        path = "/v1/completions"
        json_type = {"content-type": "application/json"}
        cases: list[tuple[int, str, dict[str, Any]]] = [
            (413, "POST", {"content": b" " * (1 << 20) + b"{}", "headers": json_type}),
            (415, "POST", {"content": b"{}", "headers": {"content-type": "text/plain"}}),
            (400, "POST", {"content": b"{", "headers": json_type}),
            (400, "POST", {"content": b"[" * 100_000, "headers": json_type}),
            (400, "POST", {"content": b"[]", "headers": json_type}),
            (421, "POST", {"content": b"{}", "headers": {**json_type, "host": "evil.example"}}),
            (405, "GET", {}),
        ]
        for status, method, terms in cases:
            told = await here.raw(method, path, **terms)
            assert told.status_code == status, terms
            assert told.json()["error"]["message"]
        assert (await here.raw("GET", "/nothing")).status_code == 404
        too_long = await here.raw("GET", "/health", headers={"x": "y" * (1 << 15)})
        assert too_long.status_code in {400, 431}
        assert (await here.complete()).choices[0].text == here.expected()


async def test_requests_beyond_the_limit_are_told_to_wait(tmp_path: Path) -> None:
    async with api(tmp_path, http={"max_requests": 1}) as here:
        for each in here.here.stages:
            each.moving = trio.Event()
        (run,) = here.here.orchestrator.runs.values()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.complete)
            await until(lambda: bool(run.requests))
            with pytest.raises(openai.RateLimitError) as caught:
                await here.complete()
            assert caught.value.code == "too_many_requests"
            assert caught.value.response.headers["retry-after"]
            assert (await here.raw("GET", "/health")).status_code == 200
            for each in here.here.stages:
                each.moving.set()


async def test_garbage_ends_its_connection_and_nothing_else(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        host, _, port = here.address.partition(":")
        for piece in (
            b"\x00\xff" * 600,
            b"GET \xff\xfe HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
            b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nhttp2-settings: ===\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10\r\n\r\n{",
        ):
            with trio.fail_after(20):
                client = await trio.open_tcp_stream(host, int(port))
                async with client:
                    await client.send_all(piece)
                    await client.send_eof()
                    try:
                        while await client.receive_some():
                            pass
                    except trio.BrokenResourceError:
                        continue
        assert (await here.complete()).choices[0].text == here.expected()


async def test_keys_are_asked_for_where_there_are_any(tmp_path: Path) -> None:
    key = "k" * 20
    file = tmp_path / "keys"
    file.write_text(f"# mine\n{key}\n")
    file.chmod(0o600)
    async with api(tmp_path, http={"api_keys": (file,)}) as here:
        assert (await here.raw("GET", "/health")).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {key}"}):
            told = await here.raw("GET", "/v1/models", headers=headers)
            assert told.status_code == 401
            assert told.json()["error"]["code"] == "invalid_api_key"
            assert (await here.raw("GET", "/metrics", headers=headers)).status_code == 401
        with openai.OpenAI(base_url=f"http://{here.address}/v1", api_key=key) as client:
            assert len((await here.call(client.models.list)).data) == 1


def test_files_of_keys_that_are_no_use(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(Exception, match="cannot be read"):
        keys.read([file])
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(Exception, match="under 16"):
        keys.read([file])
    file.write_text("long enough, this one\n")
    file.chmod(0o644)
    with pytest.raises(Exception, match="everybody"):
        keys.read([file])


async def test_figures_agree_with_status(tmp_path: Path) -> None:
    async with api(tmp_path) as here:
        for _ in range(3):
            await here.complete()
        with pytest.raises(openai.NotFoundError):
            await here.chat(model="other")
        told = await here.figures()
        run: replies.ModelRunStatus = await here.here.status()
        seen: replies.CoordinatorStatus = here.here.coordinator.serving.answers.observer.status()
        assert told["lensemble_inference_tokens_total", ()] == run.tokens == 15
        assert told["lensemble_inference_prompt_tokens_total", ()] == 24
        assert told["lensemble_inference_answers_total", (("finish", "length"),)] == 3
        assert told["lensemble_inference_sessions", (("use", "free"),)] == 2
        assert told["lensemble_inference_sessions", (("use", "in_use"),)] == 0
        assert told["lensemble_inference_requests_waiting", ()] == 0
        assert told["lensemble_inference_runs", (("state", run.state),)] == 1
        assert told["lensemble_inference_first_token_seconds_count", ()] == 3
        assert told["lensemble_inference_trip_seconds_count", ()] == 16
        assert told["lensemble_participants", (("state", "connected"),)] == 2
        listed = here.here.coordinator.serving.members.listing("")
        for state in ("alive", "suspect", "dead", "left"):
            count = sum(each.state == state for each in listed.members)
            assert told["lensemble_members", (("state", state),)] == count
        for edge in seen.edges:
            labels = (("direction", edge.direction), ("node", edge.peer))
            assert told["lensemble_edge_bytes_total", labels] == edge.bytes
        asked = (("path", "/v1/completions"), ("status", "200"))
        assert told["lensemble_http_requests_total", asked] == 3
        assert told["lensemble_event_loop_pass_seconds_count", ()] > 100
        await here.here.last(requests.TeardownRun())
        told = await here.figures()
        assert told["lensemble_inference_tokens_total", ()] == 15
        assert told["lensemble_inference_runs", (("state", "provisioned"),)] == 0
