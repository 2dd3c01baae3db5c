"""Mean, spread and extremes of a column, a piece at a time: memory does not depend on the rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Running:
    """Of each component of a vector, in float64 (Chan, Golub and LeVeque's merging of moments)."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = np.zeros(width)
        self._squares = np.zeros(width)
        self.least = np.full(width, np.inf)
        self.most = np.full(width, -np.inf)

    def add(self, rows: NDArray[np.float32]) -> None:
        """Take in ``rows`` (n, width), all finite."""
        if not len(rows):
            return
        exact = rows.astype(np.float64)
        mean, total = exact.mean(axis=0), self.count + len(rows)
        apart = mean - self.mean
        self._squares += ((exact - mean) ** 2).sum(axis=0)
        self._squares += apart**2 * self.count * len(rows) / total
        self.mean += apart * len(rows) / total
        self.count = total
        self.least = np.minimum(self.least, exact.min(axis=0))
        self.most = np.maximum(self.most, exact.max(axis=0))

    @property
    def std(self) -> NDArray[np.float64]:
        """Of all rows, not an estimate of more."""
        spread: NDArray[np.float64] = np.sqrt(self._squares / max(1, self.count))
        return spread

    def told(self) -> dict[str, Any]:
        """As JSON takes it; empty lists where nothing was added."""
        if not self.count:
            return {"rows": 0, "mean": [], "std": [], "min": [], "max": []}
        return {
            "rows": self.count,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "min": self.least.tolist(),
            "max": self.most.tolist(),
        }
