"""Whether the addresses that matter can be reached from here."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from lensemble.addresses import split_address
from lensemblectl.doctor.finding import Finding, fine, note, problem
from lensemblectl.doctor.knock import Answer, knock

MAX_ADDRESSES = 8
KNOCK_S = 3.0
COORDINATOR, OWN = "coordinator", "listening"


def coordinator(addresses: Iterable[str]) -> Iterator[Finding]:
    """Of a node: each address of its coordinator."""
    answers = _knock_at(addresses)
    reached = any(answer == "quic" for answer in answers.values())
    for address, answer in answers.items():
        found = _met(COORDINATOR, address, answer)
        # One way is enough; the transport takes the one that works.
        softer = reached and found.outcome == "problem"
        yield note(found.about, found.said, found.remedy) if softer else found


def own(addresses: Iterable[str]) -> Iterator[Finding]:
    """Of a daemon that runs: the addresses that it says it is bound to or known by."""
    for address, answer in _knock_at(addresses).items():
        if answer == "quic":
            yield fine(OWN, f"{address} answers on this host")
        else:
            host, port = split_address(address)
            yield note(
                OWN,
                f"{address} does not answer on this host ({_WHAT[answer]})",
                f"If {host} belongs to a router in front of this host, have it pass UDP port "
                f"{port} on; otherwise correct `listen` in the configuration.",
            )


_WHAT: dict[Answer, str] = {
    "quic": "an endpoint answers",
    "refused": "nobody listens on that port",
    "silent": "no answer",
    "unroutable": "this host has no route there",
}


def _met(about: str, address: str, answer: Answer) -> Finding:
    _, port = split_address(address)
    match answer:
        case "quic":
            return fine(about, f"{address} answers")
        case "refused":
            return problem(
                about,
                f"the host of {address} is there and nobody listens on that port",
                "Start the coordinator, or correct its address: join again by a fresh ticket.",
            )
        case "silent":
            return problem(
                about,
                f"{address} does not answer; a firewall drops UDP, or the host is down",
                f"Open UDP port {port} towards the coordinator there, and outgoing UDP here.",
            )
        case "unroutable":
            return problem(
                about,
                f"this host has no route to {address}",
                "Connect to that network, or have the coordinator set `listen.advertise`.",
            )


def _knock_at(addresses: Iterable[str]) -> dict[str, Answer]:
    asked = list(dict.fromkeys(addresses))[:MAX_ADDRESSES]
    with ThreadPoolExecutor(MAX_ADDRESSES) as knockers:
        return dict(zip(asked, knockers.map(lambda at: knock(at, KNOCK_S), asked), strict=True))
