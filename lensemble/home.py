"""Laying out a daemon's directory: a commented configuration, a state directory, an identity."""

from pathlib import Path

from lensemble import files, identity
from lensemble.errors import ConfigError
from lensemble.identity import Identity

STATE_NAME = "state"
IDENTITY_NAME = "identity.key"
STATE_MODE = 0o750
CONFIG_MODE = 0o644


def lay_out(directory: Path, texts: dict[str, str]) -> Identity:
    """Write ``texts`` (file name to content) into ``directory`` and draw an identity.

    Nothing that exists is replaced: an identity is kept, a file of ``texts`` refuses the whole.

    Raises:
        ConfigError: one of the files exists.
        StorageError: the directory cannot be made or written.
    """
    for name in texts:
        if (directory / name).exists():
            raise ConfigError(
                f"{directory / name} exists already",
                "Edit that file, or name another directory.",
            )
    with files.storage(directory):
        directory.mkdir(parents=True, exist_ok=True)
        files.make_directory(directory / STATE_NAME, STATE_MODE)
    who = identity.load_or_create(directory / STATE_NAME / IDENTITY_NAME)
    for name, text in texts.items():
        files.write_durably(directory / name, text.encode(), CONFIG_MODE)
    return who
