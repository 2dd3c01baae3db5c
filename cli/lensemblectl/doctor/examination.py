"""Everything that is looked at, in the order in which a person would."""

import json
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client, DaemonUnreachable, Declined
from lensemble.errors import ConfigError
from lensemblectl import places
from lensemblectl.doctor import daemon, machine, network, place
from lensemblectl.doctor.finding import Finding, note, problem
from lensemblectl.options import connect

SOCKET = "control socket"
MEMBERSHIP_NAME = "coordinator.json"
MAX_MEMBERSHIP_BYTES = 1 << 14


class Patient(msgspec.Struct):
    """The daemon that is looked at, as far as it is known; ``config`` may be None for a socket."""

    config: Path | None
    part: str = ""
    state: Path | None = None
    coordinators: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


def findings(named: Path | None, timeout_s: float) -> Iterator[Finding]:
    """Look at the daemon meant by ``named``, at its files, its network and this host.

    Raises:
        ConfigError: no daemon is named, and none lies here.
    """
    patient = _patient(named)
    heard = list(_ask(named, patient, timeout_s))
    if patient.config is not None:
        patient.part = patient.part or _part(patient.config)
        yield place.configuration(patient.config, patient.part)
        patient.coordinators = patient.coordinators or _coordinators(patient)
    yield from heard
    if patient.state is not None:
        yield from place.look(patient.state)
    yield from network.coordinator(patient.coordinators)
    yield from network.own(patient.own)
    written = place.newest_write(patient.state) if patient.state else 0.0
    yield from machine.look(written, datetime.now(tz=UTC).timestamp())


def _patient(named: Path | None) -> Patient:
    try:
        config = places.config_at(named)
    except ConfigError:
        if named is None or named.is_dir():
            raise
        return Patient(None)
    try:
        return Patient(config, state=places.state_dir_of(config))
    except ConfigError:
        # The daemon's own check says what is wrong with the file.
        return Patient(config)


def _part(config: Path) -> str:
    try:
        return places.part_of(config)
    except ConfigError:
        # The daemon's own check says what is wrong with the file.
        return "coordinator"


def _ask(named: Path | None, patient: Patient, timeout_s: float) -> Iterator[Finding]:
    try:
        with connect(named, timeout_s) as client:
            patient.part = client.greeting.daemon
            yield daemon.version(client.greeting)
            yield from _hear(client, patient)
    except (DaemonUnreachable, ConfigError) as error:
        yield note(SOCKET, error.message, error.remediation)
    except Declined as error:
        yield problem(SOCKET, error.message, error.remediation)


def _hear(client: Client, patient: Patient) -> Iterator[Finding]:
    match client.ask(requests.Status()):
        case replies.NodeStatus() as status:
            patient.state = patient.state or Path(status.state_dir)
            patient.coordinators, patient.own = status.link.addresses, status.addresses
            yield from daemon.node(status)
        case replies.CoordinatorStatus() as status:
            if status.storage is not None:
                patient.state = patient.state or Path(status.storage.state_dir)
            patient.own = status.addresses
            yield from daemon.coordinator(status)
        case _:
            return


def _coordinators(patient: Patient) -> tuple[str, ...]:
    """Of a node that does not run: by its configuration, or by the ticket that it joined with."""
    if patient.part != "node" or patient.config is None or patient.state is None:
        return ()
    try:
        tree = tomllib.loads(patient.config.read_text(encoding="utf-8"))
        named = tree.get("coordinator", {}).get("addresses")
        if not named:
            text = (patient.state / MEMBERSHIP_NAME).read_bytes()[:MAX_MEMBERSHIP_BYTES]
            named = json.loads(text)["addresses"]
    except (OSError, ValueError, KeyError, AttributeError):
        return ()
    return tuple(str(each) for each in named)
