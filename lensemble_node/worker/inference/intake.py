"""Weights of one stage coming in, from wherever: what is missing, and what became of it."""

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from blake3 import blake3

from lensemble.errors import WeightsDigestMismatch, WeightsUnasked
from lensemble.http_ranges import Stopped
from lensemble.wire.stages import MAX_RANGES, TensorPart
from lensemble_node.worker.inference import journal as log
from lensemble_node.worker.inference.cache import Cache
from lensemble_node.worker.inference.shelf import Shelf

MAX_GAP_BYTES = 255
"""Padding between two tensors that is fetched along rather than asked around."""

MARKS = 64
LEAST_MARK_BYTES, MOST_MARK_BYTES = 1 << 16, 64 << 20
"""A mark is made ``MARKS`` times on the way, so many bytes apart at least and at most."""

Progress = Callable[[Literal["fetching", "verifying"], int, int], None]
"""``progress(phase, done, total)`` in bytes."""


class Weights:
    """Tensors that lie verified in ``path``, each at the offset that its part says.

    They stay until ``close``: until then nothing prunes them.
    """

    def __init__(self, shelf: Shelf, fetched_bytes: int) -> None:
        self._shelf = shelf
        self.path: Path = shelf.path
        self.fetched_bytes = fetched_bytes

    def close(self) -> None:
        self._shelf.close()


class _Incoming(msgspec.Struct):
    """A tensor on its way; ``end`` is up to where it lies here, ``running`` the digest of that.

    ``resumed``: its beginning is of an earlier attempt.
    """

    tensor: TensorPart
    end: int
    running: blake3
    resumed: bool


