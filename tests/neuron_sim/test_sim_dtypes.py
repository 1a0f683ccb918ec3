# SPDX-License-Identifier: Apache-2.0
"""Rounding and decoding against independent definitions: torch, or exact rational search over all codes."""

import numpy as np
import pytest
import torch
from simkit import rng

from v41.backends.neuron.sim.dtypes import TABLES, CastError, as_dtype, from_float32, to_float32

torch.set_num_threads(1)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, 1.17549435e-38, 3.4028235e38, 3.3961775e38], np.float32)


def values():
    bits = rng(1).integers(0, 1 << 32, 20000, dtype=np.uint32).view(np.float32)
    return np.concatenate([SPECIAL, bits[~np.isnan(bits)], np.array([1.00390625, 1.01171875], np.float32)])


@pytest.mark.parametrize(("name", "torch_dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_rounding_to_16_bits_equals_torch_bit_for_bit(name, torch_dtype):
    x = values()
    want = torch.from_numpy(x).to(torch_dtype).view(torch.int16).numpy()
    assert np.array_equal(from_float32(x, name).view(np.int16), want)


def test_bfloat16_keeps_nan_and_decodes_every_code_as_torch_does():
    assert np.isnan(to_float32(from_float32(np.array([np.nan, -np.nan], np.float32), "bfloat16"), "bfloat16")).all()
    codes = np.arange(65536, dtype=np.uint16)
    want = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(to_float32(codes, "bfloat16"), want, equal_nan=True)


@pytest.mark.parametrize(("name", "torch_dtype"), [("float8_e5m2", torch.float8_e5m2), ("float8_e4m3fn", torch.float8_e4m3fn)])
def test_fp8_tables_equal_torch(name, torch_dtype):
    want = torch.arange(256, dtype=torch.uint8).view(torch_dtype).float().numpy()
    assert np.array_equal(TABLES[name], want, equal_nan=True)


def test_legacy_e4m3_is_ieee_like_with_largest_value_240():
    table = TABLES["float8_e4m3"]
    fn = TABLES["float8_e4m3fn"]
    below = np.r_[0:0x78, 0x80:0xF8]
    assert np.array_equal(table[below], fn[below])
    assert table[0x77] == 240.0 and np.isinf(table[[0x78, 0xF8]]).all()
    assert np.isnan(table[np.r_[0x79:0x80, 0xF9:0x100]]).all()


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2"])
def test_fp8_rounding_is_to_nearest_even_for_values_midpoints_and_neighbors(name):
    table = TABLES[name].astype(np.float64)
    finite = np.flatnonzero(np.isfinite(table[:128]))
    grid = table[finite]
    middle = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([grid, middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)]).astype(np.float32)
    x = x[x <= grid[-1]]
    distance = np.abs(x.astype(np.float64)[:, None] - grid[None])
    nearest = distance == distance.min(axis=1, keepdims=True)
    even = np.where(nearest, np.where(finite % 2 == 0, 0, 1), 2)
    want = finite[even.argmin(axis=1)]
    assert np.array_equal(from_float32(x, name), want)
    assert np.array_equal(from_float32(-x, name), want | 0x80)


@pytest.mark.parametrize(("name", "limit"), [("float8_e4m3", 240.0), ("float8_e5m2", 57344.0)])
def test_fp8_beyond_its_range_is_refused_not_guessed(name, limit):
    assert from_float32(np.array([limit], np.float32), name).shape == (1,)
    with pytest.raises(CastError, match="clamp") as error:
        from_float32(np.array([np.nextafter(np.float32(limit), np.float32(np.inf))], np.float32), name)
    assert error.value.rule == "NUM-FP8"


def test_integers_round_half_to_even_and_saturate():
    x = np.array([-300.0, -128.5, -0.5, 0.5, 1.5, 2.5, 126.5, 127.5, 300.0, np.inf, -np.inf], np.float32)
    assert from_float32(x, "int8").tolist() == [-128, -128, 0, 0, 2, 2, 126, 127, 127, 127, -128]
    assert from_float32(x, "uint8").tolist() == [0, 0, 0, 0, 2, 2, 126, 128, 255, 255, 0]
    assert from_float32(np.array([4.3e9, -1.0], np.float32), "uint32").tolist() == [4294967295, 0]
    with pytest.raises(CastError, match="NaN"):
        from_float32(np.array([np.nan], np.float32), "int32")


def test_tfloat32_keeps_ten_mantissa_bits_rounded_to_even():
    one = np.float32(1)
    step = np.float32(2.0**-10)
    x = np.array([one + step / 2, one + step * 1.5, one + step * 0.75, -one - step * 0.25], np.float32)
    assert from_float32(x, "tfloat32").tolist() == [1.0, 1.0 + 2 * step, 1.0 + step, -1.0]


def test_integers_of_2_to_24_do_not_pass_through_float32():
    assert to_float32(np.array([(1 << 24) - 1], np.int32), "int32")[0] == (1 << 24) - 1
    with pytest.raises(CastError) as error:
        to_float32(np.array([-(1 << 24)], np.int32), "int32")
    assert error.value.rule == "NUM-INT24"


def test_dtype_names_come_from_numpy_torch_and_nki():
    assert as_dtype(np.float32) == as_dtype(np.dtype("float32")) == as_dtype(torch.float32) == as_dtype("float32")
    assert as_dtype(torch.bfloat16) == "bfloat16" and as_dtype(np.bool_) == "bool"
    with pytest.raises(ValueError, match="int64"):
        as_dtype(np.int64)
