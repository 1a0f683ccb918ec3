# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on shapes and strides (element units), shared by the view methods and the operand checks."""

import math


def row_major(shape):
    """Strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def merged(shape, strides):
    """(size, stride) pairs with size-1 dimensions dropped and neighbors that continue each other merged."""
    pairs = []
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if pairs and pairs[-1][1] == n * s:
            pairs[-1] = (pairs[-1][0] * n, s)
        else:
            pairs.append((n, s))
    return pairs


def reshaped(shape, strides, target):
    """Strides of `target` over the same elements, or None when the layout forbids it."""
    chunks = merged(shape, strides)
    result, i = [], 0
    left, stride = chunks[0] if chunks else (1, 1)
    for n in target:
        if left == 1 and n > 1 and i + 1 < len(chunks):
            i += 1
            left, stride = chunks[i]
        if n > 1 and left % n:
            return None
        left //= n if n > 1 else 1
        result.append(stride * left if n > 1 else 1)
    return tuple(result) if left == 1 and i + 1 >= len(chunks) else None


def extent(shape, strides):
    """(lowest, highest) element offset that the pattern reaches, relative to its start."""
    low = high = 0
    for n, s in zip(shape, strides, strict=True):
        if s >= 0:
            high += (n - 1) * s
        else:
            low += (n - 1) * s
    return low, high


def contiguous(shape, strides):
    """Whether the pattern covers its elements in row-major order without gaps."""
    pairs = merged(shape, strides)
    return not pairs or (len(pairs) == 1 and pairs[0][1] == 1)


def infer(shape, total):
    """`shape` with its one -1 replaced so that the product is `total`; None when impossible."""
    known = math.prod(n for n in shape if n != -1)
    if list(shape).count(-1) > 1 or known == 0 or total % known:
        return None
    full = tuple(total // known if n == -1 else n for n in shape)
    return full if math.prod(full) == total else None


def run_bytes(shape, strides, size):
    """Bytes of the innermost contiguous run of a pattern: what one DMA descriptor moves."""
    pairs = merged(shape, strides)
    return pairs[-1][0] * size if pairs and pairs[-1][1] == 1 else size
