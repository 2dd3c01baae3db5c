"""Laying out a daemon's directory: a commented configuration, a state directory, an identity."""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lensemble import files, identity
from lensemble.config import with_settings
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


class Asked(msgspec.Struct, frozen=True):
    """A daemon to be laid out: ``system`` if it is that of this host.

    ``settings`` are keys and values that are not at their default ("rounds.min_participants=2").
    """

    directory: Path
    name: str
    system: System | None = None
    settings: tuple[str, ...] = ()

    def given(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """What its configuration says, ``more`` among it.

        Raises:
            ConfigError: a setting that names no key.
        """
        system = self.system.settings if self.system else {}
        return with_settings({"name": self.name, **system, **more}, self.settings)


def arguments(part: str) -> argparse.ArgumentParser:
    """What every daemon's ``init`` takes, for ``asked``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--system", action="store_const", const=System(part))
    parser.add_argument("--set", action="append", default=[])
    return parser


def asked(options: argparse.Namespace) -> Asked:
    """Of what ``arguments`` parsed."""
    return Asked(options.directory, options.name, options.system, tuple(options.set))


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


def give_as(path: Path, like: Path) -> None:
    """Give ``path`` to the owner of ``like``: root sets daemons up that run as other users.

    Raises:
        StorageError: the file system refuses.
    """
    with files.storage(path):
        owner = like.stat()
        if path.stat().st_uid != owner.st_uid:
            shutil.chown(path, owner.st_uid, owner.st_gid)


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
