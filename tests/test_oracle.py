# SPDX-License-Identifier: Apache-2.0
"""The NumPy oracle against the outputs of the released reference, operation by operation.

Bounds. A stored number is the reference's float32 result, rounded to its format. So float64 may differ from it by half a
step of the format plus the reference's float32 error, which for a sum of n products is at most n * 2**-24 times the sum
of their sizes. Where the stored bits are reproduced exactly, the test asks for the bits.
"""

from pathlib import Path

import numpy as np
import pytest
from oracle import engram, files, formats, ops

GOLDEN = Path(__file__).parent / "golden"
TINY = GOLDEN / "tiny"
U32 = 2.0**-24  # relative error of one float32 operation
EPS = 1e-20


def vectors(name):
    return files.read(GOLDEN / "ops" / f"{name}.safetensors")


def half_step(values, digits):
    """Half the distance between neighbors of a number with that many significant bits."""
    return np.ldexp(1.0, np.frexp(values)[1] - digits - 1)


def same_bits(got, want):
    return np.array_equal(formats.bf16_codes(np.asarray(got)), want)


def relative(got, want):
    return float(np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want))


# Formats


def test_every_code_decodes_to_the_stored_value():
    t = vectors("fp4_act_quant")
    pairs = formats.e2m1_unpack(t["all_codes.packed"].codes[:, None])
    decoded = [(pairs, t["all_codes.values"])]
    decoded += [(f(np.arange(256)), t[f"all_{n}.values"]) for n, f in (("e4m3", formats.e4m3_values), ("e8m0", formats.e8m0_values))]
    for got, want in decoded:
        assert np.array_equal(got, want.values, equal_nan=True)
        known = ~np.isnan(got)
        assert np.array_equal(np.signbit(got[known]), np.signbit(want.values[known]))


def test_every_finite_code_survives_decoding_and_encoding():
    short = np.arange(65536)
    short = short[(short >> 7) & 0xFF != 0xFF]
    assert np.array_equal(formats.bf16_codes(formats.bf16_values(short)), short)
    byte = np.arange(256)
    assert np.array_equal(formats.e4m3_codes(formats.e4m3_values(byte[byte & 127 != 127])), byte[byte & 127 != 127])
    assert np.array_equal(formats.e8m0_codes(formats.e8m0_values(byte[:255])), byte[:255])
    assert np.array_equal(formats.e2m1_codes(formats.e2m1_values(byte[:16])), byte[:16])


def test_bf16_rounds_ties_to_the_even_code_and_overflows_to_infinity():
    codes = np.arange(0x7F7F)
    middle = (formats.bf16_values(codes) + formats.bf16_values(codes + 1)) / 2
    assert np.array_equal(formats.bf16_codes(middle), codes + (codes & 1))
    above, below = np.nextafter(middle, np.inf), np.nextafter(middle, 0)
    assert np.array_equal(formats.bf16_codes(above), codes + 1) and np.array_equal(formats.bf16_codes(below), codes)
    assert formats.bf16_codes(np.array([2.0**128 - 2.0**119, -1e39])).tolist() == [0x7F80, 0xFF80]


