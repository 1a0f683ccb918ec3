# SPDX-License-Identifier: Apache-2.0
"""Mesh, rules, and what they cut: every element once among the shares, quantization blocks whole, and nothing replicated by oversight."""

from dataclasses import replace
from math import prod

import pytest
import torch
from helpers import released_config, tiny

import v41
from v41 import tree
from v41.sharding.caches import cache_specs, shard_cache
from v41.sharding.check import CLOSED, check
from v41.sharding.distinct import distinct
from v41.sharding.mesh import MESHES, Mesh, grid, mesh64
from v41.sharding.rules import Rules
from v41.sharding.shard import as_bytes, join, join_params, rank_slices, read_bytes, reads, shard, shard_params
from v41.sharding.tables import TABLES, WHOLE, WORLD, lean, pr71, rules_named
from v41.spec.params import param_specs
from v41.spec.table import ParamSpec, spec_of

SIZES = {"a": 8, "b": 6, "c": 96}
MESH = grid(2, 2)
KINDS = ("pr71", "lean", "tp", "ep")  # fast has lean's rules, tpxep mixes two others, single cuts nothing


def rules(axes, **more) -> Rules:
    return Rules("test", {"a": None, "b": None, "c": None} | axes, **more)


def spec(axes: str, per: tuple[int, ...] = (), name: str = "part.x", dtype: torch.dtype = torch.int32) -> ParamSpec:
    return spec_of(name, dtype, axes, SIZES, per)


def whole(s: ParamSpec) -> torch.Tensor:
    return torch.arange(prod(s.shape), dtype=s.dtype).reshape(s.shape) + 1


def changed(table: Rules, axes=None, **more) -> Rules:
    return replace(table, axes=dict(table.axes) | (axes or {}), **more)


# The mesh


def test_consecutive_ranks_form_an_attention_group():
    assert mesh64.axes == (("replica", 8), ("attn", 8)) and mesh64.size == 64
    assert mesh64.coordinate(13) == {"replica": 1, "attn": 5}
    assert mesh64.group(13, ("attn",)) == tuple(range(8, 16))
    assert mesh64.group(13, ("replica",)) == tuple(range(5, 64, 8))
    assert mesh64.group(13, WORLD) == tuple(range(64)) and mesh64.group(13, ()) == (13,)


@pytest.mark.parametrize("axes", [(), ("replica",), ("attn",), WORLD, ("attn", "replica")])
def test_a_share_is_the_place_in_the_group(axes):
    mesh = grid(2, 4)
    for rank in range(8):
        assert mesh.rank(mesh.coordinate(rank)) == rank
        assert mesh.group(rank, axes)[mesh.share(rank, axes)] == rank
    assert sorted(r for g in mesh.groups(axes) for r in g) == list(range(8))


