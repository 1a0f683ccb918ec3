# SPDX-License-Identifier: Apache-2.0
"""The weight recipe: two implementations, slices, spread, and the check values of docs/recipe.md."""

import re

import numpy as np
import pytest
import torch
from recipe_numpy import PAGE, ROLES, elements, name_key, word

from v41 import recipe, recipe_roles
from v41.checkpoint import check_values, tensor_bytes
from v41.recipe import generate
from v41.recipe_words import key, words

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}
# One name for every row of the role table, and every dtype of that row.
CASES = (
    ("layers.3.attn.indexer.k_norm.weight", "BF16", (64,)),
    ("norm.weight", "BF16", (251,)),
    ("vision.blocks.4.norm1.weight", "BF16", (64,)),
    ("embed.weight", "BF16", (67, 96)),
    ("head.weight", "BF16", (67, 96)),
    ("layers.0.attn.attn_sink", "F32", (64,)),
    ("layers.11.attn.wkv.weight", "F8_E4M3", (64, 93)),
    ("layers.11.attn.wkv.scale", "F8_E8M0", (16, 160)),
    ("mtp.0.main_proj.scale", "F8_E8M0", (8, 24)),
    ("layers.11.attn.wq_b.scale", "F8_E8M0", (16, 40)),
    ("layers.11.attn.wo_a.scale", "F8_E8M0", (16, 128)),
    ("layers.11.attn.wo_b.scale", "F8_E8M0", (16, 256)),
    ("mtp.2.confidence_head.proj.weight", "BF16", (1, 288)),
    ("layers.2.attn.compressor.wgate.weight", "BF16", (32, 64)),
    ("mtp.2.markov_head.embed.weight", "BF16", (40, 32)),
    ("mtp.2.markov_head.head.weight", "BF16", (40, 32)),
    ("layers.2.ffn.gate.weight", "BF16", (8, 256)),
    ("layers.2.ffn.gate.bias", "F32", (8,)),
    ("layers.2.ffn.gate.bias_vl", "F32", (8,)),
    ("layers.2.ffn.shared_experts.w3.scale", "F8_E8M0", (2, 8)),
    ("layers.2.ffn.shared_experts.w2.scale", "F8_E8M0", (8, 2)),
    *((f"layers.2.ffn.experts.{expert}.w1.weight", "I8", (33, 5)) for expert in range(2)),
    *((f"layers.2.ffn.experts.{expert}.{part}.scale", "F8_E8M0", (64, 8)) for expert in range(8) for part in ("w1", "w2", "w3")),
    ("layers.2.hc_ffn_fn", "F32", (24, 1024)),
    ("layers.2.hc_ffn_base", "F32", (24,)),
    ("layers.2.hc_ffn_scale", "F32", (3,)),
    ("layers.1.engram.embed.weight", "F8_E4M3", (834, 32)),
    ("layers.1.engram.embed.scale", "F8_E8M0", (834, 1)),
    ("layers.1.engram.q_weight", "BF16", (4, 256)),
    ("layers.1.engram.wkv.scale", "F8_E8M0", (40, 6)),
    ("aligner.w1.bias", "BF16", (256,)),
    ("vision.patch_embed.proj.weight", "BF16", (64, 588)),
)


def stored(name, dtype, shape, seed, rows=None):
    return bytes(tensor_bytes(name, generate(name, DTYPES[dtype], shape, seed, rows)))


def restored(name, dtype, shape, seed, first=0, last=None):
    last = int(np.prod(shape)) if last is None else last
    return elements(name, dtype, shape, seed, np.arange(first, last)).tobytes()


@pytest.mark.parametrize("seed", [0, 15, 2**64 - 1])
@pytest.mark.parametrize(("name", "dtype", "shape"), CASES, ids=[f"{name}-{dtype}" for name, dtype, _ in CASES])
def test_torch_and_numpy_make_the_same_bytes(name, dtype, shape, seed):
    assert stored(name, dtype, shape, seed) == restored(name, dtype, shape, seed)


def test_the_cases_reach_every_role_and_dtype():
    def row_of(name):
        local = re.sub(r"^(layers|mtp)\.\d+\.|\.(weight|scale)$", "", name)
        return next(number for number, row in enumerate(recipe_roles.ROLES) if re.fullmatch(row[0], local))

    assert {row_of(name) for name, _, _ in CASES} == set(range(len(recipe_roles.ROLES)))
    assert {dtype for _, dtype, _ in CASES} == set(DTYPES)


