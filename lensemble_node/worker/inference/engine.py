"""The wall to tinygrad: no other module imports it, and nothing of it but these names is used.

Kernels run on one thread, the one that imported this.  The environment is read at the import; see
``lensemble_node.engine_environment``.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.device import MultiBuffer, TinyELF
from tinygrad.engine.jit import CapturedJit
from tinygrad.engine.realize import get_runtime, resolve_params
from tinygrad.llm.gguf import ggml_data_to_tensor
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.runtime.ops_cpu import CPUProgram

__all__ = ["DEVICE", "HOST", "KernelCount", "Replay", "Tensor", "UOp",
           "causal_mask", "constant", "over", "position", "tokens_over", "unpack",
           "zeros"]  # fmt: skip

HOST = "CPU"
"""Where slots lie."""

DEVICE: str = Device.DEFAULT
"""Where weights lie and kernels run."""

_PART, _INPUT = "core_id", "PARAM"
"""What the engine calls the number of a part of a kernel, and what differs from call to call."""

_ARGUMENTS = 16
"""Of a kernel, at most; some have eight."""

_ENTRY = 1 + _ARGUMENTS
"""Words of a kernel in a table: where it begins, and its arguments."""

_Run = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64)
_SEQUENCE = f"""
typedef unsigned long long word;
typedef void (*kernel)({", ".join(["word"] * _ARGUMENTS)});
void sequence(const word *at, word count) {{
  for (word each = 0; each < count; each++, at += {_ENTRY})
    ((kernel)at[0])({", ".join(f"at[{index + 1}]" for index in range(_ARGUMENTS))});
}}
"""

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
    """The kernels of a captured computation as a table, called one after the other.

    The engine's own replay looks up each kernel, each tensor and each variable again: 30
    microseconds for one, a third of the time of a token with some hundreds of kernels, and twice
    that after the caches of the processor have been used for something else.
    """

    def __init__(self, inputs: int, names: Sequence[str]) -> None:
        self._words: list[int] = []
        self._moving: list[list[int]] = [[] for _ in range(inputs)]
        """By input: every word that says where it lies."""

        self._values: dict[str, list[int]] = {name: [] for name in names}
        """By name of a position: every word that is its value."""

        self._held: list[UOp] = []
        """What words point at lives as long as this."""

        self._table: ctypes.Array[ctypes.c_uint64] = (ctypes.c_uint64 * 0)()
        self._program = _sequence()
        self._run = _Run(self._program.addr)

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
            for part in range(call.src[0].arg.global_size[0]):
                kernels._add(call, tensors, part)
        kernels._table = (ctypes.c_uint64 * len(kernels._words))(*kernels._words)
        return kernels

    @property
    def count(self) -> int:
        """Of kernels, each part as one."""
        return len(self._words) // _ENTRY

    def _add(self, call: UOp, tensors: Sequence[Tensor], part: int) -> None:
        program = call.src[0]
        given = [each for each in call.src[1:] if not each.is_bound_var]
        places = resolve_params(call, tuple(tensor.uop.base for tensor in tensors))
        self._held += places
        function = get_runtime(HOST, program).addr
        entry = [function, *(_address(places[index]) for index in program.arg.globals)]
        begin = len(self._words)
        for offset, index in enumerate(program.arg.globals, 1):
            if given[index].op.name == _INPUT:
                self._moving[given[index].arg.slot].append(begin + offset)
        for variable in program.arg.vars:
            if variable.expr != _PART:
                self._values[variable.expr].append(begin + len(entry))
            entry.append(part if variable.expr == _PART else 0)
        self._words += entry + [0] * (_ENTRY - len(entry))

    def __call__(self, tensors: Sequence[Tensor], positions: Sequence[Position]) -> None:
        table = self._table
        for tensor, words in zip(tensors, self._moving, strict=True):
            begin = _address(tensor.uop.base)
            for word in words:
                table[word] = begin
        for variable, value in positions:
            for word in self._values[variable.expr]:
                table[word] = value
        self._run(ctypes.addressof(table), self.count)


@functools.cache
def _sequence() -> CPUProgram:
    """Machine code that calls each kernel of a table: where that begins, and how many there are.

    A kernel is given more arguments than it has.  It leaves the others alone: on the processors
    that are computed on, those of a call are in registers and on the stack of its caller.
    """
    device: Any = Device[HOST]
    renderer = ClangRenderer(replace(device.renderer.target, renderer="CLANG"))
    machine_code = renderer.compiler.compile_cached(_SEQUENCE)
    return CPUProgram(device, TinyELF(machine_code, "sequence", renderer.target, ()))


def _is_plain(call: UOp) -> bool:
    """Whether ``call`` runs one kernel on this processor, its parts one after the other."""
    kernel = call.src[0]
    if kernel.op.name != "PROGRAM" or call.src[1].device != HOST:
        return False
    # A part of an input would have to be found anew wherever the input lies.
    given = [each for each in call.src[1:] if not each.is_bound_var]
    cut = any(each.src and each.src[0].op.name == _INPUT for each in given)
    parts, *rest = kernel.arg.global_size
    most = len(kernel.arg.globals) + len(kernel.arg.vars)
    return isinstance(parts, int) and rest == [1, 1] and not cut and most <= _ARGUMENTS


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
