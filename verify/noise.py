"""Public Gumbel noise: which token had to be sampled is a function of the lease.

A token is argmax over v of logits_v / T + gumbel(key, position, v). The key comes from the lease's
seed, the group and the sample; nothing in it can be chosen by the worker. The same code runs on
numpy, jax.numpy and torch: 32-bit integer hashing that wraps, then two logarithms, so the hashed
bits are equal everywhere and the noise differs by rounding of the logarithm alone.
"""

from __future__ import annotations

from typing import Any

from runspec.common.hashing import hash_parts

# Multipliers of the `lowbias32` finalizer (C. Wellons, "Prospecting for hash functions"), signed.
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - 2**32
# Odd constants that spread consecutive positions and tokens (golden ratio; a Weyl increment).
_POSITION_STEP = 0x9E3779B9 - 2**32
_TOKEN_STEP = 0x85EBCA6B - 2**32
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def noise_key(lease_seed: bytes, group: int, sample: int) -> tuple[int, int]:
    """Two signed 32-bit words that name one rollout's noise."""
    digest = hash_parts("noise", lease_seed, group, sample)
    first = int.from_bytes(digest[:4], "big", signed=True)
    second = int.from_bytes(digest[4:8], "big", signed=True)
    return first, second


def gumbel(xp: Any, key_0: Any, key_1: Any, position: Any, token: Any) -> Any:
    """Standard Gumbel noise, f32, by broadcasting over int32 arrays.

    Args:
        xp: numpy, jax.numpy or torch.
        key_0, key_1: the words of `noise_key`.
        position: index of the output token in its sequence, 0 for the first.
        token: token ids.

    Returns:
        f32 of the broadcast shape, in [-2.82, 22.9]. The libraries' logarithms differ: the results
        lie at most 4 units in the last place apart (of 1, where they are smaller).
    """
    return _to_gumbel(xp, hashed(key_0, key_1, position, token))


def hashed(key_0: Any, key_1: Any, position: Any, token: Any) -> Any:
    """The bits that the noise is made of, i32 by broadcasting: the same in every library.

    Args:
        key_0, key_1, position, token: as for `gumbel`.
    """
    stream = _mix(_mix(position * _POSITION_STEP + key_0) ^ key_1)
    bits = _mix(token * _TOKEN_STEP + stream)
    return _mix(bits ^ key_0)


def _mix(x: Any) -> Any:
    """A bijection of 32-bit words in which each input bit flips about half of the output's."""
    x = (x ^ _shift_right(x, 16)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 15)) * _MULTIPLY_2
    return x ^ _shift_right(x, 16)


def _shift_right(x: Any, count: int) -> Any:
    return (x >> count) & ((1 << (32 - count)) - 1)  # logical, though the words are signed


def _to_gumbel(xp: Any, bits: Any) -> Any:
    # u keeps full relative precision near 0, where -log1p(-u) is small and the noise large.
    high = _as_float(xp, _shift_right(bits, 8)) * 2.0**-24
    low = _as_float(xp, bits & 0xFF) + 0.5
    uniform = xp.clip(high + low * 2.0**-32, 0.0, _LARGEST_UNIFORM)
    return -xp.log(-xp.log1p(-uniform))


def _as_float(xp: Any, x: Any) -> Any:
    return xp.asarray(x, dtype=xp.float32)
