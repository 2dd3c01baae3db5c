"""``lensemble-node CONFIG`` serves; ``lensemble-node check CONFIG`` only looks."""

import argparse
import os
import signal
import sys
import traceback
import types
from pathlib import Path

import trio

from lensemble import identity, logs
from lensemble.config import load
from lensemble.errors import LensembleError
from lensemble.state_dir import IDENTITY_NAME
from lensemble.transport.iroh_driver import IrohDriver
from lensemble.version import BUILD
from lensemble_node import daemon, home
from lensemble_node.config import NodeConfig

EXIT_FATAL = 1
EXIT_CONFIG = 2


def main(arguments: list[str] | None = None) -> int:
    """The daemon's command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="lensemble-node", description="A node of a Lensemble federation."
    )
    parser.add_argument("--version", action="version", version=BUILD)
    parser.add_argument("words", nargs="+", metavar="[check] CONFIG")
    words = parser.parse_args(arguments).words
    if len(words) > 2 or (len(words) == 2 and words[0] != "check"):
        parser.error("give one configuration file, or `check` and one")
    try:
        config = load(Path(words[-1]), NodeConfig)
        home.membership(config)
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return EXIT_CONFIG
    if len(words) == 2:
        sys.stdout.write(f"{words[-1]} is a valid configuration of a node.\n")
        return 0
    return _serve(config)


def _serve(config: NodeConfig) -> int:
    os.umask(0o007)
    logs.configure(config.log.level, config.log.format)
    sys.excepthook = _last_words
    status = 0
    try:
        trio.run(_until_signal, config)
    except* LensembleError as errors:
        first = _first(errors)
        sys.stderr.write(f"fatal: {first.message} {first.remediation}\n")
        status = EXIT_FATAL
    return status


def _last_words(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """A fault of this program: everything about it, and the line an operator looks for."""
    traceback.print_exception(kind, error, trace)
    sys.stderr.write(f"fatal: {error!r}\n")


def _first(errors: BaseExceptionGroup[LensembleError]) -> LensembleError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    if isinstance(found, LensembleError):
        return found
    raise found


async def _until_signal(config: NodeConfig) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            me = identity.load_or_create(config.state_dir / IDENTITY_NAME)
            listen = config.listen
            driver = IrohDriver(
                me,
                listen.addresses,
                heartbeat_s=listen.heartbeat_s,
                heartbeat_timeout_s=listen.heartbeat_timeout_s,
            )
            await nursery.start(daemon.serve, config, driver)
            async for received in signals:
                logs.logger("node").info("node.signal", signal=signal.Signals(received).name)
                nursery.cancel_scope.cancel()
                return


if __name__ == "__main__":
    sys.exit(main())
