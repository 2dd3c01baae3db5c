"""The program that tests global states on public data; a coordinator starts it and asks it.

One JSON object a line, on standard input and output.  It says ``{"ready": windows}`` once the data
are read, then answers each ``{"state": PLACE, "prior": PLACE}`` (checkpoint directories or
safetensors files; no prior: "") by ``{"figures": {...}}``, or by ``{"refused": REASON}`` when that
state cannot be read.  What ends it is the last line: ``{"failed": REASON}``.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol

from lensemble.errors import LensembleError, WorkerFault
from lensemble_node.worker import guard

MAX_REQUEST_BYTES = 1 << 16
EXIT_FAILED, EXIT_NO_MEMORY = 1, 71


class _Tests(Protocol):
    def test(self, state: Path, prior: Path | None) -> dict[str, Any]: ...


class Speaker:
    """Writes lines to where the coordinator listens, and nothing else gets there."""

    def __init__(self) -> None:
        self._out = guard.keep_stdout_clean()

    def say(self, line: dict[str, Any]) -> None:
        os.write(self._out, json.dumps(line, allow_nan=False).encode() + b"\n")


def main(arguments: list[str] | None = None) -> int:
    """Answer until standard input ends: 0 then, 1 after a failure, 71 without memory."""
    given = _parsed(arguments)
    speaker = Speaker()
    try:
        if given.parent:
            guard.die_with(given.parent)
        guard.limit(given.memory_bytes, given.niceness)
        _answer_all(given, speaker)
    except BrokenPipeError:
        return 0
    except LensembleError as error:
        speaker.say({"failed": f"{error.message} {error.remediation}".strip()})
        return EXIT_FAILED
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if not guard.is_out_of_memory(error):
            raise
        speaker.say({"failed": f"{given.memory_bytes} bytes of memory are not enough"})
        return EXIT_NO_MEMORY
    return 0


def _answer_all(given: argparse.Namespace, speaker: Speaker) -> None:
    # After the limits, which this import and its threads must obey.
    from lensemble_node.worker.training.gate_scores import Scorer  # noqa: PLC0415

    scorer = Scorer.of(given)
    speaker.say({"ready": scorer.windows})
    while line := sys.stdin.buffer.readline(MAX_REQUEST_BYTES):
        speaker.say(_answer(scorer, line))


def _answer(scorer: _Tests, line: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        state, prior = str(asked["state"]), str(asked["prior"])
    except (ValueError, KeyError, TypeError) as error:
        raise WorkerFault(f"not a request to test a state: {line[:200]!r}") from error
    try:
        return {"figures": scorer.test(Path(state), Path(prior) if prior else None)}
    except LensembleError as error:
        return {"refused": error.message}


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lensemble_node.worker.training.gate", description=__doc__
    )
    parser.add_argument("--workload", type=Path, required=True, help="TOML or canonical JSON")
    parser.add_argument("--data", type=Path, required=True, help="public trajectories")
    for name in ("observation-key", "image-key", "action-key"):
        parser.add_argument(f"--{name}", action="append", default=[])
    parser.add_argument("--embodiment", default="")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--memory-bytes", type=int, default=0)
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