def test_released_weight_bytes_decode_to_the_published_values():
    # The first bytes of layers.0.attn.wkv.weight and of layers.0.ffn.experts.0.w1.weight of the released checkpoint.
    wkv = formats.e4m3_values(np.frombuffer(bytes.fromhex("d871f2797069f0e5"), np.uint8)) * formats.e8m0_values(0x73)
    assert wkv.tolist() == [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    w1 = formats.e2m1_unpack(np.frombuffer(bytes.fromhex("a0a8ec4aadaf42aa"), np.uint8)) * formats.e8m0_values(0x78)
    assert (w1 * 128).tolist() == [0, -1, 0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1]


def test_activation_rounding_reproduces_every_bit():
    t = vectors("act_quant")
    codes, scales = formats.a8_codes(t["x"].values)
    assert np.array_equal(codes, t["q"].codes) and np.array_equal(scales, t["scale"].codes)
    assert same_bits(formats.a8(t["x"].values), t["qdq"].codes)


@pytest.mark.parametrize("name, encode, round_trip", [("e8m0_block32", formats.f4e_codes, formats.f4e), ("e4m3_block16", formats.f4s_codes, formats.f4s)])
def test_fp4_rounding_reproduces_every_bit(name, encode, round_trip):
    t = vectors("fp4_act_quant")
    codes, scales = encode(t["x"].values)
    assert np.array_equal(formats.e2m1_pack(codes), t[name + ".packed"].codes.view(np.uint8))
    assert np.array_equal(scales, t[name + ".scale"].codes)
    assert same_bits(round_trip(t["x"].values), t[name + ".qdq"].codes)


# Operations


def test_rms_norm_reproduces_every_bit():
    t = vectors("rms_norm")
    assert same_bits(ops.rms_norm(t["x"].values, t["weight"].values, EPS), t["out"].codes)


def rope_of(t, name):
    dim, _, original, base, factor, fast, slow = t[name + ".args"].values
    return ops.rope_frequencies(int(dim), base, int(original), factor, fast, slow)


@pytest.mark.parametrize("name", ["plain_released", "yarn_released", "plain_tiny", "yarn_tiny"])
def test_rope_tables_agree_to_a_float32_step(name):
    t = vectors("rope")
    angles = np.array([ops.rope_angles(int(p), rope_of(t, name)) for p in t[name + ".positions"].codes])
    # Half a step of a number below 1 for the rounding, half for the float32 library. A frequency one step off shows from position 64 on.
    assert np.abs(np.cos(angles) - t[name + ".cos"].values).max() <= U32
    assert np.abs(np.sin(angles) - t[name + ".sin"].values).max() <= U32


@pytest.mark.parametrize("kind, sign", [("rotated", 1.0), ("inverse", -1.0)])
@pytest.mark.parametrize("name", ["x3", "x4"])
def test_rotation_reproduces_every_bit(name, kind, sign):
    t = vectors("rope")
    f, first = rope_of(t, "yarn_tiny"), int(t["start"].codes)
    x, want = t[name].values, t[f"{name}.{kind}"].codes
    for row in range(x.shape[1]):
        assert same_bits(ops.rotate(x[:, row], ops.rope_angles(first + row, f), sign), want[:, row])
        assert not same_bits(ops.rotate(x[:, row], ops.rope_angles(first + row, f), -sign), want[:, row])


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_quantized_linear_is_exact_before_its_one_rounding(name):
    t = vectors(f"{name}_gemm")
    w = files.tile_values(t["w"].codes, t["w_scale"].codes) if name == "fp8" else files.packed_values(t["w_packed"].codes, t["w_scale"].codes)
    codes, scales = formats.a8_codes(t["x"].values)
    assert np.array_equal(codes, t["a"].codes) and np.array_equal(scales, t["a_scale"].codes)
    got = np.array([ops.linear(x, w, formats.a8) for x in t["x"].values])
    sizes = np.abs(formats.a8(t["x"].values)) @ np.abs(w).T * w.shape[1]
    assert (np.abs(got - t["out_exact_fp64"].values) <= sizes * 2.0**-53).all()
    assert (np.abs(got - t["out_fp32"].values) <= sizes * U32).all()
    assert same_bits(got, t["out_bf16"].codes)


def test_hyper_connection_mixes_agree_to_float32():
    t = vectors("hyper_connections")
    scale, base = t["scale"].values, t["base"].values
    for row, m in enumerate(t["mixes"].values[0]):
        # The argument of an exponential carries 2 roundings of its size. Each of the 40 steps adds 5 (sum of 4, eps,
        # quotient) and does not widen earlier relative errors, since dividing rows or columns never does.
        largest = (np.abs(m).max() * np.abs(scale).max() + np.abs(base).max()) * 2 * U32
        for iterations, name in ((20, "comb"), (1, "comb_iters1")):
            got = ops.split_mixes(m, scale, base, 4, iterations, 1e-6)
            bound = 2 * (2 * largest + 5 * 2 * iterations * U32)
            for part, stored in zip(got, ("pre", "post", name), strict=True):
                assert np.abs(part - t[stored].values[0, row]).max() <= bound


def test_collapse_and_expand_agree_with_the_stored_streams():
    t = vectors("hyper_connections")
    flipped, exchanged = 0, []
    for row, h in enumerate(t["stream"].values[0]):
        pre, post, comb = ops.mixes(h, t["fn"].values, t["scale"].values, t["base"].values, 20, 1e-6, EPS)
        y, want = t["sublayer_out"].values[0, row], t["hc_post_out"]
        assert same_bits(ops.collapse(h, pre), t["hc_pre_out"].codes[0, row])
        got = ops.expand(y, h, post, comb)
        slack = 256 * U32 * ops.expand(np.abs(y), np.abs(h), post, comb)  # fn has 256 columns
        assert (np.abs(got - want.values[0, row]) <= half_step(want.values[0, row], 8) + slack).all()
        flipped += (formats.bf16_codes(got) != want.codes[0, row]).sum()
        exchanged.append(ops.expand(y, h, post, comb.T))
    assert flipped <= 1  # of 2,048: one sum lies at a midpoint
    assert relative(exchanged, t["hc_post_out"].values[0]) > 0.1


def test_attention_is_the_plain_softmax_with_a_sink():
    t = vectors("sparse_attn")
    scale, sink = float(t["scale"].values), t["sink"].values
    flipped = 0
    for b, s in np.ndindex(2, 6):
        q, kv, slots = t["q"].values[b, s], t["kv"].values[b], t["idx"].codes[b, s]
        want, exact = t["out"].values[b, s], t["out_exact_fp64"].values[b, s]
        plain = ops.attend_list(q, kv, sink, slots, scale)
        assert np.abs(plain - exact).max() <= 70 * 2.0**-52 * np.abs(kv).max()
        # Each probability is rounded to bf16, and together they are at most 1.
        assert (np.abs(plain - want) <= 2.0**-9 * np.abs(kv).max(0) + half_step(want, 8)).all()
        runs = ops.attend_in_runs(q, kv, sink, slots, scale, formats.bf16)
        flipped += (formats.bf16_codes(runs) != t["out"].codes[b, s]).sum()
        assert (np.abs(runs - want) <= 2 * half_step(want, 8)).all()
    assert flipped <= 1  # of 6,144


def test_slot_lists_are_equal():
    t = vectors("index_lists")
    for name, stored in t.items():
        words = name.split(".")
        kind, window, count, position = words[0], int(words[1][3:]), int(words[3].lstrip("sblock")), int(words[4][3:])
        for row in range(count):
            if kind == "dspark":
                want = ops.draft_list(position, window, count)
            else:
                want = ops.prefill_list(row, window, count) if position == 0 else ops.ring_list(position, window)
            assert (stored.codes[:, row] == want).all(), name


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_compressor_reproduces_every_latent_and_says_when_it_has_one(ratio):
    t = vectors("compressor")
    p = f"ratio{ratio}"
    wgate = t[p + ".wgate"].values if ratio > 1 else None
    for b, x in enumerate(t[p + ".x"].values):
        latents = ops.compress(x, t[p + ".wkv"].values, wgate, t[p + ".norm"].values, ratio, EPS, formats.bf16)
        for first in (1, 2, 3, 4, 7, 8):
            stored = np.concatenate([t[f"{p}.prefill{first}"].codes[b], t[f"{p}.prefill{first}.step_latents"].codes[b]])
            assert same_bits(latents, stored)
            assert t[f"{p}.prefill{first}.step_yields"].codes.tolist() == [(i + 1) % ratio == 0 for i in range(first, len(x))]
            if ratio > 1:  # the unfinished group keeps its float32 projections
                left = first % ratio
                for state, weight in (("kv_state", t[p + ".wkv"].values), ("score_state", wgate)):
                    got, sizes = (a[first - left : first] @ w.T for a, w in ((x, weight), (np.abs(x), np.abs(weight))))
                    assert (np.abs(got - t[f"{p}.prefill{first}.{state}"].values[b, :left]) <= 64 * U32 * sizes).all()


def test_candidate_blocks_are_equal():
    t = vectors("candidate_blocks")
    for name in (n for n in t if ".blocks" in n):
        kind, _, sizes = name.partition(".blocks")
        blocks, size = (int(n) for n in sizes.split("x"))
        for b, row in np.ndindex(t[name].codes.shape[:2]):
            visible = int(t["decode.len"].codes) if kind == "decode" else int(t["prefill.lens"].codes[row, 0])
            assert np.array_equal(ops.candidate_rows(t[kind + ".score"].values[b, row], visible, blocks, size), t[name].codes[b, row])


def test_the_newest_candidate_block_stays_when_it_is_the_worst():
    scores = np.array([9.0, 8.0, 7.0, 6.0, -5.0])
    assert ops.candidate_rows(scores, 5, 1, 2).tolist() == [False] * 4 + [True]
    assert ops.candidate_rows(scores, 5, 2, 2).tolist() == [True, True, False, False, True]


def test_top_k_prefers_the_lower_index():
    assert ops.top_k(np.array([1.0, 3.0, 3.0, -np.inf, 3.0]), 2) == [1, 2]
    assert ops.select(np.array([1.0, 3.0, 3.0, -np.inf, 3.0]), 4) == [0, 1, 2, 4]
    assert ops.greedy(np.array([0.0, 2.0, 2.0])) == 1


def test_index_scores_apply_relu_before_the_weights():
    q, keys = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[2.0, -3.0], [-1.0, -1.0], [1.0, 1.0]])
    assert ops.index_scores(q, keys, np.array([-1.0, 5.0])).tolist() == [-2.0, 0.0, 4.0]