class Intake:
    """Ask for ``ranges``, hand what comes to ``take``, then ``finish``.

    Args:
        cache: asked to make room.
        shelf: of the model; closed with this, or given on to ``Weights``.
        tensors: what the stage needs.
        progress: told as bytes are verified and come in.
        should_stop: asked often; ``Stopped`` is raised once it is true.

    Raises:
        WeightsError: no room, by its subclass.
        StorageError: the file system refuses.
        Stopped: asked to.
    """

    def __init__(
        self,
        cache: Cache,
        shelf: Shelf,
        tensors: tuple[TensorPart, ...],
        progress: Progress = lambda _phase, _done, _total: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cache = cache
        self._shelf = shelf
        self._tensors = tuple(sorted(tensors, key=lambda each: each.offset))
        self._progress = progress
        self._should_stop = should_stop
        self._total = sum(tensor.nbytes for tensor in tensors)
        self._incoming: dict[int, _Incoming] = {}
        self._offsets: list[int] = []
        self._unmarked = 0
        self._dirty: set[int] = set()
        self._damaged = ""
        self._done = 0
        self.fetched_bytes = 0
        self._check_held()
        self.look_again()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) of the file that are missing and are this process's to fetch.

        At most ``MAX_RANGES``; gaps are closed, the smallest first, until it is so few.
        """
        spans = [
            (each.end, each.tensor.offset + each.tensor.nbytes) for each in self._incoming.values()
        ]
        spans.sort()
        gap = MAX_GAP_BYTES
        while len(joined := _joined(spans, gap)) > MAX_RANGES:
            gap *= 2
        return tuple((begin, end - begin) for begin, end in joined)

    @property
    def is_complete(self) -> bool:
        """Whether ``ranges`` is empty; cheap enough to ask after every chunk."""
        return not self._incoming

    @property
    def waits_for_others(self) -> bool:
        """Whether tensors are missing that another worker of this node is fetching."""
        return any(
            not self._is_held(tensor) and tensor.offset not in self._incoming
            for tensor in self._tensors
        )

    def look_again(self) -> None:
        """Take note of what others fetched, and claim what is missing and nobody fetches."""
        self._shelf.journal.refresh()
        claimed = []
        for tensor in self._tensors:
            if tensor.offset in self._incoming or self._is_held(tensor):
                continue
            if self._shelf.claim(tensor):
                claimed.append(tensor)
        # Between the look and the claim another worker may have completed it.
        self._shelf.journal.refresh()
        for tensor in claimed:
            if self._is_held(tensor):
                self._shelf.release(tensor)
            else:
                self._begin(tensor)
        self._offsets = sorted(self._incoming)
        need = sum(
            each.tensor.offset + each.tensor.nbytes - each.end for each in self._incoming.values()
        )
        if need:
            self._cache.make_room(need)
        self._done = self._count()
        self._tell()

    def take(self, offset: int, piece: memoryview) -> None:
        """Bytes of the file from ``offset`` on; padding between tensors is passed over.

        Raises:
            WeightsUnasked: not the next bytes of a tensor that is missing.
            WeightsDigestMismatch: a tensor is complete and not what its digest says; it is dropped.
            WeightsDiskFull: no room; nothing is marked that is not there.
            Stopped: asked to.
        """
        if self._should_stop():
            raise Stopped
        self.fetched_bytes += piece.nbytes
        while piece.nbytes:
            place = bisect_right(self._offsets, offset) - 1
            each = self._incoming.get(self._offsets[place]) if place >= 0 else None
            until = 0 if each is None else each.tensor.offset + each.tensor.nbytes
            if each is None or offset >= until:
                count = self._padding(place, offset, piece.nbytes)
            else:
                count = min(until - offset, piece.nbytes)
                self._put(each, offset, piece[:count])
            piece, offset = piece[count:], offset + count
        self._tell()

    def finish(self) -> Weights:
        """Everything is here.

        Raises:
            WeightsUnasked: it is not.
            WeightsDigestMismatch: what an earlier attempt left here was damaged, and is dropped.
        """
        if self._incoming and self._damaged:
            raise WeightsDigestMismatch(self._damaged)
        if self._incoming or self.waits_for_others:
            missing = sum(length for _, length in self.ranges)
            raise WeightsUnasked(f"the weights ended {missing} bytes early")
        self._shelf.settle()
        return Weights(self._shelf, self.fetched_bytes)

    def comes_from(self, etag: str) -> bool:
        """Whether what lies here, or will, is of the file that has this ``etag`` at its source.

        If it is not, what has no digest is forgotten, and ``ranges`` are others.
        """
        origin = self._shelf.journal.origin
        if origin == etag or all(tensor.digest is not None for tensor in self._tensors):
            return True
        begun = bool(self._shelf.journal.verified or self._shelf.journal.marks)
        self._drop_all(etag)
        return not begun

    def close(self) -> None:
        """Mark how far everything came, and let go.

        Raises:
            WeightsError: the disk is full, and the last marks are missing.
        """
        try:
            if self._dirty:
                self._mark()
        finally:
            self._shelf.close()

    def _drop_all(self, etag: str) -> None:
        self._shelf.journal.append(
            *(log.Dropped(tensor.offset) for tensor in self._tensors if tensor.digest is None),
            log.Origin(etag),
        )
        for each in list(self._incoming.values()):
            if each.tensor.digest is None:
                self._begin(each.tensor)
        self.look_again()

    def _check_held(self) -> None:
        """Compute again the digests of what is said to be here, unless it surely is."""
        if self._shelf.in_place:
            self._verify_in_place()
            return
        if self._shelf.is_settled():
            return
        # All lines, not only this stage's: afterwards the whole file is called settled.
        lines = list(self._shelf.journal.verified.values())
        total, done = sum(line.nbytes for line in lines), 0
        for line in lines:
            end = line.offset + line.nbytes
            found = self._shelf.hashed(line.offset, end, self._should_stop).hexdigest()
            done += line.nbytes
            self._progress("verifying", done, total)
            if found != line.digest:
                self._shelf.journal.append(log.Dropped(line.offset))

    def _verify_in_place(self) -> None:
        settled, done = self._shelf.is_settled(), 0
        for tensor in self._tensors:
            if not (settled and self._is_held(tensor)):
                end = tensor.offset + tensor.nbytes
                found = self._shelf.hashed(tensor.offset, end, self._should_stop).hexdigest()
                if tensor.digest not in {None, found}:
                    raise WeightsDigestMismatch(
                        f"{tensor.name} in {self._shelf.path} is not what its digest says"
                    )
                self._shelf.journal.append(
                    log.Verified(tensor.name, tensor.offset, tensor.nbytes, found)
                )
            done += tensor.nbytes
            self._progress("verifying", done, self._total)

    def _is_held(self, tensor: TensorPart) -> bool:
        line = self._shelf.journal.verified.get(tensor.offset)
        return (
            line is not None
            and line.nbytes == tensor.nbytes
            and tensor.digest in {None, line.digest}
        )

    def _begin(self, tensor: TensorPart) -> None:
        """``tensor`` is claimed: go on from where its last mark is."""
        end = self._shelf.journal.marks.get(tensor.offset, tensor.offset)
        if not tensor.offset < end < tensor.offset + tensor.nbytes:
            # The last word comes again even if it is here: completion is what verifies.
            end = tensor.offset
        running = self._shelf.hashed(tensor.offset, end, self._should_stop)
        self._incoming[tensor.offset] = _Incoming(tensor, end, running, end > tensor.offset)

    def _padding(self, place: int, offset: int, nbytes: int) -> int:
        """How many of ``nbytes`` bytes at ``offset`` lie before the next missing tensor."""
        if place + 1 < len(self._offsets):
            return min(self._offsets[place + 1] - offset, nbytes)
        return nbytes

    def _put(self, each: _Incoming, offset: int, piece: memoryview) -> None:
        if offset != each.end:
            raise WeightsUnasked(
                f"bytes of {each.tensor.name} from {offset} on; {each.end} is what comes next"
            )
        self._shelf.write(piece, offset)
        each.running.update(piece)
        each.end += piece.nbytes
        self._unmarked += piece.nbytes
        self._done += piece.nbytes
        if each.end == each.tensor.offset + each.tensor.nbytes:
            self._complete(each)
        else:
            self._dirty.add(each.tensor.offset)
        step = min(max(self._total // MARKS, LEAST_MARK_BYTES), MOST_MARK_BYTES)
        if self._unmarked >= step:
            self._mark()

    def _complete(self, each: _Incoming) -> None:
        tensor, found = each.tensor, each.running.hexdigest()
        self._dirty.discard(tensor.offset)
        if tensor.digest not in {None, found}:
            self._shelf.journal.append(log.Dropped(tensor.offset))
            said = f"{tensor.name} came as something else than its digest says"
            if each.resumed:
                # Whether the old bytes or the fresh ones are wrong shows when all are fresh.
                self._damaged = said
                self._begin(tensor)
                self._done -= tensor.nbytes
                return
            raise WeightsDigestMismatch(said)
        self._shelf.journal.append(log.Verified(tensor.name, tensor.offset, tensor.nbytes, found))
        self._shelf.release(tensor)
        del self._incoming[tensor.offset]
        self._offsets.remove(tensor.offset)

    def _mark(self) -> None:
        self._shelf.mark({offset: self._incoming[offset].end for offset in self._dirty})
        self._dirty.clear()
        self._unmarked = 0

    def _tell(self) -> None:
        self._progress("fetching", self._done, self._total)

    def _count(self) -> int:
        """Bytes of the stage that lie here."""
        verified = self._shelf.journal.verified
        done = sum(tensor.nbytes for tensor in self._tensors if tensor.offset in verified)
        return done + sum(each.end - each.tensor.offset for each in self._incoming.values())


def _joined(spans: list[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """``spans``, sorted, with those joined that are at most ``gap`` bytes apart."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
