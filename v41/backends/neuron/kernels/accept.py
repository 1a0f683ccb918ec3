# SPDX-License-Identifier: Apache-2.0
"""accept_greedy, accept_token, accept_block: how many drafts stand, and the token after them (docs/kernels.md, Token choice).

    greedy   best tokens of all rows (choose.py), then a few instructions on one lane
    token    chances p_i(d_i), q_i(d_i) gathered from HBM, one draft a lane; passed = p > u q; leading ones by a scan
    block    P_i = min(P_{i-1} p_i / q_i, 1) by a scan; R_i = sum of relu(P_i p - q) over the rows; h_i = R_i / (R_i + 1 - P_i)
    both     row `accepted` of p and q gathered by a computed row number; relu(weight * p - q), or p where all stand or nothing is left; a draw

One core: what counts is the chain. Decisions are exact but where two sides of a comparison agree within their rounding (p / q is p * (1 / q),
sums are in another order); docs/kernels.md says how far.

Limits: float32 rows, b * rows * vocabulary below 2^31, b * (n + 1) * 128 below 2^24, n <= 127 drafts.
"""

import torch
from torch import Tensor

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.nucleus import drawn, lane_sums
from v41.backends.neuron.kernels.tiles import P
from v41.backends.neuron.kernels.verdict import block_verdict, chances, column, leading, loaded_float, token_verdict, wide_value
from v41.backends.neuron.kernels.vocab import best_tokens, earlier, first_best, laid, lane_best, ones, summed
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.ops.accept import Verdict


@nki.jit
def greedy_kernel(logits, drafts, offered, b, lanes, w):
    """(accepted, token), each (1, b) int32: logits (b * (n + 1), lanes * w), drafts (1, b * n), offered (1, b)."""
    count = logits.shape[0]
    rows = count // b
    best = nl.ndarray((1, count), dtype=nl.float32, buffer=nl.sbuf)
    for start in range(0, count, P):
        some = min(P, count - start)
        turned = nl.ndarray((1, some), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=best_tokens(logits, start, some, lanes, w))
        nisa.tensor_copy(dst=best[:, start : start + some], src=turned)
    tokens = best.reshape((1, b, rows))
    accepted = nl.ndarray((1, b), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=accepted, value=0.0)
    if rows > 1:
        passed = nl.ndarray((1, b, rows - 1), dtype=nl.float32, buffer=nl.sbuf)
        given = loaded_float(drafts, 1, b * (rows - 1)).reshape((1, b, rows - 1))
        nisa.tensor_tensor(dst=passed, data1=tokens[:, :, 0 : rows - 1], data2=given, op=nl.equal)
        leading(accepted, passed, loaded_float(offered, 1, b))
    number = nl.ndarray((1, b, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=number, pattern=[[0, b], [1, rows]], offset=0)
    nisa.tensor_tensor(dst=number, data1=number, data2=accepted.expand_dim(2).broadcast(2, rows), op=nl.equal)
    nisa.tensor_tensor(dst=number, data1=number, data2=tokens, op=nl.multiply)
    token = nl.ndarray((1, b), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=token, op=nl.add, data=number, axis=2)
    return result(accepted, b), result(token, b)


def result(values, b):
    """Whole numbers (1, b) as an int32 output."""
    out = nl.ndarray((1, b), dtype=nl.int32, buffer=nl.shared_hbm)
    whole = nl.ndarray((1, b), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=whole, src=values)
    nisa.dma_copy(dst=out, src=whole)
    return out


@nki.jit
def sampled_kernel(p, q, drafts, offered, u, u_next, rule, b, lanes, w):
    """(accepted, token), each (1, b) int32: p (b * (n + 1), lanes * w), q (b * n, lanes * w), drafts and u (b * n, 1), offered and u_next (1, b)."""
    n = drafts.shape[0] // b
    every, before = ones(lanes, lanes), earlier(lanes)
    counts = nl.ndarray((1, b), dtype=nl.float32, buffer=nl.sbuf)
    best = nl.ndarray((lanes, 2, b), dtype=nl.float32, buffer=nl.sbuf)
    offers = loaded_float(offered, 1, b)
    for i in range(b):
        offer = offers[:, i : i + 1]
        given, uniform = column(drafts, i * n, n, nl.int32), column(u, i * n, n, nl.float32)
        of_p, of_q = chances(p, given, i * (n + 1), n), chances(q, given, i * n, n)
        weight = ones(1, 1)
        if rule == "token":
            accepted = token_verdict(of_p, of_q, uniform, offer, n)
        else:
            accepted, weight = block_verdict(p, q, i, of_p, of_q, uniform, offer, n, every, lanes, w)
        nisa.tensor_copy(dst=counts[:, i : i + 1], src=accepted)
        rest = after(p, q, i, n, weight, accepted, offer, every, lanes, w)
        chance = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=chance, src=u_next.ap([[0, lanes], [1, 1]], offset=i))
        lane_best(best, i, drawn(rest, chance, every, before))
    token = nl.ndarray((1, b), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=token, data=first_best(best, b, lanes, w))
    return result(counts, b), result(token, b)


