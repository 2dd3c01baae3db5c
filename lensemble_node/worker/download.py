"""State blobs on their way from an edge to the state store."""

from dataclasses import dataclass

from lensemble.blob import BlobReader, Complete, Data, Expected
from lensemble.errors import FrameError, LensembleError
from lensemble.ids import Digest
from lensemble.params import ParamLayout
from lensemble_node.worker.state_store import PartFile, StateStore


@dataclass(frozen=True)
class _Want:
    """The rest of the state ``digest``, from byte ``held`` on, as sent for ``at``."""

    at: tuple[int, int]
    digest: Digest
    held: int


@dataclass
class _Blob:
    """One blob being read; without ``part`` it is read to its end and kept nowhere."""

    digest: Digest
    reader: BlobReader
    part: PartFile | None
    begun: bool = False

    def close(self) -> None:
        if self.part is not None:
            self.part.close()
            self.part = None


class Inbound:
    """What comes in on the state edge: one blob for each time a state was asked for, in order.

    Args:
        store: where states go.
        federation: whose states.
        layout: of which shape.
    """

    def __init__(self, store: StateStore, federation: str, layout: ParamLayout) -> None:
        self._store = store
        self._federation = federation
        self._layout = layout
        self._blob: _Blob | None = None
        self._next: _Want | None = None
        self.at: tuple[int, int] | None = None
        """The (round, attempt) of the blob that was last begun."""

    def expect(self, at: tuple[int, int], digest: Digest) -> int:
        """Prepare for the state ``digest`` sent for ``at`` = (round, attempt).

        Returns:
            How many leading bytes are held; none will come when that is all.

        Raises:
            StorageError: the file system refuses.
        """
        held = self._store.held_bytes(digest)
        self._next = _Want(at, digest, held) if held < self._layout.nbytes else None
        if self._blob is not None and not self._blob.begun:
            self._drop()
        return held

    def feed(self, chunk: memoryview) -> Digest | None:
        """Take the next chunk; the digest of the state that became complete with it, if one did.

        Raises:
            PeerError: not a blob that was asked for; what came of it is forgotten.
            StorageError: the file system refuses.
        """
        blob = self._blob or self._open()
        blob.begun = True
        try:
            event = blob.reader.feed(chunk)
            if isinstance(event, Data) and blob.part is not None:
                blob.part.write(event.view, event.offset)
        except LensembleError:
            self._drop()
            self._store.forget_part(blob.digest)
            raise
        if not isinstance(event, Complete):
            return None
        kept = blob.part is not None
        self._drop()
        if not kept:
            return None
        self._store.complete(blob.digest)
        return blob.digest

    @property
    def position(self) -> int:
        """Bytes of the state coming in that are here."""
        return 0 if self._blob is None else self._blob.reader.position

    def reset(self) -> None:
        """The edge is gone; a blob half-way stays as far as it came."""
        self._drop()
        self._next = None

    def _open(self) -> _Blob:
        if self._next is None:
            raise FrameError("a chunk on the state edge that no state was asked for")
        want, self._next = self._next, None
        self.at = want.at
        # A blob still on its way when this one was asked for may have completed the state since.
        whole = self._store.held_bytes(want.digest) == self._layout.nbytes
        expected = Expected("state", self._federation, *want.at, self._layout, want.digest)
        reader = BlobReader(expected, prefix=self._store.pieces(want.digest, want.held))
        part = None if whole else self._store.open_part(want.digest)
        self._blob = _Blob(want.digest, reader, part)
        return self._blob

    def _drop(self) -> None:
        if self._blob is not None:
            self._blob.close()
            self._blob = None
