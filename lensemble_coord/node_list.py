"""Nodes that an operator has named for something: durable, until that is taken back."""

from pathlib import Path
from typing import ClassVar

import msgspec
import trio

from lensemble import files
from lensemble.errors import OperatorError, StorageError
from lensemble.ids import NodeId

MAX_NODES = 4096
MAX_BYTES = 1 << 21


class NodeList:
    """Node ids, each with a reason, in a file of the state directory ``directory``.

    Raises:
        StorageError: what was written cannot be read.
    """

    FILE: ClassVar[str]
    STATE: ClassVar[str]
    """What such a node is: "drained"."""

    VERB: ClassVar[str]
    """The command that makes it so."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / self.FILE
        self.nodes: dict[NodeId, str] = self._read()

    async def add(self, node: NodeId, reason: str) -> None:
        """Name ``node``; again is as once.

        Raises:
            OperatorError: too many are named.
            StorageError: the disk does not take it; then nothing has changed.
        """
        if node in self.nodes:
            return
        if len(self.nodes) >= MAX_NODES:
            raise OperatorError(
                f"{len(self.nodes)} nodes are {self.STATE}",
                f"Take one back: lensemblectl {self.VERB} --undo.",
            )
        await self._replace({**self.nodes, node: reason})

    async def remove(self, node: NodeId) -> bool:
        """Take it back; False if ``node`` was not named.

        Raises:
            StorageError: the disk does not take it; then nothing has changed.
        """
        if node not in self.nodes:
            return False
        await self._replace({each: of for each, of in self.nodes.items() if each != node})
        return True

    async def _replace(self, nodes: dict[NodeId, str]) -> None:
        content = msgspec.json.encode(nodes, order="sorted")
        await trio.to_thread.run_sync(files.write_durably, self._path, content)
        self.nodes = nodes

    def _read(self) -> dict[NodeId, str]:
        if not self._path.exists():
            return {}
        try:
            content = files.read_limited(self._path, MAX_BYTES)
            return msgspec.json.decode(content, type=dict[NodeId, str])
        except msgspec.DecodeError as error:
            raise StorageError(
                f"{self._path} does not say which nodes are {self.STATE}: {error}",
                f"Restore the file, or remove it and {self.VERB} the nodes again.",
            ) from error