def after(p, q, i, n, weight, accepted, offer, every, lanes, w):
    """What the next token of sequence i is drawn from, (lanes, w): `after` of the spec; weight, accepted and offer are (1, 1)."""
    three = nl.ndarray((1, 3), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=three[:, 0:1], src=weight)
    nisa.tensor_copy(dst=three[:, 1:2], src=accepted)
    nisa.tensor_tensor(dst=three[:, 2:3], data1=accepted, data2=offer, op=nl.greater_equal)
    scalars = wide_value(three, every, lanes)
    target = picked(p, i * (n + 1), n, scalars[:, 1:2], lanes, w)
    rest = picked(q, i * n, n - 1, scalars[:, 1:2], lanes, w)
    nisa.scalar_tensor_tensor(dst=rest, data=target, op0=nl.multiply, operand0=scalars[:, 0:1], op1=nl.subtract, operand1=rest)
    nisa.tensor_scalar(dst=rest, data=rest, op0=nl.maximum, operand0=0.0)
    scratch = nl.ndarray((lanes, w), dtype=nl.float32, buffer=nl.sbuf)
    bonus = summed(every, lane_sums(rest, scratch))
    nisa.tensor_scalar(dst=bonus, data=bonus, op0=nl.less_equal, operand0=0.0, op1=nl.maximum, operand1=scalars[:, 2:3])
    takes = nl.ndarray((lanes, 1), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=takes, src=bonus)
    # By predicate: behind the offer q may hold anything.
    nisa.tensor_copy_predicated(dst=rest, src=target, predicate=takes.broadcast(1, w))
    return rest


def picked(rows, first, last, number, lanes, w):
    """Row first + min(number, last) of an HBM tensor (n, lanes * w), as (lanes, w); number (lanes, 1) float32."""
    at = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    lane = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=lane, pattern=[[0, 1]], offset=first * lanes, channel_multiplier=1)
    nisa.tensor_scalar(dst=at, data=number, op0=nl.minimum, operand0=float(last), op1=nl.multiply, operand1=float(lanes))
    nisa.tensor_tensor(dst=at, data1=at, data2=lane, op=nl.add)
    index = nl.ndarray((lanes, 1), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=index, src=at)
    t = nl.ndarray((lanes, w), dtype=nl.float32, buffer=nl.sbuf)
    base = rows.reshape((rows.shape[0] * lanes, w))
    nisa.dma_copy(dst=t, src=base.ap([[w, lanes], [1, w]], vector_offset=index, indirect_dim=0))
    return t


def empty(like: Tensor) -> Verdict:
    """The verdict on no sequence."""
    none = torch.empty(0, dtype=torch.int32, device=like.device)
    return none, none


def accept_greedy(run: Run, logits: Tensor, drafts: Tensor, offered: Tensor) -> Verdict:
    """`accept_greedy` of the spec: logits [b, n + 1, vocab] fp32, drafts [b, n], offered [b]."""
    b, n = drafts.shape
    if b == 0:
        return empty(drafts)
    rows, lanes, w = laid(logits, -torch.inf)
    given = dense(drafts if n else offered, 1, -1)
    accepted, token = run(greedy_kernel, 1, rows, given, dense(offered, 1, -1), b, lanes, w)
    return accepted.view(b), token.view(b)


def sampled(run: Run, rule: str, p: Tensor, q: Tensor, drafts: Tensor, offered: Tensor, u: Tensor, u_next: Tensor) -> Verdict:
    b, n = drafts.shape
    if b == 0:
        return empty(drafts)
    if n == 0:
        # As if one had been drafted and none offered: the token is drawn from the only row.
        none = torch.zeros((b, 1), dtype=u.dtype, device=u.device)
        return sampled(run, rule, p.expand(-1, 2, -1), p, none.int(), torch.zeros_like(offered), none, u_next)
    if n >= P or p.numel() >= 2**31 or b * (n + 1) * P > 2**24:
        raise ValueError(f"accept_{rule}: {n} drafts of {b} sequences, {p.numel()} probabilities; the kernel takes {P - 1} drafts and 2^31")
    (wide_p, lanes, w), (wide_q, _, _) = laid(p, 0.0), laid(q, 0.0)
    args = (wide_p, wide_q, dense(drafts, -1, 1), dense(offered, 1, -1), dense(u, -1, 1), dense(u_next, 1, -1))
    accepted, token = run(sampled_kernel, 1, *args, rule, b, lanes, w)
    return accepted.view(b), token.view(b)


def accept_token(run: Run, p: Tensor, q: Tensor, drafts: Tensor, offered: Tensor, u: Tensor, u_next: Tensor) -> Verdict:
    """`accept_token` of the spec: p [b, n + 1, vocab], q [b, n, vocab] fp32, drafts and u [b, n], offered and u_next [b]."""
    return sampled(run, "token", p, q, drafts, offered, u, u_next)


def accept_block(run: Run, p: Tensor, q: Tensor, drafts: Tensor, offered: Tensor, u: Tensor, u_next: Tensor) -> Verdict:
    """`accept_block` of the spec, with the arguments of `accept_token`."""
    return sampled(run, "block", p, q, drafts, offered, u, u_next)
