# SPDX-License-Identifier: Apache-2.0
"""Layers, steps and loads of released size (all marked slow): against plain float64, within memory, and beside the safetensors package."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import v41
from tests import recipe_numpy
from tests.checkpoint_kit import ROOT, script
from tests.oracle import files as oracle
from tests.oracle import formats
from v41.checkpoint.header import NAMES
from v41.engram_map import default_token_map, engram_map
from v41.released import released_table
from v41.stream import job_over, recipe_source
from v41.stream.run import streamed

pytestmark = pytest.mark.slow
SEED, SAMPLES, ULP = 5, 6, 2.0**-53
MEMORY = 16 * 2**30


def every_kind() -> v41.Config:
    """Full-size layers, one of each kind: window, with Engram, full at ratio 2, reuse, full with Engram, full at ratio 1, reindex."""
    published = json.loads((ROOT / "v41" / "data" / "released_config.json").read_text())
    text = published["text_config"]
    for key in [k for k in text if k.startswith("dspark_")] + ["num_nextn_predict_layers"]:
        del text[key]
    text |= {"num_hidden_layers": 7, "compress_ratios": [0, 0, 2, 2, 2, 1, 1], "kv_source_layer_ids": [2, 4, 5]}
    text |= {"index_source_layer_ids": [2, 4, 5, 6], "candidate_source_layer_id": 5, "engram_layer_ids": [1, 4]}
    return v41.Config.from_dict(published)


class Plain:
    """Rows of a released tensor as float64, from the numpy recipe and the numpy formats: no code of the library."""

    def __init__(self, config: v41.Config):
        self.table = {name: (NAMES[item.dtype], item.shape) for name, item in released_table(config).items()}

    def codes(self, name: str, rows: list[int]) -> np.ndarray:
        dtype, shape = self.table[name]
        index = np.asarray(rows)[:, None] * shape[1] + np.arange(shape[1])
        raw = recipe_numpy.elements(name, dtype, shape, SEED, index.reshape(-1))
        return raw.view(oracle.STORED[dtype]).reshape(len(rows), shape[1])

    def values(self, name: str, rows: list[int]) -> np.ndarray:
        """Of a weight with a scale, its dequantized rows."""
        scale, (dtype, _) = name.removesuffix("weight") + "scale", self.table[name]
        codes = self.codes(name, rows)
        if dtype == "I8":
            return oracle.packed_values(codes, self.codes(scale, rows))
        if dtype == "F8_E4M3":
            tiles = rows if ".engram.embed." in name else [r // 32 for r in rows]
            return oracle.row_values(codes, self.codes(scale, tiles))
        return formats.bf16_values(codes) if dtype == "BF16" else codes.astype(np.float64)


def sampled(name: str, count: int) -> list[int]:
    """The first and last row, and some between, by name."""
    draw = np.random.default_rng(len(name) + count).integers(0, count, SAMPLES)
    return sorted({0, count - 1, *draw.tolist()})


class Checker:
    """A backend that recomputes sampled outputs of every product. `names`: where a weight lies in memory, to its name."""

    def __init__(self, config: v41.Config):
        self.plain, self.names, self.checked = Plain(config), {}, set()

    def note(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.names[tensor.data_ptr()] = name
        return tensor

    def compare(self, name: str, x: torch.Tensor, y: torch.Tensor, rows: list[int]) -> None:
        """Sums of K products in any order: off by at most K roundings of the sum of magnitudes."""
        w, flat = self.plain.values(name, rows), x.double().flatten(0, -2).numpy()
        got = y.double().flatten(0, -2).numpy()[:, rows]
        bound = (w.shape[1] + 2) * ULP * (np.abs(flat) @ np.abs(w).T) + 1e-30
        assert (np.abs(got - flat @ w.T) <= bound).all(), name
        assert not (np.abs(got[:, 1:] - (flat @ w.T)[:, :-1]) <= bound[:, 1:]).all(), f"{name}: the bound would not see another row"
        self.checked.add(name)

    def linear(self, x, w, numerics):
        y, name = v41.spec.ops.linear.linear(x, w, numerics), self.names[w.weight.data_ptr()]
        self.compare(name, x, y, sampled(name, y.shape[-1]))
        return y

    def plain_linear(self, x, w, numerics):
        y, name = v41.spec.ops.linear.plain_linear(x, w, numerics), self.names[w.data_ptr()]
        self.compare(name, x, y, sampled(name, y.shape[-1]))
        return y

    def wide_linear(self, x, w, numerics):
        y = v41.spec.ops.linear.wide_linear(x, w, numerics)
        name = "head.weight" if y.shape[-1] == 129280 else self.names[w.data_ptr()]
        self.compare(name, x, y, sampled(name, y.shape[-1]))
        return y

    def grouped_linear(self, x, w, groups, numerics):
        y, name = v41.spec.ops.linear.grouped_linear(x, w, groups, numerics), self.names[w.weight.data_ptr()]
        heads, width = x.shape[2] // groups, y.shape[-1] // groups
        for g in range(groups):
            part = x[:, :, g * heads : (g + 1) * heads].flatten(2)
            self.compare(name, part, y, [g * width + r for r in (0, 17, width - 1)])
        return y

    def experts(self, x, weights, ids, w1, w2, w3, *, limit, numerics):
        y = v41.backends.cpu.moe.experts(x, weights, ids, w1, w2, w3, limit=limit, numerics=numerics)
        names = [self.names[w.weight.data_ptr()] for w in (w1, w2, w3)]
        if names[0].split(".experts.")[0] not in {n.split(".experts.")[0] for n in self.checked if ".experts." in n}:
            self.compare_expert(names, x, weights, y, limit)
        return y

    def shared_expert(self, x, w1, w2, w3, *, limit, numerics):
        y = v41.spec.ops.experts.shared_expert(x, w1, w2, w3, limit=limit, numerics=numerics)
        self.compare_expert([self.names[w.weight.data_ptr()] for w in (w1, w2, w3)], x, torch.ones(len(x), 1), y, limit)
        return y

    def compare_expert(self, names, x, weights, y, limit):
        """The first expert of each layer: all of w1 and w3, sampled rows of w2, with the error carried from one to the other."""
        flat, inter = x.double().numpy(), self.plain.table[names[0]][1][0]
        gate_w, up_w = (self.plain.values(n, list(range(inter))) for n in (names[0], names[2]))
        rows = sampled(names[1], y.shape[-1])
        down = self.plain.values(names[1], rows)
        gate, up = np.minimum(flat @ gate_w.T, limit), np.clip(flat @ up_w.T, -limit, limit)
        slip = [(flat.shape[1] + 2) * ULP * (np.abs(flat) @ np.abs(w).T) for w in (gate_w, up_w)]
        silu = gate / (1 + np.exp(-gate))
        weight = weights.double().numpy()
        hidden = weight * silu * up
        error = np.abs(weight) * (1.1 * slip[0] * (np.abs(up) + slip[1]) + np.abs(silu) * slip[1]) + 64 * ULP * np.abs(hidden)
        bound = error @ np.abs(down).T + (inter + 2) * ULP * ((np.abs(hidden) + error) @ np.abs(down).T) + 1e-30
        got = y.double().numpy()[:, rows]
        assert (np.abs(got - hidden @ down.T) <= bound).all(), names
        assert (np.abs(hidden @ down.T) > 4 * bound).any(), "the bound would see nothing"
        self.checked.update(names)


def test_a_full_size_layer_of_each_kind_equals_plain_float64_on_sampled_rows():
    config = every_kind()
    checker = Checker(config)
    source = recipe_source(config, SEED)
    read = source.read_tensor
    source = replace(source, read_tensor=lambda name: checker.note(name, read(name)))
    known = engram_map(config, default_token_map(config))
    job = job_over(config, source, v41.Numerics("exact", dtype="float64"), known, draft=False)
    swapped = {n: getattr(checker, n) for n in ("linear", "plain_linear", "wide_linear", "grouped_linear", "experts", "shared_expert")}
    job = replace(job, ops=replace(job.ops, name="checker", **swapped))
    cache = v41.init_cache(job.params, 1, 8)
    out, _, taps = streamed(job).record(job.params, cache, torch.tensor([[77, 5000]]))
    assert torch.isfinite(out.logits).all() and out.logits.std() > 0.1
    for i in range(7):
        kinds = {"attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "ffn.shared_experts.w2"}
        kinds |= {"attn.indexer.wq_b", "attn.indexer.weights_proj"} if config.layer_plan[i].owns_index else set()
        kinds |= {"attn.compressor.wkv", "attn.indexer.wk"} if config.layer_plan[i].owns_kv else set()
        kinds |= {"engram.wkv"} if config.layer_plan[i].engram is not None else set()
        assert {f"layers.{i}.{kind}.weight" for kind in kinds} <= checker.checked
        assert sum(n.startswith(f"layers.{i}.ffn.experts.") for n in checker.checked) == 3
    for table, layer in enumerate(config.engram_layer_ids):
        name = f"layers.{layer}.engram.embed.weight"
        for row in taps["engram_hash_ids"][0, :, table, ::7].flatten().tolist():
            stored = job.source.gather_rows(name, [row]).view(torch.uint8)[0].numpy()
            assert (stored == checker.plain.codes(name, [row])[0]).all() and str(row) in job.log.rows[name]


# The peak of this process alone: getrusage starts from what the parent held.
PEAK = """
def peak():
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
STEP = """
import sys, torch
torch.set_num_threads(1)
import v41
from v41.stream import prepare_run
from v41.stream.run import streamed
job = prepare_run(sys.argv[1], v41.Numerics())
cache = v41.init_cache(job.params, 1, 16)
run = streamed(job)
out, cache, _ = run.record(job.params, cache, torch.tensor([[0]]))
drafted, cache, _ = run.record_draft(job.params, cache, out.hidden, torch.tensor([5]))
assert out.logits.shape == (1, 1, 129280) and not out.logits.any() and drafted.tokens.shape == (1, 5)
print(peak())
"""


