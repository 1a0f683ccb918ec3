# SPDX-License-Identifier: Apache-2.0
"""Bad arguments: a ValueError with argument, sequence and numbers, before anything is computed; cache and parameters stay as they are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import v41
from v41 import tree

TINY = Path(__file__).parent.parent / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def params() -> v41.Params:
    return v41.load_params(TINY)


@pytest.fixture(scope="module")
def started(params: v41.Params) -> v41.Cache:
    """Two sequences of 6 and 3 positions, capacity 10, draft rings filled."""
    out, cache = v41.step(params, v41.init_cache(params, 2, 10), torch.arange(12).view(2, 6), valid=[6, 3])
    return v41.draft(params, cache, out.hidden, None, valid=[6, 3])[1]


def row(*ids: int) -> torch.Tensor:
    return torch.tensor([[i] for i in ids])


STEPS: dict[str, tuple[Callable, str]] = {
    "float ids": (lambda p, c: v41.step(p, c, row(1, 2).float()), r"tokens: dtype torch.float32, not torch.int32 or torch.int64"),
    "a list": (lambda p, c: v41.step(p, c, [[1], [2]]), r"tokens: a list, not a tensor"),
    "one dimension": (lambda p, c: v41.step(p, c, torch.tensor([1, 2])), r"tokens: shape \[2\], not \[2, any\]"),
    "another batch": (lambda p, c: v41.step(p, c, row(1, 2, 3)), r"tokens: shape \[3, 1\], not \[2, any\]"),
    "no rows": (lambda p, c: v41.step(p, c, torch.zeros(2, 0, dtype=torch.int64)), r"tokens: shape \[2, 0\]"),
    "another device": (lambda p, c: v41.step(p, c, torch.zeros(2, 1, dtype=torch.int64, device="meta")), r"tokens: on meta, the cache is on cpu"),
    "a negative id": (lambda p, c: v41.step(p, c, row(1, -4)), r"tokens: -4 at sequence 1, row 0 is not a token id \(0..511\)"),
    "an id too large": (lambda p, c: v41.step(p, c, row(512, 1)), r"tokens: 512 at sequence 0, row 0 is not a token id"),
    "an image": (
        lambda p, c: v41.step(replace(p, config=seeing(p)), replace(c, config=seeing(p)), row(1, 509)),
        r"tokens: 509 at sequence 1, row 0 is the image token: there is no vision part",
    ),
    "too many valid": (lambda p, c: v41.step(p, c, row(1, 2), valid=[1, 2]), r"valid: 2 at sequence 1 leaves 0..1"),
    "negative valid": (lambda p, c: v41.step(p, c, row(1, 2), valid=[-1, 1]), r"valid: -1 at sequence 0"),
    "valid of another batch": (lambda p, c: v41.step(p, c, row(1, 2), valid=[1]), r"valid: shape \[1\], not \[2\]"),
    "over the capacity": (
        lambda p, c: v41.step(p, c, torch.zeros(2, 5, dtype=torch.int64)),
        r"tokens: sequence 0 holds 6 positions and gets 5 more, the capacity is 10",
    ),
    "unknown logits": (lambda p, c: v41.step(p, c, row(1, 2), logits="some"), r"logits: 'some' is not one of"),
    "no cache": (lambda p, c: v41.step(p, None, row(1, 2)), r"cache: a NoneType, not Cache"),
    "no params": (lambda p, c: v41.step(None, c, row(1, 2)), r"params: a NoneType, not Params"),
    "other numerics": (
        lambda p, c: v41.step(replace(p, numerics=v41.Numerics("exact")), c, row(1, 2)),
        r"cache: made for numerics .*faithful.*, params have .*exact",
    ),
    "another config": (
        lambda p, c: v41.step(replace(p, config=v41.Config.from_json(Path(__file__).parent / "golden/tiny/checkpoint/config.json")), c, row(1, 2)),
        r"cache: made for another config",
    ),
    "rewind too far": (
        lambda p, c: v41.rewind(v41.step(p, v41.init_cache(p, 1, 20), torch.zeros(1, 12, dtype=torch.int64))[1], [3]),
        r"length: sequence 0 once held 12 positions; rewinding to 3 goes back 9, the slack is 8",
    ),
    "rewind forwards": (lambda p, c: v41.rewind(c, [6, 4]), r"length: 4 at sequence 1 is beyond the positions held, \[6, 3\]"),
    "rewind below zero": (lambda p, c: v41.rewind(c, [-1, 3]), r"length: -1 at sequence 0 is negative"),
    "take outside": (lambda p, c: v41.take(c, [0, 2]), r"sequences: \[0, 2\] leaves 0..1"),
    "draft rows that leave a gap": (
        lambda p, c: v41.draft(p, v41.step(p, c, torch.zeros(2, 2, dtype=torch.int64))[1], hidden(p, 2, 1), None),
        r"hidden: sequence 0 has draft rows up to position 6 and gets 1 more, which do not join on: the cache holds 8",
    ),
    "draft rows twice": (lambda p, c: v41.draft(p, c, hidden(p, 2, 1), None), r"gets 1 more, which do not join on: the cache holds 6"),
    "hidden of another dtype": (
        lambda p, c: v41.draft(p, c, hidden(p, 2, 1).float(), None, valid=[0, 0]),
        r"hidden: torch.float32, not a tensor of torch.bfloat16",
    ),
    "hidden of another width": (lambda p, c: v41.draft(p, c, hidden(p, 2, 1)[..., 1:], None, valid=[0, 0]), r"hidden: shape \[2, 1, 767\]"),
    "a draft token too large": (lambda p, c: v41.draft(p, c, hidden(p, 2, 1), torch.tensor([1, 600]), valid=[0, 0]), r"token: 600 at sequence 1"),
    "a draft without a head": (lambda p, c: v41.draft(replace(p, draft=None), c, hidden(p, 2, 1), None, valid=[0, 0]), r"params: no draft head"),
    "layers out of order": (lambda p, c: v41.layers(p, *v41.embed(p, c, row(1, 2))[::-1], 1, 3), r"layers: the boundary lies before layer 0, not 1"),
    "layers that do not exist": (lambda p, c: v41.layers(p, *v41.embed(p, c, row(1, 2))[::-1], 0, 9), r"layers: 0..9 are no layers of a model with 8"),
    "head too early": (lambda p, c: v41.head(p, v41.embed(p, c, row(1, 2))[0]), r"head: the boundary lies before layer 0 of 8"),
    "no capacity": (lambda p, c: v41.init_cache(p, 1, 0), r"capacity: 0 is not an integer of at least 1"),
    "a capacity beyond the positions": (lambda p, c: v41.init_cache(p, 1, 2**20), r"capacity: 1048576 is above max_position_embeddings 131072"),
    "no batch": (lambda p, c: v41.init_cache(p, 0, 4), r"batch: 0 is not"),
}


def hidden(p: v41.Params, batch: int, rows: int) -> torch.Tensor:
    return torch.zeros(batch, rows, 3 * p.config.hidden_size, dtype=torch.bfloat16)


def seeing(p: v41.Params) -> v41.Config:
    """The config with an image token."""
    return v41.Config.from_dict(p.config.to_dict() | {"image_token_id": 509})


@pytest.mark.parametrize("name", STEPS)
def test_a_bad_argument_is_refused_by_name(name: str, params: v41.Params, started: v41.Cache) -> None:
    call, message = STEPS[name]
    before = [(leaf, leaf.clone()) for leaf in (*tree.leaves(params), *tree.leaves(started))]
    with pytest.raises(ValueError, match=message):
        call(params, started)
    for leaf, copy in before:
        assert torch.equal(leaf.view(torch.uint8), copy.view(torch.uint8))


RELEASED = {
    "a second chunk": (
        lambda p: v41.step(p, prefilled(p, 4), torch.zeros(1, 2, dtype=torch.int64)),
        "one prefill from empty, then one row at a time; 2 rows at position 4",
    ),
    "padding": (lambda p: v41.step(p, v41.init_cache(p, 1, 8), torch.zeros(1, 2, dtype=torch.int64), valid=[1]), "takes whole calls only"),
    "all logits": (lambda p: v41.step(p, v41.init_cache(p, 1, 8), torch.zeros(1, 2, dtype=torch.int64), logits="all"), "logits: 'all' is not one of"),
    "unequal lengths": (
        lambda p: v41.step(p, replace(v41.init_cache(p, 2, 8), length=torch.tensor([1, 2], dtype=torch.int32)), row(1, 2)),
        r"takes equal lengths only, these are \[1, 2\]",
    ),
}


def prefilled(p: v41.Params, rows: int) -> v41.Cache:
    return v41.step(p, v41.init_cache(p, 1, 16), torch.zeros(1, rows, dtype=torch.int64))[1]


@pytest.mark.parametrize("name", RELEASED)
def test_released_takes_only_the_calls_that_the_release_has(name: str) -> None:
    call, message = RELEASED[name]
    with pytest.raises(ValueError, match=message):
        call(v41.load_params(TINY, numerics=v41.Numerics("released")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("other",), "regime 'other' is not one of"),
        (("exact", "mine"), "index_keys 'mine' is not one of"),
        (("exact", None, "bfloat16"), "dtype 'bfloat16' in regime 'exact'"),
        (("faithful", None, torch.float32), "dtype 'float32' in regime 'faithful'"),
    ],
)
def test_numerics_that_do_not_exist_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        v41.Numerics(*arguments)


def test_rows_that_are_not_real_may_hold_anything(params: v41.Params, started: v41.Cache) -> None:
    out, cache = v41.step(params, started, torch.tensor([[-9, 2**40], [5, 511]]), valid=[0, 1])
    assert cache.length.tolist() == [6, 4]
    assert not out.logits[0].any() and out.logits[1, 0].any() and not out.logits[1, 1].any()
    assert not out.hidden[0].any()


def test_a_saved_cache_is_refused_by_other_numerics_and_after_a_change(params: v41.Params, started: v41.Cache, tmp_path: Path) -> None:
    v41.save_cache(params, started, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(started), tree.leaves(v41.load_cache(params, tmp_path)), strict=True))
    with pytest.raises(ValueError, match=r"numerics is .*faithful.*, the parameters have .*exact"):
        v41.load_cache(v41.load_params(TINY, numerics=v41.Numerics("exact")), tmp_path)
    with pytest.raises(ValueError, match="config_sha256 is"):
        v41.load_cache(v41.load_params(Path(__file__).parent / "golden/tiny/checkpoint"), tmp_path)
    with pytest.raises(ValueError, match="draft is True, the parameters have False"):
        v41.load_cache(v41.load_params(TINY, draft=False), tmp_path)
    file = tmp_path / "cache.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"cache.safetensors: .* has other bytes than the manifest's sha256 says"):
        v41.load_cache(params, tmp_path)
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="cache.safetensors"):
        v41.load_cache(params, tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no manifest of a saved cache"):
        v41.load_cache(params, tmp_path)


def sample(**changed: torch.Tensor) -> v41.Sample:
    given = {"temperature": torch.ones(2), "top_p": torch.ones(2), "uniforms": torch.full((2, 5), 0.5)} | changed
    return v41.Sample(**given)


RAW = {
    "ops by name": (lambda p, c: v41.step(p, c, row(1, 2), ops="cpu"), "ops: a str, not Backend"),
    "valid of letters": (lambda p, c: v41.step(p, c, row(1, 2), valid="ab"), "valid: 'ab' is no tensor or list of numbers"),
    "ragged valid": (lambda p, c: v41.step(p, c, row(1, 2), valid=[[1], [1, 2]]), "valid: .* is no tensor"),
    "logits switched off by False": (lambda p, c: v41.step(p, c, row(1, 2), logits=False), "logits: False is not one of"),
    "record without a cache": (lambda p, c: v41.record(p, None, row(1, 2)), "cache: a NoneType, not Cache"),
    "rewind to nothing": (lambda p, c: v41.rewind(c, None), "length: None is no tensor"),
    "rewind of nothing": (lambda p, c: v41.rewind(None, [1]), "cache: a NoneType"),
    "take of letters": (lambda p, c: v41.take(c, "a"), "sequences: 'a' is no tensor"),
    "init_cache without params": (lambda p, c: v41.init_cache(None, 1, 4), "params: a NoneType"),
    "head without a boundary": (lambda p, c: v41.head(p, None), "boundary: a NoneType"),
    "layers by text": (lambda p, c: v41.layers(p, *v41.embed(p, c, row(1, 2))[::-1], "0", 1), "layers: '0'..1 are no layers"),
    "layers with the cache before embed": (
        lambda p, c: v41.layers(p, c, v41.embed(p, c, row(1, 2))[0], 0, 1),
        r"cache: holds \[6, 3\] positions, the boundary ends at \[7, 4\]",
    ),
    "layers with another batch": (lambda p, c: v41.layers(p, v41.take(c, [0]), v41.embed(p, c, row(1, 2))[0], 0, 1), "boundary: 2 sequences, the cache has 1"),
    "numerics by name": (lambda p, c: v41.load_params(TINY, numerics="exact"), "numerics: 'exact' is a str, not v41.Numerics"),
    "a negative temperature": (
        lambda p, c: v41.draft(p, c, hidden(p, 2, 1), torch.tensor([1, 2]), valid=[0, 0], sample=sample(temperature=-torch.ones(2))),
        "sample.temperature: -1.0 at",
    ),
    "a temperature that is NaN": (
        lambda p, c: v41.draft(p, c, hidden(p, 2, 1), torch.tensor([1, 2]), valid=[0, 0], sample=sample(temperature=torch.full((2,), float("nan")))),
        "sample.temperature: nan",
    ),
    "a uniform of 1": (
        lambda p, c: v41.draft(p, c, hidden(p, 2, 1), torch.tensor([1, 2]), valid=[0, 0], sample=sample(uniforms=torch.ones(2, 5))),
        "sample.uniforms: 1.0 at",
    ),
    "uniforms of float64": (
        lambda p, c: v41.draft(p, c, hidden(p, 2, 1), torch.tensor([1, 2]), valid=[0, 0], sample=sample(uniforms=torch.zeros(2, 5).double())),
        "sample.uniforms: dtype torch.float64",
    ),
    "one stop string instead of a list": (lambda p, c: v41.generate(p, [[1]], max_tokens=1, stop_strings="ab"), "stop_strings: 'ab' is a string"),
    "a prompt of fractions": (lambda p, c: v41.generate(p, [[0.9, 5]], max_tokens=1), r"prompts\[0\]: .* is neither a text nor a list of token ids"),
    "flat prompts": (lambda p, c: v41.generate(p, [0, 1], max_tokens=1), r"prompts\[0\]: 0 is neither"),
}


@pytest.mark.parametrize("name", RAW)
def test_a_plausible_mistake_is_a_named_value_error(name: str, params: v41.Params, started: v41.Cache) -> None:
    call, message = RAW[name]
    with pytest.raises(ValueError, match=message):
        call(params, started)


def test_a_backend_may_name_its_parameters_as_it_likes_but_must_be_callable_alike(params: v41.Params, started: v41.Cache) -> None:
    cpu = v41.available_backends()["cpu"]
    seen = []
    for tap in (lambda n, t: seen.append(n) or t, lambda *a: a[1], lambda name, tensor, more=1: tensor):
        assert torch.equal(v41.step(params, started, row(1, 2), ops=replace(cpu, tap=tap))[0].logits, v41.step(params, started, row(1, 2))[0].logits)
    assert "layers.3.h_out" in seen
    for bad in (lambda n: n, lambda a, b, c: a):
        with pytest.raises(TypeError, match="cannot be called like the spec's tap"):
            replace(cpu, tap=bad)


def test_a_poisoned_tap_reaches_the_logits(params: v41.Params, started: v41.Cache) -> None:
    cpu, clean = v41.available_backends()["cpu"], v41.step(params, started, row(1, 2))[0].logits
    for target in ("layers.0.attn_in", "layers.3.engram_out", "layers.6.ffn_out", "layers.7.pre_mix_out", "layers.2.route_weights"):
        poisoned = replace(cpu, tap=lambda n, t, target=target: t * float("nan") if n == target else t)
        assert torch.isnan(v41.step(params, started, row(1, 2), ops=poisoned)[0].logits).all(), target
    zeroed = replace(cpu, tap=lambda n, t: torch.zeros_like(t) if n == "engram_hash_ids" else t)
    assert not torch.equal(v41.step(params, started, row(1, 2), ops=zeroed)[0].logits, clean)


def test_what_a_call_gives_are_ordinary_tensors(params: v41.Params, started: v41.Cache) -> None:
    out, cache, taps = v41.record(params, started, row(1, 2))
    drafted, cache, more = v41.record_draft(params, cache, out.hidden, torch.tensor([3, 3]))
    boundary, held = v41.embed(params, started, row(1, 2))
    boundary, held = v41.layers(params, held, boundary, 0, params.config.num_hidden_layers)
    state = v41.init_spec(params, cache, out.logits[:, -1])
    emitted, state, cache = v41.spec_step(params, cache, state)
    given = [t for part in (out, cache, drafted, boundary, held, state, emitted) for t in tree.leaves(part)]
    given += [*taps.values(), *more.values(), v41.head(params, boundary)]
    assert not any(t.is_inference() for t in given)
    out.logits.zero_()


def test_ambient_torch_state_changes_nothing(params: v41.Params, started: v41.Cache) -> None:
    clean = v41.step(params, started, row(1, 2))[0].logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(v41.step(params, started, row(1, 2))[0].logits, clean)
    with torch.inference_mode():
        assert torch.equal(v41.step(params, started, row(1, 2))[0].logits, clean)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(v41.step(params, started, row(1, 2))[0].logits, clean)
    finally:
        torch.set_default_dtype(before)
