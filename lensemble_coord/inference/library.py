"""The models that are open: facts, tensors and tokenizer of each, read once and in a thread."""

from collections import OrderedDict
from functools import partial
from pathlib import Path

import msgspec
import trio

from lensemble.errors import ConfigError
from lensemble.wire.stages import FromPath, FromUrl
from lensemble_coord.inference import models
from lensemble_coord.inference.models import Model
from lensemble_coord.inference.tokens import Tokenizer
from lensemble_coord.inference.wiring import Material

MAX_OPEN = 8
"""Models whose vocabulary stays in memory."""


class Library:
    """Opens models, one at a time; ``directory`` keeps the digests of their tensors."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[tuple[str, str], Tokenizer] = OrderedDict()
        self._turn = trio.Lock()

    async def header(self, place: str) -> Model:
        """What the header of the model at ``place``, a path of this host or a URL, says.

        Raises:
            ConfigError, ModelFileError, UnsupportedModel, WeightsError: see ``models.read``.
        """
        return await trio.to_thread.run_sync(partial(models.read, place, _should_stop))

    async def open(self, model: Model, fetch: str) -> Material:
        """``model`` with the digests of its tensors and its tokenizer.

        With ``fetch`` "path" every node reads the same path of its own; else they are sent to it.
        From a URL every node fetches by itself.

        Raises:
            WeightsChanged, StorageError: see ``models.with_digests``.
            ModelFileError, UnsupportedModel, OperatorError: see ``Tokenizer``.
        """
        async with self._turn:
            tokenizer = await self._tokenizer(model)
            digested = partial(
                models.with_digests, model, self._directory, should_stop=_should_stop
            )
            known = await trio.to_thread.run_sync(digested)
        made = Material(known.facts, known.tensors, known.digest, tokenizer)
        if known.path is None:
            return msgspec.structs.replace(made, place=FromUrl(url=known.url))
        if fetch == "path":
            return msgspec.structs.replace(made, place=FromPath(path=str(known.path)))
        return msgspec.structs.replace(made, file=known.path)

    async def _tokenizer(self, model: Model) -> Tokenizer:
        key = (model.facts.tokenizer_digest, model.facts.name)
        if key not in self._open:
            self._open[key] = await trio.to_thread.run_sync(Tokenizer, model.metadata)
        self._open.move_to_end(key)
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return self._open[key]


def _should_stop() -> bool:
    """Asked in a thread: leaves it with ``Cancelled`` when nobody waits for it any more."""
    trio.from_thread.check_cancelled()
    return False


def check(place: str, fetch: str) -> None:
    """Refuse what cannot be.

    Raises:
        ConfigError: a URL that is to be read as a path.
    """
    if fetch == "path" and models.is_url(place):
        raise ConfigError(f"{place} is no path", "Leave out --fetch, or name a file.")