def test_small_meshes_keep_groups_of_at_most_eight():
    assert {n: m.axes for n, m in MESHES.items()} == {n: grid(max(1, n // 8), min(n, 8)).axes for n in (1, 2, 4, 8, 16, 32, 64)}


def test_places_outside_a_mesh_are_refused_with_their_numbers():
    for call, words in (
        (lambda: MESH.coordinate(4), "rank 4: the mesh has 4"),
        (lambda: MESH.rank({"replica": 0, "attn": 2}), "attn: 2 of 2"),
        (lambda: MESH.rank({"replica": 0}), "replica, attn"),
        (lambda: MESH.ways(("tp",)), "mesh axis tp"),
        (lambda: Mesh((("x", 2), ("x", 2))), "stands twice"),
        (lambda: Mesh((("x", 0),)), "x: 0 ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


# Rules


def test_an_unlisted_axis_is_an_error_and_no_replica():
    with pytest.raises(ValueError, match=r"axis c of part\.x is not listed"):
        Rules("test", {"a": "attn"}).partition(spec("a c"), MESH)


def test_a_mesh_axis_may_cut_a_tensor_once():
    with pytest.raises(ValueError, match=r"part\.x: a b use the mesh axis attn twice"):
        rules({"a": "attn", "b": ("replica", "attn")}).partition(spec("a b"), MESH)
    assert rules({"a": "attn", "b": "replica"}).partition(spec("a b"), MESH) == ((0, ("attn",)), (1, ("replica",)))


def test_a_size_that_does_not_divide_needs_padding():
    with pytest.raises(ValueError, match="b of 6 does not divide by 4"):
        rules({"b": ("replica", "attn")}).local_shape(spec("b"), MESH)
    assert rules({"b": ("replica", "attn")}, padding={"b": 1}).local_shape(spec("b"), MESH) == (2,)
    assert rules({"b": ("replica", "attn")}, padding={"b": 4}).local_shape(spec("b"), MESH) == (4,)
    assert rules({"b": "attn"}, padding={"b": 4}).local_shape(spec("b"), MESH) == (4,)
    assert rules({"b": "attn"}, padding={"b": 4}).local_shape(spec("b"), grid(1, 1)) == (6,)  # nothing is cut: nothing is padded
    with pytest.raises(ValueError, match="b is padded to multiples of 0"):
        rules({}, padding={"b": 0})


def test_a_cut_may_not_go_through_a_quantization_block():
    assert rules({"c": "attn"}).local_shape(spec("c", (16,)), MESH) == (3,)
    with pytest.raises(ValueError, match="48 of 96 c on each of 2 ranks cut a block of 32"):
        rules({"c": "attn"}).local_shape(spec("c", (32,)), MESH)
    assert rules({"c": "attn"}, padding={"c": 32}).local_shape(spec("c", (32,)), MESH) == (2,)


def test_2304_columns_are_cut_8_ways_but_not_16():
    scale = next(s for s, _ in distinct(released_config(), False) if s.name.endswith("experts.{experts}.w2.scale"))
    cut = changed(lean, {"moe_inter": "attn"})
    assert cut.local_shape(scale, grid(4, 8)) == (384 // 4, 5120, 9)
    with pytest.raises(ValueError, match="144 of 2304 moe_inter on each of 16 ranks cut a block of 32"):
        cut.local_shape(scale, grid(4, 16))


def test_a_dimension_of_two_axes_is_cut_on_the_outer_one():
    assert rules({"a": "attn"}).local_shape(spec("a*b"), MESH) == (24,)
    with pytest.raises(ValueError, match="a of 8 does not divide by 16"):  # 48 would: the cut would go through a's elements
        rules({"a": "attn"}).local_shape(spec("a*b"), grid(1, 16))
    with pytest.raises(ValueError, match=r"axis b is cut over \('attn',\), but stands inside a\*b"):
        rules({"b": "attn"}).local_shape(spec("a*b"), MESH)
    assert rules({"b": "attn", "a*b": None}).local_shape(spec("a*b"), MESH) == (48,)
    assert rules({"a*b": "attn"}).local_shape(spec("a*b"), grid(1, 16)) == (3,)


def test_a_rule_for_a_part_holds_for_that_part_only():
    table = rules({"a": "attn", "gate.a": None, "gate.a*b": "replica"})
    assert table.of("a", "layers.0.ffn.gate.weight") == () and table.of("gate.a") == ()
    assert table.of("a", "layers.0.ffn.gateau.weight") == ("attn",) and table.of("a") == ("attn",)
    assert table.local_shape(spec("a*b", name="x.gate.y"), MESH) == (24,)
    assert table.of("gate.a*b") == ("replica",) and table.of("a*b") == ("attn",) and table.over("a", "gate.a*b") == ("attn", "replica")


def test_rules_are_values():
    axes = {"a": "attn", "b": None, "c": None}
    table = Rules("test", axes)
    axes["a"] = None
    assert table.of("a") == ("attn",) and hash(table) == hash(Rules("test", {"a": "attn", "b": None, "c": None}))
    with pytest.raises(TypeError):
        table.axes["a"] = None
    with pytest.raises(ValueError, match="choice 'best'"):
        Rules("test", {}, choice="best")
    with pytest.raises(ValueError, match="shipped are pr71, lean"):
        rules_named("none")


# Cutting and joining


@pytest.mark.parametrize("axes", [{}, {"a": "attn"}, {"a": WORLD}, {"a": ("attn", "replica")}, {"a": "attn", "b": "replica"}])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8])
def test_shards_joined_are_the_tensor_bit_for_bit(axes, dtype):
    s = spec("a b", dtype=dtype)
    tensor = torch.randint(0, 256, (8, 6 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    parts = [shard(tensor, s, rules(axes, padding={"b": 2}), MESH, r) for r in range(4)]
    assert torch.equal(as_bytes(join(parts, s, rules(axes, padding={"b": 2}), MESH)), as_bytes(tensor))
    assert all(p.dtype == dtype and p.data_ptr() != tensor.data_ptr() for p in parts)


def test_padding_is_zeros_at_the_end_and_is_dropped_when_joined():
    table, s = rules({"b": WORLD}, padding={"b": 2}), spec("b")
    parts = [shard(whole(s), s, table, MESH, r) for r in range(4)]
    assert [p.tolist() for p in parts] == [[1, 2], [3, 4], [5, 6], [0, 0]]
    parts[3] = torch.tensor([7, 7])
    assert join(parts, s, table, MESH).tolist() == [1, 2, 3, 4, 5, 6]


def test_ranks_that_hold_one_share_must_agree():
    table, s = rules({"a": "attn"}), spec("a")
    parts = [shard(whole(s), s, table, MESH, r) for r in range(4)]
    parts[2][1] = 0
    with pytest.raises(ValueError, match=r"part\.x: ranks 0 and 2 hold the same share with different values"):
        join(parts, s, table, MESH)
    with pytest.raises(ValueError, match="3 parts for 4 ranks"):
        join(parts[:3], s, table, MESH)
    with pytest.raises(ValueError, match=r"part\.x of rank 1: shape \(3,\), the rules say \(4,\)"):
        join([parts[0], parts[1][:3], *parts[2:]], s, table, MESH)
    with pytest.raises(ValueError, match=r"part\.x: shape \(7,\), the rules say \(8,\)"):
        shard(whole(s)[:7], s, table, MESH, 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_model_cut_and_joined_keeps_every_byte(name):
    params = replace(tiny(), draft=None, layers=tiny().layers[:2])  # every kind of weight: the second layer has an Engram
    config = replace(params.config, num_hidden_layers=2, num_nextn_predict_layers=0)
    params = replace(params, config=config)
    parts = [shard_params(params, TABLES[name], MESH, r) for r in range(4)]
    joined = join_params(parts, TABLES[name], MESH)
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(tree.leaves(joined), tree.leaves(params), strict=True))
    assert parts[3].engram_map is params.engram_map and parts[3].config is config


def test_parts_have_the_shapes_that_the_rules_say():
    params, rank = tiny(), 3
    part = shard_params(params, lean, MESH, rank)
    want = [lean.local_shape(s, MESH) for s in param_specs(params.config)]
    assert [tuple(t.shape) for t in tree.leaves(replace(part, engram_map=None))] == want
    heads = part.layers[0].attn.attn_sink
    assert torch.equal(heads, params.layers[0].attn.attn_sink[4:8])


# What a rank reads


@pytest.mark.parametrize("name", KINDS)
def test_every_element_of_every_tensor_is_on_as_many_ranks_as_the_rules_say(name):
    table = TABLES[name]
    for s, _ in distinct(released_config(), True):
        ways = mesh64.ways(tuple(m for _, axes in table.partition(s, mesh64) for m in axes))
        slices = [rank_slices(s, table, mesh64, rank) for rank in range(64)]
        assert sum(prod(r.length for r in found) for found in slices) == prod(s.shape) * 64 // ways, s.name
        assert len(set(slices)) <= ways


@pytest.mark.parametrize("name", KINDS)
def test_scales_follow_their_weights(name):
    specs = {s.name: s for s in param_specs(released_config())}
    for s in (s for n, s in specs.items() if n.endswith(".scale") and n.startswith(("layers.1.", "layers.2.", "mtp."))):
        weight = specs[s.name.replace(".scale", ".weight")]
        for rank in (0, 9, 35, 36, 63):
            pairs = zip(rank_slices(s, TABLES[name], mesh64, rank), rank_slices(weight, TABLES[name], mesh64, rank), s.dims, weight.dims, strict=True)
            for scale, code, many, one in pairs:
                assert [x * many.per for x in scale] == [x * one.per for x in code], (s.name, rank)


def test_a_rank_of_pr71_reads_its_six_experts_its_rows_and_no_others():
    specs = {s.name: s for s in param_specs(released_config())}
    names = [n for n, _ in reads(specs["layers.7.ffn.experts.{experts}.w1.weight"], pr71, mesh64, 5)]
    assert names == [f"layers.7.ffn.experts.{e}.w1.weight" for e in range(30, 36)]
    draft = [n for n, _ in reads(specs["mtp.1.ffn.experts.{experts}.w2.scale"], pr71, mesh64, 63)]
    assert draft == [f"mtp.1.ffn.experts.{e}.w2.scale" for e in (126, 127)]
    rows = rank_slices(specs["layers.1.engram.embed.weight"], pr71, mesh64, 63)[0]
    assert (rows.size, rows.start, rows.stop) == (6000097, 63 * 6000097, 384006168)
    vocab = rank_slices(specs["head.weight"], pr71, mesh64, 63)[0]
    assert (vocab.size, vocab.start, vocab.stop) == (2048, 129024, 129280)
    heads = rank_slices(specs["layers.0.attn.wq_b.weight"], pr71, mesh64, 13)[0]
    assert (heads.start, heads.stop) == (5 * 8 * 512, 6 * 8 * 512)


def test_a_rank_of_lean_reads_all_columns_of_its_tile_of_an_expert():
    specs = {s.name: s for s in param_specs(released_config())}
    found = dict(reads(specs["layers.0.ffn.experts.{experts}.w2.weight"], lean, mesh64, 13))
    assert list(found) == [f"layers.0.ffn.experts.{e}.w2.weight" for e in range(48, 96)]
    assert {(r[0].length, r[1].start, r[1].stop) for r in found.values()} == {(5120, 5 * 144, 6 * 144)}
    assert list(reads(specs["layers.0.ffn.shared_experts.w1.weight"], lean, mesh64, 36)) == []  # 72 blocks on 36 ranks
    assert [r.start for r in rank_slices(specs["mtp.0.main_proj.weight"], lean, mesh64, 13)] == [5 * 640, 0]


def test_bytes_that_all_ranks_read_are_those_of_their_slices():
    config = released_config()
    files = sum(s.dtype.itemsize * prod(s.shape) for s in param_specs(config))
    assert read_bytes(config, TABLES["single"], grid(1, 1), 0) == files == 509_315_486_040
    assert sum(read_bytes(config, TABLES["tp"], grid(1, 8), r) for r in range(8)) > files
    experts = 6 * 40 * 3 * 5120 * 2304 * 17 // 32 + 2 * 3 * 3 * 5120 * 2304 * 17 // 32
    assert read_bytes(config, pr71, mesh64, 0) > experts + 2 * 6000097 * 264


# Whether rules fit


@pytest.mark.parametrize("name", list(TABLES))
def test_shipped_tables_fit_the_released_model_on_64_ranks(name):
    check(released_config(), TABLES[name], mesh64)


@pytest.mark.parametrize("key", [k for k in WHOLE if k not in ("engram_parts", "b")])
def test_an_axis_that_nothing_closes_may_not_be_cut(key):
    with pytest.raises(ValueError, match=f"nothing closes a cut of .*{key}"):
        check(released_config(), changed(pr71, {key: "attn"}), mesh64)


def test_a_cut_that_is_closed_is_not_refused():
    for key in sorted(CLOSED - {"heads", "o_groups", "moe_inter", "shared_inter", "main_proj.dim"}):
        table = TABLES["single"]
        check(released_config(), changed(table, {key: "attn"}, padding={"engram_rows": 1}), mesh64)


@pytest.mark.parametrize(
    "axes, words",
    [
        ({"stray": None}, r"no tensor has \['stray'\]"),
        ({"gate.stray": None}, r"no tensor has \['gate.stray'\]"),
        ({"o_groups": None}, "but o_groups, which hold them"),
        ({"shared_inter": "attn", "experts": "replica"}, "not within the routed experts' reduction"),
        ({"moe_inter": "attn"}, "use the mesh axis attn twice"),
    ],
)
def test_rules_that_would_give_wrong_results_are_refused(axes, words):
    with pytest.raises(ValueError, match=words):
        check(released_config(), changed(pr71, axes), mesh64)


def test_a_router_follows_its_experts_unless_a_rule_keeps_it_whole():
    table = replace(pr71, axes={k: v for k, v in pr71.axes.items() if k != "gate.experts"})
    with pytest.raises(ValueError, match="gate.experts over .*every rank routes by itself"):
        check(released_config(), table, mesh64)


@pytest.mark.parametrize("key", sorted(k for k in pr71.axes if "." not in k))
def test_rules_must_list_every_axis(key):
    with pytest.raises(ValueError, match=rf"axes without a rule \['{key}'\]"):
        check(released_config(), replace(pr71, axes={k: v for k, v in pr71.axes.items() if k != key}), mesh64)


# Caches


def test_caches_are_a_table_of_their_own():
    cache = v41.init_cache(tiny(), batch=2, capacity=64)
    specs = cache_specs(cache)
    assert [s.shape for s in specs] == [tuple(t.shape) for t in tree.leaves(cache)]
    assert ["*".join(d.axes) for d in next(s for s in specs if s.name.endswith("index_keys")).dims] == ["b", "t", "index_dim"]
    assert {s.name for s in specs} >= {"length", "history", "draft.0", "layers.0.window"}
    part = shard_cache(cache, pr71, MESH, 3)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(part), tree.leaves(cache), strict=True))
    split = shard_cache(cache, changed(pr71, {"b": "replica"}), MESH, 3)
    assert split.batch == 1 and split.layers[0].window.shape[0] == 1
