# SPDX-License-Identifier: Apache-2.0
"""The spec's primitives against the released reference's outputs, vector by vector (tests/golden/ops/README.md).

In `released` the arithmetic is the reference's own, so bits are asked for wherever the vectors say so. Bounds elsewhere count fp32
roundings: one is at most 2**-24 of the number.
"""

from pathlib import Path

import helpers
import pytest
import torch
from helpers import EXACT64, FAITHFUL, OPS, RELEASED, half_step, relative, same_bits, steps_apart
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from v41.backends.cpu import backend
from v41.checkpoint import check_values
from v41.spec import compress, slots
from v41.spec.cache import LayerCache
from v41.spec.config import Yarn
from v41.spec.export import unfinished
from v41.spec.numerics import Numerics
from v41.spec.ops import attend, choose, experts, index, linear, mix, ngram, norm, product, quant, rope
from v41.spec.params import Compressor
from v41.spec.table import Fp4, Fp8, Fp8Rows

U32 = 2.0**-24
EPS = 1e-20
used: set[tuple[str, str]] = set()


class Vectors(dict[str, Tensor]):
    """The tensors of one file; remembers which of them were asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(load_file(OPS / f"{name}.safetensors"))
        self.name = name

    def __getitem__(self, key: str) -> Tensor:
        used.add((self.name, key))
        return super().__getitem__(key)


# Formats


def test_activation_codes_scales_and_round_trip_equal_the_release_bit_for_bit():
    t = Vectors("act_quant")
    codes, scale = quant.act_quant(t["x"], Numerics())
    assert same_bits(codes, t["q"]) and same_bits(scale, t["scale"])
    assert same_bits(quant.act_round(t["x"], Numerics()), t["qdq"])


def test_index_codes_scales_and_round_trip_equal_the_release_bit_for_bit():
    t = Vectors("fp4_act_quant")
    values, scale = quant.index_quant(t["x"])
    assert same_bits(quant.e2m1_pack(values.flatten(-2)), t["e8m0_block32.packed"])
    assert same_bits(quant.scale_byte(scale), t["e8m0_block32.scale"])
    assert same_bits(quant.index_round(t["x"], Numerics()), t["e8m0_block32.qdq"])


def test_compressed_row_codes_scales_and_round_trip_equal_the_release_bit_for_bit():
    t = Vectors("fp4_act_quant")
    values, scale = quant.kv_quant(t["x"], Numerics())
    assert same_bits(quant.e2m1_pack(values.flatten(-2)), t["e4m3_block16.packed"])
    assert same_bits(scale, t["e4m3_block16.scale"])
    assert same_bits(quant.kv_round(t["x"], Numerics()), t["e4m3_block16.qdq"])


def test_every_code_of_the_three_formats_decodes_to_the_released_value():
    t = Vectors("fp4_act_quant")
    assert torch.equal(quant.e2m1_unpack(t["all_codes.packed"][:, None], torch.float32), t["all_codes.values"])
    one = torch.full((8, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = quant.dequantize(Fp8Rows(t["all_e4m3.bytes"].view(8, 32).view(torch.float8_e4m3fn), one), torch.float32).flatten()
    assert torch.equal(found.nan_to_num(0.25), t["all_e4m3.values"].nan_to_num(0.25))
    assert found.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    scale, want = t["all_e8m0.bytes"].view(torch.float8_e8m0fnu), t["all_e8m0.values"]
    assert torch.equal(quant.scale_value(scale[:255]), want[:255]) and want[255].isnan()
    with pytest.raises(ValueError, match=r"s\.scale: byte 0xFF at \[255\]"):  # so that no parameter holds the one NaN
        check_values("s.scale", scale)


def test_released_weight_bytes_decode_to_the_published_values():
    # The first bytes of layers.0.attn.wkv.weight and of layers.0.ffn.experts.0.w1.weight of the released checkpoint.
    def e8m0(byte: int, *shape: int) -> Tensor:
        return torch.full(shape, byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    wkv = torch.frombuffer(bytearray.fromhex("d871f2797069f0e5"), dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    got = quant.dequantize(Fp8(wkv, e8m0(0x73, 1, 1)), torch.bfloat16)[0]
    assert got.tolist() == [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    w1 = torch.frombuffer(bytearray.fromhex("a0a8ec4aadaf42aa"), dtype=torch.int8)[None]
    got = quant.dequantize(Fp4(w1, e8m0(0x78, 1, 1)), torch.bfloat16)[0] * 128
    assert got.tolist() == [0, -1, 0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1]


# Products


def gemm(kind: str) -> tuple[Vectors, Tensor]:
    t = Vectors(f"{kind}_gemm")
    if kind == "fp8":
        return t, quant.dequantize(Fp8(t["w"], t["w_scale"]), torch.float32)
    return t, experts.expert_weight(Fp4(t["w_packed"][None], t["w_scale"][None]), 0, RELEASED)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantized_products_equal_the_release_bit_for_bit(kind):
    t, w = gemm(kind)
    codes, scale = quant.act_quant(t["x"], Numerics())
    assert same_bits(codes, t["a"]) and same_bits(scale, t["a_scale"])
    assert same_bits(linear.quantized(t["x"], w, RELEASED), t["out_bf16"])
    rows = quant.act_round(t["x"], Numerics())
    assert same_bits(product.block_product(rows, w, RELEASED), t["out_fp32"])
    # In `faithful` the sum of the same exact terms runs in another order: n roundings of the sum of their sizes, then half a step.
    sizes = rows.double().abs() @ w.double().abs().T * w.shape[1] * U32
    faithful = linear.quantized(t["x"], w, FAITHFUL)
    assert ((faithful.double() - t["out_exact_fp64"]).abs() <= sizes + half_step(t["out_exact_fp64"], 8)).all()
    exact = linear.quantized(rows.double(), w.double(), EXACT64)
    assert ((exact - t["out_exact_fp64"]).abs() <= sizes * 2.0**-29).all()


def test_linear_reads_ragged_tiles_as_the_release_does():
    t = Vectors("fp8_gemm")
    assert t["w"].shape == (70, 96) and t["w_scale"].shape == (3, 3)  # the last tile is 6 rows high
    assert same_bits(linear.linear(t["x"], Fp8(t["w"], t["w_scale"]), RELEASED), t["out_bf16"])


def test_rms_norm_equals_the_release_bit_for_bit():
    t = Vectors("rms_norm")
    assert same_bits(norm.rms_norm(t["x"], t["weight"], EPS), t["out"])


# Rotary embedding


def frequencies(t: Vectors, name: str) -> Tensor:
    dim, _, original, base, factor, fast, slow = t[name + ".args"].tolist()
    return rope.frequencies(int(dim), base, Yarn(factor, fast, slow, int(original)) if original else None)


@pytest.mark.parametrize("name", ["plain_released", "yarn_released", "plain_tiny", "yarn_tiny"])
def test_rotary_tables_equal_the_release_at_every_position(name):
    t = Vectors("rope")
    positions, f = t[name + ".positions"].int(), frequencies(t, name)
    assert int(t[name + ".args"][1]) > int(positions.max())  # the second argument is the table's length
    units = torch.tensor([1.0, 0.0]).repeat(len(f)).expand(1, len(positions), -1)
    turned = rope.rope(units, positions[None], f)[0]  # (1, 0) turns into (cos, sin)
    # The same float32 angle; cos and sin of it may differ by one rounding of a number below 1.
    assert (turned[:, 0::2] - t[name + ".cos"]).abs().max() <= U32
    assert (turned[:, 1::2] - t[name + ".sin"]).abs().max() <= U32


@pytest.mark.parametrize("name", ["x3", "x4"])
def test_rotation_and_its_inverse_equal_the_release_bit_for_bit(name):
    t = Vectors("rope")
    f, x = frequencies(t, "yarn_tiny"), t[name]
    at = (int(t["start"]) + torch.arange(5, dtype=torch.int32)).expand(2, -1)
    assert same_bits(rope.rope(x, at, f), t[name + ".rotated"])
    assert same_bits(rope.rope_inverse(x, at, f), t[name + ".inverse"])
    assert not torch.equal(t[name + ".rotated"], t[name + ".inverse"])


# Hyper-connections


def test_mixes_equal_the_release_to_float32():
    t = Vectors("hyper_connections")
    scale, base, stream = t["scale"], t["base"], t["stream"]
    # An argument of exp carries 2 roundings of its size; a Sinkhorn step adds 5 and widens nothing: dividing rows or columns never does.
    largest = (t["mixes"].abs().amax(-1) * scale.abs().max() + base.abs().max()) * 2 * U32
    for iters, name in ((20, "comb"), (1, "comb_iters1")):
        got = mix.hc_split_sinkhorn(t["mixes"], scale, base, 4, iters, 1e-6, RELEASED)
        for part, want in zip(got, (t["pre"], t["post"], t[name]), strict=True):
            assert ((part - want).abs().flatten(2).amax(-1) <= 2 * (2 * largest + 5 * 2 * iters * U32)).all()
    got = mix.hc_mixes(stream, t["fn"], scale, base, iters=20, eps=1e-6, norm_eps=EPS, numerics=RELEASED)
    for part, want in zip(got, (t["mixes_pre"], t["mixes_post"], t["mixes_comb"]), strict=True):
        assert relative(part, want) <= 1e-6
    assert relative(got[2].transpose(-1, -2), t["mixes_comb"]) > 0.1  # so that the order of its axes matters


def test_collapse_and_expand_equal_the_release_bit_for_bit():
    t = Vectors("hyper_connections")
    assert same_bits(mix.hc_pre(t["stream"], t["mixes_pre"]), t["hc_pre_out"])
    assert same_bits(mix.hc_post(t["sublayer_out"], t["stream"], t["mixes_post"], t["mixes_comb"]), t["hc_post_out"])


# Attention


@pytest.mark.parametrize("cut", [70, 40, 0])
def test_attention_over_a_list_equals_the_release_wherever_the_list_is_cut_in_two(cut):
    t = Vectors("sparse_attn")
    q, kv, idx, scale = t["q"], t["kv"], t["idx"], float(t["scale"])
    got = attend.sparse_attn(q, kv, idx[..., :cut], kv, idx[..., cut:], t["sink"], scale, Numerics())
    assert steps_apart(got, t["out"]) <= 1  # the README's bound: exp may differ in its last bit
    assert (got != t["out"]).sum() <= 2  # of 6,144
    assert same_bits(got[:, 1], torch.zeros_like(got[:, 1]))  # a query without slots
    exact = attend.sparse_attn(q.double(), kv.double(), idx[..., :cut], kv.double(), idx[..., cut:], t["sink"], scale, Numerics())
    assert (exact - t["out_exact_fp64"]).abs().max() <= 70 * 2.0**-52 * kv.double().abs().max()


def test_slot_lists_equal_the_release_in_its_own_coordinates():
    t = Vectors("index_lists")
    for name in t:
        kind, window, batch, rows, position = name.split(".")
        size, b, p = int(window[3:]), int(batch[1:]), int(position[3:])
        if kind == "dspark":
            block = int(rows[5:])
            listed = slots.draft_list(torch.full((b,), p, dtype=torch.int32), size, RELEASED, p + 1)
            own = (size + torch.arange(block, dtype=torch.int32)).expand(b, block, -1)
            got = torch.cat((torch.remainder(listed, size).expand(-1, block, -1), own), -1)
        else:
            at = (p + torch.arange(int(rows[1:]), dtype=torch.int32)).expand(b, -1)
            got = slots.window_list(at, size, RELEASED, p)
            got = got if p == 0 else torch.where(got >= 0, torch.remainder(got, size), -1)  # a decode step lists slots of its ring
        assert same_bits(got.contiguous(), t[name]), name


# Compressor


def empty_layer(ratio: int, numerics) -> LayerCache:
    """Room for 19 positions of 32 channels in two sequences."""
    carry = torch.zeros((2, ratio, 32), dtype=numerics.wide) if ratio > 1 else None  # ratio - 1 tokens and the sink
    rows = torch.zeros((2, 20, 32), dtype=numerics.act)
    return LayerCache(rows, rows, rows, carry, carry)


def compressed(p: Compressor, state: LayerCache, x: Tensor, held: int, ratio: int, numerics) -> tuple[Tensor, Tensor, LayerCache]:
    """(latents, which groups they finish, state) of one call behind `held` positions."""
    length = torch.full((2,), held, dtype=torch.int32)
    call = slots.call_rows(length, torch.full_like(length, x.shape[1]), x.shape[1], held if numerics.compact else None)
    groups = compress.groups_of(call, ratio)
    z, state = compress.latents(p, state, x, call, groups, ratio, helpers.config(), numerics, backend)
    return z, groups.done, state


@pytest.mark.parametrize("first", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_compressor_equals_the_release_in_prefill_state_and_every_step(ratio, first):
    t, name = Vectors("compressor"), f"ratio{ratio}"
    run = f"{name}.prefill{first}"
    p = Compressor(t[name + ".wkv"], t[name + ".wgate"] if ratio > 1 else None, t[name + ".norm"])
    x = t[name + ".x"]
    z, done, state = compressed(p, empty_layer(ratio, RELEASED), x[:, :first], 0, ratio, RELEASED)
    assert same_bits(z, t[run]) and done.all()
    if ratio > 1:
        live, length = first % ratio, torch.full((2,), first, dtype=torch.int32)
        rings = (state.group_kv, p.wkv, t[run + ".kv_state"]), (state.group_score, p.wgate, t[run + ".score_state"])
        for ring, weight, want in rings:
            # Two sums of 64 terms, each in its own order.
            bound = 2 * 64 * U32 * (x[:, first - live : first].double().abs() @ weight.double().abs().T)
            assert want.shape[1] == ratio and ((unfinished(ring, length, ratio) - want)[:, :live].abs() <= bound).all()
    yields, latents = [], []
    for position in range(first, 19):
        z, done, state = compressed(p, state, x[:, position : position + 1], position, ratio, RELEASED)
        yields.append(z.shape[1] == 1)
        latents.append(z)
    assert yields == t[run + ".step_yields"].tolist()
    assert same_bits(torch.cat(latents, 1), t[run + ".step_latents"])


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_compressor_in_faithful_finishes_the_same_groups_with_the_same_latents(ratio):
    t, name, run = Vectors("compressor"), f"ratio{ratio}", f"ratio{ratio}.prefill3"
    p = Compressor(t[name + ".wkv"], t[name + ".wgate"] if ratio > 1 else None, t[name + ".norm"])
    state, latents, yields = empty_layer(ratio, FAITHFUL), [], []
    for position in range(19):
        z, done, state = compressed(p, state, t[name + ".x"][:, position : position + 1], position, ratio, FAITHFUL)
        assert z.shape[1] == 1  # a fixed column, finished or not
        yields.append(bool(done.all()))
        latents += [z] if done.all() else []
    assert yields[3:] == t[run + ".step_yields"].tolist()
    # Sums in another order move a pooled value by one bf16 step at most; the norm passes that on.
    assert steps_apart(torch.cat(latents, 1), torch.cat((t[run], t[run + ".step_latents"]), 1)) <= 2


# Indexer


@pytest.mark.parametrize("numerics", [RELEASED, FAITHFUL], ids=lambda n: n.regime)
def test_candidate_blocks_equal_the_release(numerics):
    t = Vectors("candidate_blocks")
    for name in (n for n in t if ".blocks" in n):
        kind, _, sizes = name.partition(".blocks")
        blocks, size = (int(n) for n in sizes.split("x"))
        scores = t[kind + ".score"]
        lens = t["decode.len"].expand(1, 1) if kind == "decode" else t["prefill.lens"]
        visible = lens.int().flatten().expand(2, -1).contiguous()
        chosen = index.candidate_blocks(index.mask_rows(scores, visible), visible, blocks, size, numerics)
        assert torch.equal(index.candidate_rows(chosen, scores.shape[-1], size), t[name]), name


# Mixture of experts


@pytest.mark.parametrize("name", ["sqrtsoftplus.top2", "sqrtsoftplus.top1", "sigmoid.top3", "softmax.top3"])
@pytest.mark.parametrize("numerics", [RELEASED, FAITHFUL], ids=lambda n: n.regime)
def test_router_equals_the_release(name, numerics):
    t = Vectors("gate")
    function, top = name.split(".top")
    x, weight = t[name + ".x"], t[name + ".weight"]
    options = {"k": int(top), "function": function, "normalize": True, "route_scale": 1.5, "numerics": numerics}
    weights, ids = experts.gate(x, weight, t[name + ".bias"], **options)
    assert torch.equal(ids.long(), t[name + ".experts"])
    # A logit is off by 64 roundings of its terms, a score at most by twice that relatively; normalizing doubles it once more.
    bound = 4 * (64 * (x.double().abs() @ weight.double().abs().T).amax(-1, keepdim=True).clamp_max(88) + 20) * U32
    assert ((weights.double() - t[name + ".route_weights"]).abs() <= bound * weights.double() + 2.0**-126).all()


def test_router_ties_go_to_the_released_choice_in_released_and_to_the_lower_expert_in_faithful():
    t = Vectors("gate")
    want = {RELEASED: t["tie.experts_cpu_choice"], FAITHFUL: torch.tensor([[2, 3]] * 3)}
    for numerics, ids in want.items():
        options = {"k": 2, "function": "sqrtsoftplus", "normalize": True, "route_scale": 1.5, "numerics": numerics}
        weights, found = experts.gate(t["tie.x"], t["tie.weight"], t["tie.bias"], **options)
        assert torch.equal(found.long(), ids)
        assert (weights - t["tie.route_weights"]).abs().max() <= 8 * U32  # equal scores: the weights do not tell
    assert not torch.equal(want[RELEASED], want[FAITHFUL])


def test_a_routed_expert_equals_the_release_bit_for_bit():
    t = Vectors("expert")
    w1, w2, w3 = (Fp4(t[f"fp4.w{i}.weight"][None], t[f"fp4.w{i}.scale"][None]) for i in (1, 2, 3))
    x, weight = t["fp4.x"], t["fp4.route_weight"][:, 0]
    plain = experts.expert(x, torch.ones_like(weight), w1, w2, w3, 0, limit=10.0, numerics=RELEASED)
    assert same_bits(plain, t["fp4.out"])
    weighted = experts.expert(x, weight, w1, w2, w3, 0, limit=10.0, numerics=RELEASED)
    assert same_bits(weighted, t["fp4.out_weighted"])
    assert not torch.equal((plain.float() * weight[:, None]).to(plain.dtype), weighted)  # the weight goes in before w2
    # The whole primitive, with one expert that every row chose: one rounding less than the expert's own output has.
    ids = torch.zeros((6, 1), dtype=torch.int32)
    total = experts.experts(x, weight[:, None], ids, w1, w2, w3, limit=10.0, numerics=RELEASED)
    assert same_bits(total, t["fp4.out_weighted"].float())


def test_the_shared_expert_equals_the_release_bit_for_bit():
    t = Vectors("expert")
    w1, w2, w3 = (Fp8(t[f"fp8.w{i}.weight"], t[f"fp8.w{i}.scale"]) for i in (1, 2, 3))
    x = t["fp8.x"]
    assert same_bits(experts.shared_expert(x, w1, w2, w3, limit=10.0, numerics=RELEASED), t["fp8.out"])
    # No fp8 expert is weighted in this model; its parts are.
    hidden = experts.swiglu(linear.linear(x, w3, RELEASED), linear.linear(x, w1, RELEASED), 10.0, RELEASED) * t["fp8.route_weight"]
    assert same_bits(linear.linear(hidden.to(x.dtype), w2, RELEASED), t["fp8.out_weighted"])


def test_the_clamps_are_reached_and_each_side_changes_the_expert():
    t = Vectors("expert")
    w1, w3 = (Fp8(t[f"fp8.w{i}.weight"], t[f"fp8.w{i}.scale"]) for i in (1, 3))
    gate, up = linear.linear(t["fp8.x"], w1, RELEASED), linear.linear(t["fp8.x"], w3, RELEASED)
    assert (gate > 10).any() and (gate < -10).any() and (up > 10).any() and (up < -10).any()
    big = torch.tensor([[20.0, -20.0, 20.0, -20.0]]), torch.tensor([[20.0, 20.0, -20.0, -20.0]])
    ten = torch.nn.functional.silu(torch.tensor(10.0)) * 10
    low = torch.nn.functional.silu(torch.tensor(-20.0)) * 10  # the gate has no lower clamp
    assert torch.allclose(experts.swiglu(*big[::-1], 10.0, RELEASED), torch.stack((ten, low, -ten, -low))[None], rtol=1e-6)
    assert torch.equal(experts.swiglu(*big[::-1], 0.0, RELEASED), torch.nn.functional.silu(big[0]) * big[1])


# Choice and Engram


def test_the_best_token_is_the_first_of_equal_ones():
    t = Vectors("sample")
    assert torch.equal(choose.choose(t["logits"], None, 0).long(), t["temp0"])
    cold = choose.Sample(torch.zeros(4), torch.ones(4), torch.full((4, 1), 0.9))
    assert torch.equal(choose.choose(t["logits"], cold, 0).long(), t["temp0"])


def hashed(t: Vectors, alive: Tensor, positions: range) -> Tensor:
    """Row ids of some positions of both layers; `alive` is false at images."""
    at = torch.tensor(positions)[:, None] - torch.arange(4)
    ids, mask = t["ids"][:, at.clamp_min(0)].int(), alive[:, at.clamp_min(0)] & (at >= 0)
    pad = torch.tensor(2, dtype=torch.int32)
    rows = [ngram.engram_hash(ids, mask, pad, t["multipliers"][i], t["primes"][i], t["offsets"][i]) for i in range(2)]
    return torch.stack(rows, 2).long()


def test_engram_rows_equal_the_release_in_prefill_in_steps_and_around_images():
    t = Vectors("engram_hash")
    everyone = torch.ones((2, 12), dtype=torch.bool)
    assert torch.equal(hashed(t, everyone, range(8)), t["prefill8"])
    assert torch.equal(torch.cat([hashed(t, everyone, range(p, p + 1)) for p in range(8, 12)], 1), t["steps8to12"])
    assert not t["mask"].all()
    assert torch.equal(hashed(t, t["mask"], range(8)), t["prefill8_masked"])


def test_engram_gather_and_gate_equal_the_release_bit_for_bit():
    t = Vectors("engram_gate")
    rows = ngram.engram_rows(Fp8Rows(t["table"], t["table_scale"]), t["hash_ids"].int(), RELEASED)
    assert same_bits(rows, t["rows"].flatten(2))
    kv = linear.linear(rows, Fp8(t["wkv.weight"], t["wkv.scale"]), RELEASED)
    for mask, name in ((None, "out"), (t["mask"], "out_masked")):
        assert same_bits(ngram.engram_gate(t["x"], kv, t["q_weight"], t["k_weight"], mask, eps=EPS, numerics=RELEASED), t[name])
    assert not torch.equal(t["out"], t["out_masked"])


def test_no_vector_of_the_folder_is_left_unread(request):
    ran = {item.name for item in request.session.items if Path(item.path) == Path(__file__)}
    mine = {name for name in globals() if name.startswith("test_")}
    assert {n.partition("[")[0] for n in ran} <= mine
    if {n.partition("[")[0] for n in ran} != mine:
        pytest.skip("only some of the tests of this file run: nothing to say about vectors that the others read")
    stored = set()
    for path in OPS.glob("*.safetensors"):
        with safe_open(path, "pt") as f:
            stored |= {(path.name.removesuffix(".safetensors"), key) for key in f.keys()}  # noqa: SIM118  (no mapping)
    assert len(stored) > 150 and not stored - used
