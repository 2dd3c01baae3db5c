"""Figures as people read them, and sentences made of replies."""

from datetime import UTC, datetime

from lensemble.ctl import replies

SHORT_HEX = 12
MAX_NAMES = 5


def duration(seconds: float) -> str:
    """``0.3 s``, ``42 s``, ``3 min 12 s``, ``2 h 05 min``, ``4 d 3 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 2 * 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def brief(seconds: float) -> str:
    """``0.4s``, ``73s``, ``12min``, ``3h``: for the cell of a table."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def milliseconds(value: float) -> str:
    """``<1 ms``, ``12 ms``."""
    return "<1 ms" if value < 1 else f"{value:.0f} ms"


def size(count: int) -> str:
    """``912 B``, ``12.3 MB``: powers of 1000."""
    if count < 1000:
        return f"{count} B"
    value, units = count / 1000, ["kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}"


def counted(count: int, noun: str) -> str:
    """``1 round``, ``3 rounds``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short(digest: str) -> str:
    return digest[:SHORT_HEX]


def moment(unix_s: float | None) -> str:
    """Local date and time."""
    if unix_s is None:
        return ""
    return datetime.fromtimestamp(unix_s, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def names(of: tuple[str, ...]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(of[:MAX_NAMES])
    return shown if len(of) <= MAX_NAMES else f"{shown} and {len(of) - MAX_NAMES} more"


def counts(of: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(of.items()))


def progress(activity: str, step: int, steps: int, done: int, total: int) -> str:
    """``training 31/50``, ``sending update 12.3 MB/100 MB``, ``idle``."""
    if total:
        return f"{activity} {size(done)}/{size(total)}"
    return f"{activity} {step}/{steps}" if steps else activity


def round_line(status: replies.RoundStatus) -> str:
    """Where a round is and why it is not further, in one line."""
    if status.state == "closed":
        # At rest, or for an instant between two rounds: no round is in flight.
        return status.reason[:1].upper() + status.reason[1:] or "No round is in flight"
    attempt = f", attempt {status.attempt}" if status.attempt else ""
    on = f"; on {names(status.waiting_on)}" if status.waiting_on else ""
    why = f": {status.reason}{on}" if status.reason else ""
    return f"round {status.index}{attempt} {status.state.upper()}{why}"


def clock_line(status: replies.RoundStatus) -> str:
    """For how long, and for how long still."""
    until = "" if status.deadline_in_s is None else f", {duration(status.deadline_in_s)} left"
    return f"for {duration(status.since_s)}{until}"


def closed_line(closed: replies.RoundSummary) -> str:
    """One closed round."""
    parts = [
        f"{counted(len(closed.contributors), 'contributor')} ({names(closed.contributors)})",
        "" if closed.seconds is None else duration(closed.seconds),
        "" if closed.loss is None else f"loss {closed.loss:.4g}",
        f"state {short(closed.digest)}",
        *closed.alerts,
    ]
    attempt = f" at attempt {closed.attempt}" if closed.attempt else ""
    return f"round {closed.index} CLOSED{attempt}: {', '.join(part for part in parts if part)}"


def aborted_line(aborted: replies.RoundAborted) -> str:
    """One failed attempt."""
    after = f"; {aborted.next}" if aborted.next else ""
    return f"round {aborted.index}, attempt {aborted.attempt} ABORTED: {aborted.reason}{after}"


def run_line(run: replies.RunStatus) -> str:
    """How far a run is, and when it may end."""
    eta = ""
    if run.closed and run.remaining:
        eta = f", about {duration(run.elapsed_s / run.closed * run.remaining)} to go"
    aborted = (
        f", {counted(run.attempts_aborted, 'attempt')} aborted" if run.attempts_aborted else ""
    )
    return f"run {run.run}: {run.closed} of {run.rounds} rounds closed{aborted}{eta}"
