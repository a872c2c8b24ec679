"""Polynomials over GF(65497), many at once, in float64.

Elements are balanced residues, integers in [-32748, 32748] held as float64. A product of three
stays below 2**46 and a sum of 128 products below 2**38, far from the 2**53 up to which float64 is
exact. So sums of products are matrix products with one reduction at the end.
"""

from __future__ import annotations

from functools import cache

import numpy as np

PRIME = 65497
TERMS = 128
"""Coefficients of every polynomial here: degree at most 127."""
_BABY = 16  # 128 = 8 x 16: powers are split as x**(16 b + a)
NODES = np.arange(-TERMS // 2, TERMS // 2, dtype=np.float64)
"""Fixed points at which a product of factors is evaluated and then interpolated."""


def reduce(values: np.ndarray) -> np.ndarray:
    """Return balanced residues of integers below 2**50 in magnitude.

    The result is exact: PRIME is odd, so no quotient lies within 2**-18 of a half, and rounding
    errors are smaller.
    """
    quotients = np.rint(values * (1.0 / PRIME))
    quotients *= -PRIME
    quotients += values
    return quotients


def canonical(values: np.ndarray) -> np.ndarray:
    """Return balanced residues as integers in [0, PRIME), i64."""
    integers = values.astype(np.int64)
    integers[integers < 0] += PRIME
    return integers


def evaluate(coefficients: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return values of polynomials at points.

    Args:
        coefficients: [C, 128], ascending.
        points: [C, k].

    Returns:
        [C, k].
    """
    return _evaluate(coefficients, _powers(reduce(points)))


def interpolate(points: np.ndarray, values: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the coefficients of the polynomials of least degree through some points.

    With M(X) = prod_i (X - x_i) and w_i = y_i / M'(x_i), Lagrange's sum_i w_i M(X) / (X - x_i),
    expanded in 1 / X, has the coefficients c_j = sum_{l > j} M_l s_{l-j-1} with the power sums
    s_m = sum_i w_i x_i**m. All of it is products of small matrices.

    Args:
        points: [C, 128], distinct modulo PRIME among the used ones of a row.
        values: [C, 128].
        used: bool [C, 128]; points that are not used are ignored.

    Returns:
        [C, 128], ascending, zero from the number of used points on.
    """
    points, values = reduce(points), reduce(values)
    powers = _powers(points)
    master = _from_roots(points, used)  # M_0 .. M_128
    degrees = np.arange(1.0, TERMS + 1)
    slopes = _evaluate(reduce(master[:, 1:] * degrees), powers)
    weights = np.where(used, reduce(values * _inverses()[canonical(slopes)]), 0.0)
    baby, giant = powers
    sums = reduce(giant * weights[:, None]) @ baby.swapaxes(1, 2)  # [C, 8, 16]
    return _correlate(master[:, 1:], reduce(sums).reshape(-1, TERMS))  # s_0 .. s_127


def _powers(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x**a for a < 16, and x**(16 b) for b < 8: [C, 16, k] and [C, 8, k]."""
    baby = _first_powers(points, _BABY)
    step = reduce(baby[:, -1] * points)
    return baby, _first_powers(step, TERMS // _BABY)


def _first_powers(points: np.ndarray, count: int) -> np.ndarray:
    powers = np.empty((points.shape[0], count, points.shape[1]))
    powers[:, 0], powers[:, 1] = 1.0, points
    have = 2
    while have < count:  # x**have * (x**0 .. x**(have-1))
        step = reduce(powers[:, have - 1] * points)
        powers[:, have : 2 * have] = reduce(powers[:, :have] * step[:, None])
        have *= 2
    return powers


def _evaluate(coefficients: np.ndarray, powers: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    baby, giant = powers
    blocks = coefficients.reshape(-1, TERMS // _BABY, _BABY)
    partial = reduce(blocks @ baby)  # [C, 8, k]
    partial *= giant
    return reduce(partial.sum(axis=1))


def _from_roots(roots: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the coefficients M_0 .. M_128 of prod (X - root) over the used roots: [C, 129].

    The product is evaluated at 128 fixed nodes and interpolated by a fixed matrix. If all 128 roots
    are used, X**128 is one term too many for 128 nodes. So it is subtracted before and added after.
    """
    factors = NODES - roots[:, :, None]  # [C, roots, nodes]
    factors[~used] = 1.0
    monic = used.all(axis=1, keepdims=True).astype(np.float64)
    values = reduce(_product(factors) - monic * node_powers())
    return np.concatenate([reduce(values @ node_matrix()), monic], axis=1)


def _product(factors: np.ndarray) -> np.ndarray:
    """Return the product over axis 1, three at a time (at most 2**48 between reductions)."""
    while (count := factors.shape[1]) > 1:
        third = -(-count // 3)
        product = factors[:, :third].copy()
        for start in (third, 2 * third):
            rest = factors[:, start : start + third]
            product[:, : rest.shape[1]] *= rest
        factors = reduce(product)
    return factors[:, 0]


def _correlate(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return c_j = sum_{i >= j} left_i right_{i-j}: [C, 128]."""
    padded = np.concatenate([np.zeros((len(right), TERMS - 1)), right], axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, TERMS, axis=1)  # [C, 128, 128]
    return reduce(np.einsum("cji,ci->cj", windows, left))[:, ::-1]


@cache
def _inverses() -> np.ndarray:
    """Return 1 / a for a in [0, PRIME), as a**(PRIME - 2); 0 for 0."""
    base = reduce(np.arange(PRIME, dtype=np.float64))
    result = np.ones(PRIME)
    for bit in f"{PRIME - 2:b}":
        result = reduce(result * result)
        if bit == "1":
            result = reduce(result * base)
    return result


@cache
def node_powers() -> np.ndarray:
    """Return node**128 at the fixed nodes: [128]."""
    return np.array([pow(int(node), TERMS, PRIME) for node in NODES], dtype=np.float64)


@cache
def node_matrix() -> np.ndarray:
    """Return the matrix from values at the fixed nodes to coefficients: [128 nodes, 128].

    Row j is Lagrange's basis polynomial of node j: N(X) / (X - t_j) divided by its value at t_j,
    with N(X) = prod_j (X - t_j), by synthetic division.
    """
    master = np.ones(1)  # descending powers
    for node in NODES:
        master = reduce(np.append(master, 0.0) - np.append(0.0, master * node))
    rows = np.empty((TERMS, TERMS))
    quotient, value = np.zeros(TERMS), np.zeros(TERMS)
    for power in range(TERMS - 1, -1, -1):
        quotient = reduce(master[TERMS - 1 - power] + quotient * NODES)
        value = reduce(value * NODES + quotient)
        rows[:, power] = quotient
    return reduce(rows * _inverses()[canonical(value)][:, None])
