# SPDX-License-Identifier: Apache-2.0
"""gate: router scores, the k best experts of score + bias, their weights (docs/kernels.md, Router).

    for a block of at most 128 tokens:
        rows cut into chunks, one per lane, and transposed: u (128 inner, tile, token)
        logits (token, expert) = sum over tiles of u tile.T @ weight tile      exact products of bfloat16, sums in fp32
        score = sqrt(softplus) | sigmoid | softmax
        ids: rounds of max8, nc_find_index8 (the lower index of equal values first) and, between rounds, nc_match_replace8
        weights = score at ids / (sum + 1e-20) * route_scale

sqrt(softplus(x)) is min(sqrt(softplus(x) + 2^-116), exp(x / 2)): ScalarE's sqrt begins at 2^-116, and below softplus(x) = 2^-25 the two agree.

Limits: dim is padded to a multiple of 128; at most 512 experts, 64 chosen; tokens in bfloat16 or float32. Ids are those of the definition
wherever scores + bias are equal or further apart than the noise of the logits: that noise is about sqrt(dim) * 2^-24 of the largest partial sum.
Below logits of -87 the definition's exp is a float32 subnormal, which has fewer bits, and from -104 on it is 0; the kernel's score is
exp(x / 2) down to -174: weights that are quotients of such scores differ, and ids where a bias of exactly 0 lets them decide.
To be done once at load: the weight as `Tiled`.
"""

from torch import Tensor
from torch.nn.functional import pad

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.folded import BANK, folded, in_tiles, load, turned
from v41.backends.neuron.kernels.tiles import P, replicated
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import Numerics
from v41.spec.table import Tiled

EIGHT = 8
TINY = 1e-20
LOWEST = -3.4028234663852886e38
SQRT_FROM = 2.0**-116
HIGH = 160.0  # exp(x / 2) stays finite below it


@nki.jit
def gate_kernel(x, weight, bias, rows, k, function, normalize, route_scale):
    """weights (n, k) and ids (n, k) int32 of x (n, size), n a multiple of cores * rows.

    weight (parts, 128, size / 128, experts / parts), bias (1, experts).
    """
    n, experts, tiles = x.shape[0], bias.shape[1], weight.shape[2]
    parts, columns = weight.shape[0], weight.shape[3]
    out = nl.ndarray((n, k), dtype=nl.float32, buffer=nl.shared_hbm)
    ids = nl.ndarray((n, k), dtype=nl.int32, buffer=nl.shared_hbm)
    blocks = n // nl.num_programs(0) // rows
    first = nl.program_id(0) * blocks * rows
    held = nl.ndarray((P, parts, tiles, columns), dtype=x.dtype, buffer=nl.sbuf)
    added = replicated(bias, rows, experts)
    for block in range(blocks):
        r = first + block * rows
        u = turned(folded(x, r, rows), rows, x.dtype)
        if block == 0:
            load(held, weight, 8)
        logits = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.psum)
        for t in range(tiles):
            for b in range(parts):
                mine = logits[:, b * columns : (b + 1) * columns]
                nisa.nc_matmul(dst=mine, stationary=u[:, t, :], moving=held[:, b, t, :], accumulate=t > 0)
        score = widened(rows, experts, 0.0)
        scores(score[:, 0:experts], logits, rows, experts, function)
        biased = widened(rows, experts, LOWEST)
        nisa.tensor_tensor(dst=biased[:, 0:experts], data1=score[:, 0:experts], data2=added, op=nl.add)
        found = best(biased, rows, k)
        weights = chosen(score, found, rows, k, normalize, route_scale)
        nisa.dma_copy(dst=out[r : r + rows, :], src=weights[:, 0:k])
        nisa.dma_copy(dst=ids[r : r + rows, :], src=found.view(nl.int32)[:, 0:k])
    return out, ids


def widened(rows, experts, value):
    """A tile (rows, experts), or of the 8 columns that max8 needs; what is added holds `value`."""
    t = nl.ndarray((rows, max(EIGHT, experts)), dtype=nl.float32, buffer=nl.sbuf)
    if experts < EIGHT:
        nisa.memset(dst=t, value=value)
    return t


