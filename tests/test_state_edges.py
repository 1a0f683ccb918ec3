# SPDX-License-Identifier: Apache-2.0
"""Edges of every ring and group, state mutants, threads, purity, memory."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import v41
from tests.states import poison
from tests.test_states import CAPACITY, TINY, Run, one_shot, params, tokens
from v41 import tree
from v41.spec import cache as caches
from v41.spec import slots

# ratio 2 and 1, window and index_topk 32, 6 candidate blocks of 8; 8 positions of slack.
LENGTHS = ((1, 2, 3, 31), (32, 33, 48, 49), (63, 64, 65, 66), (67, 68, 100, 103))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_cut_at_an_edge_changes_nothing(lengths: tuple[int, ...]) -> None:
    run = Run("faithful", [0, 2, 3, 4])
    run.step(list(lengths), 0, 0)
    run.cache = poison(run.cache)
    run.step([1] * 4, 2, 1)
    run.step([3, 0, 2, 1], 0, 2)
    run.finish()


def test_single_rows_over_the_edge_of_every_ring_equal_one_call() -> None:
    """The window ring holds 40 positions, those of groups and history 9 and 11; rows 26 to 48 come one by one."""
    run = Run("faithful", [2, 3])
    run.step([26, 25], 0, 0)
    for n in range(22):
        run.step([1, 1], 0, n)
    run.finish()


def test_a_cache_filled_to_its_capacity_holds_and_one_more_is_refused() -> None:
    p = params("faithful")
    _, cache = v41.step(p, v41.init_cache(p, 1, 33), tokens()[:1, :33])
    with pytest.raises(ValueError, match="sequence 0 holds 33 positions and gets 1 more, the capacity is 33"):
        v41.step(p, cache, tokens()[:1, 33:34])


def test_lengths_below_every_ratio_have_no_compressed_row() -> None:
    p = params("faithful")
    out, cache, taps = v41.record(p, v41.init_cache(p, 1, CAPACITY), tokens()[:1, :1])
    assert (taps["layers.2.topk_idxs"] == -1).all() and torch.isfinite(out.logits).all()
    assert v41.export_cache(p, cache)["layers.2.compress_kv_cache"].shape[1] == 0


# State rules broken on purpose; each must be caught by the schedule below.
TARGETS, REWIND, WINDOW = slots.ring_targets, caches.rewind, slots.window_list


def ring_off_by_one(call: slots.Call, size: int) -> torch.Tensor:
    good = TARGETS(call, size)
    return torch.where(good < size, (good + 1) % size, good)


def mark_not_kept(cache: v41.Cache, length: torch.Tensor) -> v41.Cache:
    return replace(REWIND(cache, length), high=length)


def history_not_rewound(cache: v41.Cache, length: torch.Tensor) -> v41.Cache:
    moved = replace(cache, history=cache.history.roll(1, 1))
    return REWIND(moved, length)


def group_carry_lost(call: slots.Call, size: int) -> torch.Tensor:
    return torch.full_like(TARGETS(call, size), size) if size < 10 else TARGETS(call, size)


def list_by_age(positions: torch.Tensor, window: int, numerics: v41.Numerics, start: int | None) -> torch.Tensor:
    return WINDOW(positions, window, numerics, start).flip(-1)


def newest_of_long_chunk_lost(call: slots.Call, size: int) -> torch.Tensor:
    kept = call.live & (call.positions < call.length[:, None] + size)
    return torch.where(kept, torch.remainder(call.positions, size), size)


MUTANTS = {
    "ring off by one": ("v41.spec.attention.ring_targets", ring_off_by_one),
    "group carry lost": ("v41.spec.compress.ring_targets", group_carry_lost),
    "history ring off by one": ("v41.spec.model.ring_targets", ring_off_by_one),
    "history not rewound": ("v41.spec.cache.rewind", history_not_rewound),
    "list order by age": ("v41.spec.attention.window_list", list_by_age),
    "oldest rows of a long chunk kept": ("v41.spec.attention.ring_targets", newest_of_long_chunk_lost),
}


def schedule() -> None:
    run = Run("faithful", [0, 3])
    run.step([41, 7], 1, 0)
    run.step([2, 1], 0, 1)
    run.rewind([3, 2])
    run.step([5, 50], 0, 2)
    run.step([1, 1], 0, 3)
    run.finish()


def test_the_schedule_of_the_mutants_passes_unbroken() -> None:
    schedule()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_state_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_shot("faithful", 0), one_shot("faithful", 3)  # the right values, before anything is broken
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError):
        schedule()


def test_a_mark_that_is_not_kept_lets_a_rewind_pass_that_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        run = Run("faithful", [0])
        run.step([100], 0, 0)
        for back in (92, 84):
            run.cache = v41.rewind(run.cache, [back])

    with pytest.raises(ValueError, match="goes back 16, the slack is 8"):
        twice()
    monkeypatch.setattr("v41.spec.cache.rewind", mark_not_kept)
    twice()


def test_a_step_leaves_its_arguments_untouched() -> None:
    p = params("faithful")
    cache = v41.step(p, v41.init_cache(p, 1, CAPACITY), tokens()[:1, :40])[1]
    before = [(leaf, leaf.clone()) for leaf in (*tree.leaves(cache), *tree.leaves(p))]
    out, after = v41.step(p, cache, tokens()[:1, 40:44])
    v41.draft(p, v41.draft(p, cache, torch.zeros(1, 40, 768).bfloat16(), None)[1], torch.zeros(1, 1, 768).bfloat16(), None, valid=[0])
    v41.rewind(after, [41]), v41.take(after, [0, 0])
    for leaf, copy in before:
        assert torch.equal(leaf.view(torch.uint8), copy.view(torch.uint8))
    assert out.logits.shape == (1, 4, 512)


def test_two_models_stepped_in_turn_equal_two_separate_runs() -> None:
    a, b = params("faithful"), params("exact float64")
    ca, cb = v41.init_cache(a, 1, CAPACITY), v41.init_cache(b, 1, CAPACITY)
    for n in range(3):
        oa, ca = v41.step(a, ca, tokens()[:1, n : n + 1])
        ob, cb = v41.step(b, cb, tokens()[1:2, n : n + 1])
    assert torch.equal(oa.logits[0, 0], one_shot("faithful", 0)[0][2])
    assert torch.allclose(ob.logits[0, 0], one_shot("exact float64", 1)[0][2], rtol=1e-10, atol=1e-10)


THREADS = """
import sys, torch, v41
torch.set_num_threads(int(sys.argv[1]))
p = v41.load_params(sys.argv[2])
t = torch.randint(0, 505, (2, 130), generator=torch.Generator().manual_seed(1))
out, cache = v41.step(p, v41.init_cache(p, 2, 130), t)
_, cache = v41.draft(p, cache, out.hidden, None)
import hashlib
from v41 import tree
h = hashlib.sha256(out.logits.numpy().tobytes())
for leaf in tree.leaves(cache): h.update(leaf.contiguous().view(torch.uint8).numpy().tobytes())
print(h.hexdigest())
"""


def test_one_and_two_threads_give_the_same_bytes() -> None:
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(TINY.parent.parent)}
    runs = [
        subprocess.run([sys.executable, "-c", THREADS, n, str(TINY)], env=env | {"OMP_NUM_THREADS": n}, capture_output=True, text=True, check=True).stdout
        for n in ("1", "2")
    ]
    assert runs[0] == runs[1] and len(runs[0]) == 65


MEMORY = """
import resource, sys, torch, v41
torch.set_num_threads(1)
p = v41.load_params(sys.argv[2])
n = int(sys.argv[1])
cache = v41.init_cache(p, 1, n)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
v41.step(p, cache, torch.randint(0, 505, (1, n), generator=torch.Generator().manual_seed(1)), logits="last")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_a_long_prompt_takes_memory_linear_in_its_tokens() -> None:
    """Twice the tokens take at most twice the memory of a prefill, plus a tenth for what the allocator keeps."""
    env = os.environ | {"PYTHONPATH": str(TINY.parent.parent)}
    used = {}
    for n in (8192, 16384):
        done = subprocess.run([sys.executable, "-c", MEMORY, str(n), str(TINY)], env=env, capture_output=True, text=True, check=True)
        used[n] = int(done.stdout)
    assert used[16384] <= 2.2 * used[8192], used