def test_the_page_and_the_table_have_the_same_roles():
    names = {dtype: name for name, dtype in DTYPES.items()}
    table = [
        [
            pattern,
            "+".join(names[dtype] for dtype in dtypes),
            str(role.gain),
            "yes" if role.linear else "no",
            str(role.mean),
            str(role.head_mean),
        ]
        for pattern, dtypes, role in recipe_roles.ROLES
    ]
    assert table == ROLES


def test_the_check_values_of_the_page_hold():
    rows = re.findall(r"^\| `(\S+)` \| (\S+) \| \[(.*?)\] \| `([0-9a-f ]+)` \|$", PAGE, re.M)
    assert len(rows) == 8
    for name, dtype, shape, head in rows:
        assert stored(name, dtype, tuple(map(int, shape.split(","))), 0)[:8] == bytes.fromhex(head), name
    assert f"{key(0, 'embed.weight'):#x}" in PAGE
    for found in (words(key(0, "embed.weight"), 0, 4), words(key(0, "embed.weight"), 2**33 + 1, 2)):
        assert " ".join(f"{number:#010x}" for number in found.tolist()) in PAGE


@pytest.mark.parametrize("start", [0, 12345, 2**32 - 7, 2**36 + 3])
def test_words_agree_across_the_32_bit_boundary(start):
    number = name_key(3, "x")
    assert number == key(3, "x")
    assert words(number, start, 20).tolist() == word(number, np.arange(start, start + 20)).tolist()


def test_words_of_one_key_and_of_two_do_not_repeat():
    found = torch.cat([words(key(0, name), 0, 4096) for name in ("layers.0.a", "layers.0.b")])
    # 8192 of 2^32: about 0.008 equal pairs are expected, so 3 would be a fault
    assert len(found.unique()) >= len(found) - 2


@pytest.mark.parametrize(("name", "dtype", "shape"), [case for case in CASES if len(case[2]) == 2 and case[2][0] > 20][:12])
def test_any_rows_can_be_made_alone(name, dtype, shape):
    whole = stored(name, dtype, shape, 1)
    width = len(whole) // shape[0]
    for first, last in ((0, 1), (3, 17), (shape[0] - 1, shape[0]), (5, 5)):
        assert stored(name, dtype, shape, 1, slice(first, last)) == whole[first * width : last * width]


def test_chunks_do_not_show(monkeypatch):
    cases = [("embed.weight", "BF16", (67, 96)), ("layers.2.hc_ffn_fn", "F32", (24, 64)), ("layers.2.attn.wkv.weight", "F8_E4M3", (64, 93))]
    whole = [stored(*case, 0) for case in cases]
    monkeypatch.setattr(recipe, "CHUNK", 128)
    assert [stored(*case, 0) for case in cases] == whole


def test_the_last_rows_of_the_released_engram_table_are_there_at_once():
    rows, width = 384006168, 256
    made = stored("layers.1.engram.embed.weight", "F8_E4M3", (rows, width), 0, slice(rows - 2, rows))
    assert made == restored("layers.1.engram.embed.weight", "F8_E4M3", (rows, width), 0, (rows - 2) * width, rows * width)
    assert len(set(made)) > 100  # 512 draws from 126 codes and two zeros


def test_names_and_seeds_change_the_bytes():
    base = stored("layers.0.ffn.gate.bias", "F32", (384,), 0)
    assert base != stored("layers.0.ffn.gate.bias_vl", "F32", (384,), 0)
    assert base != stored("layers.1.ffn.gate.bias", "F32", (384,), 0)
    assert base != stored("layers.0.ffn.gate.bias", "F32", (384,), 1)


def test_fp8_has_subnormals_zero_448_and_both_signs_but_no_nan():
    tensor = generate("layers.0.attn.wkv.weight", torch.float8_e4m3fn, (512, 512), 0)
    check_values("wkv", tensor)
    codes = set(bytes(tensor_bytes("wkv", tensor)))
    assert codes == {code | sign for code in recipe.CODES for sign in (0, 128)}
    assert set(range(8)) <= codes and 0x7E in codes and 0xFE in codes and not codes & {0x7F, 0xFF}


def test_fp4_uses_all_sixteen_codes_equally():
    raw = torch.frombuffer(tensor_bytes("w", generate("layers.0.ffn.experts.0.w1.weight", torch.int8, (512, 512), 0)), dtype=torch.uint8)
    for nibble in (raw & 15, raw >> 4):
        counts = torch.bincount(nibble.long(), minlength=16)
        assert (counts - 2**14).abs().max() < 5 * 124  # binomial, n = 2^18, p = 1/16: standard deviation 124


