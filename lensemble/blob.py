"""A model-sized transfer on one edge: a header chunk, data chunks, a trailer chunk.

Each chunk is one frame of the edge.  Header and trailer are a magic of 8 bytes and a msgpack body;
data chunks are bare bytes, all of ``chunk_bytes`` but the last.  A ``state`` blob carries the flat
float32 parameters, a ``momentum`` blob the outer momentum beside them, and either may start at
``offset`` when the receiver holds what lies before; so may a ``sum`` blob, the revealed sum of a
round, whose data chunks are packed one by one (see ``packing``).  An ``update`` blob carries words
of the field and is signed.  Sizes and offsets are those of what is unpacked, and the digest always
covers all ``total_bytes`` of it: the parameter digest, ``SumDigest`` or ``UpdateDigest``.

Reading is incremental: the bytes pass through one running hash on their way to a slot, a spool or a
file, so that neither end holds a second copy of the model.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from lensemble.errors import ContractViolation, FrameError
from lensemble.ids import Digest
from lensemble.packing import OVERHEAD_BYTES, unpack
from lensemble.params import MAX_PARAMETERS, PARAMETER_BYTES, ParameterDigest, Shape
from lensemble.wire.fence import Count, Federation, Hash

SCHEMA = 1
MAX_BLOB_BYTES = MAX_PARAMETERS * PARAMETER_BYTES
MAX_CHUNK_BYTES = 1 << 28
ENVELOPE_BYTES = 1024
"""No header or trailer chunk is larger; an edge that carries blobs has at least this capacity."""
SIGNATURE_BYTES = 64
_HEADER_MAGIC = b"LNSBLOBH"
_TRAILER_MAGIC = b"LNSBLOBT"
_UPDATE_TAG = b"lensemble/update/v1\x00"
_SUM_TAG = b"lensemble/field-sum/v1\x00"

Kind: TypeAlias = Literal["state", "momentum", "sum", "update"]
Body = TypeVar("Body", bound=msgspec.Struct)


class BlobHeader(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """What follows; ``offset`` is the position of the first data byte that is sent."""

    schema: int = SCHEMA
    kind: Kind
    federation: Federation
    round: Count
    attempt: Count
    total_bytes: Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)]
    offset: Annotated[int, Meta(ge=0, le=MAX_BLOB_BYTES)] = 0
    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]
    layout_digest: Hash
    digest_hint: Hash
    """What the trailer will say, so that a receiver can tell early that it has or rejects it."""


class BlobTrailer(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    digest: Hash
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""
    """Of an update, by the node key of its sender; empty for all else."""


class Expected(msgspec.Struct, frozen=True):
    """What a receiver is prepared to take, known from messages before the blob begins."""

    kind: Kind
    federation: str
    round: int
    attempt: int
    layout: Shape
    """Of the parameters; of a sum or an update, the plan of its words."""
    digest: Digest
    max_chunk_bytes: int = MAX_CHUNK_BYTES


class Header(msgspec.Struct, frozen=True):
    header: BlobHeader


class Data(msgspec.Struct, frozen=True):
    """``view`` belongs at byte ``offset`` of the whole; it is valid until the next is fed."""

    offset: int
    view: memoryview


class Complete(msgspec.Struct, frozen=True):
    """Every byte was there, the digest is right and the signature, if one is due, verified."""

    digest: Digest
    signature: bytes


Event: TypeAlias = Header | Data | Complete
VerifySignature: TypeAlias = Callable[[Digest, bytes], bool]


class SumDigest:
    """SHA-256 over tag, digest of the plan and the words of a revealed sum, fed piece by piece."""

    def __init__(self, layout: Shape) -> None:
        self._hash = hashlib.sha256(_SUM_TAG + bytes.fromhex(layout.digest))

    def update(self, piece: bytes | memoryview) -> None:
        self._hash.update(piece)

    def hexdigest(self) -> Digest:
        return Digest(self._hash.hexdigest())


class UpdateDigest:
    """SHA-256 over tag, digest of the plan and the words of an update, fed piece by piece."""

    def __init__(self, layout: Shape) -> None:
        self._hash = hashlib.sha256(_UPDATE_TAG + bytes.fromhex(layout.digest))
        self._left = layout.nbytes

    def update(self, piece: bytes | memoryview) -> None:
        self._left -= len(piece)
        self._hash.update(piece)

    def hexdigest(self) -> Digest:
        """The digest, once exactly the layout's bytes were fed.

        Raises:
            ContractViolation: too few or too many bytes.
        """
        if self._left != 0:
            raise ContractViolation(f"the update is {-self._left} bytes longer than its layout")
        return Digest(self._hash.hexdigest())


class _Trusted:
    """In the place of a hash whose bytes somebody else verifies."""

    def __init__(self, expected: Digest) -> None:
        self._expected = expected

    def update(self, piece: bytes | memoryview) -> None:
        """Nothing is computed."""

    def hexdigest(self) -> Digest:
        return self._expected


def update_digest(layout: Shape, pieces: Iterable[memoryview]) -> Digest:
    """The digest of an update whose bytes are ``pieces`` in order."""
    running = UpdateDigest(layout)
    for piece in pieces:
        running.update(piece)
    return running.hexdigest()


# ---- sending ----


def header_chunk(header: BlobHeader, into: memoryview) -> int:
    """Write the header chunk into ``into`` (writable bytes); returns its extent.

    Raises:
        ContractViolation: offset or sizes that no reader accepts, or ``into`` is too small.
    """
    if header.offset > header.total_bytes or header.offset % PARAMETER_BYTES:
        raise ContractViolation(f"a blob of {header.total_bytes} bytes from byte {header.offset}")
    return _write(_HEADER_MAGIC + msgspec.msgpack.encode(header), into)


def packed_chunk_bytes(capacity_bytes: int) -> int:
    """``chunk_bytes`` of a blob whose packed chunks fit an edge of ``capacity_bytes``."""
    room = capacity_bytes - OVERHEAD_BYTES
    return room - room % PARAMETER_BYTES


def data_ranges(header: BlobHeader) -> Iterator[tuple[int, int]]:
    """(position in the flat vector, length) of each data chunk, in bytes."""
    for start in range(header.offset, header.total_bytes, header.chunk_bytes):
        yield start, min(header.chunk_bytes, header.total_bytes - start)


def trailer_chunk(digest: Digest, signature: bytes, into: memoryview) -> int:
    """Write the trailer chunk into ``into``; returns its extent.

    Raises:
        ContractViolation: ``into`` is too small.
    """
    trailer = BlobTrailer(digest=digest, signature=signature)
    return _write(_TRAILER_MAGIC + msgspec.msgpack.encode(trailer), into)


def _write(chunk: bytes, into: memoryview) -> int:
    if len(chunk) > into.nbytes:
        raise ContractViolation(
            f"a slot of {into.nbytes} bytes cannot hold a blob's envelope of {len(chunk)}",
            f"Give edges a capacity of at least {ENVELOPE_BYTES} bytes.",
        )
    into[: len(chunk)] = chunk
    return len(chunk)


# ---- receiving ----


def read_header(chunk: memoryview) -> BlobHeader:
    """The header in the first chunk of a blob, for one whose receiver asks first what it is.

    Raises:
        FrameError, ContractViolation: not the header of a blob that this build reads.
    """
    return _decode_header(chunk)


class BlobReader:
    """Takes the chunks of one blob in order and answers each with one event.

    Args:
        expected: what this blob has to be.
        verify: whether the signature of an update is its sender's; None for a state.
        prefix: for a resumed state, the bytes already held, in order; they are hashed here and
            now, so construct the reader where that may take its time.
        unhashed_from: of a sum whose receiver verifies what it makes of it: its bytes are not
            hashed, the first that comes is at most this one, and the digest is as expected once
            all bytes have come.

    Raises:
        ContractViolation: the prefix is longer than the layout, an update without ``verify``, or
            anything but a sum unhashed.
    """

    def __init__(
        self,
        expected: Expected,
        *,
        verify: VerifySignature | None = None,
        prefix: Iterable[memoryview] = (),
        unhashed_from: int | None = None,
    ) -> None:
        if expected.kind == "update" and verify is None:
            raise ContractViolation("an update is read with its sender's signature or not at all")
        if expected.kind != "sum" and unhashed_from is not None:
            raise ContractViolation(f"a {expected.kind} that nobody verifies")
        self._expected = expected
        self._verify = verify
        self._unhashed_from = unhashed_from
        self._running = self._digest()
        self._position = 0
        for piece in prefix:
            self._running.update(piece)
            self._position += len(piece)
        if self._position > expected.layout.nbytes:
            raise ContractViolation(
                f"{self._position} bytes held of a {expected.kind} of {expected.layout.nbytes}"
            )
        self._header: BlobHeader | None = None
        self._unpacked = memoryview(bytearray())
        self._over = ""

    @property
    def complete(self) -> bool:
        return self._over == "complete"

    @property
    def position(self) -> int:
        """Bytes of the flat vector that have passed, the prefix included."""
        return self._position

    def feed(self, chunk: memoryview) -> Event:
        """Take the next chunk (bytes); after an error every further one is refused.

        Raises:
            FrameError: not a chunk of a blob, or out of place.
            ContractViolation: a blob, but not the expected one, or wrong in digest or signature.
        """
        if self._over:
            raise FrameError(f"a chunk of {chunk.nbytes} bytes after a blob that is {self._over}")
        self._over = "refused"
        event = self._take(chunk)
        self._over = "complete" if isinstance(event, Complete) else ""
        return event

    def close(self) -> None:
        """Say that no chunk follows.

        Raises:
            FrameError: the blob is not complete.
        """
        if not self.complete:
            total = self._expected.layout.nbytes
            raise FrameError(f"a blob ended at byte {self._position} of {total}, without trailer")

    def _digest(self) -> "ParameterDigest | SumDigest | UpdateDigest | _Trusted":
        layout = self._expected.layout
        if self._unhashed_from is not None:
            return _Trusted(self._expected.digest)
        match self._expected.kind:
            case "state" | "momentum":
                return ParameterDigest(layout)
            case "sum":
                return SumDigest(layout)
            case "update":
                return UpdateDigest(layout)

    def _take(self, chunk: memoryview) -> Event:
        if self._header is None:
            self._header = _decode_header(chunk)
            self._check(self._header)
            return Header(self._header)
        left = self._header.total_bytes - self._position
        if left == 0:
            return self._finish(_decode(chunk, _TRAILER_MAGIC, BlobTrailer))
        size = min(left, self._header.chunk_bytes)
        view = self._unpack(chunk, size) if self._header.kind == "sum" else chunk
        if view.nbytes != size:
            raise FrameError(
                f"a data chunk of {chunk.nbytes} bytes where {size} are due, at byte "
                f"{self._position} of {self._header.total_bytes}"
            )
        self._running.update(view)
        start, self._position = self._position, self._position + size
        return Data(start, view)

    def _unpack(self, chunk: memoryview, size: int) -> memoryview:
        if len(self._unpacked) < size:
            self._unpacked = memoryview(bytearray(size))
        view = self._unpacked[:size]
        unpack(chunk, view)
        return view

    def _check(self, header: BlobHeader) -> None:
        want = self._expected
        terms = (
            ("kind", header.kind, want.kind),
            ("federation", header.federation, want.federation),
            ("round", header.round, want.round),
            ("attempt", header.attempt, want.attempt),
            ("total_bytes", header.total_bytes, want.layout.nbytes),
            ("layout_digest", header.layout_digest, want.layout.digest),
            ("digest_hint", header.digest_hint, want.digest),
        )
        for name, got, due in terms:
            if got != due:
                raise ContractViolation(f"a blob whose {name} is {got}; expected {due}")
        if header.chunk_bytes > want.max_chunk_bytes:
            raise ContractViolation(
                f"a blob in chunks of {header.chunk_bytes} bytes; at most {want.max_chunk_bytes}"
            )
        if header.offset <= (self._unhashed_from or 0):
            self._running, self._position = self._digest(), header.offset
        if header.offset != self._position:
            raise ContractViolation(
                f"a blob that resumes at byte {header.offset}; {self._position} are held"
            )

    def _finish(self, trailer: BlobTrailer) -> Complete:
        digest = self._running.hexdigest()
        if not digest == trailer.digest == self._expected.digest:
            raise ContractViolation(
                f"a blob with the digest {digest}; its trailer says {trailer.digest}, "
                f"expected {self._expected.digest}"
            )
        if self._verify is None:
            if trailer.signature:
                raise ContractViolation(
                    f"a {self._expected.kind} blob carries a signature; it has none"
                )
        elif len(trailer.signature) != SIGNATURE_BYTES or not self._verify(
            digest, trailer.signature
        ):
            raise ContractViolation("the signature of an update is not its sender's")
        return Complete(digest, trailer.signature)


class _Versioned(msgspec.Struct, array_like=True):
    schema: int


def _decode_header(chunk: memoryview) -> BlobHeader:
    version = _decode(chunk, _HEADER_MAGIC, _Versioned).schema
    if version != SCHEMA:
        raise ContractViolation(f"a blob of schema {version}; this build reads {SCHEMA}")
    return _decode(chunk, _HEADER_MAGIC, BlobHeader)


def _decode(chunk: memoryview, magic: bytes, body: type[Body]) -> Body:
    if chunk.nbytes > ENVELOPE_BYTES or bytes(chunk[: len(magic)]) != magic:
        raise FrameError(f"a chunk of {chunk.nbytes} bytes where a blob's {magic!r} is due")
    try:
        return msgspec.msgpack.decode(chunk[len(magic) :], type=body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a blob's {magic!r} that does not decode: {error}") from error
