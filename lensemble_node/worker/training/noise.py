"""Secret randomness: what noise, coins and samples of a private release are drawn from.

Every release draws a fresh 256-bit key from the operating system and reads the keystream of
AES-256 in counter mode under it, which nobody without the key can tell from uniform bytes.  The key
is kept nowhere and goes with the object, so that the noise can neither be drawn again nor be
subtracted by whoever learns every seed of the federation.  A seeded statistical generator would be
both: its state can be solved for from its output.
"""

import os
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from lensemble.params import FlatParameters

Entropy: TypeAlias = Callable[[int], bytes]
KEY_BYTES = 32
_NONCE = bytes(16)
"""The key is used once, so the counter may start anywhere."""
_PIECE = 1 << 16
_UNIT = 2.0**-53


class SecretNoise:
    """Draws for one release; ``entropy`` gives so many secret bytes."""

    def __init__(self, entropy: Entropy = os.urandom) -> None:
        cipher = Cipher(algorithms.AES(entropy(KEY_BYTES)), modes.CTR(_NONCE))
        self._stream = cipher.encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """Uniform words, shape ``(count,)``."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Uniform in [0, 1), on a grid of 2**-53, shape ``(count,)``."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * _UNIT

    def gaussian(self, count: int) -> NDArray[np.float64]:
        """Standard normal, shape ``(count,)``, by Box and Muller's transform.

        No draw lies beyond 8.6; that much of a true normal's mass is 1e-17.
        """
        half = (count + 1) // 2
        radius = np.sqrt(-2.0 * np.log(self.uniform(half) + _UNIT))
        angle = 2.0 * np.pi * self.uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def coins(self, count: int, rate: float) -> NDArray[np.bool_]:
        """True with probability ``rate`` each, shape ``(count,)``."""
        return self.uniform(count) < rate

    def numbers(self, below: int, count: int) -> NDArray[np.int64]:
        """Uniform in ``range(below)``, shape ``(count,)``; ``below`` is at most 2**31."""
        # 53 bits over so few numbers: none is likelier than another by more than 2**-22.
        return (self.uniform(count) * below).astype(np.int64)

    def add_to(self, flat: FlatParameters, deviation: float) -> None:
        """Add N(0, ``deviation``**2) to every coordinate of ``flat`` (float32), in place.

        Sums are formed in float64 and rounded once.  The guarantee is that of the real-valued
        mechanism; what floating point itself may give away is not accounted for.
        """
        for start in range(0, len(flat), _PIECE):
            piece = flat[start : start + _PIECE]
            piece[...] = piece + deviation * self.gaussian(len(piece))
