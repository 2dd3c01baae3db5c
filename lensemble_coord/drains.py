"""Nodes that an operator wants to be left alone: durable, until that is taken back.

A drained node holds what it holds and finishes what it is at; it gets no further stages and is not
expected in rounds that open later.
"""

from pathlib import Path

import msgspec
import trio

from lensemble import files
from lensemble.errors import OperatorError, StorageError
from lensemble.ids import NodeId

FILE = "drained.json"
MAX_DRAINS = 4096
MAX_BYTES = 1 << 21
BARRED = "it is drained"


class Drains:
    """The drained nodes of the coordinator whose state lies in ``directory``, each with a reason.

    Raises:
        StorageError: what was written of them cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self.nodes: dict[NodeId, str] = _read(self._path)

    def why(self, node: NodeId) -> str:
        """Why nothing is to be placed on ``node``; empty if something may."""
        return BARRED if node in self.nodes else ""

    async def add(self, node: NodeId, reason: str) -> None:
        """Drain ``node``; again is as once.

        Raises:
            OperatorError: too many are drained.
            StorageError: the disk does not take it; then nothing has changed.
        """
        if node in self.nodes:
            return
        if len(self.nodes) >= MAX_DRAINS:
            raise OperatorError(
                f"{len(self.nodes)} nodes are drained", "Take one back: lensemblectl drain --undo."
            )
        await self._replace({**self.nodes, node: reason})

    async def remove(self, node: NodeId) -> bool:
        """Take it back; False if ``node`` was not drained.

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


def _read(path: Path) -> dict[NodeId, str]:
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(files.read_limited(path, MAX_BYTES), type=dict[NodeId, str])
    except msgspec.DecodeError as error:
        raise StorageError(
            f"{path} does not say which nodes are drained: {error}",
            "Restore the file, or remove it and drain the nodes again.",
        ) from error
