"""Orders for the weights of a made-up model whose bytes are random."""

from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from lensemble.http_ranges import Patience
from lensemble.model_facts import manifest_digest
from lensemble.wire.stages import TensorPart
from lensemble_node.worker.inference.fetch import Order, Watch
from tests.coord.planning import model

HEADER_BYTES = 1000
QUICK = Watch(patience=Patience(tries=3, first_wait_s=0.01, most_wait_s=5, silence_s=2))


def content(tensors: int = 20, nbytes: int = 10_000, seed: int = 0) -> bytes:
    """A header whose first bytes alone are right, then tensors, each aligned to 32."""
    stride = -(-nbytes // 32) * 32
    rest = np.random.default_rng(seed).bytes(HEADER_BYTES + 20 + tensors * stride)
    return b"GGUF" + rest


def parts(
    whole: bytes, tensors: int = 20, nbytes: int = 10_000, *, digests: bool = True
) -> tuple[TensorPart, ...]:
    stride = -(-nbytes // 32) * 32
    found = []
    for index in range(tensors):
        at = HEADER_BYTES + 24 + index * stride
        found.append(
            TensorPart(
                name=f"blk.{index}.attn_q.weight",
                ggml_type=0,
                shape=(nbytes // 4,),
                offset=at,
                nbytes=nbytes,
                digest=blake3(whole[at : at + nbytes]).hexdigest() if digests else None,
            )
        )
    return tuple(found)


def order(
    cache: Path,
    whole: bytes,
    tensors: tuple[TensorPart, ...],
    place: str,
    *,
    source: str = "url",
    of_all: tuple[TensorPart, ...] | None = None,
    cache_bytes: int = 0,
) -> Order:
    facts = msgspec.structs.replace(model()[0], file_bytes=len(whole))
    return msgspec.convert(
        {
            "facts": facts,
            "manifest_digest": manifest_digest(facts, of_all or tensors),
            "tensors": tensors,
            "source": source,
            "place": place,
            "cache_dir": cache,
            "cache_bytes": cache_bytes,
        },
        Order,
    )


def lies_there(path: Path, whole: bytes, tensors: tuple[TensorPart, ...]) -> bool:
    there = path.read_bytes()
    return len(there) == len(whole) and all(
        there[each.offset : each.offset + each.nbytes]
        == whole[each.offset : each.offset + each.nbytes]
        for each in tensors
    )
