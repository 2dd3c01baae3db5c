"""What the daemon itself says, if it answers."""

from collections.abc import Iterator

from lensemble.ctl import replies
from lensemble.version import VERSION
from lensemblectl.doctor.finding import Finding, fine, note, problem

VERSIONS, LINK, WORKER, ALERTS = "version", "link", "worker", "alert"
LINKED = "joined"


def version(greeting: replies.Greeting) -> Finding:
    """Command and daemon are of one installation, unless one was upgraded without the other."""
    said = f"this command is {VERSION}, the {greeting.daemon} {greeting.version}"
    if greeting.version != VERSION:
        return problem(VERSIONS, said, "Start the daemon again, or install one release everywhere.")
    return fine(VERSIONS, said)


def node(status: replies.NodeStatus) -> Iterator[Finding]:
    """Its link, its worker and its alerts."""
    link = status.link
    if link.state == LINKED:
        yield fine(LINK, f"joined {link.name or link.coordinator[:16]}")
    elif link.state == "unconfigured":
        yield note(LINK, "this node belongs to no coordinator", "lensemblectl join TICKET")
    else:
        yield problem(
            LINK,
            f"{link.state}: {link.reason}",
            "See what is said of the coordinator's addresses below, and its log.",
        )
    worker = status.worker
    if worker is not None and worker.reason:
        yield note(
            WORKER,
            f"{worker.state}: {worker.reason}",
            "`lensemblectl events` and the log of the node have its last lines.",
        )
    yield from _alerts(status.alerts)


def coordinator(status: replies.CoordinatorStatus) -> Iterator[Finding]:
    """Its alerts, and who was refused."""
    yield from _alerts(status.alerts)
    if status.refused:
        counted = ", ".join(f"{count} {why}" for why, count in sorted(status.refused.items()))
        yield note(
            "refused", counted, "`lensemblectl events` names who and why; invite whom you expect."
        )


def _alerts(alerts: tuple[str, ...]) -> Iterator[Finding]:
    for alert in alerts:
        yield note(ALERTS, alert, "`lensemblectl events` says since when.")
