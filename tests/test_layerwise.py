# SPDX-License-Identifier: Apache-2.0
"""One layer at a time on stored inputs, and the stack cut in two at every place.

Each layer gets the stored stream, pre mix and shared state of the layers below, so that an error shows in the layer that makes it
(tests/golden/tiny/README.md, 2: attn_out and h_out within 1e-3, ffn_out within 5e-3, pre_mix_out within 1e-4, every choice equal).
"""

import json
from dataclasses import replace

import pytest
import torch
from helpers import FAITHFUL, PROMPT, RELEASED, TINY, config, golden, published, relative, same_bits, stored_boundary, tiny, unchecked
from torch import Tensor

import v41
from v41 import tree
from v41.backends.cpu import backend
from v41.backends.record import recorder

ROWS = PROMPT
BOUNDS = {
    "engram_out": 1e-3,
    "attn_out": 1e-3,
    "ffn_out": 5e-3,
    "h_out": 1e-3,
    "pre_mix_out": 1e-4,
    "route_weights": 1e-3,
    "index_score": 5e-3,
}
LAYERS = range(8)


def alone(layer: int, numerics: v41.Numerics) -> tuple[dict[str, Tensor], v41.Cache]:
    """(taps, cache) of one layer on stored inputs."""
    params = tiny(numerics)
    ops, taps = recorder(backend)
    after, cache = v41.layers(params, *stored_boundary(layer, params), layer, layer + 1, ops=ops)
    assert after.layer == layer + 1
    return taps, cache


def open_queries(layer: int) -> list[int]:
    """Queries whose stored choice is one of several equal ones."""
    ties = json.loads((TINY / "ties.json").read_text())["main"]
    return sorted({query for where, _, at, _, query in ties if where == "prefill" and at == layer})


def compare(layer: int, taps: dict[str, Tensor], ignored: list[int]) -> str:
    """Asserts the bounds for all queries but the ignored ones; the bitwise share as text."""
    stored, name = golden("main.prefill"), f"layers.{layer}."
    rows = torch.tensor([r for r in range(ROWS) if r not in ignored])
    names = [n.removeprefix(name) for n in stored if n.startswith(name)]
    assert len(names) >= 6
    same = 0
    for tap in names:
        got, want = taps[name + tap], stored[name + tap]
        if tap == "topk_idxs":
            want = torch.where(want >= 0, want - ROWS, -1).sort(-1).values
            got = got.sort(-1).values
        if tap in ("index_score", "candidates"):  # fixed lists cover the whole buffer: rows behind the prompt, in the block of its last one
            behind, got = got[..., want.shape[-1] :], got[..., : want.shape[-1]]
            assert (behind == (want[..., -1:] if tap == "candidates" else -torch.inf)).all()
        if tap.startswith("route"):
            got, want = got.view(1, ROWS, -1), want.view(1, ROWS, -1)
        got, want = got[:, rows], want[:, rows]
        if want.is_floating_point():
            assert relative(got, want) <= BOUNDS[tap], f"{name}{tap}: {relative(got, want):.1e}"
            same += same_bits(got, want)
        else:
            assert torch.equal(got.to(want.dtype), want), name + tap
            same += 1
    return f"layer {layer}: {same} of {len(names)} taps bitwise equal, {len(ignored)} queries with open ties left out"


def compare_cache(layer: int, cache: v41.Cache) -> None:
    """The rows that the layer itself wrote."""
    params, stored = tiny(cache.numerics), golden("main.caches")
    for name, got in v41.export_cache(params, cache).items():
        if not name.startswith(f"layers.{layer}."):
            continue
        want = stored["after_prefill." + name]
        if name.endswith("_state"):
            live = ROWS % config().layer_plan[layer].ratio
            got, want = got[:, :live], want[:, :live]
        assert got.shape == want.shape and relative(got, want) <= 1e-3, name


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_alone_gives_the_released_taps_and_cache_rows(layer):
    with unchecked():  # test_golden_tiny.py runs the same calls with their shapes checked
        taps, cache = alone(layer, RELEASED)
    print(compare(layer, taps, []))
    compare_cache(layer, cache)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_alone_in_faithful_keeps_to_the_released_one_but_for_ties(layer):
    """Sums in another order and fixed lists: the same roundings, so the same bounds; only queries with open ties may choose otherwise."""
    with unchecked():
        taps, cache = alone(layer, FAITHFUL)
    print(compare(layer, taps, open_queries(layer)))
    compare_cache(layer, cache)


