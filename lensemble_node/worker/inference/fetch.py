"""Getting the weights of one stage: from a file of this node, over HTTP, or from an edge.

``begin`` says what is missing; ``fetch`` gets it where that is this process's own doing.  For an
edge the caller sends ``intake.ranges`` to whoever produces it, hands each chunk to ``take``, and
calls ``finish`` when the edge ends.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from lensemble import gguf, model_header
from lensemble.errors import (
    ModelFileError,
    UnsupportedModel,
    WeightsChanged,
    WeightsUnreachable,
)
from lensemble.http_ranges import Patience, RangeReader, Stopped, shown
from lensemble.model_facts import ModelFacts
from lensemble.wire.stages import TensorPart
from lensemble_node.worker.inference.cache import About, Cache, identity_of
from lensemble_node.worker.inference.intake import Intake, Progress, Weights
from lensemble_node.worker.inference.shelf import Shelf

MAX_PASSES = 3
"""Over what is missing: the first, one for tensors that turned out damaged, one for others'."""

WAIT_S = 0.1
"""Between looks at what another worker of this node is fetching."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """As ``stage_signals.Host`` says it."""

    facts: ModelFacts
    manifest_digest: str
    tensors: tuple[TensorPart, ...]
    source: Literal["edge", "path", "url"]
    place: str
    cache_dir: Path
    cache_bytes: int = 0


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Who is told how it goes, and who may end it."""

    progress: Progress = lambda _phase, _done, _total: None
    should_stop: Callable[[], bool] = lambda: False
    patience: Patience = Patience()


def begin(order: Order, watch: Watch | None = None) -> Intake:
    """Open the model's place and find out what is missing; of a path, verify it.

    Raises:
        ModelFileError: tensors that overlap or lie outside the file.
        WeightsError: by its subclass.
        StorageError: the cache cannot be used.
        Stopped: asked to.
    """
    watch = watch or Watch()
    _check_parts(order)
    cache = Cache(order.cache_dir, order.cache_bytes)
    identity = identity_of(order.manifest_digest, order.tensors, order.source, order.place)
    path = Path(order.place) if order.source == "path" else None
    if path is not None:
        _check_header(path, order)
    place = shown(order.place) if order.source == "url" else order.source
    about = About(
        order.facts.name,
        order.manifest_digest,
        order.facts.file_bytes,
        place,
        "" if path is None else order.place,
    )
    pin = cache.pin(identity, about)
    try:
        shelf = Shelf(pin, order.facts.file_bytes, path)
    except BaseException:
        pin.close()
        raise
    try:
        return Intake(cache, shelf, order.tensors, watch.progress, watch.should_stop)
    except BaseException:
        shelf.close()
        raise


def fetch(order: Order, watch: Watch | None = None) -> Weights:
    """Weights from a path or URL, verified.  Raises as ``begin`` and ``Intake.take``."""
    watch = watch or Watch()
    intake = begin(order, watch)
    try:
        if order.source == "url":
            _over_http(order, intake, watch)
        return intake.finish()
    except BaseException:
        intake.close()
        raise


def wait_for_others(intake: Intake, watch: Watch) -> None:
    """Until no other worker of this node is fetching what is missing here.

    What such a worker gave up is in ``intake.ranges`` then.
    """
    while intake.waits_for_others and not intake.ranges:
        if watch.should_stop():
            raise Stopped
        time.sleep(WAIT_S)
        intake.look_again()


def _over_http(order: Order, intake: Intake, watch: Watch) -> None:
    if intake.is_complete and not intake.waits_for_others:
        return
    reader = RangeReader(order.place, watch.should_stop, watch.patience, order.facts.file_bytes)
    # The address comes from the coordinator; what is no model at all is not read for it.
    if reader.read(0, len(gguf.MAGIC)) != gguf.MAGIC:
        raise WeightsChanged(f"{reader.title} is no GGUF file")
    for _ in range(MAX_PASSES):
        for offset, length in intake.ranges:
            if not _get(reader, intake, offset, length):
                break
        wait_for_others(intake, watch)
        if not intake.ranges:
            return


def _get(reader: RangeReader, intake: Intake, offset: int, length: int) -> bool:
    """One range; False if the file turned out to be another than was begun with."""
    for piece in reader.pieces(offset, length):
        if not intake.comes_from(reader.identity.etag if reader.identity else ""):
            return False
        intake.take(offset, piece)
        offset += piece.nbytes
    return True


def _check_parts(order: Order) -> None:
    end = 0
    for tensor in sorted(order.tensors, key=lambda each: each.offset):
        if tensor.offset < end or not tensor.nbytes:
            raise ModelFileError(f"{tensor.name} overlaps the tensor before it, or is empty")
        end = tensor.offset + tensor.nbytes
        if end > order.facts.file_bytes:
            raise ModelFileError(
                f"{tensor.name} ends at byte {end}, the file at {order.facts.file_bytes}"
            )


def _check_header(path: Path, order: Order) -> None:
    """Only the model that was planned with is read, whatever ``path`` names.

    The path comes from the coordinator.  A file that could be any of this node's would tell about
    itself by its digests, and by what it computes as weights.  Refusals do not quote it either.
    """
    if not path.is_file():
        raise WeightsUnreachable(f"{path} is no file that this node can read")
    try:
        header = gguf.parse_file(path)
        found = {part.name: part for part in model_header.parts_of(header)}
        same = model_header.facts_of(header) == order.facts and all(
            found.get(tensor.name) == msgspec.structs.replace(tensor, digest=None)
            for tensor in order.tensors
        )
    except (ModelFileError, UnsupportedModel):
        same = False
    if not same:
        raise WeightsChanged(f"{path} is not the model that was planned with")
