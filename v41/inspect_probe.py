# SPDX-License-Identifier: Apache-2.0
"""The first thing to run on the released checkpoint: published numbers against what this code finds (docs/checkpoints.md 3)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from v41 import api
from v41.checkpoint import Folder, open_folder
from v41.engram_map import multipliers, primes
from v41.golden.make import one_thread
from v41.inspect_report import count, sizes_of
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.ops.ngram import engram_hash
from v41.spec.ops.quant import dequantize
from v41.spec.ops.rope import layer_frequencies
from v41.spec.table import Fp4, Fp8Rows
from v41.stream import Job, prepare_run
from v41.stream.run import streamed
from v41.tokenizer import token_map

RELEASED = Path(__file__).parent / "data" / "released_config.json"
TOTALS = (96_085, 510_286_023_000, 763_205_315_794)  # tensors, bytes, parameters
# Row 0 of two tensors: stored bytes, scale byte, and the values that they decode to.
FP8 = ("layers.0.attn.wkv", "d871f2797069f0e5", 0x73, (-16, 144, -160, 288, 128, 72, -128, -52))  # times 2^-12
FP4 = (
    "layers.0.ffn.experts.0.w1",
    "a0a8ec4aadaf42aa",
    0x78,
    (0, -1, 0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1),  # times 2^-7
)
FREQUENCIES = {16: 2.265625e-3, 20: 2.9697778e-4, 24: 1.953125e-5, 31: 5.680529e-7}  # YaRN, of layers that compress
MAP_SIZE = 99_092
MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
# Table rows of the compressed ids 10 20 30 40 50 at the last of them.
IDS = (10, 20, 30, 40, 50)
HASHES = {
    1: "5457301 26470289 42926785 62582378 68079542 85915763 102834638 114358063 130605657 156377119 174550172 181396638 "
    "194477994 217026077 226856678 250510400 261515048 274655344 296704228 307730068 331081547 342108941 363969460 377395685",
    14: "12112771 17594806 40177035 60567362 78763383 80843792 100677074 126606474 142726201 145257379 175637107 180701399 "
    "198428675 221226053 227233095 255906954 259419700 284922264 302986529 306158514 323132060 342210866 353939203 380580960",
}
PROMPT, NEXT = (42,) * 129, (271, 51570)  # the one published check of real weights: its greedy tokens


@dataclass(frozen=True)
class Verdict:
    """One check: pass, fail, or not run, which is no pass."""

    check: str
    status: str
    expected: str
    found: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verdict(check: str, expected: Any, found: Any) -> Verdict:
    return Verdict(check, "pass" if expected == found else "fail", _short(expected), _short(found))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def stored_bytes(folder: Folder) -> Iterator[Verdict]:
    """Bytes of the file, and what they decode to."""
    for (name, code, scale, values), kind, unit in ((FP8, Fp8Rows, 2.0**-12), (FP4, Fp4, 2.0**-7)):
        row, factor = folder.rows(name + ".weight", 0, 1), folder.rows(name + ".scale", 0, 1)
        raw = bytes(row.view(torch.uint8)[0, :8].tolist()).hex(), int(factor.view(torch.uint8)[0, 0])
        yield verdict(f"{name}: bytes of row 0", f"{code} scale {scale:02x}", f"{raw[0]} scale {raw[1]:02x}")
        decoded = dequantize(kind(row[:, :8], factor[:, :1]), torch.float32)[0].tolist()
        yield verdict(f"{name}: values of row 0", [v * unit for v in values], decoded)


def hash_rows(config: Config, table: int, ids: Sequence[int]) -> list[int]:
    """Table rows of the last of `ids`."""
    size, drawn = config.engram_max_ngram_size, torch.tensor(primes(config)[table])
    columns = drawn.flatten().tolist()
    offsets = torch.tensor([sum(columns[:i]) for i in range(len(columns))])
    back = torch.tensor(list(reversed(ids))[:size], dtype=torch.int32).view(1, 1, -1)
    pad = torch.tensor(config.engram_pad_token_id, dtype=torch.int32)
    factors = torch.from_numpy(multipliers(config, config.engram_layer_ids[table]))
    return engram_hash(back, torch.ones_like(back, dtype=torch.bool), pad, factors, drawn, offsets)[0, 0].tolist()


def arithmetic(config: Config, directory: Path) -> Iterator[Verdict]:
    """What follows from the config and the tokenizer alone."""
    for table, layer in enumerate(config.engram_layer_ids):
        yield verdict(f"Engram multipliers of layer {layer}", list(MULTIPLIERS[layer]), multipliers(config, layer).tolist())
        yield verdict(f"Engram rows of layer {layer}", [int(n) for n in HASHES[layer].split()], hash_rows(config, table, IDS))
    f = layer_frequencies(config, 1)
    for i, want in FREQUENCIES.items():
        close = abs(float(f[i]) - want) <= 2.0**-21 * want  # 4 steps of float32: power, reciprocal, ramp
        yield Verdict(f"YaRN frequency {i}", "pass" if close else "fail", str(want), f"{float(f[i]):.8g}")
    try:
        yield verdict("token map: compressed ids", MAP_SIZE, int(token_map(directory / "tokenizer.json").max()) + 1)
    except ValueError as error:
        yield Verdict("token map: compressed ids", "fail", str(MAP_SIZE), _short(error))


def greedy_tokens(job: Job, prompt: Sequence[int], steps: int) -> list[int]:
    """The tokens after a prompt, one layer in memory at a time, without drafts and records."""
    run, cache = streamed(job), api.init_cache(job.params, 1, len(prompt) + steps)
    fed, found = torch.tensor([prompt]), []
    with one_thread(job.params):
        for _ in range(steps):
            out, cache, _ = run.record(job.params, cache, fed, logits="last")
            fed = out.logits[:, -1].argmax(-1)[:, None]
            found.append(int(fed))
    return found


def probe(directory: str | Path, run: bool, show: Callable[[int, int, str], None] = lambda done, total, what: None) -> list[Verdict]:
    """Every check as a verdict. run=False leaves out the streamed run, which reads about 290 GB; show(bytes read, bytes expected, unit).

    Raises ValueError for a config that is not the released one: the numbers belong to it.
    """
    directory = Path(directory)
    config = Config.from_json(directory / "config.json")
    if config != Config.from_json(RELEASED):
        raise ValueError(f"--probe: {directory / 'config.json'} is not the released config, to which the published numbers belong")
    folder = open_folder(directory)
    total = count(sizes_of(folder.entries).values())
    verdicts = [verdict("tensors, bytes, parameters", TOTALS, (total.tensors, total.bytes, total.parameters))]
    verdicts += [*stored_bytes(folder), *arithmetic(config, directory)]
    what = f"greedy tokens after {len(PROMPT)} x id {PROMPT[0]}"
    if not run:
        return [*verdicts, Verdict(what, "not run", _short(list(NEXT)), "")]
    job, done = prepare_run(directory, Numerics(), draft=False), 0

    def on_read(size: int) -> None:
        nonlocal done
        done += size
        show(done, total.bytes, "greedy tokens")

    job = replace(job, source=replace(job.source, on_read=on_read))
    return [*verdicts, verdict(what, list(NEXT), greedy_tokens(job, PROMPT, len(NEXT)))]
