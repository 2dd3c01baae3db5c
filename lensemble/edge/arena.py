"""One sparse shared memory per node, from which the rings of its edges are leased.

The arena is an anonymous file of fixed size, mapped once by the daemon and once by each worker and
never moved.  Pages exist only where somebody wrote; a region that is given back has its pages
taken away again, so memory follows what is leased and not what has passed through.
"""

import mmap
import os
import weakref
from bisect import insort
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec.structs import replace

from lensemble.edge.spec import EdgeSpec
from lensemble.errors import ArenaExhausted, InvariantError
from lensemble.ids import SlotIndex

DEFAULT_ARENA_BYTES = 1 << 36
"""Address space, not memory: a page takes memory from its first write on."""

PAGE_BYTES = mmap.PAGESIZE


class Place(msgspec.Struct, frozen=True, order=True):
    """Where a ring lies in the arena: what a worker needs to find its slots.

    ``offset`` is in bytes and page-aligned; so is the distance from one slot to the next.
    """

    offset: int
    slot_bytes: int
    slots: int

    @property
    def stride(self) -> int:
        return _whole_pages(self.slot_bytes)

    @property
    def nbytes(self) -> int:
        """Address space taken, in bytes."""
        return self.stride * self.slots


class Region:
    """A leased ring of slots in a mapped arena."""

    def __init__(self, mapped: memoryview, place: Place) -> None:
        self.place = place
        self.offset = place.offset
        self.nbytes = place.nbytes
        self._slots = tuple(
            mapped[start : start + place.slot_bytes]
            for start in range(place.offset, place.offset + place.nbytes, place.stride)
        )

    def slot(self, index: SlotIndex) -> memoryview:
        """Slot ``index``: a writable view of bytes, ``slot_bytes`` long."""
        return self._slots[index]


class Arena:
    """A mapped arena; the one that made it is also the one that leases from it.

    A created one closes its file once nothing refers to it any more, if not before.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._closing: Callable[[], object] = partial(os.close, fd)
        self.nbytes = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED)
        self._mapped = memoryview(self._map)
        self._leased: list[tuple[int, int]] = []  # where each begins and ends, in order

    @classmethod
    def create(cls, nbytes: int = DEFAULT_ARENA_BYTES) -> "Arena":
        """A new arena of ``nbytes`` of address space, rounded up to whole pages."""
        fd = os.memfd_create("lensemble-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, _whole_pages(nbytes))
        arena = cls(fd)
        arena._closing = weakref.finalize(arena, os.close, fd)
        return arena

    @classmethod
    def attach(cls, fd: int) -> "Arena":
        """Map the arena behind ``fd``, inherited from the process that created it."""
        return cls(fd)

    def region(self, place: Place) -> Region:
        """The slots at ``place``, as a worker sees them.

        Raises:
            ArenaExhausted: ``place`` lies outside the arena.
        """
        if place.offset < 0 or place.offset + place.nbytes > self.nbytes:
            raise ArenaExhausted(f"{place} lies outside an arena of {self.nbytes} bytes")
        return Region(self._mapped, place)

    def check_fits(self, spec: EdgeSpec) -> None:
        """Whether the ring of one end of ``spec`` fits when nothing else is leased.

        Raises:
            ArenaExhausted: it does not; the message has the arithmetic.
        """
        wanted = Place(0, spec.capacity_bytes, spec.slots)
        if wanted.nbytes > self.nbytes:
            raise ArenaExhausted(
                f"edge {spec.edge} needs {spec.slots} slots x {wanted.stride} bytes = "
                f"{wanted.nbytes} bytes; the whole arena has {self.nbytes}",
                "Enlarge the arena, or provision fewer slots or a smaller capacity.",
            )

    def lease(self, spec: EdgeSpec) -> Region | None:
        """The ring of one end of ``spec``, first fit; None while there is no room for it.

        Raises:
            ArenaExhausted: it could not fit even if nothing else were leased.
        """
        self.check_fits(spec)
        wanted = Place(0, spec.capacity_bytes, spec.slots)
        offset = 0
        nbytes = wanted.nbytes
        for begin, end in self._leased:
            if begin - offset >= nbytes:
                break
            offset = end
        if self.nbytes - offset < nbytes:
            return None
        insort(self._leased, (offset, offset + nbytes))
        return Region(self._mapped, replace(wanted, offset=offset))

    def give_back(self, region: Region) -> None:
        """End a lease and take its pages away; nobody may use the region any more.

        Raises:
            InvariantError: the region is not leased from this arena.
        """
        span = (region.offset, region.offset + region.nbytes)
        if span not in self._leased:
            raise InvariantError(f"{region.place} is not leased")
        self._leased.remove(span)
        self._map.madvise(mmap.MADV_REMOVE, region.offset, region.nbytes)

    def close(self) -> None:
        """Close the file; the mapping ends when the last view of a slot is gone."""
        self._closing()

    def leased_bytes(self) -> int:
        """Address space that is leased now."""
        return sum(end - begin for begin, end in self._leased)

    def resident_bytes(self) -> int:
        """Memory the arena takes now, all mappings together."""
        return os.fstat(self.fd).st_blocks * 512


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
