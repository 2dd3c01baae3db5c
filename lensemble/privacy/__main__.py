"""Prints one plan as JSON; what ``lensemblectl privacy plan`` runs."""

import argparse
import sys
from pathlib import Path

import msgspec
from pydantic import ValidationError

from lensemble import config
from lensemble.errors import ConfigError, LensembleError
from lensemble.privacy import plan
from lensemble.workload import FieldTerms, Privacy, Workload

_USAGE = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lensemble.privacy")
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--participants", type=int)
    for name in ("epsilon", "delta", "sigma", "sample-rate"):
        parser.add_argument(f"--{name}", type=float)
    options = parser.parse_args()
    try:
        made = plan.make(
            _workload(options),
            options.rounds,
            participants=options.participants,
        )
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return _USAGE
    sys.stdout.write(msgspec.json.encode(made).decode() + "\n")
    return 0


def _workload(options: argparse.Namespace) -> Workload:
    """The workload asked about, with the options in place of its own terms."""
    base = Workload() if options.workload is None else config.load(options.workload, Workload)
    asked = {
        "epsilon": options.epsilon,
        "delta": options.delta,
        "noise_multiplier": options.sigma,
        "sample_rate": options.sample_rate,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    terms = base.privacy.model_dump() | given | {"enabled": True}
    # A plan is arithmetic: whether the field has room is checked where the workload is used.
    room = FieldTerms(bits=base.field.bits, k=8, n_max=base.field.n_max)
    try:
        return base.model_copy(update={"privacy": Privacy.model_validate(terms), "field": room})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{where or 'privacy'}: {first['msg']}", "Correct that option."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
