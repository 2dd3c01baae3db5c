"""``lensemblectl budget`` and ``lensemblectl privacy plan``."""

from pathlib import Path
from typing import Annotated

import typer

from lensemble.ctl import replies, requests
from lensemble.errors import OperatorError
from lensemblectl import programs, words
from lensemblectl.commands.setup import put_json_object
from lensemblectl.exits import say
from lensemblectl.options import TIMEOUT_S, Json, Socket, Timeout, connect, put_json

plans = typer.Typer(no_args_is_help=True, help="What noise buys, and what it costs.")


def budget(socket: Socket = None, timeout: Timeout = TIMEOUT_S, json: Json = False) -> None:
    """Show what is spent of a node's privacy budget, what is left, and for how many rounds.

    Of a coordinator: what each node reports to have spent.

    Example: lensemblectl budget --socket arm-1
    """
    with connect(socket, timeout) as client:
        reply = client.ask(requests.Status())
    if json:
        put_json(reply)
        return
    match reply:
        case replies.NodeStatus(privacy=replies.PrivacyStatus() as privacy):
            for line in words.budget_lines(privacy):
                say(line)
        case replies.NodeStatus():
            say("no budget is kept: the workload asks for no noise, or is not known yet")
        case replies.CoordinatorStatus():
            _say_reported(reply.participants)
        case _:
            put_json(reply)


def _say_reported(who: tuple[replies.ParticipantStatus, ...]) -> None:
    told = [each for each in who if each.epsilon is not None]
    for each in told:
        say(f"{each.name}: epsilon {each.epsilon:.3f} spent, as it reports")
    if not told:
        raise OperatorError(
            "no node has reported what it spent",
            "Nodes do so with each update, where the workload has privacy.enabled = true.",
        )


@plans.command("plan")
def plan(
    rounds: Annotated[int, typer.Option(help="Rounds to be covered.", min=1, max=1_000_000)],
    epsilon: Annotated[
        float | None, typer.Option(help="Budget; default: the workload's.", min=1e-3, max=1e4)
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Default: the workload's.", min=1e-30, max=0.099)
    ] = None,
    sigma: Annotated[
        float | None,
        typer.Option(help="Noise multiplier; default: the workload's.", min=1e-3, max=1e4),
    ] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="Default: the workload's.", min=1e-6, max=1.0)
    ] = None,
    participants: Annotated[
        int | None, typer.Option(help="Nodes in the mean, for its noise.", min=1, max=1_000_000)
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(help="Workload file; default: the shipped model.", exists=True)
    ] = None,
    json: Json = False,
) -> None:
    """Print the noise that a budget needs, and what is left of learning under it.

    Example: lensemblectl privacy plan --epsilon 8 --rounds 100 --participants 330
    """
    asked = [f"--rounds={rounds}"]
    for name, value in (
        ("epsilon", epsilon),
        ("delta", delta),
        ("sigma", sigma),
        ("sample-rate", sample_rate),
        ("participants", participants),
        ("workload", workload),
    ):
        asked += [] if value is None else [f"--{name}={value}"]
    made = programs.ask("lensemble.privacy", asked)
    if json:
        put_json_object(made)
        return
    for line in words.plan_lines(made):
        say(line)