def child(code: str, *arguments: str) -> list[float]:
    """The numbers that a fresh process prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PEAK + code, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(word) for word in done.stdout.split()]


def test_a_full_size_step_and_draft_stream_within_16_gib(tmp_path):
    script("make_released").make(tmp_path / "released")
    (peak,) = child(STEP, str(tmp_path / "released"))
    print(f"peak RSS of a full-size step with its draft: {peak / 2**30:.2f} GiB")
    assert peak < MEMORY


OURS = """
import sys, time, torch
torch.set_num_threads(1)
import v41
from v41.params_io import released_tensors
start = time.perf_counter()
params = v41.load_params(sys.argv[1])
seen = sum(int(t.view(torch.uint8).flatten()[::4096].sum()) for _, t in released_tensors(params))
print(time.perf_counter() - start, peak(), seen)
"""
THEIRS = """
import glob, sys, time, torch
torch.set_num_threads(1)
import v41
from safetensors.torch import load_file
start = time.perf_counter()
tensors = {}
for file in sorted(glob.glob(sys.argv[1] + "/model-*")):
    tensors |= {n: t.clone() if sys.argv[2] == "clone" else t for n, t in load_file(file).items()}
seen = sum(int(t.view(torch.uint8).flatten()[::4096].sum()) for t in tensors.values())
print(time.perf_counter() - start, peak(), seen)
"""


@cache
def four_gb_config() -> dict:
    """Released sizes, one window layer with 64 experts: 4.0 GB."""
    published = json.loads((ROOT / "v41" / "data" / "released_config.json").read_text())
    text = published["text_config"]
    for key in [k for k in text if k.startswith(("dspark_", "engram_", "candidate_"))] + ["num_nextn_predict_layers"]:
        del text[key]
    text |= {
        "num_hidden_layers": 1,
        "compress_ratios": [0],
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "n_routed_experts": 64,
    }
    del published["vision_config"]
    return published


def test_loading_4_gb_beside_the_safetensors_package(tmp_path):
    config_file, folder = tmp_path / "config.json", tmp_path / "folder"
    config_file.write_text(json.dumps(four_gb_config()))
    script("make_released").make(folder, config_file)
    for shard in folder.glob("model-*"):
        with open(shard, "r+b") as file:
            head = int(np.frombuffer(file.read(8), "<u8")[0])
            file.seek(8 + head)
            left = shard.stat().st_size - 8 - head
            while left:
                left -= file.write(b"\x31" * min(left, 1 << 24))
    size = v41.read_plan(folder).bytes
    assert 3.9e9 < size < 4.2e9
    child(OURS, str(folder))  # both read from the page cache
    for how in ("map", "clone"):  # load_file maps the file and copies nothing until it is touched; a clone is what load_params gives
        runs = [(child(OURS, str(folder)), child(THEIRS, str(folder), how)) for _ in range(3)]
        times, memory = (sorted(round(ours[i] / theirs[i], 3) for ours, theirs in runs) for i in (0, 1))
        print(f"{size / 1e9:.2f} GB against load_file ({how}): time ratios {times}, peak memory ratios {memory}; seconds and bytes {runs}")
        assert all(ours[1] < size + 2**30 for ours, _ in runs), "the weights, the interpreter and little else"
        assert all(ours[2] == theirs[2] for ours, theirs in runs)
