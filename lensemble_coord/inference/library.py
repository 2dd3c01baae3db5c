"""The models that are open: facts, tensors and tokenizer of each file, read once."""

from collections import OrderedDict
from pathlib import Path

import msgspec
import trio

from lensemble import files, gguf, model_header
from lensemble.errors import ConfigError
from lensemble.ids import Digest
from lensemble.model_facts import manifest_digest
from lensemble.wire.stages import FromPath
from lensemble_coord.inference.tokens import Tokenizer
from lensemble_coord.inference.wiring import Material

MAX_OPEN = 8
"""Models whose vocabulary stays in memory."""


class Library:
    """Opens models; one file at a time, in a thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[object, ...], Material] = OrderedDict()
        self._turn = trio.Lock()

    async def open(self, place: str, fetch: str) -> Material:
        """The model at ``place``, a path of this host.

        With ``fetch`` "path" every node reads the same path of its own; else they are sent to it.

        Raises:
            ConfigError: no such file.
            ModelFileError, UnsupportedModel, StorageError: see ``gguf.parse_file``, ``facts_of``.
        """
        path = Path(place)
        if not path.is_absolute():
            raise ConfigError(f"{place} is no absolute path", "Name the model by its whole path.")
        async with self._turn:
            with files.storage(path):
                about = await trio.Path(path).stat()
            key = (place, about.st_size, about.st_mtime_ns, about.st_ino)
            if key not in self._open:
                self._open[key] = await trio.to_thread.run_sync(_read, path)
            self._open.move_to_end(key)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
            found = self._open[key]
        if fetch == "path":
            return msgspec.structs.replace(found, file=None, place=FromPath(path=place))
        return found


def _read(path: Path) -> Material:
    header = gguf.parse_file(path)
    facts, parts = model_header.facts_of(header), model_header.parts_of(header)
    digest: Digest = manifest_digest(facts, parts)
    return Material(facts, parts, digest, Tokenizer(header.metadata), file=path)
