"""``lensemblectl run`` and ``abort``."""

import sys
from collections.abc import Iterator
from typing import Annotated, Protocol

import typer

from lensemble.ctl import replies, requests
from lensemble.errors import OperatorError
from lensemblectl import words
from lensemblectl.exits import FAILED, INTERRUPTED, complain, say, stop
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json

REATTACH = "The rounds go on. Watch them again: lensemblectl run --attach"


def run(
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", "-n", help="Rounds to run.", min=1, max=requests.MAX_ROUNDS),
    ] = None,
    open_timeout: Annotated[
        float | None,
        typer.Option(help="Fail when a round finds no quorum for so many seconds.", min=0.1),
    ] = None,
    attach: Annotated[bool, typer.Option("--attach", help="Watch the run that goes on.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start it, and do not watch.")] = False,
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """Run rounds and show how they go; succeeds only if every one of them closed.

    Ctrl-C leaves the rounds running.

    Example: lensemblectl run --rounds 5
    """
    request = _request(rounds, open_timeout, attach=attach, detach=detach)
    ended = False
    with connect(socket, timeout) as client:
        view = _view(json)
        try:
            with view:
                for reply in client.stream(request):
                    view.see(reply)
                    ended = ended or (isinstance(reply, replies.RunEnded) and reply.completed)
        except KeyboardInterrupt:
            sys.stderr.write(f"\n{REATTACH}{f' --socket {socket}' if socket else ''}\n")
            stop(INTERRUPTED)
    if not ended and not detach:
        stop(FAILED)


def abort(
    reason: Annotated[
        str, typer.Option(help="Recorded with the round.")
    ] = "aborted by the operator",
    socket: Socket = None,
    timeout: Timeout = TIMEOUT_S,
    json: Json = False,
) -> None:
    """End the round in flight and the run; what is committed stays.

    Example: lensemblectl abort --reason "cooling failed"
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.Abort(reason=reason))
    if json or not isinstance(reply, replies.Done):
        put_json(reply)
    else:
        say(reply.message)


def _request(
    rounds: int | None, open_timeout: float | None, *, attach: bool, detach: bool
) -> requests.Run | requests.Attach:
    if attach:
        if rounds or detach or open_timeout is not None:
            raise OperatorError(
                "--attach watches a run as it is and takes no other option of `run`",
                "Leave out --rounds, --open-timeout and --detach.",
            )
        return requests.Attach()
    if not rounds:
        raise OperatorError("how many rounds?", "Say `--rounds N`, or `--attach` to a run.")
    return requests.Run(rounds=rounds, open_timeout_s=open_timeout, detach=detach)


class _View(Protocol):
    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...
    def see(self, reply: replies.Reply) -> None: ...


def _view(json: bool) -> _View:
    if json:
        return _Lines(json=True)
    return _Live() if sys.stdout.isatty() else _Lines(json=False)


class _Lines:
    """A line for each change of state or reason."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._said = ""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def see(self, reply: replies.Reply) -> None:
        if self._json:
            put_json(reply)
            return
        if isinstance(reply, replies.CoordinatorStatus):
            line = words.round_line(reply.round)
            if line != self._said:
                say(line)
            self._said = line
            return
        for line in _told(reply):
            say(line)
        _judge(reply)


class _Live:
    """What has happened scrolls by; what happens now stays below it."""

    def __init__(self) -> None:
        from rich.console import Group  # noqa: PLC0415 - lines need no terminal
        from rich.live import Live  # noqa: PLC0415

        from lensemblectl import render  # noqa: PLC0415

        self._group = Group
        self._parts = render.live
        self._console = render.console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def see(self, reply: replies.Reply) -> None:
        if isinstance(reply, replies.CoordinatorStatus):
            parts = self._parts(reply, self._console.width)
            self._live.update(self._group(*parts), refresh=True)
            return
        for line in _told(reply):
            self._console.print(line, markup=False)
        if isinstance(reply, replies.RunEnded):
            self._live.stop()
            _judge(reply)


def _told(reply: replies.Reply) -> Iterator[str]:
    match reply:
        case replies.RunStarted():
            verb = "goes on" if reply.already else "starts"
            first, last = reply.first_round, reply.first_round + reply.rounds - 1
            which = f"round {first}" if first == last else f"rounds {first} to {last}"
            yield f"run {reply.run} {verb}: {which}"
            yield from (f"warning: {warning}" for warning in reply.warnings)
        case replies.RoundClosed():
            yield words.closed_line(reply.round)
        case replies.RoundAborted():
            yield words.aborted_line(reply)
        case replies.RunEnded(completed=True):
            took = words.duration(reply.seconds)
            all_of = words.counted(reply.rounds, "round")
            yield f"run {reply.run} completed: {all_of} closed in {took}, state {reply.digest}"
        case _:
            return


def _judge(reply: replies.Reply) -> None:
    if isinstance(reply, replies.RunEnded) and not reply.completed:
        complain(
            f"run {reply.run} ended with {reply.closed} of {reply.rounds} rounds closed: "
            f"{reply.reason}",
            reply.remediation,
        )