def scores(score, logits, rows, experts, function):
    """score = the scores of logits in PSUM."""
    if function == "sigmoid":
        nisa.activation(dst=score, op=nl.sigmoid, data=logits)
        return
    if function == "softmax":
        total = nl.ndarray((rows, 2), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=total[:, 0:1], op=nl.maximum, data=logits, axis=1, negate=True)
        command = nisa.reduce_cmd.reset_reduce
        nisa.activation(dst=score, op=nl.exp, data=logits, bias=total[:, 0:1], reduce_op=nl.add, reduce_res=total[:, 1:2], reduce_cmd=command)
        nisa.reciprocal(dst=total[:, 1:2], data=total[:, 1:2])
        nisa.tensor_scalar(dst=score, data=score, op0=nl.multiply, operand0=total[:, 1:2])
        return
    capped = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=capped, data=logits, op0=nl.minimum, operand0=HIGH)
    root = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=root, op=nl.softplus, data=logits)
    nisa.activation(dst=root, op=nl.sqrt, data=root, bias=SQRT_FROM)
    nisa.activation(dst=capped, op=nl.exp, data=capped, scale=0.5)
    nisa.tensor_tensor(dst=score, data1=root, data2=capped, op=nl.minimum)


def best(values, rows, k):
    """(rows, at least k) uint32 positions of the k largest of each row, best first; the lower position of equal values first."""
    rounds = -(-k // EIGHT)
    found = nl.ndarray((rows, rounds * EIGHT), dtype=nl.uint32, buffer=nl.sbuf)
    for i in range(rounds):
        top = nl.ndarray((rows, EIGHT), dtype=nl.float32, buffer=nl.sbuf)
        nisa.max8(dst=top, src=values)
        nisa.nc_find_index8(dst=found[:, i * EIGHT : (i + 1) * EIGHT], data=values, vals=top)
        if i + 1 < rounds:
            rest = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.nc_match_replace8(dst=rest, data=values, vals=top, imm=LOWEST)
            values = rest
    return found


def chosen(score, found, rows, k, normalize, route_scale):
    """The scores at the first k positions, normalized where asked for, times route_scale."""
    weights = nl.ndarray((rows, found.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=weights, data=score, indices=found)
    if normalize and k > 1:
        total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=total, op=nl.add, data=weights[:, 0:k], axis=1)
        nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=TINY)
        nisa.reciprocal(dst=total, data=total)
        nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=total, op1=nl.multiply, operand1=route_scale)
        return weights
    nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=route_scale)
    return weights


def gate(
    run: Run, x: Tensor, weight: Tensor | Tiled, bias: Tensor, k: int, function: str, normalize: bool, route_scale: float, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """`gate` of the spec: x [n, dim], weight [experts, dim], bias [experts]; same values in every regime but float64 and `released`."""
    experts = bias.shape[0]
    if numerics.dtype == "float64" or numerics.compact:
        raise ValueError(f"gate: numerics {numerics.regime} {numerics.dtype}; the kernel takes trn2, faithful and exact float32")
    if experts > BANK // 4 or not 1 <= k <= min(experts, 64):
        raise ValueError(f"gate: {experts} experts, {k} chosen; the kernel takes at most {BANK // 4} experts and chooses 1 to 64")
    n = x.shape[0]
    if n == 0:
        return bias.new_empty((0, k)), bias.new_empty((0, k)).int()
    cores = 1 if n <= P else 2
    rows = -(-n // (cores * -(-n // (cores * P))))
    padded = dense(pad(x, (0, -x.shape[1] % P, 0, -n % (cores * rows))), -1, x.shape[1] + -x.shape[1] % P)
    tiles = in_tiles(weight).to(x.dtype)
    out, ids = run(gate_kernel, cores, padded, tiles, dense(bias, 1, -1), rows, k, function, normalize, float(route_scale))
    return out[:n], ids[:n]
