"""Public Gumbel noise: which token had to be sampled is a function of the lease.

A token is argmax over v of logits_v / T + gumbel(key, position, v). The key comes from the lease's
seed, the group and the sample; nothing in it can be chosen by the worker. The same code runs on
numpy, jax.numpy and torch: 32-bit integer hashing that wraps, then a logarithm, so the hashed bits
are equal everywhere and the noise differs by rounding of the logarithm alone.

A sampler takes the same token as argmax of exp(logits_v / T) / exponential(...): of a race of
exponential clocks the first. That takes a logarithm less, and the log-prob is at hand.
"""

from __future__ import annotations

from typing import Any

from runspec.core.hashing import hash_parts

# Multipliers of the `lowbias32` finalizer (C. Wellons, "Prospecting for hash functions"), signed.
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = 0x846CA68B - 2**32
# Odd constants that spread consecutive positions and tokens (golden ratio; a Weyl increment).
_POSITION_STEP = 0x9E3779B9 - 2**32
_TOKEN_STEP = 0x85EBCA6B - 2**32
_SMALLEST_UNIFORM, _LARGEST_UNIFORM = 2.0**-32, 1.0 - 2.0**-24  # for words 0 and 2**31 - 1


def noise_key(lease_seed: bytes, group: int, sample: int) -> tuple[int, int]:
    """Two signed 32-bit words that name one rollout's noise.

    They are a hash's: words that differ in the last or the first bit of the second alone would
    share noise, and nobody comes by such.
    """
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
        f32 of the broadcast shape, in [-2.82, 22.19]. The libraries' logarithms differ: the results
        lie at most 4 units in the last place apart (of 1, where they are smaller).
    """
    return -xp.log(exponential(xp, key_0, key_1, position, token_words(token)))


def exponential(xp: Any, key_0: Any, key_1: Any, position: Any, words: Any) -> Any:
    """Standard exponential noise, f32: exp(-gumbel).

    Args:
        xp, key_0, key_1, position: as for `gumbel`.
        words: of `token_words`.
    """
    # Full relative precision near 0, where the noise that wins comes from.
    uniform = xp.asarray(hashed(key_0, key_1, position, words), dtype=xp.float32) * 2.0**-31
    return -xp.log1p(-xp.clip(uniform, _SMALLEST_UNIFORM, _LARGEST_UNIFORM))


def token_words(token: Any) -> Any:
    """i32 of the tokens' shape: a scrambled table of the vocabulary, worth keeping."""
    scrambled = _scramble(token * _TOKEN_STEP)
    return scrambled ^ _shift_right(scrambled, 16)


def hashed(key_0: Any, key_1: Any, position: Any, words: Any) -> Any:
    """The bits that the noise is made of, i32 >= 0 by broadcasting: the same in every library.

    Positions add and keys multiply, both without loss; what that leaves of structure is scrambled.

    Args:
        key_0, key_1, position: as for `gumbel`.
        words: of `token_words`.
    """
    scrambled = _scramble((words + (position * _POSITION_STEP + key_0)) * (key_1 | 1))
    return scrambled ^ (scrambled >> 16)  # the sign folds away: of 2**31 words each comes of two


def _scramble(x: Any) -> Any:
    """A bijection of 32-bit words: the finalizer but for its last shift."""
    x = (x ^ _shift_right(x, 16)) * _MULTIPLY_1
    return (x ^ _shift_right(x, 15)) * _MULTIPLY_2


def _shift_right(x: Any, count: int) -> Any:
    return (x >> count) & ((1 << (32 - count)) - 1)  # logical, though the words are signed