@pytest.mark.parametrize("score, top", [("sqrtsoftplus", 2), ("sqrtsoftplus", 1), ("sigmoid", 3), ("softmax", 3)])
def test_router_chooses_the_same_experts(score, top):
    t, p = vectors("gate"), f"{score}.top{top}"
    weight = t[p + ".weight"].values
    for row, x in enumerate(t[p + ".x"].values):
        experts, weights = ops.route(x, weight, t[p + ".bias"].values, top, score, 1.5)
        assert experts == t[p + ".experts"].codes[row].tolist()
        # A logit is off by 64 roundings; a score at most by twice that, relatively; normalizing doubles it once more.
        bound = 4 * (64 * (np.abs(weight) @ np.abs(x)).max() + 20) * U32
        assert (np.abs(weights - t[p + ".route_weights"].values[row]) <= bound * weights + 2.0**-126).all()


def test_router_ties_go_to_the_lower_expert_unlike_the_stored_choice():
    t = vectors("gate")
    for x, stored, want in zip(t["tie.x"].values, t["tie.experts_cpu_choice"].codes, t["tie.route_weights"].values, strict=True):
        experts, weights = ops.route(x, t["tie.weight"].values, t["tie.bias"].values, 2, "sqrtsoftplus", 1.5)
        assert experts == [2, 3] and stored.tolist() == [3, 5]
        assert np.abs(weights - want).max() <= 8 * U32


