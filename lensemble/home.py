"""Laying out a daemon's directory: a commented configuration, a state directory, an identity."""

import shutil
from pathlib import Path
from typing import Any

import msgspec

from lensemble import files, identity
from lensemble.errors import ConfigError, StorageError
from lensemble.identity import Identity
from lensemble.state_dir import GROUP, IDENTITY_NAME

STATE_NAME = "state"
STATE_MODE = 0o750
CONFIG_MODE = 0o644


class System(msgspec.Struct, frozen=True):
    """Where a daemon that systemd runs keeps what, as its unit file says; ``part``: coord, node."""

    part: str

    @property
    def user(self) -> str:
        return f"lensemble-{self.part}"

    @property
    def state(self) -> Path:
        return Path("/var/lib/lensemble") / self.part

    @property
    def socket(self) -> Path:
        return Path("/run/lensemble") / self.part / "ctl.sock"

    @property
    def settings(self) -> dict[str, Any]:
        """What its configuration says that is not at the default."""
        return {"state_dir": str(self.state), "ctl": {"socket": str(self.socket)}}


def lay_out(directory: Path, texts: dict[str, str], system: System | None = None) -> Identity:
    """Write ``texts`` (file name to content) into ``directory`` and draw an identity.

    Nothing that exists is replaced: an identity is kept, a file of ``texts`` refuses the whole.
    With ``system`` the state lies where its unit expects it and belongs to its user.

    Raises:
        ConfigError: one of the files exists.
        StorageError: the directory cannot be made or written, or the user does not exist.
    """
    state = system.state if system else directory / STATE_NAME
    for name in texts:
        if (directory / name).exists():
            raise ConfigError(
                f"{directory / name} exists already",
                "Edit that file, or name another directory.",
            )
    with files.storage(directory):
        directory.mkdir(parents=True, exist_ok=True)
        state.parent.mkdir(parents=True, exist_ok=True)
        files.make_directory(state, STATE_MODE)
    who = identity.load_or_create(state / IDENTITY_NAME)
    if system is not None:
        _give((state, state / IDENTITY_NAME), system.user)
    for name, text in texts.items():
        files.write_durably(directory / name, text.encode(), CONFIG_MODE)
    return who


def _give(paths: tuple[Path, ...], user: str) -> None:
    for path in paths:
        try:
            shutil.chown(path, user, GROUP)
        except LookupError as error:
            raise StorageError(
                f"there is no user {user} or no group {GROUP} on this system",
                "Make them first: systemd-sysusers lensemble.conf (`make install-system` does so).",
            ) from error
        except OSError as error:
            raise StorageError(
                f"cannot give {path} to {user}: {error.strerror}", "Run this as root."
            ) from error
