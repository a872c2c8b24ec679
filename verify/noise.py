"""Public Gumbel noise: which token had to be sampled is a function of the lease.

A token is argmax over v of logits_v / T + gumbel(key, position, v). The key comes from the lease's
seed, the group and the sample; the worker can choose no part of it. The same code runs on numpy,
jax.numpy and torch: 32-bit integer hashing that wraps, then a logarithm. So the hashed bits are
equal everywhere, and the noise differs only by the rounding of the logarithm.

A sampler computes the same token as argmax of exp(logits_v / T) / exponential(...), the exponential
form of the Gumbel-max trick. That needs one logarithm less, and it gives the log-prob too.
"""

from __future__ import annotations

from typing import Any

from runspec.core.canonical import hash_parts

# Multipliers of the `lowbias32` finalizer (C. Wellons, "Prospecting for hash functions"), signed.
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - 2**32
# Odd constants that spread consecutive positions and tokens (golden ratio; a Weyl increment).
_POSITION_STEP = 0x9E3779B9 - 2**32
_TOKEN_STEP = 0x85EBCA6B - 2**32
_SMALLEST_UNIFORM, _LARGEST_UNIFORM = 2.0**-32, 1.0 - 2.0**-24  # for words 0 and 2**31 - 1


def noise_key(lease_seed: bytes, group: int, sample: int) -> tuple[int, int]:
    """Return two signed 32-bit words that determine the noise of one rollout.

    The words come from a hash. Keys that differ only in the last or the first bit of the second
    word would share noise, and nobody can find such keys.
    """
    digest = hash_parts("noise", lease_seed, group, sample)
    first = int.from_bytes(digest[:4], "big", signed=True)
    second = int.from_bytes(digest[4:8], "big", signed=True)
    return first, second


def gumbel(xp: Any, key_0: Any, key_1: Any, position: Any, token: Any) -> Any:
    """Return standard Gumbel noise, f32, by broadcasting over int32 arrays.

    Args:
        xp: numpy, jax.numpy or torch.
        key_0, key_1: the words of `noise_key`.
        position: index of the output token in its sequence, 0 for the first.
        token: token ids.

    Returns:
        f32 of the broadcast shape, in [-2.82, 22.19]. The libraries' logarithms differ: results
        differ by at most 4 units in the last place (of 1 for results below 1).
    """
    return -xp.log(exponential(xp, key_0, key_1, position, token_words(token)))


def exponential(xp: Any, key_0: Any, key_1: Any, position: Any, words: Any) -> Any:
    """Return standard exponential noise, f32: exp(-gumbel).

    Args:
        xp, key_0, key_1, position: as for `gumbel`.
        words: result of `token_words`.
    """
    # Full relative precision near 0, because the largest noise comes from there.
    uniform = xp.asarray(hashed(key_0, key_1, position, words), dtype=xp.float32) * 2.0**-31
    return -xp.log1p(-xp.clip(uniform, _SMALLEST_UNIFORM, _LARGEST_UNIFORM))


def token_words(token: Any) -> Any:
    """Return scrambled words, i32 of the tokens' shape; callers may cache them."""
    scrambled = _scramble(token * _TOKEN_STEP)
    return scrambled ^ _shift_right(scrambled, 16)


def hashed(key_0: Any, key_1: Any, position: Any, words: Any) -> Any:
    """Return the bits of the noise, i32 >= 0 by broadcasting, equal in every library.

    Positions are added and keys multiplied, both without loss; then the result is scrambled.

    Args:
        key_0, key_1, position: as for `gumbel`.
        words: result of `token_words`.
    """
    scrambled = _scramble((words + (position * _POSITION_STEP + key_0)) * (key_1 | 1))
    return scrambled ^ (scrambled >> 16)  # two words give the same result


def _scramble(x: Any) -> Any:
    """Apply a bijection of 32-bit words: the finalizer without its last shift."""
    x = (x ^ _shift_right(x, 16)) * _MULTIPLY_1
    return (x ^ _shift_right(x, 15)) * _MULTIPLY_2


def _shift_right(x: Any, count: int) -> Any:
    return (x >> count) & ((1 << (32 - count)) - 1)  # logical, though the words are signed
