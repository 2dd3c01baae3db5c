import itertools
import math
import random
import threading

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, ECB
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import ContractViolation
from lensemble.secagg.masks import MaskStream, Term
from tests.library.masked_attempt import Attempt, nodes

SIZE = 150_001
KEYS = [bytes([index]) * 32 for index in range(1, 4)]
TERMS = [Term(KEYS[0]), Term(KEYS[1], negative=True), Term(KEYS[2])]


def keystream(key: bytes, words: int) -> np.ndarray:
    encryptor = Cipher(AES(key[:16]), CTR(key[16:])).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * words)), dtype="<u4")


WHOLE = keystream(KEYS[0], SIZE) - keystream(KEYS[1], SIZE) + keystream(KEYS[2], SIZE)


def test_the_mask_of_a_term_is_the_vector_of_nist() -> None:
    # SP 800-38A, F.5.1: the keystream is ciphertext xor plaintext.
    key = "2b7e151628aed2a6abf7158809cf4f3c" + "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
    words = np.zeros(4, dtype=np.uint32)
    MaskStream([Term(bytes.fromhex(key))]).add(0, words)
    plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172a")
    cipher = bytes.fromhex("874d6191b620e3261bef6864990db6ce")
    assert words.tobytes() == bytes(a ^ b for a, b in zip(plain, cipher, strict=True))


def test_the_counter_carries_over_all_of_its_128_bits() -> None:
    key = bytes(16) + b"\xff" * 16
    words = np.zeros(4, dtype=np.uint32)
    MaskStream([Term(key)]).add(4, words)
    assert words.tobytes() == Cipher(AES(bytes(16)), ECB()).encryptor().update(bytes(16))


def test_terms_add_up_with_their_signs() -> None:
    words = np.arange(SIZE, dtype=np.uint32)
    stream = MaskStream(TERMS)
    stream.add(0, words)
    assert np.array_equal(words, np.arange(SIZE, dtype=np.uint32) + WHOLE)
    stream.subtract(0, words)
    assert np.array_equal(words, np.arange(SIZE, dtype=np.uint32))


@settings(deadline=None)
@given(st.lists(st.integers(0, SIZE), max_size=12), st.randoms(use_true_random=False))
def test_any_chunks_in_any_order_give_the_same_mask(cuts: list[int], order: random.Random) -> None:
    edges = sorted({0, *cuts, SIZE})
    chunks = list(itertools.pairwise(edges))
    order.shuffle(chunks)
    words, stream = np.zeros(SIZE, dtype=np.uint32), MaskStream(TERMS)
    for start, stop in chunks:
        stream.add(start, words[start:stop])
    assert np.array_equal(words, WHOLE)


def test_a_far_offset_is_reached_at_once() -> None:
    far = (1 << 33) + 3
    words = np.zeros(1, dtype=np.uint32)
    MaskStream([Term(KEYS[0])]).add(far, words)
    counter = (int.from_bytes(KEYS[0][16:], "big") + far // 4) % (1 << 128)
    block = Cipher(AES(KEYS[0][:16]), ECB()).encryptor().update(counter.to_bytes(16, "big"))
    assert words.tobytes() == block[12:]


def test_two_streams_of_the_same_terms_run_side_by_side() -> None:
    results = [np.zeros(SIZE, dtype=np.uint32) for _ in range(2)]

    def run(words: np.ndarray) -> None:
        stream = MaskStream(TERMS)
        for start in range(0, SIZE, 1000):
            stream.add(start, words[start : start + 1000])

    threads = [threading.Thread(target=run, args=(words,)) for words in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(words, WHOLE) for words in results)


@pytest.mark.parametrize(
    "words",
    [
        np.zeros(4, dtype=np.int32),
        np.zeros((2, 2), dtype=np.uint32),
        np.zeros(8, dtype=np.uint32)[::2],
    ],
)
def test_what_is_not_flat_words_is_refused(words: np.ndarray) -> None:
    with pytest.raises(ContractViolation):
        MaskStream(TERMS).add(0, words)


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(ContractViolation):
        MaskStream(TERMS).add(-1, np.zeros(1, dtype=np.uint32))


def test_a_term_does_not_show_its_key() -> None:
    assert KEYS[0].hex() not in repr(TERMS[0])
    assert str(KEYS[0]) not in repr(TERMS[0])


@pytest.mark.parametrize("size", [4, 16, 32, 33, 64])
def test_mask_bytes_of_one_participant_grow_as_the_logarithm(size: int) -> None:
    attempt = Attempt(nodes(size), size // 2 + 1)
    generated = {4 * len(bound.terms()) for bound in attempt.bind().values()}
    assert generated == {4 * (1 + attempt.roster.degree)}, "bytes a parameter, for everyone"
    assert attempt.roster.degree <= 6 * math.log2(size) + 2
