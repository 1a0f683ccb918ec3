# SPDX-License-Identifier: Apache-2.0
"""Few rows over all lanes: rows cut into chunks, one per lane, transposed for a product over their inner axis; the weight beside them."""

from torch import Tensor
from torch.nn.functional import pad

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P
from v41.backends.neuron.nki import nisa, nl
from v41.spec.table import Tiled

BANK = 2048  # bytes of a PSUM bank


def folded(t, row, rows):
    """(rows * chunks, tiles / chunks * 128): rows row .. row + rows - 1 of an HBM tensor (n, tiles * 128), in as many chunks as fill the lanes."""
    tiles = t.shape[1] // P
    chunks = 1
    for c in range(1, tiles + 1):
        if tiles % c == 0 and c * rows <= P:
            chunks = c
    lanes, size = rows * chunks, tiles // chunks * P
    x = nl.ndarray((lanes, size), dtype=t.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=t.reshape((t.shape[0] * chunks, size))[row * chunks : row * chunks + lanes, :])
    return x


def batch_of(x):
    """How many tiles of 128 columns of x a PSUM bank takes when they are turned."""
    return max(1, BANK // (x.shape[0] * (4 if x.dtype == nl.float32 else 2)))


def turn(u, x, rows, first):
    """u (128, chunks, tiles, rows) from `folded` rows, tiles first .. of each chunk: element (p, c, j, r) is column 128 (first + j) + p of chunk c of row r."""
    chunks, tiles = u.shape[1], u.shape[2]
    batch = batch_of(x)
    for s in range(0, tiles, batch):
        some = min(batch, tiles - s)
        ps = nl.ndarray((P, some, rows, chunks), dtype=x.dtype, buffer=nl.psum)
        for i in range(some):
            nisa.nc_transpose(dst=ps[:, i, :, :], data=x[:, (first + s + i) * P : (first + s + i + 1) * P])
        part = -(-some // 4)
        for i in range(0, some, part):
            stop = min(i + part, some)
            engine = nisa.engine.scalar if i // part % 2 else nisa.engine.vector
            nisa.tensor_copy(dst=u[:, :, s + i : s + stop, :], src=ps[:, i:stop, :, :].permute((0, 3, 1, 2)), engine=engine)


def turned(x, rows, dtype):
    """(128, tiles, rows) in dtype, all tiles of `folded` rows: element (p, j, r) is column 128 j + p of row r."""
    chunks, parts = x.shape[0] // rows, x.shape[1] // P
    u = nl.ndarray((P, chunks, parts, rows), dtype=dtype, buffer=nl.sbuf)
    turn(u, x, rows, 0)
    return u.reshape((P, chunks * parts, rows))


def load(held, weight, pieces):
    """A prepared weight (blocks, 128, tiles, columns) on chip, in pieces, so that the first products need not wait for its last byte.

    held (128, blocks, tiles, columns).
    """
    blocks, tiles = weight.shape[0], weight.shape[2]
    step = -(-tiles // pieces)
    for t in range(0, tiles, step):
        stop = min(t + step, tiles)
        for b in range(blocks):
            nisa.dma_copy(dst=held[:, b, t:stop, :], src=weight[b, :, t:stop, :])


def in_tiles(weight: Tensor | Tiled) -> Tensor:
    """(blocks, 128, tiles, columns) of a weight [columns, inner]: what a lane reads is contiguous. To be made once at load: `Tiled`."""
    tiles = weight.weight if isinstance(weight, Tiled) else one_block(weight).weight
    return dense(tiles, *tiles.shape)


def one_block(weight: Tensor) -> Tiled:
    """A weight [columns, inner] in tiles, in one block and its own dtype; the inner axis is padded with zeros."""
    columns, inner = weight.shape
    lanes = pad(weight, (0, -inner % P)).view(columns, -1, P)
    return Tiled(lanes.permute(2, 1, 0).contiguous()[None], None, inner)
