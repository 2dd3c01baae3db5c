"""The configuration tables and value types that both daemons have."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict, StringConstraints, model_validator

from lensemble.addresses import family, is_loopback, split_address
from lensemble.config import OptionalPath, Section

MAX_ADDRESSES = 8
SOCKET_NAME = "ctl.sock"


def _one_of_each_family(addresses: tuple[str, ...]) -> tuple[str, ...]:
    families = [family(text) for text in addresses]
    for version in sorted(set(families)):
        if families.count(version) > 1:
            raise ValueError(f"more than one IPv{version} address; give at most one of each family")
    return addresses


def _checked(address: str) -> str:
    split_address(address)
    return address


Title = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$")]
"""A name to show: 1 to 64 letters, digits, spaces, dots, dashes and underscores."""

NodeKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A node id: 64 lower-case hex digits."""

Address = Annotated[str, AfterValidator(_checked)]
"""``host:port`` with an IP address; IPv6 in brackets."""

Addresses = Annotated[tuple[Address, ...], Strict(False), Field(max_length=MAX_ADDRESSES)]

Listen = Annotated[
    tuple[Address, ...],
    Strict(False),
    Field(min_length=1, max_length=2),
    AfterValidator(_one_of_each_family),
]
"""Addresses to bind: one or two, at most one of each family."""


class Heartbeats(Section):
    """How the loss of a peer is noticed."""

    heartbeat_s: float = Field(
        1.0, ge=0.05, le=60, description="Seconds between the heartbeats of a connection."
    )
    heartbeat_timeout_s: float = Field(
        3.0,
        ge=0.1,
        le=300,
        description=(
            "A peer that is silent for this many seconds is lost: 3 on one network, 5 across the "
            "internet. At least two heartbeats."
        ),
    )

    @model_validator(mode="after")
    def _two_heartbeats_fit(self) -> "Heartbeats":
        if self.heartbeat_timeout_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"heartbeat_timeout_s = {self.heartbeat_timeout_s} is shorter than two heartbeats "
                f"of {self.heartbeat_s} s"
            )
        return self


class SocketSection(Section):
    """The local socket that `lensemblectl` talks to."""

    socket: OptionalPath = Field(
        None, description=f'Path of the unix socket; empty: "{SOCKET_NAME}" in state_dir.'
    )


def _loopback_or_none(address: str) -> str:
    if address and not is_loopback(address):
        raise ValueError(
            f"{address!r} reaches beyond this host; figures are told on loopback only, such as "
            '"127.0.0.1:9107"'
        )
    return address


class MetricsSection(Section):
    """Figures for Prometheus, at /metrics. Needs the extra `http` of the package."""

    address: Annotated[str, AfterValidator(_loopback_or_none)] = Field(
        "",
        description=(
            'Where they are told: an address of loopback, such as "127.0.0.1:9107"; empty: nowhere.'
        ),
    )


class LogSection(Section):
    """What goes to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least severe level that is written."
    )
    format: Literal["auto", "json", "console"] = Field(
        "auto", description='"auto" writes for people on a terminal and JSON lines elsewhere.'
    )
