"""Deriving seeds: one root seed, a label for each use, the same number on every machine."""

import blake3

SCHEME = "blake3-v1"


def derive(root: int, label: str) -> int:
    """The 63-bit seed of ``label`` under ``root``.

    The first 8 bytes, big-endian, of BLAKE3 over ``"{root}:{label}"`` in UTF-8, top bit cleared.
    """
    head = blake3.blake3(f"{root}:{label}".encode()).digest(length=8)
    return int.from_bytes(head, "big") & ((1 << 63) - 1)


def sketch(root: int, round_index: int) -> int:
    """The seed of the random projection shared by all participants of ``round_index``."""
    return derive(root, f"sketch:{round_index}")
