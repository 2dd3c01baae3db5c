"""A model over HTTP: the openai package, Prometheus and a trace, with real processes."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.federation import until
from tests.e2e.serving import CTX, Serving

pytestmark = pytest.mark.e2e

API, FIGURES = "127.0.0.1:8080", "127.0.0.1:9107"
TALK: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


class Open(Serving):
    """A federation whose coordinator serves HTTP, and whose first node tells figures."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, 2)
        with self.coordinator.config.open("a") as config:
            config.write(f'\n[http]\nenabled = true\naddress = "{API}"\n')
        with self.nodes["node-0"].config.open("a") as config:
            config.write(f'\n[metrics]\naddress = "{FIGURES}"\n')


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    made = Open(tmp_path_factory.mktemp("api"))
    try:
        made.ready()
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def run(here: Open) -> str:
    return here.run("0:2@node-0,2:4@node-1", sessions=2)


@pytest.fixture(scope="module")
def client(run: str) -> Iterator[openai.OpenAI]:
    assert run
    with openai.OpenAI(base_url=f"http://{API}/v1", api_key="none", max_retries=0) as made:
        yield made


def figures(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    told = httpx2.get(f"http://{address}/metrics")
    assert told.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(told.text)
        for sample in family.samples
    }


def complete(client: openai.OpenAI, prompt: str, most: int = 8, **terms: Any) -> Any:
    return client.completions.create(**GREEDY, prompt=prompt, max_tokens=most, **terms)


def test_it_answers_as_prompt_does(here: Open, run: str, client: openai.OpenAI) -> None:
    asked = here.ask(run, "hello", most=8)
    told = complete(client, "hello")
    assert told.choices[0].text == asked.text
    assert told.usage.prompt_tokens == asked.end.prompt_tokens
    assert told.usage.completion_tokens == asked.end.completion_tokens
    assert told.choices[0].finish_reason == asked.end.finish
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *said, usage = complete(client, "hello", **options)
    assert "".join(each.choices[0].text for each in said) == asked.text
    assert usage.usage == told.usage
    drawn: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": 11}
    seeded = client.completions.create(model="tiny", prompt="hello", max_tokens=8, **drawn)
    assert seeded.choices[0].text == here.ask(run, "hello", most=8, **drawn).text


def test_a_chat_streams_and_stops(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=TALK, max_tokens=12)
    text = whole.choices[0].message.content
    assert text
    chunks = client.chat.completions.create(**GREEDY, messages=TALK, max_tokens=12, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == text
    stop = text[len(text) // 2 :][:2]
    cut = client.chat.completions.create(**GREEDY, messages=TALK, max_tokens=12, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_two_clients_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    texts = ["first", "second one", "the third"]
    alone = {text: complete(client, text, 20).choices[0].text for text in texts}
    together: dict[str, str] = {}

    def ask(text: str) -> None:
        with openai.OpenAI(base_url=f"http://{API}/v1", api_key="none") as own:
            together[text] = complete(own, text, 20).choices[0].text

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_what_it_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, "x" * (CTX + 1))
    assert long.value.code == "context_length_exceeded"
    assert f"{CTX + 1}" in long.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=TALK)
    assert unknown.value.code == "model_not_found"


def test_who_leaves_frees_the_session(here: Open, run: str, client: openai.OpenAI) -> None:
    before = here.inspect(run).finished.get("cancelled", 0)
    for _ in range(5):
        stream = complete(client, "hello", 58, stream=True)
        next(iter(stream))
        stream.close()
        until("the session is free", lambda: not here.inspect(run).requests, 5.0)
        if here.inspect(run).finished.get("cancelled", 0) > before:
            return
    raise AssertionError("every answer was faster than its client")


def test_figures_and_trace_agree_with_inspect(
    here: Open, run: str, client: openai.OpenAI, tmp_path: Path
) -> None:
    complete(client, "hello", 20)
    told, node, status = figures(API), figures(FIGURES), here.inspect(run)
    assert told["lensemble_inference_tokens_total", ()] == status.tokens
    for finish, count in status.finished.items():
        assert told["lensemble_inference_answers_total", (("finish", finish),)] == count
    assert status.hop_ms is not None
    hop = told["lensemble_inference_hop_seconds", (("run", run),)]
    assert 0.2 * status.hop_ms < hop * 1e3 < 5 * status.hop_ms
    (stage,) = here.node_status("node-0").stages
    labels = (("run", run), ("stage", "0"))
    assert node["lensemble_stage_chunks_total", labels] == stage.computed
    file = tmp_path / "trace.json"
    command = [sys.executable, "-m", "lensemblectl.app", "trace", run]
    socket = f"--socket={here.coordinator.socket}"
    for more in ([], ["--out", str(file)]):
        done = subprocess.run([*command, socket, *more], check=True, capture_output=True, text=True)
        assert done.stdout
    slices = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    tokens = [each for each in slices if each["pid"] == 0]
    assert [each["name"] for each in tokens][-3:] == ["token 17", "token 18", "token 19"]
    for token in tokens[-10:]:
        inside = [e for e in slices if e["pid"] and e["args"]["step"] == token["args"]["step"]]
        assert [each["name"] for each in inside] == ["wait", "compute", "hand over"] * 2
        assert 0 < sum(each["dur"] for each in inside) < token["dur"]


def test_a_killed_worker_ends_a_stream_with_an_error(
    here: Open, run: str, client: openai.OpenAI
) -> None:
    stream = complete(client, "hello", 58, stream=True)
    pieces = iter(stream)
    next(pieces)
    began = time.monotonic()
    subprocess.run(["kill", "-KILL", str(here.stage_pid("node-1", run))], check=True)
    with pytest.raises(openai.APIError, match="node-1") as caught:
        list(pieces)
    assert time.monotonic() - began < 10
    assert caught.value.code == "worker_fault"
    here.until_over(run)
    with pytest.raises(openai.InternalServerError) as gone:
        complete(client, "hello")
    assert (gone.value.status_code, gone.value.code) == (503, "run_faulted")
