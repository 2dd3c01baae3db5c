"""A task that is not the world model: predict the next character of private text files.

The example of ``docs/writing-a-task.md``.  Context and alphabet come from the workload's options,
the text from the directory that the node's ``data.path`` names: every ``*.txt`` in it.  How often
a node's authors use each character stays on the node, as a bias of its own.
"""

from collections.abc import Iterable, Mapping

import torch
from torch.nn import functional

from lensemble.errors import DatasetError
from lensemble_node.tasks import Setting, Shapes, Task, Tensors

HELD_OUT = 10
"""One character in so many is kept for ``evaluate``."""


class Letters(Task):
    """A perceptron over the ``context`` characters before the one to predict."""

    def __init__(self, setting: Setting) -> None:
        self.context = int(setting.options["context"])
        self.width = int(setting.options["width"])
        self.alphabet = str(setting.options["alphabet"])
        files = sorted(setting.data.glob("*.txt"))
        if not files:
            raise DatasetError(f"no *.txt in {setting.data}", "Name another directory.")
        self.texts = [file.read_bytes() for file in files]
        codes = torch.tensor([self.alphabet.find(c) + 1 for c in self._characters()])
        # Row i: the characters before character i + context, and that one.
        rows = codes.to(setting.device).unfold(0, self.context + 1, 1)
        held_out = torch.arange(len(rows)) % HELD_OUT == 0
        self.train, self.test = rows[~held_out], rows[held_out]

    def _characters(self) -> str:
        return "\n".join(text.decode(errors="replace") for text in self.texts).lower()

    @property
    def symbols(self) -> int:
        """The alphabet, and one for everything else."""
        return len(self.alphabet) + 1

    def shapes(self) -> Shapes:
        return {
            "letters": (self.symbols, 8),
            "hidden.weight": (self.width, 8 * self.context),
            "hidden.bias": (self.width,),
            "output.weight": (self.symbols, self.width),
        }

    def examples(self) -> int:
        return len(self.train)

    def records(self) -> Iterable[bytes]:
        return self.texts

    def local(self) -> Tensors:
        return {"output.bias": torch.zeros(self.symbols)}

    def loss(self, parameters: Tensors, examples: torch.Tensor) -> torch.Tensor:
        return self._surprise(parameters, self.train[examples])

    def evaluate(self, parameters: Tensors) -> Mapping[str, float]:
        return {"heldout_nats": float(self._surprise(parameters, self.test))}

    def _surprise(self, parameters: Tensors, rows: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of the last column given the others."""
        seen = parameters["letters"][rows[:, :-1]].flatten(1)
        hidden = torch.tanh(
            functional.linear(seen, parameters["hidden.weight"], parameters["hidden.bias"])
        )
        scores = functional.linear(hidden, parameters["output.weight"], parameters["output.bias"])
        return functional.cross_entropy(scores, rows[:, -1])
