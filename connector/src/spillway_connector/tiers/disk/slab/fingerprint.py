"""128-bit fingerprints of keys, a thousand at a time.

A key is cut into 32-bit words w (little-endian, zero padded). With 64-bit odd constants a:

    h = mix(namespace part + length * a[0] + sum(w[i] * a[i + 1]))   modulo 2**64, twice, with two sets of constants

which is one matrix product for a whole batch; a hash function per key would cost ten times as much. (Multilinear
hashing: Carter and Wegman, "Universal classes of hash functions", J. Comput. Syst. Sci. 18, 1979.) Two keys share a
fingerprint with probability 2**-128; the frame has the whole key, so even then no wrong bytes are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from struct import unpack

import numpy as np
import numpy.typing as npt

from spillway_connector.tiers.frame import KEY_BYTES_MAX

U64 = npt.NDArray[np.uint64]
_WORDS_MAX = KEY_BYTES_MAX // 4


def _constants(count: int) -> U64:
    """splitmix64 from zero, made odd. Part of the format: never change it."""
    values, state, mask = [], 0, (1 << 64) - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        values.append((z ^ (z >> 31)) | 1)
    return np.array(values, np.uint64)


_LENGTH, _FACTORS = np.split(_constants(2 * (_WORDS_MAX + 1)).reshape(_WORDS_MAX + 1, 2), [1])
_LENGTHS: list[int] = _LENGTH[0].tolist()
_FACTORS_BY_HALF: list[list[int]] = _FACTORS.T.tolist()
_U64 = (1 << 64) - 1
_MIX_SHIFT = np.uint64(32)
_MIX_FACTOR = np.uint64(0xD6E8FEB86659FD93)


def namespace_words(digest: bytes) -> U64:
    """The part of a namespace (16 bytes) in its keys' fingerprints, shape (2,)."""
    return np.frombuffer(digest, "<u8", 2).astype(np.uint64)


def fingerprint_of(key: bytes, namespace: tuple[int, int]) -> tuple[int, int]:
    """The same for one key, in a tenth of the time that arrays of one element take. Raises ValueError."""
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"key: 1 to {KEY_BYTES_MAX} bytes needed")
    count = len(key) + 3 >> 2
    words = unpack(f"<{count}I", key.ljust(count * 4, b"\x00"))
    low, high = (
        mixed_one(part + len(key) * length + sum(map(mul, words, factors)) & _U64)
        for part, length, factors in zip(namespace, _LENGTHS, _FACTORS_BY_HALF, strict=True)
    )
    return low, high


def fingerprints(keys: Sequence[bytes], namespace: U64) -> U64:
    """Shape (n, 2) for n keys of 1 to 64 bytes.

    Keys of one length, as vLLM's are, cost about 50 ns each; mixed lengths some more. Raises ValueError.
    """
    if not keys:
        return np.empty((0, 2), np.uint64)
    sizes = set(map(len, keys))
    longest = max(sizes)
    if len(sizes) == 1 and not longest % 4:
        padded, joined = longest, b"".join(keys)
        lengths = np.array([[longest]], np.uint64)
    else:
        padded = longest + 3 & ~3
        joined = b"".join(key.ljust(padded, b"\x00") for key in keys)
        lengths = np.fromiter(map(len, keys), np.uint64, len(keys))[:, None]
    if 0 in sizes or longest > KEY_BYTES_MAX:
        raise ValueError(f"key: 1 to {KEY_BYTES_MAX} bytes needed")
    words = np.frombuffer(joined, "<u4").reshape(len(keys), padded // 4).astype(np.uint64)
    return mixed(words @ _FACTORS[: padded // 4] + (lengths * _LENGTH + namespace))


def fingerprints_of_padded(keys: npt.NDArray[np.uint8], lengths: npt.NDArray[np.uint16], namespaces: U64) -> U64:
    """The same for keys as frame headers hold them: ``keys`` (n, 64) zero padded, ``namespaces`` (n, 2)."""
    words = np.ascontiguousarray(keys).view("<u4").astype(np.uint64)
    return mixed(words @ _FACTORS + (lengths.astype(np.uint64)[:, None] * _LENGTH + namespaces))


def mixed(sums: U64) -> U64:
    """Spread the high bits, which depend on all of the key, over the low ones; in place."""
    for _ in range(2):
        sums ^= sums >> _MIX_SHIFT
        sums *= _MIX_FACTOR
    sums ^= sums >> _MIX_SHIFT
    return sums


def mixed_one(value: int) -> int:
    """:func:`mixed` for one number below 2**64."""
    for _ in range(2):
        value ^= value >> 32
        value = value * 0xD6E8FEB86659FD93 & _U64
    return value ^ value >> 32
