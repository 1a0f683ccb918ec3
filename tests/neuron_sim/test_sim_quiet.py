# SPDX-License-Identifier: Apache-2.0
"""What must not be reported: legal neighbors of the broken kernels, under a policy in which every warning raises."""

import numpy as np
import pytest
from broken_memory import new, rc, stored, tile
from simkit import NO_LINT

from v41.backends.neuron import sim
from v41.backends.neuron.sim import cost
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl
from v41.backends.neuron.sim.storage import LIMIT

X = np.ones((128, 64), np.float32)
QUIET = sim.Policy(NO_LINT.demote, sim.PEDANTIC.promote)


def cube(x):
    """x as a 3-D pattern that does not merge."""
    return x.ap([[64, 64], [4, 2], [1, 3]])


def neighbors(t):
    """Interleaved columns: the boxes meet, the bytes do not."""
    nisa.tensor_copy(t[:, 0:64:2], t[:, 1:64:2])


def two_rows(x):
    """Two writes of an input that do not overlap."""
    nisa.dma_copy(x[0:1], tile((1, 64)))
    nisa.dma_copy(x[1:2], tile((1, 64)))
    return x


def skipped_but_initialized(x):
    """oob skip over a tile that was filled before."""
    t = tile((4, 64))
    i = tile((4, 1), nl.uint32, value=200)
    nisa.dma_copy(t, x.vector_select(0, i), oob_mode=nisa.oob_mode.skip)
    return stored(t)


def partly_predicated(x):
    """Where the predicate is false dst may stay unwritten, as long as nobody reads it."""
    t = new((2, 8))
    p = tile((2, 8), nl.uint8)
    nisa.memset(p[:, 0:4], 1)
    nisa.tensor_copy_predicated(t, 2.0, p)
    return stored(t[:, 0:4])


