# SPDX-License-Identifier: Apache-2.0
"""Computing golden outputs: a prefill, greedy decode steps, drafts, and with taps every boundary and cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41 import api
from v41.golden import folder
from v41.golden.coverage import coverage
from v41.params_io import tensor_digests, weights_digest
from v41.spec.cache import Cache
from v41.spec.draft import Drafted
from v41.spec.model import Output
from v41.spec.params import Params

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Run:
    """How a run computes: its two calls of the model. The default holds all weights in memory; v41.stream reads them as it goes."""

    record: Callable[..., tuple[Output, Cache, dict[str, Tensor]]] = api.record
    record_draft: Callable[..., tuple[Drafted | None, Cache, dict[str, Tensor]]] = api.record_draft


EMPTY = -1  # a prompt row that is not real


@contextmanager
def one_thread(params: Params) -> Iterator[None]:
    """One torch thread, except in `faithful`, whose bits do not depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if params.numerics.regime == "faithful" else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prompt_tensor(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(tokens int64 [batch, longest], lengths int32 [batch]); shorter prompts end in -1. ValueError for an empty prompt."""
    lengths = [len(p) for p in prompts]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"prompt: lengths {lengths}; every sequence needs a token")
    tokens = torch.full((len(prompts), max(lengths)), EMPTY, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    return tokens, torch.tensor(lengths, dtype=torch.int32)


def margin(logits: Tensor) -> Tensor:
    """Best minus second best."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1]


def compute(
    params: Params,
    tokens: Tensor,
    lengths: Tensor,
    steps: int,
    taps: bool,
    forced: Tensor | None = None,
    progress: Progress = lambda done, total: None,
    run: Run = Run(),
) -> dict[str, dict[str, Tensor]]:
    """Tensors by part and name (docs/golden.md 2). `forced` [batch, steps] is fed to the decode steps instead of the greedy tokens."""
    cache = api.init_cache(params, tokens.shape[0], tokens.shape[1] + steps + 1)
    parts: dict[str, dict[str, Tensor]] = {"prefill": {}, "decode": {}, "caches": {}}
    rows: list[dict[str, Tensor]] = []
    with one_thread(params):
        every = "last" if params.numerics.compact or not taps else "all"
        out, cache, seen = run.record(params, cache, tokens, valid=lengths, logits=every)
        last = out.logits if out.logits.shape[1] == 1 else out.logits[torch.arange(len(lengths)), (lengths - 1).long()][:, None]
        parts["prefill"] |= seen
        cache = _draft(run, params, cache, out.hidden, None, lengths, parts["prefill"], "")[1]
        progress(1, steps + 1)
        parts["caches"] |= {f"after_prefill.{n}": t for n, t in api.export_cache(params, cache).items()}
        rows.append({"logits": last[:, 0], "tokens": last[:, 0].argmax(-1)})
        for k in range(steps):
            fed = rows[-1]["tokens"][:, None] if forced is None else forced[:, k : k + 1]
            out, cache, seen = run.record(params, cache, fed)
            parts["decode"] |= {f"step{k}.{n}": t for n, t in seen.items()}
            row = {"logits": out.logits[:, 0], "tokens": out.logits[:, 0].argmax(-1)}
            told = row["tokens"] if forced is None or k + 1 >= forced.shape[1] else forced[:, k + 1]
            drafted, cache = _draft(run, params, cache, out.hidden, told, None, parts["decode"], f"step{k}.")
            rows.append(row | ({} if drafted is None else {"hidden": out.hidden[:, 0]} | drafted))
            progress(k + 2, steps + 1)
        parts["caches"] |= {f"after_decode.{n}": t for n, t in api.export_cache(params, cache).items()}
    kept = parts if taps else {}
    return {"outputs": _outputs(tokens, lengths, rows), **{p: t for p, t in kept.items() if t}}


def _draft(
    run: Run,
    params: Params,
    cache: Any,
    hidden: Tensor | None,
    token: Tensor | None,
    valid: Tensor | None,
    seen: dict[str, Tensor],
    prefix: str,
) -> tuple[dict[str, Tensor] | None, Any]:
    """One draft with its taps put into `seen`; nothing for a model without a draft head."""
    if params.draft is None:
        return None, cache
    drafted, cache, taps = run.record_draft(params, cache, hidden, token, valid=valid)
    seen |= {prefix + n: t for n, t in taps.items()}
    if drafted is None:
        return None, cache
    ids = torch.cat((token[:, None], drafted.tokens.long()), 1)
    return {"spec.output_ids": ids, "spec.logits": drafted.logits, "spec.confidence": drafted.confidence}, cache


def _outputs(tokens: Tensor, lengths: Tensor, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The part that every golden folder has, one column a step."""
    out = {name: torch.stack([r[name] for r in rows], 1) for name in ("logits", "tokens")}
    out |= {"prompt": tokens, "lengths": lengths, "margin": margin(out["logits"])}
    drafts = rows[1:]
    if drafts and "spec.logits" in drafts[0]:
        out |= {name: torch.stack([r[name] for r in drafts], 1) for name in ("spec.output_ids", "spec.logits", "spec.confidence")}
        out |= {"decode_main_hidden": torch.stack([r["hidden"] for r in drafts], 1), "spec.margin": margin(out["spec.logits"])}
    return {name: t.contiguous() for name, t in out.items()}


def make(
    params: Params, prompts: Sequence[Sequence[int]], steps: int, out: Path, taps: bool, recipe: dict[str, Any] | None, progress: Progress
) -> dict[str, Any]:
    """Computes and writes a golden folder, its manifest last; gives the manifest.

    recipe: how to make the weights again ({"seed": int}), where they come from the recipe.
    """
    tokens, lengths = prompt_tensor(prompts)
    check_steps(steps)
    folder.check_out(out)
    weights = {"sha256": weights_digest(params), "recipe": recipe, "streamed": False, "read": {"whole": tensor_digests(params), "rows": {}}}
    parts = compute(params, tokens, lengths, steps, taps, progress=progress)
    folder.prepare(out)
    return write(params, tokens, lengths, {"steps": steps, "taps": taps}, parts, weights, out)


def check_steps(steps: int) -> None:
    if steps < 0:
        raise ValueError(f"steps: {steps} is negative")


def write(
    params: Params,
    tokens: Tensor,
    lengths: Tensor,
    run: dict[str, Any],
    parts: dict[str, dict[str, Tensor]],
    weights: dict[str, Any],
    out: Path,
) -> dict[str, Any]:
    """Writes the parts and the manifest of a golden folder. Of the manifest only `weights` says how they were read."""
    manifest = {
        "kind": "v41 golden",
        "schema": folder.SCHEMA,
        "reference": "deepseek-ai/DeepSeek-V4.1-Flash dba1be0a40aa45a94ad051997016db3960a90277",
        "numerics": params.numerics.describe(),
        "ties": "torch.topk" if params.numerics.compact else "lower index",
        "versions": folder.versions(),
        "run": {"batch": tokens.shape[0], "lengths": lengths.tolist(), **run, "draft": params.draft is not None},
        "weights": weights,
        "config_sha256": folder.text_digest(params.config.source),
        "config": params.config.to_dict(),
        "smallest_margin": float(parts["outputs"]["margin"].min()) if "margin" in parts["outputs"] else None,
        "coverage": coverage(params, tokens, parts),
        "tensors": {part: folder.write_part(out, part, tensors) for part, tensors in parts.items()},
    }
    if params.engram_map is not None:
        manifest["token_map"] = params.engram_map.token_map.tolist()
    folder.write_json(out / folder.MANIFEST, manifest)
    return manifest
