"""``lensemblectl report``: writes one HTML file about a federation, or about one run of it."""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from lensemble import files
from lensemble.errors import LensembleError
from lensemble_coord.training.verify import verify_state
from lensemble_report.history import read

EXIT_UNSOUND, EXIT_USAGE = 1, 2
EXTRA = ("jinja2", "markupsafe", "matplotlib")


def main(arguments: list[str] | None = None) -> int:
    """Write the report: 0, or 1 if verification finds problems, or 2 if there is no report."""
    given = _parsed(arguments)
    try:
        return _write(given)
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        sys.stderr.write(
            f"Error: a report needs {error.name}, which is not installed\n"
            "Try: pip install 'lensemble[report]'\n"
        )
        return EXIT_USAGE


def _write(given: argparse.Namespace) -> int:
    from lensemble_report.page import page  # noqa: PLC0415 - of the extra, see ``main``
    from lensemble_report.plots import all_plots  # noqa: PLC0415

    history = read(given.state_dir, given.run)
    verified = verify_state(given.state_dir) if given.verify else None
    text = page(history, all_plots(history), verified, datetime.now(tz=UTC).isoformat())
    files.write_durably(given.out, text.encode(), mode=0o644)
    sound = verified is None or verified.sound
    told = {
        "report": str(given.out),
        "rounds": len(history.rounds),
        "verify": "not done" if verified is None else "sound" if sound else "problems",
    }
    if given.json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stdout.write(f"{given.out}: {told['rounds']} rounds, verify: {told['verify']}\n")
    return 0 if sound else EXIT_UNSOUND


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lensemblectl report", description=__doc__)
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help="or: latest")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    parser.add_argument("--no-verify", dest="verify", action="store_false")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
