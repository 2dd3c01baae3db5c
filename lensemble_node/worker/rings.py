"""The worker's view of its slots: which it may read, which it may fill."""

from collections import deque

from lensemble.edge.arena import Arena, Place, Region
from lensemble.errors import WorkerFault
from lensemble.ids import SlotIndex
from lensemble_node import signals


class Ring:
    """One attached edge; ``free`` are the slots of a tx ring that are this process's to fill."""

    def __init__(self, attach: signals.Attach, region: Region) -> None:
        self.edge = attach.edge
        self.direction = attach.direction
        self.capacity_bytes = attach.capacity_bytes
        self._region = region
        self._slots = attach.slots
        self.free: deque[int] = deque(range(attach.slots) if attach.direction == "tx" else ())

    def slot(self, index: int) -> memoryview:
        """The bytes of slot ``index``, writable.

        Raises:
            WorkerFault: the ring has no such slot.
        """
        if not 0 <= index < self._slots:
            raise WorkerFault(f"edge {self.edge} has no slot {index}")
        return self._region.slot(SlotIndex(index))

    def released(self, index: int) -> None:
        """The stream is done with ``index``; a slot that is free already stays so."""
        self.slot(index)
        if index not in self.free:
            self.free.append(index)


class Rings:
    """All attached edges by id."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._rings: dict[int, Ring] = {}

    def attach(self, command: signals.Attach) -> None:
        """Raises ``WorkerFault`` for an edge that is attached already."""
        if command.edge in self._rings:
            raise WorkerFault(f"edge {command.edge} is attached already")
        place = Place(command.offset, command.capacity_bytes, command.slots)
        self._rings[command.edge] = Ring(command, self._arena.region(place))

    def detach(self, edge: int) -> None:
        self._rings.pop(edge, None)

    def ring(self, edge: int) -> Ring | None:
        return self._rings.get(edge)
