# SPDX-License-Identifier: Apache-2.0
"""The spec's product without its copies: each output is summed in the order in which the spec's single product sums it (docs/performance.md 3).

That order depends on the columns summed, not on how many rows or outputs there are, from 4 rows and some outputs on (docs/numerics.md 4).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from v41.backends.cpu.widen import Matrix, plain, room, sizes, some_rows, widen
from v41.spec.numerics import Numerics
from v41.spec.ops.product import ROWS
from v41.spec.table import Fp4Like, Fp8Like
from v41.spec.types import F32

HELD = 1 << 19  # weights that are float32 at once
LEAST = 32  # outputs of one product; a few outputs take another path in the BLAS, with other last bits
GROUPS = (8, 4, 2)  # products that threads may share out
FEW = 128  # rows up to which that is better than to leave threads to one product


def single(numerics: Numerics) -> bool:
    """Whether sums are in float32. Those in float64 are left to the spec."""
    return numerics.wide == torch.float32


def full_rows(x: F32[Tensor, "*n rows in"]) -> F32[Tensor, "*n m in"]:
    """x with rows of zeros up to a multiple of 4."""
    return torch.constant_pad_nd(x, (0, 0, 0, -x.shape[-2] % ROWS)) if x.shape[-2] % ROWS else x


def groups_of(rows: int, outputs: int, columns: int) -> int:
    """Into how many equal products one is cut: none where there is one thread, or work for all of them."""
    if rows > FEW or columns < LEAST or torch.get_num_threads() == 1:
        return 1
    return next((g for g in GROUPS if outputs % g == 0 and outputs // g >= LEAST), 1)


def wide_product(x: F32[Tensor, "m in"], w: F32[Tensor, "out in"]) -> F32[Tensor, "m out"]:
    """x @ w.T for a multiple of 4 rows."""
    (rows, columns), outputs = x.shape, w.shape[0]
    groups = groups_of(rows, outputs, columns)
    if groups == 1:
        return torch.mm(x, w.T)
    part, (step, unit) = outputs // groups, w.stride()
    cut = w.as_strided((groups, columns, part), (part * step, unit, step))
    return torch.bmm(x.expand(groups, rows, columns), cut).transpose(0, 1).reshape(rows, outputs)


def pieces(outputs: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of outputs with at most about `HELD` weights each, none of them short."""
    count = max(-(-outputs * columns // HELD), 1)
    step = -(-outputs // count // 256) * 256
    a = 0
    while a < outputs:
        b = a + step if outputs - a - step >= LEAST else outputs
        yield a, min(b, outputs)
        a = b


def times(x: F32[Tensor, "n in"], *weights: Fp8Like | Fp4Like | Matrix) -> F32[Tensor, "n out"]:
    """x @ w.T, not rounded, for the weights one below the other. They are widened into one buffer, a long one piece by piece."""
    rows, matrices = full_rows(x), [plain(w) for w in weights]
    shapes = [sizes(m) for m in matrices]
    outputs, columns = sum(n for n, _ in shapes), shapes[0][1]
    if outputs * columns <= HELD and (len(shapes) == 1 or min(shapes)[0] >= LEAST):
        y = wide_product(rows, widened(matrices, room(outputs, columns, x.device)))
    else:
        y = torch.cat([part for m in matrices for part in by_pieces(rows, m)], 1)
    return y if len(x) == len(rows) else y[: len(x)]


def widened(matrices: list[Matrix], space: Tensor) -> Tensor:
    """The space, with the matrices one below the other."""
    for m, into in zip(matrices, space.split([sizes(m)[0] for m in matrices]), strict=True):
        widen(m, into)
    return space


def by_pieces(x: F32[Tensor, "m in"], matrix: Matrix) -> Iterator[F32[Tensor, "m piece"]]:
    """The product with ranges of outputs."""
    outputs, columns = sizes(matrix)
    cuts = list(pieces(outputs, columns))
    space = room(max(b - a for a, b in cuts), columns, x.device)
    for a, b in cuts:
        yield wide_product(x, widened([some_rows(matrix, a, b)], space[: b - a]))