def scratch_same_pattern(x):
    """HBM scratch that is read as it was written."""
    h = nl.ndarray((4, 8), nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(h, tile((4, 8)))
    nisa.dma_copy(new((4, 8)), h)


def sequence_of_lanes(x):
    """Lanes 64..127 keep their sum while lanes 0..63 are reset again."""
    t = tile(value=1.0)
    r = new((64, 1))
    nisa.tensor_scalar_reduce(new((64, 64)), t[64:128], nl.add, 0.0, nl.add)
    nisa.tensor_scalar_reduce(new((64, 64)), t[0:64], nl.add, 0.0, nl.add)
    nisa.tensor_scalar_reduce(new((64, 64)), t[64:128], nl.add, 0.0, nl.add, r, reduce_cmd=rc.reduce)
    return stored(r)


LEGAL = {
    "3-D onto a whole tile": lambda x: nisa.dma_copy(new((64, 2, 3)), cube(x)),
    "2-D onto part of a tile": lambda x: nisa.dma_copy(new()[0:32], x[0:32]),
    "3-D from HBM to HBM": lambda x: nisa.dma_copy(nl.ndarray((64, 6), nl.float32, buffer=nl.private_hbm), cube(x)),
    "interleaved columns": lambda x: neighbors(tile()),
    "in place": lambda x: nisa.tensor_scalar(tile(), tile(), nl.add, 1.0),
    "in place, other shape": lambda x: nisa.tensor_copy(*[t.reshape((128, 8, 8)) if i else t for i, t in enumerate([tile()] * 2)]),
    "64 partitions from 64": lambda x: nisa.memset(new()[64:128], 0.0),
    "32 partitions from 96": lambda x: nisa.memset(new()[96:128], 0.0),
    "one partition from 32": lambda x: nisa.memset(new()[32], 0.0),
    "exactly full SBUF": lambda x: new((128, 49152)),
    "exactly full PSUM": lambda x: [new((128, 512), buffer=nl.psum) for _ in range(8)],
    "a whole bank": lambda x: nisa.nc_matmul(new((64, 1024), buffer=nl.psum)[:, 512:1024], tile(), tile((128, 512))),
    "a bank border": lambda x: nisa.nc_matmul(new((64, 600), buffer=nl.psum)[:, 448:512], tile(), tile()),
    "fp8 at its limit": lambda x: nisa.tensor_copy(new(dtype=nl.float8_e4m3), tile(value=-240.0)),
    "integers below 2**24": lambda x: nisa.tensor_copy(new(), tile(dtype=nl.int32, value=(1 << 24) - 1)),
    "16-bit masks": lambda x: nisa.tensor_scalar(new(dtype=nl.int32), tile(dtype=nl.int32), nl.bitwise_and, 1 << 20),
    "sqrt at its lower limit": lambda x: nisa.activation(new(), nl.sqrt, tile(value=2.0**-116)),
    "rsqrt at its upper limit": lambda x: nisa.activation(new(), nl.rsqrt, tile(value=2.0**97)),
    "negative reciprocal": lambda x: nisa.activation(new(), nl.reciprocal, tile(value=-(2.0**42))),
    "sin of pi": lambda x: nisa.activation(new(), nl.sin, tile(value=np.pi)),
    "exp of -inf": lambda x: nisa.activation(new(), nl.exp, tile(value=float("-inf"))),
    "infinity from infinity": lambda x: nisa.tensor_scalar(new(), tile(value=float("inf")), nl.add, 1.0),
    "skip over filled rows": skipped_but_initialized,
    "partial predicate": partly_predicated,
    "two rows of an input": two_rows,
    "scratch": scratch_same_pattern,
    "lanes": sequence_of_lanes,
    "local gather at the last element": lambda x: nisa.local_gather(new((128, 32)), tile(), tile((128, 1), nl.uint16, value=62), 2),
    "gather at the last element": lambda x: nisa.nc_n_gather(new(), tile(), tile(dtype=nl.uint32, value=63)),
    "the last row": lambda x: nisa.dma_copy(new((4, 64)), x.vector_select(0, tile((4, 1), nl.uint32, value=127))),
    "bn_stats of 512": lambda x: nisa.bn_stats(new((128, 6)), tile((128, 512))),
    "hwdge of 16 rows": lambda x: nisa.dma_transpose(new((64, 16), nl.bfloat16), half(16), dge_mode=nisa.dge_mode.hwdge),
    "hwdge copy by the sync engine": lambda x: nisa.dma_copy(new(), x, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync),
    "tiles of 64 rows": lambda x: nisa.nc_matmul(new((64, 64), buffer=nl.psum), tile()[64:128], tile()[64:128], tile_position=(64, 0), tile_size=(64, 128)),
    "ScalarE multiply and add": lambda x: nisa.tensor_scalar(new(), tile(), nl.multiply, 2.0, op1=nl.add, operand1=1.0, engine=nisa.engine.scalar),
    "stride of 32767": lambda x: nisa.memset(new((1, 99000), nl.int8)[:, 0:70000:32767], 0),
    "gpsimd sendrecv limits": None,
}
LEGAL.pop("gpsimd sendrecv limits")


def half(rows):
    """A written 2-byte SBUF tile."""
    return tile((rows, 64), nl.bfloat16)


@pytest.mark.parametrize("case", LEGAL)
def test_a_legal_kernel_is_not_reported(case):
    def kernel(x):
        result = LEGAL[case](x)
        return result if hasattr(result, "storage") and result.buffer is nl.shared_hbm else None

    sim.simulate(kernel, QUIET)(X)


def test_lanes_keep_their_sums_apart():
    assert (sim.simulate(sequence_of_lanes, NO_LINT)(X) == 128.0).all()


def test_a_long_history_keeps_every_dependency():
    far = 4 * LIMIT - 1

    def chain(first):
        def kernel(x):
            t = new((1, 4 * LIMIT))
            for i in (0, far, *range(1, 2 * LIMIT)):
                nisa.memset(t[:, i : i + 1], 0.0)
            nisa.tensor_copy(new((1, 1)), t[:, first : first + 1])

        return kernel

    paths = [sim.profile(chain(first), NO_LINT)(X)[1].critical_path_us for first in (0, far, 1, LIMIT, 2 * LIMIT - 1)]
    # A merged entry is a box around several writes: it may make a reader wait longer, never less.
    assert min(paths) >= 2 * cost.vector_busy(1, 0.25)
