# SPDX-License-Identifier: Apache-2.0
"""Inputs of cases and of single blocks: numbers that follow from a name, by the words of the weight recipe (docs/recipe.md 1)."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from v41.recipe import CODES
from v41.recipe_words import key, words
from v41.spec.numerics import DTYPES, Numerics
from v41.spec.table import Fp4, Fp8, Fp8Rows

SEED = 0


@dataclass(frozen=True)
class Inputs:
    """Named inputs of one case in one regime. Values are those of the regime's activation dtype, also where the twin holds them in float64."""

    case: str
    numerics: Numerics

    def words(self, name: str, count: int) -> Tensor:
        return words(key(SEED, f"{self.case}.{name}"), 0, count)

    def bell(self, name: str, *shape: int) -> Tensor:
        """Float64 numbers with a mean square of 1: the sum of four bytes of a word."""
        w = self.words(name, prod(shape))
        s = sum(((w >> shift) & 255 for shift in (0, 8, 16, 24)), torch.zeros_like(w)) - 510
        return (s.double() / 147.8).view(shape) + (w & 0xFFFF).view(shape).double() * 2.0**-24

    def act(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        """Activations."""
        return self.as_act(self.bell(name, *shape) * scale)

    def as_act(self, x: Tensor) -> Tensor:
        """Given numbers as activations of the regime."""
        return x.to(DTYPES[str(self.numerics.dtype)]).to(self.numerics.act)

    def wide(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        """Numbers of the dtype of sums: float32 values, but in a float64 regime."""
        x = self.bell(name, *shape) * scale
        return (x if self.numerics.dtype == "float64" else x.float()).to(self.numerics.wide)

    def bf16(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        """A stored bfloat16 tensor."""
        return (self.bell(name, *shape) * scale).to(torch.bfloat16)

    def f32(self, name: str, *shape: int, scale: float = 1.0) -> Tensor:
        """A stored float32 tensor."""
        return (self.bell(name, *shape) * scale).float()

    def ids(self, name: str, low: int, high: int, *shape: int) -> Tensor:
        """Integers low .. high - 1 as int32."""
        return (low + self.words(name, prod(shape)) % (high - low)).to(torch.int32).view(shape)

    def fp8_codes(self, name: str, *shape: int) -> Tensor:
        table = torch.tensor(list(CODES) + [c | 128 for c in CODES], dtype=torch.uint8)
        return table[self.words(name, prod(shape)) % 256].view(shape).view(torch.float8_e4m3fn)

    def scales(self, name: str, low: int, *shape: int) -> Tensor:
        """e8m0 bytes of 2^low .. 2^(low + 3)."""
        return (127 + low + self.words(name, prod(shape)) % 4).to(torch.uint8).view(shape).view(torch.float8_e8m0fnu)

    def fp8(self, name: str, rows: int, columns: int) -> Fp8:
        """A quantized weight whose product with unit rows is about 1."""
        low = -9 - max(columns.bit_length() // 2 - 2, 0)
        return Fp8(self.fp8_codes(name + ".weight", rows, columns), self.scales(name + ".scale", low, -(-rows // 32), -(-columns // 32)))

    def fp8_rows(self, name: str, rows: int, columns: int) -> Fp8Rows:
        return Fp8Rows(self.fp8_codes(name + ".weight", rows, columns), self.scales(name + ".scale", -8, rows, -(-columns // 32)))

    def fp4(self, name: str, stack: int, rows: int, columns: int) -> Fp4:
        codes = (self.words(name + ".weight", stack * rows * columns // 2) % 256).to(torch.uint8).view(torch.int8).view(stack, rows, columns // 2)
        return Fp4(codes, self.scales(name + ".scale", -5, stack, rows, columns // 32))