@pytest.mark.parametrize("name, values", [("fp4", files.packed_values), ("fp8", files.tile_values)])
def test_expert_reproduces_every_bit(name, values):
    t = vectors("expert")
    w1, w2, w3 = (values(t[f"{name}.w{i}.weight"].codes, t[f"{name}.w{i}.scale"].codes) for i in (1, 2, 3))
    late = 0
    for row, x in enumerate(t[name + ".x"].values):
        weight = float(t[name + ".route_weight"].values[row, 0])
        plain = ops.expert(x, w1, w2, w3, 10.0, 1.0, formats.a8, formats.bf16)
        assert same_bits(plain, t[name + ".out"].codes[row])
        weighted = t[name + ".out_weighted"].codes[row]
        assert same_bits(ops.expert(x, w1, w2, w3, 10.0, weight, formats.a8, formats.bf16), weighted)
        late += not same_bits(plain * weight, weighted)
    assert late > 0  # weighing after w2 is a different function


def test_greedy_takes_the_first_of_equal_logits():
    t = vectors("sample")
    assert [ops.greedy(row) for row in t["logits"].values] == t["temp0"].codes.tolist()


def test_engram_constants_and_hashes_are_equal():
    t = vectors("engram_hash")
    primes = engram.primes(2, 16_000_000, 4, 8)
    assert np.array_equal(primes, t["primes"].codes)
    assert [sum(map(sum, p)) for p in primes] == [384_006_168, 384_016_682]
    for column, layer in enumerate((1, 14)):
        factors = engram.multipliers(layer, 99_092, 4)
        assert factors == t["multipliers"].codes[column].tolist()
        assert engram.offsets(primes[column]) == t["offsets"].codes[column].tolist()
        stored = np.concatenate([t["prefill8"].codes, t["steps8to12"].codes], 1)
        for b, row in enumerate(t["ids"].codes.tolist()):
            alive = [i if ok else None for i, ok in zip(row, t["mask"].codes[b], strict=False)]
            for ids, want in ((row, stored), (alive, t["prefill8_masked"].codes)):
                for position in range(want.shape[1]):
                    assert engram.hash_rows(ids, position, factors, primes[column], 2) == want[b, position, column].tolist()


def test_engram_gate_reproduces_every_bit():
    t = vectors("engram_gate")
    table = files.row_values(t["table"].codes, t["table_scale"].codes)
    wkv = files.tile_values(t["wkv.weight"].codes, t["wkv.scale"].codes)
    for position, h in enumerate(t["x"].values[0]):
        rows = table[t["hash_ids"].codes[0, position]]
        assert same_bits(rows, t["rows"].codes[0, position])
        projected = formats.bf16(ops.linear(rows.reshape(-1), wkv, formats.a8))
        for name, dead in (("out", False), ("out_masked", not t["mask"].codes[0, position])):
            got = engram.add(h, projected, t["q_weight"].values, t["k_weight"].values, EPS, dead)
            assert same_bits(got, t[name].codes[0, position])


def test_compressed_vocabulary_is_equal():
    t = files.read(TINY / "engram_map.safetensors")
    mapped = engram.token_map(TINY / "checkpoint/tokenizer.json")
    assert mapped == t["token_map"].codes.tolist() and mapped[2] == int(t["pad_id_compressed"].codes)
    primes = engram.primes(2, 120, 4, 2)
    assert np.array_equal(primes, t["primes"].codes)
    assert [engram.offsets(p) for p in primes] == t["offsets"].codes.tolist()
    assert [engram.multipliers(layer, 407, 4) for layer in (1, 5)] == t["multipliers"].codes.tolist()
