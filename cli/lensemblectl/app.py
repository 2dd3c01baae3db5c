"""``lensemblectl``: the verbs, and the exit status of each outcome.

0 done; 1 the outcome is a failure; 2 usage or configuration; 3 a model does not fit the nodes;
4 it could not be provisioned, or its weights not be had; 5 its run faulted; 6 its teardown was not
clean; 69 no daemon answers; 130 interrupted.
"""

import sys

import typer

from lensemble.ctl.client import DaemonUnreachable, Declined
from lensemble.errors import LensembleError
from lensemblectl.commands import (
    asking,
    backup,
    checkpoint,
    data,
    doctor,
    draining,
    keys,
    members,
    model_runs,
    placing,
    privacy,
    programs,
    report,
    rounds,
    run,
    setup,
    status,
    tracing,
)
from lensemblectl.exits import (
    FAILED,
    INFEASIBLE,
    INTERRUPTED,
    NOT_PROVISIONED,
    OK,
    UNREACHABLE,
    USAGE,
    complain,
)

USAGE_CODES = frozenset({"config", "context_length_exceeded", "malformed"})
MODEL_CODES = frozenset({"model_file", "unsupported_model"})

# What every complaint about arguments derives from; typer exports only the most specific ones.
MISUSE: type[Exception] = typer.BadParameter.mro()[2]

app = typer.Typer(
    name="lensemblectl",
    help="Ask and command the daemons of Lensemble on this machine.",
    epilog=(
        "Exit status: 0 done, 1 the outcome is a failure, 2 usage or configuration, 3 a model does "
        "not fit the nodes, 4 it could not be provisioned or its weights not be had, 5 its run "
        "faulted, 6 its teardown was not clean, 69 no daemon answers, 130 interrupted."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

START, WORK, MODELS, LOOK, FILES, TRY = (
    "Setting up",
    "Working",
    "Models over several nodes",
    "Looking",
    "Proof and files",
    "Trying out",
)

app.add_typer(setup.init, name="init", rich_help_panel=START)
app.command("invite", rich_help_panel=START)(setup.invite)
app.command("join", rich_help_panel=START)(setup.join)
app.command("leave", rich_help_panel=START)(setup.leave)
app.command("revoke", rich_help_panel=START)(keys.revoke)
app.command("rotate-key", rich_help_panel=START)(keys.rotate_key)
app.command("run", rich_help_panel=WORK)(run.run)
app.command("abort", rich_help_panel=WORK)(run.abort)
app.command("drain", rich_help_panel=WORK)(draining.drain)
app.command("plan", rich_help_panel=MODELS)(placing.plan)
app.command("provision", rich_help_panel=MODELS)(placing.provision)
app.command("prompt", rich_help_panel=MODELS)(asking.prompt)
app.command("chat", rich_help_panel=MODELS)(asking.chat)
app.command("runs", rich_help_panel=MODELS)(model_runs.runs)
app.command("inspect", rich_help_panel=MODELS)(model_runs.inspect)
app.command("trace", rich_help_panel=MODELS)(tracing.trace)
app.command("stop", rich_help_panel=MODELS)(model_runs.stop_run)
app.command("teardown", rich_help_panel=MODELS)(model_runs.teardown)
app.command("doctor", rich_help_panel=LOOK)(doctor.doctor)
app.command("status", rich_help_panel=LOOK)(status.status)
app.command("members", rich_help_panel=LOOK)(members.members)
app.command("budget", rich_help_panel=LOOK)(privacy.budget)
app.add_typer(privacy.plans, name="privacy", rich_help_panel=LOOK)
app.command("rounds", rich_help_panel=LOOK)(rounds.rounds)
app.command("round", rich_help_panel=LOOK)(rounds.one_round)
app.command("events", rich_help_panel=LOOK)(rounds.events)
app.add_typer(checkpoint.verbs, name="checkpoint", rich_help_panel=FILES)
app.command("verify", rich_help_panel=FILES)(programs.verify)
app.command("backup", rich_help_panel=FILES)(backup.backup)
app.command("restore", rich_help_panel=FILES)(backup.restore)
app.command("report", rich_help_panel=FILES)(report.report)
app.add_typer(data.verbs, name="data", rich_help_panel=FILES)
app.command("probe", rich_help_panel=FILES, context_settings=programs.PASSED_ON)(programs.probe)
app.command("models", rich_help_panel=FILES, context_settings=programs.PASSED_ON)(programs.models)
app.command("simulate", rich_help_panel=TRY, context_settings=programs.PASSED_ON)(programs.simulate)
app.command("demo", rich_help_panel=TRY, context_settings=programs.PASSED_ON)(programs.demo)
app.command("demo-inference", rich_help_panel=TRY, context_settings=programs.PASSED_ON)(
    programs.demo_inference
)
app.command("version", rich_help_panel=TRY)(programs.version)


def main() -> None:
    """The console script."""
    sys.exit(answer(sys.argv[1:]))


def answer(arguments: list[str]) -> int:
    """Perform the command in ``arguments`` and return its exit status."""
    try:
        status_of = app(arguments, prog_name="lensemblectl", standalone_mode=False)
        sys.stdout.flush()
    except MISUSE as error:
        return _misused(error)
    except LensembleError as error:
        complain(error.message, error.remediation)
        return _status_for(error)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return status_of if isinstance(status_of, int) else OK


def _status_for(error: LensembleError) -> int:
    match error:
        case DaemonUnreachable():
            return UNREACHABLE
        case Declined():
            return _status_of(error.reply.code)
        case _:
            return USAGE


def _status_of(code: str) -> int:
    if code in USAGE_CODES:
        return USAGE
    if code == "plan_infeasible":
        return INFEASIBLE
    return NOT_PROVISIONED if code in MODEL_CODES or code.startswith("weights") else FAILED


def _misused(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "lensemblectl")
    format_message = getattr(error, "format_message", error.__str__)
    if type(error).__name__ == "NoArgsIsHelpError":
        # Its message is the help text of the verb, which has been printed.
        return USAGE
    complain(format_message(), f"{path} --help")
    return USAGE


if __name__ == "__main__":
    main()
