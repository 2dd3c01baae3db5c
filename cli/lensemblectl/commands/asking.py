"""``lensemblectl prompt`` and ``chat``: questions to a model that is provisioned."""

import sys
from typing import Annotated, Any, TypeAlias

import typer

from lensemble.ctl import replies, requests
from lensemblectl import model_words
from lensemblectl.exits import FAILED, INTERRUPTED, RUN_FAULTED, complain, stop
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json

RunId: TypeAlias = Annotated[
    str, typer.Option("--run", help="The beginning of its id.", show_default="the only one")
]
MaxTokens: TypeAlias = Annotated[
    int, typer.Option(help="Longest answer, in tokens.", min=1, max=1 << 20)
]
Temperature: TypeAlias = Annotated[
    float, typer.Option(help="0 always takes the likeliest token.", min=0, max=100)
]
TopK: TypeAlias = Annotated[
    int, typer.Option(help="Draw from so many likeliest tokens; 0: from all.", min=0)
]
TopP: TypeAlias = Annotated[
    float, typer.Option(help="Draw from the likeliest tokens of this mass together.", max=1)
]
Penalty: TypeAlias = Annotated[
    float, typer.Option("--repeat-penalty", help="Over 1: less likely to repeat itself.", max=100)
]
Seed: TypeAlias = Annotated[int, typer.Option(help="The same seed draws the same answer.", min=0)]
System: TypeAlias = Annotated[
    str, typer.Option(help="What the model is told to be.", show_default="the model's own")
]


def prompt(
    text: Annotated[str, typer.Argument(help="The question; - reads standard input.")],
    run: RunId = "",
    system: System = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on with the text, without a chat template.")
    ] = False,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    repeat_penalty: Penalty = 1.0,
    seed: Seed = 0,
    stop_at: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")
    ] = None,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Ask a model that is provisioned, and print its answer as it comes.

    Ctrl-C ends the answer.

    Example: lensemblectl prompt "What is the capital of France?"
    """
    said = sys.stdin.read() if text == "-" else text
    asked: dict[str, Any] = {"text": said} if raw else {"turns": _turns(system, said)}
    request = requests.Prompt(
        run=run,
        **asked,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        stop=tuple(stop_at or ()),
    )
    with connect(socket, timeout) as client:
        try:
            _, end = _show(client.stream(request), json=json)
        except KeyboardInterrupt:
            client.close()
            sys.stderr.write("\n")
            stop(INTERRUPTED)
    status = _judge(end)
    if sys.stdout.isatty() and end is not None and not json:
        sys.stderr.write(f"{model_words.answer_line(end)}\n")
    if status:
        stop(status)


def chat(
    run: RunId = "",
    system: System = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    repeat_penalty: Penalty = 1.0,
    seed: Seed = 0,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Talk with a model that is provisioned, a line at a time.

    Ctrl-C ends an answer; Ctrl-D or an empty line ends the conversation.

    Example: lensemblectl chat --system "Answer in one sentence."
    """
    turns = list(_turns(system, ""))[:-1]
    while line := _line():
        turns.append(requests.Turn(role="user", content=line))
        request = requests.Prompt(
            run=run,
            turns=tuple(turns),
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
        )
        said = ""
        with connect(socket, timeout) as client:
            try:
                said, end = _show(client.stream(request), json=json)
            except KeyboardInterrupt:
                client.close()
                sys.stderr.write("\n")
                del turns[-1]
                continue
        if status := _judge(end):
            stop(status)
        turns.append(requests.Turn(role="assistant", content=said))


def _turns(system: str, said: str) -> tuple[requests.Turn, ...]:
    first = (requests.Turn(role="system", content=system),) if system else ()
    return (*first, requests.Turn(role="user", content=said))


def _line() -> str:
    """What the person says next; empty at the end."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return sys.stdin.readline().strip()


def _show(answer: Any, *, json: bool) -> tuple[str, replies.Answered | None]:  # noqa: ANN401
    """Print ``answer`` as it comes; its text and its end."""
    said: list[str] = []
    end: replies.Answered | None = None
    for reply in answer:
        if isinstance(reply, replies.Answered):
            end = reply
        if json:
            put_json(reply)
        elif isinstance(reply, replies.Paused):
            sys.stderr.write(f"{model_words.paused_line(reply)}\n")
        text = getattr(reply, "text", "")
        said.append(text)
        if not json and text:
            sys.stdout.write(text)
            sys.stdout.flush()
    if not json and said:
        sys.stdout.write("\n")
    return "".join(said), end


def _judge(end: replies.Answered | None) -> int:
    """The exit status of an answer that ended so; says what is wrong."""
    if end is None:
        complain("the run ended before the answer", "lensemblectl runs")
        return RUN_FAULTED
    if end.fault is not None:
        model_words.complain_of(end.run, end.fault)
        return RUN_FAULTED
    if end.finish == "cancelled":
        complain("the answer was cancelled: its run was stopped", "lensemblectl runs")
        return FAILED
    return 0