def test_garbage_in_a_cache_row_that_is_live_is_noticed() -> None:
    """The poison itself can fail: NaN in a live row reaches the logits."""
    p = params("faithful")
    _, cache = v41.step(p, v41.init_cache(p, 1, CAPACITY), tokens()[:1, :20])
    window = cache.layers[0].window.clone()
    window[:, 19] = float("nan")
    bad = replace(cache, layers=(replace(cache.layers[0], window=window), *cache.layers[1:]))
    assert torch.isnan(v41.step(p, bad, tokens()[:1, 20:21])[0].logits).any()
    assert torch.isfinite(v41.step(p, poison(cache), tokens()[:1, 20:21])[0].logits).all()


def test_the_tiny_checkpoint_is_the_one_of_its_command() -> None:
    """checkpoints/tiny is made by the recipe: seed and digest of its manifest, config and token map as committed."""
    import json

    from v41.params_io import weights_digest
    from v41.tokenizer import token_map

    manifest = json.loads((TINY / "manifest.json").read_text())
    config = v41.Config.from_json(TINY / "config.json")
    made = v41.init_params(config, manifest["recipe"]["seed"], torch.from_numpy(token_map(TINY / "tokenizer.json")))
    assert weights_digest(made) == manifest["sha256"] == weights_digest(params("faithful"))
    assert sum(f.stat().st_size for f in TINY.iterdir()) < 10_000_000
    assert config.max_position_embeddings >= 65536
    flags = manifest["coverage"]
    assert all(on for on in flags.values() if isinstance(on, bool)), flags
    assert flags["clamped_swiglu_inputs"] > 100
    assert Path(TINY / "tokenizer.json").stat().st_size < 100_000
