"""Which daemon is meant: by ``--socket``, or by what lies in the working directory."""

import tomllib
from pathlib import Path

from lensemble.ctl.client import DaemonUnreachable
from lensemble.errors import ConfigError

COORDINATOR_CONFIG = "coord.toml"
NODE_CONFIG = "node.toml"
NODE_TABLES = frozenset({"coordinator", "data", "share", "task", "worker"})
SOCKET_NAME = "ctl.sock"
SYSTEM = (Path("/run/lensemble/coord/ctl.sock"), Path("/run/lensemble/node/ctl.sock"))
WITHIN = (COORDINATOR_CONFIG, NODE_CONFIG, SOCKET_NAME, f"state/{SOCKET_NAME}")


def socket_at(named: Path | None) -> Path:
    """The socket meant by ``named``: itself, or that of the configuration or directory it is.

    Without ``named``: of the working directory, then of the daemons of the system.

    Raises:
        ConfigError: a configuration that cannot be read, or a directory without one.
        DaemonUnreachable: nothing named, and nothing found.
    """
    place = _located(named)
    return _socket_of(place) if place.suffix == ".toml" else place


def config_at(named: Path | None) -> Path:
    """The configuration file meant by ``named``, or found in the working directory.

    Raises:
        ConfigError: there is none.
    """
    try:
        place = _located(named)
    except DaemonUnreachable:
        place = Path(SOCKET_NAME)
    if place.suffix != ".toml":
        raise ConfigError(
            f"no configuration file is named by {named or 'the working directory'}",
            f"Name it with --socket, such as --socket node/{NODE_CONFIG}.",
        )
    return place


def part_of(config: Path) -> str:
    """What it is of, "coordinator" or "node": by its name, else by a table that only one has.

    Raises:
        ConfigError: the file cannot be read.
    """
    if config.name in {COORDINATOR_CONFIG, NODE_CONFIG}:
        return "node" if config.name == NODE_CONFIG else "coordinator"
    return "node" if NODE_TABLES & _tree(config).keys() else "coordinator"


def state_dir_of(config: Path) -> Path:
    """The state directory of the daemon that ``config`` configures.

    Raises:
        ConfigError: the file cannot be read.
    """
    value = _tree(config).get("state_dir", "state")
    return config.parent / str(value)


def _located(named: Path | None) -> Path:
    if named is not None and not named.is_dir():
        return named
    for name in WITHIN:
        if (found := (named or Path()) / name).exists():
            return found
    if named is not None:
        raise ConfigError(
            f"{named} holds neither {COORDINATOR_CONFIG} nor {NODE_CONFIG} nor a control socket",
            "Name the daemon's configuration file or socket with --socket.",
        )
    for found in SYSTEM:
        if found.exists():
            return found
    raise DaemonUnreachable(
        f"no daemon is named, and there is no {COORDINATOR_CONFIG}, {NODE_CONFIG} or control "
        "socket here",
        "Name the daemon's directory, configuration file or socket with --socket.",
    )


def _socket_of(config: Path) -> Path:
    table = _tree(config).get("ctl")
    socket = table.get("socket") if isinstance(table, dict) else None
    return config.parent / str(socket) if socket else state_dir_of(config) / SOCKET_NAME


def _tree(config: Path) -> dict[str, object]:
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {config}: {error.strerror}",
            "Name the daemon's configuration file or socket with --socket.",
        ) from error
    except ValueError as error:
        raise ConfigError(f"{config} is not TOML: {error}", "Correct that line.") from error
