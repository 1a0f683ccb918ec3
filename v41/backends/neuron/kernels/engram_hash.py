# SPDX-License-Identifier: Apache-2.0
"""engram_hash: table rows of n-grams, exact, without 64-bit integers, modulo or division (docs/kernels.md, Engram).

A position lies on a lane. 64-bit numbers are eight bytes, each in an int32; bytes and small sums are exact in VectorE's fp32:

    known = ids, the pad id behind the first unmasked one                                     copies by predicate
    product[c] = sum over a + k = c of id byte a * multiplier byte k                          below 2^18; carries go up byte by byte
    mixed_n = product_0 ^ .. ^ product_n                                                      bits
    modulo p:  high, low = sum over c of byte c * (upper, lower 12 bits of 2^(8 c) mod p)     each below 2^24: exact in any order
               a ninth byte is the sign: -2^64 mod p
               X = high * 4096 + low < 2041 p;  q = X * fp32(1/p) to the nearest integer, off by less than 1/2 + 2^-10
               r = (high - q * upper(p)) * 4096 + (low - q * lower(p)), + p where it is negative
    row = r + offset in int32 on GpSimd

|r| < p / 2 + p / 1024 before the last step, so every number of the way is an integer below 2^24, or a multiple of 4096 below 2^36.

Limits: ids and pad in 0 .. 2^31 - 1, primes 2 .. 2^24, rows below 2^31, as the wrapper checks; any 64-bit multipliers: products and xors
are those of two's complement. To be done once at load: `tables`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, replicated
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl

BYTES = 8
DIGITS = BYTES + 1  # and the sign
HALF = 12  # bits of the lower part of a residue


class Tables(NamedTuple):
    """What the kernel reads in place of int64 multipliers, primes and offsets; `engram_hash` takes these three too."""

    multipliers: Tensor  # [1, lookback * 8] float32: their bytes
    primes: Tensor  # [22, columns] float32: upper, then lower halves of the residues of 2^(8 c), nine of a column; p, upper, lower, 1 / p
    offsets: Tensor  # [1, columns] int32


@nki.jit
def hash_kernel(ids, mask, pad, multipliers, primes, offsets):
    """rows (n, columns) int32 of ids (n, lookback) int32 and mask (n, lookback) uint8; n a multiple of cores * (rows of a block)."""
    n, lookback = ids.shape
    columns = offsets.shape[1]
    out = nl.ndarray((n, columns), dtype=nl.int32, buffer=nl.shared_hbm)
    mine = n // nl.num_programs(0)
    first = nl.program_id(0) * mine
    lanes = min(P, mine)
    factors = replicated(multipliers, lanes, lookback * BYTES)
    constants = replicated(primes, lanes, (2 * DIGITS + 4) * columns)
    parts, moduli = constants[:, 0 : 2 * DIGITS * columns], constants[:, 2 * DIGITS * columns : (2 * DIGITS + 4) * columns]
    starts = replicated(offsets, lanes, columns)
    low8 = nl.ndarray((lanes, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=low8, value=255)
    for row in range(first, first + mine, lanes):
        known = known_ids(ids, mask, pad, row, lanes, lookback)
        digits = mixed(products(known, factors, low8, lanes, lookback), lanes, lookback)
        found = residues_of(digits, parts, moduli, lanes, lookback - 1, columns)
        rows = nl.ndarray((lanes, columns), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rows, src=found)
        nisa.tensor_tensor(dst=rows, data1=rows, data2=starts, op=nl.add, engine=nisa.engine.gpsimd)
        nisa.dma_copy(dst=out[row : row + lanes, :], src=rows)
    return out


def known_ids(ids, mask, pad, row, lanes, lookback):
    """(lanes, lookback) int32: the ids up to the first whose mask is 0, the pad id from there on."""
    given = nl.ndarray((lanes, lookback), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=given, src=ids[row : row + lanes, :])
    holds = nl.ndarray((lanes, lookback), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.dma_copy(dst=holds, src=mask[row : row + lanes, :])
    known = nl.ndarray((lanes, lookback), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=known, src=pad.ap([[0, lanes], [0, lookback]]))
    for j in range(1, lookback):
        nisa.tensor_tensor(dst=holds[:, j : j + 1], data1=holds[:, j : j + 1], data2=holds[:, j - 1 : j], op=nl.bitwise_and)
    nisa.tensor_copy_predicated(dst=known, src=given, predicate=holds)
    return known


def products(known, factors, low8, lanes, lookback):
    """(lanes, lookback, 9) int32: the bytes of id * multiplier modulo 2^64, then its sign bit."""
    product = nl.ndarray((lanes, lookback, DIGITS), dtype=nl.int32, buffer=nl.sbuf)
    wide = factors.reshape((lanes, lookback, BYTES))
    byte = nl.ndarray((lanes, lookback), dtype=nl.int32, buffer=nl.sbuf)
    term = nl.ndarray((lanes, lookback, BYTES), dtype=nl.float32, buffer=nl.sbuf)
    for a in range(4):
        count = BYTES - a
        nisa.tensor_scalar(dst=byte, data=known, op0=nl.right_shift, operand0=8 * a, op1=nl.bitwise_and, operand1=low8)
        spread = byte.expand_dim(2).broadcast(2, count)
        if a == 0:
            nisa.tensor_tensor(dst=product[:, :, 0:BYTES], data1=wide, data2=spread, op=nl.multiply, engine=nisa.engine.vector)
        else:
            nisa.tensor_tensor(dst=term[:, :, 0:count], data1=wide[:, :, 0:count], data2=spread, op=nl.multiply)
            sums = product[:, :, a:BYTES]
            nisa.tensor_tensor(dst=sums, data1=sums, data2=term[:, :, 0:count], op=nl.add, engine=nisa.engine.vector)
    carry = nl.ndarray((lanes, lookback), dtype=nl.int32, buffer=nl.sbuf)
    for c in range(BYTES - 1):
        nisa.tensor_scalar(dst=carry, data=product[:, :, c], op0=nl.right_shift, operand0=8)
        above = product[:, :, c + 1]
        nisa.tensor_tensor(dst=above, data1=above, data2=carry, op=nl.add, engine=nisa.engine.vector)
    nisa.tensor_scalar(dst=product[:, :, 0:BYTES], data=product[:, :, 0:BYTES], op0=nl.bitwise_and, operand0=low8)
    nisa.tensor_scalar(dst=product[:, :, BYTES], data=product[:, :, BYTES - 1], op0=nl.right_shift, operand0=7)
    return product


def mixed(product, lanes, lookback):
    """(lanes, lookback - 1, 9) float32: byte by byte the xor of the first two products, of the first three, ..."""
    bits = nl.ndarray((lanes, lookback - 1, DIGITS), dtype=nl.int32, buffer=nl.sbuf)
    for n in range(1, lookback):
        before = product[:, 0, :] if n == 1 else bits[:, n - 2, :]
        nisa.tensor_tensor(dst=bits[:, n - 1, :], data1=before, data2=product[:, n, :], op=nl.bitwise_xor)
    digits = nl.ndarray((lanes, lookback - 1, DIGITS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=digits, src=bits)
    return digits


def residues_of(digits, parts, moduli, lanes, sizes, columns):
    """(lanes, columns) float32: the number of each n-gram size modulo the primes of its columns."""
    heads = columns // sizes
    sums = nl.ndarray((lanes, 2, columns), dtype=nl.float32, buffer=nl.sbuf)
    spread = digits.expand_dim(2).broadcast(2, heads)
    weights = parts.reshape((lanes, 2, sizes, heads, DIGITS))
    for half in range(2):
        term = nl.ndarray((lanes, sizes, heads, DIGITS), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=term, data1=spread, data2=weights[:, half], op=nl.multiply)
        nisa.tensor_reduce(dst=sums[:, half, :], op=nl.add, data=term, axis=3)
    high, low = sums[:, 0, :], sums[:, 1, :]
    p, upper, lower, inverse = constant(moduli, 0, columns), constant(moduli, 1, columns), constant(moduli, 2, columns), constant(moduli, 3, columns)
    quotient = nl.ndarray((lanes, columns), dtype=nl.int32, buffer=nl.sbuf)
    r = nl.ndarray((lanes, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=r, data=high, op0=nl.multiply, operand0=4096.0, op1=nl.add, operand1=low)
    nisa.tensor_tensor(dst=quotient, data1=r, data2=inverse, op=nl.multiply)
    for half in range(2):
        nisa.tensor_tensor(dst=r, data1=quotient, data2=upper if half == 0 else lower, op=nl.multiply)
        nisa.tensor_tensor(dst=sums[:, half, :], data1=sums[:, half, :], data2=r, op=nl.subtract)
    nisa.scalar_tensor_tensor(dst=r, data=high, op0=nl.multiply, operand0=4096.0, op1=nl.add, operand1=low)
    fix = nl.ndarray((lanes, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=fix, data=r, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=p)
    nisa.tensor_tensor(dst=r, data1=r, data2=fix, op=nl.add)
    return r


def constant(moduli, i, columns):
    """Row i of the constants of the primes."""
    return moduli[:, i * columns : (i + 1) * columns]


def tables(multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tables:
    """The constants of int64 multipliers [lookback], primes [sizes, heads] and offsets [columns], to be made at load.

    Raises ValueError where a prime leaves 2 .. 2^24 or a row would leave int32.
    """
    p = primes.flatten()
    if not bool(((p >= 2) & (p <= 2**24)).all()) or not bool(((offsets >= 0) & (offsets + p <= 2**31)).all()):
        raise ValueError(f"engram_hash: primes {int(p.min())}..{int(p.max())}, rows up to {int((offsets + p).max())}; the kernel takes 2..2^24 and 2^31")
    digits = [(multipliers >> (8 * k)) & 0xFF for k in range(BYTES)]
    powers = [torch.remainder(torch.tensor(256**c if c < BYTES - 1 else 2**55), p) for c in range(BYTES)]
    powers[BYTES - 1] = powers[BYTES - 1] * 2 % p
    # 2^64 = 2^56 * 256; residues are below 2^24, so the product fits.
    residues = torch.stack([*powers, -(powers[BYTES - 1] * 256) % p], -1)
    halves = torch.stack((residues >> HALF, residues & (2**HALF - 1))).flatten(1).view(-1, p.numel())
    moduli = torch.stack((p, p >> HALF, p & (2**HALF - 1)))
    return Tables(
        torch.stack(digits, -1).to(torch.float32).view(1, -1),
        torch.cat((halves.to(torch.float32), moduli.to(torch.float32), (1 / p.double()).float()[None])),
        offsets.to(torch.int32).view(1, -1),
    )


def engram_hash(run: Run, ids: Tensor, mask: Tensor, pad: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """`engram_hash` of the spec: ids, mask [b, s, lookback], pad [], multipliers [lookback], primes [sizes, heads], offsets [sizes * heads].

    The last three may be `tables` of them.
    """
    b, s, lookback = ids.shape
    n, columns = b * s, offsets.numel()
    if lookback < 2:
        raise ValueError(f"engram_hash: lookback {lookback}; the kernel takes 2 or more")
    if n == 0:
        return ids.new_empty((b, s, columns))
    if multipliers.dtype == torch.float32:
        constants = Tables(dense(multipliers, 1, -1), dense(primes, -1, columns), dense(offsets, 1, -1))
    else:
        constants = tables(multipliers, primes, offsets)
    cores = 1 if n <= P else 2
    more = -n % (cores * min(P, -(-n // cores)))
    flat = dense(padded(ids.reshape(n, lookback), (0, 0, 0, more)), -1, lookback)
    holds = dense(padded(mask.reshape(n, lookback).to(torch.uint8), (0, 0, 0, more)), -1, lookback)
    rows = run(hash_kernel, cores, flat, holds, dense(pad, 1, 1), *constants)
    return rows[:n].view(b, s, columns)
