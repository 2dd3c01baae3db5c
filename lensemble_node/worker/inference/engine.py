"""The wall to tinygrad: no other module imports it, and nothing of it but these names is used.

Kernels run on one thread, the one that imported this.  The environment is read at the import; see
``lensemble_node.engine_environment``.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.llm.gguf import ggml_data_to_tensor

__all__ = ["DEVICE", "HOST", "KernelCount", "Replay", "Tensor", "UOp",
           "causal_mask", "constant", "over", "position", "tokens_over", "unpack",
           "zeros"]  # fmt: skip

HOST = "CPU"
"""Where slots lie."""

DEVICE: str = Device.DEFAULT
"""Where weights lie and kernels run."""

Float32: TypeAlias = npt.NDArray[np.float32]


def over(memory: memoryview, *shape: int) -> Tensor:
    """A float32 tensor of ``shape`` that lies where ``memory`` does, at a multiple of 64 bytes.

    Whoever owns ``memory`` keeps it for as long as the tensor is used.
    """
    return _lying(memory, shape, dtypes.float32)


def tokens_over(memory: memoryview, *shape: int) -> Tensor:
    """As ``over``, of u32."""
    return _lying(memory, shape, dtypes.uint32)


def _lying(memory: memoryview, shape: tuple[int, ...], kind: object) -> Tensor:
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return Tensor.from_blob(address, shape, dtype=kind, device=HOST)


def unpack(raw: memoryview, ggml_type: int, shape: tuple[int, ...], halves_of: int = 0) -> Tensor:
    """The float32 tensor stored as ``raw``, in memory of its own on ``DEVICE``.

    ``shape`` is outermost first.  ``halves_of``: the file interleaves the two halves of each of
    so many heads along the first axis, and here they lie one after the other.
    """
    stored = _lying(raw, (len(raw),), dtypes.uint8).to(DEVICE)
    values = ggml_data_to_tensor(stored, int(np.prod(shape)), ggml_type).reshape(*shape)
    if halves_of:
        half = shape[0] // halves_of // 2
        paired = values.reshape(halves_of, half, 2, *shape[1:])
        values = paired.transpose(1, 2).reshape(*shape)
    return values.cast(dtypes.float32).clone().realize()


def constant(values: Float32) -> Tensor:
    """``values`` on ``DEVICE``, in memory."""
    return Tensor(np.ascontiguousarray(values), device=DEVICE).clone().realize()


def zeros(*shape: int) -> Tensor:
    """Float32 zeros on ``DEVICE``, in memory and touched."""
    return Tensor.zeros(*shape, dtype=dtypes.float32, device=DEVICE).contiguous().realize()


def position(name: str, most: int) -> UOp:
    """A whole number from 0 to ``most`` that is bound when a replay is called."""
    return UOp.variable(name, 0, most)


def causal_mask(rows: int, start: UOp) -> Tensor:
    """What is added to scores (rows, start + rows) so that no row looks ahead."""
    shape = (rows, start + rows)
    blocked = Tensor.full(shape, float("-inf"), dtype=dtypes.float32, device=DEVICE, buffer=False)
    return blocked.triu(start + 1)


class Replay:
    """A computation that is captured at its first call and replayed at every other.

    It takes realised tensors and bound positions, and everything it closes over is realised: so
    the engine's first, uncaptured run can be left out.
    """

    def __init__(self, computation: Callable[..., Tensor]) -> None:
        self._jit = TinyJit(computation)
        self._jit.cnt = 1

    def __call__(self, *given: Tensor | UOp) -> None:
        self._jit(*given)


class KernelCount:
    """How many kernels were made or taken from the cache since it was made; replays make none.

    ``made_one`` is called before each; what it raises ends the capture.
    """

    def __init__(self, made_one: Callable[[], None] = lambda: None) -> None:
        self.made = 0
        self.made_one = made_one
        for device in {HOST, DEVICE}:
            self._watch(device)

    def _watch(self, device: str) -> None:
        compiler = Device[device].compiler
        make = compiler.compile_cached

        def counted(source: str) -> bytes:
            self.made += 1
            self.made_one()
            return make(source)

        vars(compiler)["compile_cached"] = counted