# Cuts


def small(numerics: v41.Numerics) -> v41.Params:
    return v41.init_params(v41.Config.from_dict(published()), 3, numerics=numerics)


def trees(*items) -> list[Tensor]:
    return [t for item in items for t in tree.leaves(item)]


@pytest.mark.parametrize("numerics", [RELEASED, FAITHFUL], ids=lambda n: n.regime)
def test_every_cut_between_two_layers_gives_the_step_bit_for_bit(numerics):
    params = small(numerics)
    cache, count = v41.init_cache(params, batch=2, capacity=40), params.config.num_hidden_layers
    ids = torch.randint(3, 60, (2, 26))
    for call in (ids[:, :25], ids[:, 25:]):  # the prefill leaves half a group, the step finishes it
        out, after = v41.step(params, cache, call)
        with unchecked():
            boundary, below = v41.embed(params, cache, call)
            for k in range(count + 1):  # `boundary` lies before layer k, and the layers below it ran one by one
                end, whole = v41.layers(params, below, boundary, k, count)
                assert same_bits(v41.head(params, end), out.logits)
                assert all(same_bits(a, b) for a, b in zip(trees(whole), trees(after), strict=True)), k
                if k < count:
                    boundary, below = v41.layers(params, below, boundary, k, k + 1)
        cache = after


def test_cuts_that_do_not_fit_the_boundary_are_refused():
    params = small(FAITHFUL)
    boundary, cache = v41.embed(params, v41.init_cache(params, batch=1, capacity=8), torch.ones(1, 4, dtype=torch.int64))
    for a, b, text in ((1, 2, "lies before layer 0, not 1"), (2, 1, "2..1 are no layers"), (0, 5, "0..5 are no layers"), (-1, 2, "-1..2")):
        with pytest.raises(ValueError, match=text):
            v41.layers(params, cache, boundary, a, b)
    with pytest.raises(ValueError, match="before layer 0 of 4"):
        v41.head(params, boundary)
    boundary, cache = v41.layers(params, cache, boundary, 0, 2)
    with pytest.raises(ValueError, match="lies before layer 2, not 1"):
        v41.layers(params, cache, boundary, 1, 3)
    other = replace(params, numerics=RELEASED)
    with pytest.raises(ValueError, match="cache: made for numerics"):
        v41.layers(other, cache, boundary, 2, 4)


def test_a_boundary_without_what_was_handed_down_is_noticed():
    """The selection and rows that cross a cut are used: others give another result."""
    params = small(FAITHFUL)
    boundary, cache = v41.embed(params, v41.init_cache(params, batch=1, capacity=40), torch.randint(3, 60, (1, 30)))
    boundary, cache = v41.layers(params, cache, boundary, 0, 3)
    want, _ = v41.layers(params, cache, boundary, 3, 4)
    changes = {"compressed": boundary.handed.compressed * 0, "index_keys": -boundary.handed.index_keys}
    changes["candidates"] = torch.where(boundary.handed.candidates > 2, boundary.handed.candidates, -1)
    for name, value in changes.items():
        other = replace(boundary, handed=replace(boundary.handed, **{name: value}))
        assert not torch.equal(v41.layers(params, cache, other, 3, 4)[0].stream, want.stream), name
    assert not torch.equal(v41.layers(params, cache, replace(boundary, pre=boundary.pre.flip(-1)), 3, 4)[0].stream, want.stream)
