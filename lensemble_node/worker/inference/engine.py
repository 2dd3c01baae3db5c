"""The wall to tinygrad: no other module imports it, and nothing of it but these names is used.

Kernels run on one thread, the one that imported this.  The environment is read at the import; see
``lensemble_node.engine_environment``.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.device import MultiBuffer
from tinygrad.engine.jit import CapturedJit
from tinygrad.engine.realize import get_runtime, resolve_params
from tinygrad.llm.gguf import ggml_data_to_tensor

__all__ = ["DEVICE", "HOST", "KernelCount", "Replay", "Tensor", "UOp",
           "causal_mask", "constant", "over", "position", "tokens_over", "unpack",
           "zeros"]  # fmt: skip

HOST = "CPU"
"""Where slots lie."""

DEVICE: str = Device.DEFAULT
"""Where weights lie and kernels run."""

_PART, _INPUT = "core_id", "PARAM"
"""What the engine calls the number of a part of a kernel, and what differs from call to call."""

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


Position: TypeAlias = tuple[UOp, int]
"""What ``position`` made, and the number it has now."""


class Replay:
    """A computation that is captured at its first call and replayed at every other.

    It takes realised tensors and bound positions, and everything it closes over is realised: so
    the engine's first, uncaptured run can be left out.  Tensors of later calls are like those of
    the first, and lie elsewhere at most.
    """

    def __init__(self, computation: Callable[..., Tensor]) -> None:
        self._jit = TinyJit(computation)
        self._jit.cnt = 1
        self._kernels: Kernels | None = None

    def __call__(self, tensors: Sequence[Tensor], *positions: Position) -> None:
        if self._kernels is not None:
            self._kernels(tensors, positions)
            return
        first = self._jit.captured is None
        self._jit(*tensors, *(variable.bind(value) for variable, value in positions))
        if first and self._jit.captured is not None:
            self._kernels = Kernels.of(self._jit.captured, tensors, positions)


class Kernels:
    """The kernels of a captured computation as calls of machine code, with nothing in between.

    The engine's own replay looks up each kernel, each tensor and each variable again: 30
    microseconds for one, a third of the time of a token with some hundreds of kernels, and twice
    that after the caches of the processor have been used for something else.
    """

    def __init__(self, inputs: int, names: Sequence[str]) -> None:
        self._calls: list[tuple[Callable[..., None], tuple[ctypes.c_uint64, ...]]] = []
        self._values = {name: ctypes.c_uint64() for name in names}
        self._moving: list[list[ctypes.c_uint64]] = [[] for _ in range(inputs)]
        """By input: every argument that says where it lies."""
        self._held: list[UOp] = []
        """What arguments point at lives as long as this."""

    @classmethod
    def of(
        cls, captured: CapturedJit[Tensor], tensors: Sequence[Tensor], positions: Sequence[Position]
    ) -> "Kernels | None":
        """None where more was captured than kernels for this processor, as on a GPU."""
        calls = captured.linear.src
        if not all(_is_plain(call) for call in calls):
            return None
        kernels = cls(len(tensors), [variable.expr for variable, _ in positions])
        for call in calls:
            kernels._add(call, tensors)
        return kernels

    def _add(self, call: UOp, tensors: Sequence[Tensor]) -> None:
        program = call.src[0]
        given = [each for each in call.src[1:] if not each.is_bound_var]
        places = resolve_params(call, tuple(tensor.uop.base for tensor in tensors))
        self._held += places
        arguments = [ctypes.c_uint64(_address(places[index])) for index in program.arg.globals]
        for index, argument in zip(program.arg.globals, arguments, strict=True):
            if given[index].op.name == _INPUT:
                self._moving[given[index].arg.slot].append(argument)
        function = get_runtime(HOST, program).fxn
        for part in range(program.arg.global_size[0]):
            own = {**self._values, _PART: ctypes.c_uint64(part)}
            numbers = [own[variable.expr] for variable in program.arg.vars]
            self._calls.append((function, (*arguments, *numbers)))

    def __call__(self, tensors: Sequence[Tensor], positions: Sequence[Position]) -> None:
        for tensor, moving in zip(tensors, self._moving, strict=True):
            begin = _address(tensor.uop.base)
            for argument in moving:
                argument.value = begin
        for variable, value in positions:
            self._values[variable.expr].value = value
        for function, arguments in self._calls:
            function(*arguments)


def _is_plain(call: UOp) -> bool:
    """Whether ``call`` runs one kernel on this processor, its parts one after the other."""
    kernel = call.src[0]
    if kernel.op.name != "PROGRAM" or call.src[1].device != HOST:
        return False
    # A part of an input would have to be found anew wherever the input lies.
    given = [each for each in call.src[1:] if not each.is_bound_var]
    cut = any(each.src and each.src[0].op.name == _INPUT for each in given)
    parts, *rest = kernel.arg.global_size
    return isinstance(parts, int) and rest == [1, 1] and not cut


def _address(place: UOp) -> int:
    """Where the memory of a realised tensor begins."""
    memory = place.buffer
    if isinstance(memory, MultiBuffer):
        raise TypeError("a tensor that is spread over several devices")
    return int(memory.ensure_allocated().get_buf(HOST).va_addr)


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