def test_the_stated_mean_squares_are_those_of_the_tables():
    fp8 = torch.tensor(list(recipe.CODES), dtype=torch.uint8).view(torch.float8_e4m3fn).double().pow(2).mean()
    fp4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double().pow(2).mean()
    jitter = torch.tensor(recipe.JITTER).double().exp2().pow(2).mean()
    assert (float(fp8), float(fp4), float(jitter)) == (recipe.FP8_SQUARE[0] / recipe.FP8_SQUARE[1], 137 / 16, 185 / 128)
    assert recipe.FP4_SQUARE == (137, 16)


def root_mean_square(tensor):
    return float(tensor.double().pow(2).mean().sqrt())


@pytest.mark.parametrize("name", ["attn.wq_a", "attn.wo_b", "ffn.shared_experts.w1", "engram.wkv"])
def test_a_scaled_weight_has_the_wanted_root_mean_square(name):
    out, fan_in = 1024, 1280
    codes = generate(f"layers.1.{name}.weight", torch.float8_e4m3fn, (out, fan_in), 4).double()
    scale = generate(f"layers.1.{name}.scale", torch.float8_e8m0fnu, (out // 32, fan_in // 32), 4)
    exponents = scale.view(torch.uint8).double() - 127
    value = codes * exponents.exp2().repeat_interleave(32, 0).repeat_interleave(32, 1)
    gain = next(role.gain for pattern, _, role in recipe_roles.ROLES if re.fullmatch(pattern, name)) / 100
    # 1280 tiles whose squares spread by a factor of about 1.2: the mean square is known to 3.4 %, the root to 1.7 %; five times that
    assert root_mean_square(value) * fan_in**0.5 == pytest.approx(gain, rel=0.085)
    assert len(exponents.unique()) >= 4


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "mean", "spread"),
    [
        ("embed.weight", "BF16", (512, 256), 0, 1),
        ("head.weight", "BF16", (512, 256), 0, 3 / 16),
        ("norm.weight", "BF16", (65536,), 1, 0.15),
        ("layers.0.hc_attn_fn", "F32", (24, 16384), 0, 1 / 128),
        ("layers.0.ffn.gate.bias", "F32", (65536,), 0, 0.2),
        ("layers.0.attn.attn_sink", "F32", (65536,), 0, 1),
    ],
)
def test_a_plain_weight_has_the_wanted_mean_and_spread(name, dtype, shape, mean, spread):
    value = generate(name, DTYPES[dtype], shape, 2).double()
    count = value.numel()
    assert float(value.mean()) == pytest.approx(mean, abs=5 * spread / count**0.5)
    assert root_mean_square(value - mean) == pytest.approx(spread, rel=1 / 32 + 5 / count**0.5)  # M has at least 6 bits


def test_norm_weights_stay_positive_and_sinks_differ():
    norms = generate("norm.weight", torch.bfloat16, (65536,), 0).float()
    assert 0.45 < float(norms.min()) < 0.6 and 1.4 < float(norms.max()) < 1.55
    for layer in range(40):
        sinks = generate(f"layers.{layer}.attn.attn_sink", torch.float32, (64,), 0)
        assert len(sinks.unique()) == 64


def test_one_expert_in_eight_is_wide():
    def middle(expert, part):
        scale = generate(f"layers.5.ffn.experts.{expert}.{part}.scale", torch.float8_e8m0fnu, (64, 32), 0)
        return float(scale.view(torch.uint8).double().mean())

    for part, shift in (("w1", 2), ("w2", -2), ("w3", 2)):
        means = torch.tensor([middle(expert, part) for expert in range(16)])
        wide = (means - means.median()) * shift > shift**2 / 2
        assert wide.nonzero().flatten().tolist() == [expert for expert in range(16) if (expert + key(0, "layers.5.ffn.experts")) % 8 == 0]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "rows", "words_in_message"),
    [
        ("layers.0.attn.nothing.weight", torch.bfloat16, (2, 2), None, "no role"),
        ("embed.weight", torch.float32, (2, 2), None, "torch.float32"),
        ("embed.scale", torch.float8_e8m0fnu, (2, 2), None, "no scale"),
        ("layers.0.attn.wkv.weight", torch.float8_e8m0fnu, (2, 2), None, "torch.float8_e4m3fn"),
        ("embed.weight", torch.bfloat16, (2, 2), slice(1, 3), r"\[2, 2\]"),
        ("embed.weight", torch.bfloat16, (2, 2), slice(0, 2, 2), "slice"),
    ],
)
def test_what_has_no_recipe_is_refused(name, dtype, shape, rows, words_in_message):
    with pytest.raises(ValueError, match=words_in_message) as error:
        generate(name, dtype, shape, 0, rows)
    assert name in str(error.value)


def test_a_seed_outside_64_bits_is_refused():
    with pytest.raises(ValueError, match="seed -1"):
        generate("embed.weight", torch.bfloat16, (2, 2), -1)
