# SPDX-License-Identifier: Apache-2.0
"""Whether the run notices: wrong models, edited packs, tensors in another layout. Each must be caught (docs/conformance.md 10)."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from v41.conformance import primitives
from v41.conformance.blocks import teacher_forced
from v41.conformance.claims import Claims
from v41.conformance.edits import edits
from v41.conformance.judge import Stored, judge
from v41.conformance.layouts import layouts
from v41.conformance.mutants.cases import MUTANTS
from v41.conformance.mutants.kit import Mutant, nothing
from v41.conformance.mutants.more import MORE
from v41.conformance.target import Target
from v41.conformance.walk import Opened, Stop, every_stop, open_with_params
from v41.golden.pack import make_pack
from v41.params_io import init_params
from v41.spec.backend import Backend
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.params import Params

TINY = Path(__file__).parent.parent / "data" / "tiny_config.json"
SEED = 41
# The layers of the tiny model, narrower; an Engram where a tap is; more positions than window, selection and candidates hold.
NARROW = {
    **{"vocab_size": 200, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 64, "qk_rope_head_dim": 16},
    **{"q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "sliding_window": 8, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8},
    **{"candidate_topk_blocks": 5, "candidate_block_size": 2, "engram_layer_ids": [1, 6], "engram_compressed_vocab_size": 150},
    **{"dspark_noise_token_id": 190, "dspark_markov_rank": 16, "dspark_block_size": 3},
}
SCENARIOS = ("prefill", "decode", "chunks")
EXACTNESS = frozenset({"faithful", "released"})
# A config that another model has is no mistake that calls with the right config show.
ELSEWHERE = {"19 Sinkhorn iterations": "by 'one Sinkhorn iteration less'"}


@dataclass(frozen=True)
class Row:
    """One wrong thing. where: the first tensor that differs. loose: whether the noise gates alone notice it too."""

    kind: str
    name: str
    caught: bool
    where: str
    loose: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        gates = {None: "", True: "  gates too", False: "  bits only"}[self.loose]
        return f"{self.kind:8} {self.name:62} {'caught' if self.caught else 'MISSED':7} {self.where}{gates}"


def narrow_config() -> Config:
    """The model of the self-test."""
    told = json.loads(TINY.read_text(encoding="utf-8"))
    return Config.from_dict(told | {"text_config": told["text_config"] | NARROW})


def packs_of(given: Sequence[Path], checkpoint: Path | None, folder: Path) -> list[Opened]:
    """The packs given, else small ones of a narrow model, made now in both regimes that the mutants were written for."""
    if given:
        return [open_with_params(p, checkpoint) for p in given]
    config = narrow_config()
    for regime in ("faithful", "released"):
        params = init_params(config, SEED, numerics=Numerics(regime))
        make_pack(params, {"seed": SEED}, folder / regime, [s for s in SCENARIOS if s != "chunks" or regime == "faithful"])
    return [open_with_params(folder / r, None) for r in ("faithful", "released")]


Wanted = list[tuple[primitives.Edge, Numerics, primitives.Expected]]


def expectations() -> Wanted:
    """What every primitive gives, before anything is changed."""
    return [(e, n, primitives.expected(e, n)) for n in (Numerics(), Numerics("exact", dtype="float64")) for e in primitives.edges(n)]


def order_of(stops: Sequence[tuple[Opened, Stop]]) -> list[tuple[Opened, Stop]]:
    """Short calls first, so that most mutants are caught soon."""
    return sorted(stops, key=lambda os: (os[1].op != "step", os[0].regime != "faithful", not os[1].taps))


def changed(opened: Opened, stop: Stop, params: Params) -> tuple[Opened, Stop]:
    """The call with the changed parameters."""
    return replace(opened, params=params), replace(stop, before=replace(stop.before, config=params.config))


def first_wrong(mutant: Mutant, calls: Sequence[tuple[Opened, Stop]], wanted: Wanted, bits: bool) -> str | None:
    """Where a mutant is first noticed; None where it is not."""
    claims = Claims(bits=EXACTNESS if bits else frozenset())
    for opened, stop in calls:
        with mutant.change(opened.params, Backend("spec")) as (params, ops):
            try:
                findings = teacher_forced(Target(mutant.name, ops, claims), *changed(opened, stop, params))
            except Exception as e:
                return f"{opened.regime} {stop.name}: {type(e).__name__}"
        bad = next((f for f in findings if f.bad), None)
        if bad is not None:
            return f"{opened.regime} {stop.name} {bad.name}"
    with mutant.change(calls[0][0].params, Backend("spec")) as (_, ops):
        return wrong_primitive(ops, wanted, bits)


def wrong_primitive(ops: Backend, wanted: Wanted, bits: bool) -> str | None:
    """The first primitive case that differs."""
    for edge, numerics, expected in wanted:
        try:
            got = primitives.call(ops, edge, numerics)
        except Exception as e:
            return f"primitive {edge.name}: {type(e).__name__}"
        stored = Stored(expected.want, expected.far)
        if any(judge(n, got.get(n), stored, got, bits, True).bad for n in expected.want):
            return f"primitive {edge.name} ({numerics.regime})"
    return None


def code_rows(opened: Sequence[Opened], wanted: Wanted, names: Sequence[str] | None) -> Iterator[Row]:
    """Every mutant; the unchanged spec first, which must pass."""
    calls = order_of([(o, s) for o in opened for s in every_stop(o) if s.op in ("step", "draft")])
    clean = first_wrong(Mutant("unchanged", "", "", "", nothing), calls, wanted, True)
    yield Row("code", "unchanged: nothing may be caught", clean is None, clean or "passes")
    for mutant in (*MUTANTS, *MORE):
        if mutant.name in ELSEWHERE or (names is not None and mutant.name not in names):
            continue
        where = first_wrong(mutant, calls, wanted, True)
        loose = first_wrong(mutant, calls, wanted, False) is not None if where else None
        yield Row("code", mutant.name, where is not None, where or "", loose)


def self_test(given: Sequence[Path], checkpoint: Path | None, names: Sequence[str] | None = None) -> Iterator[Row]:
    """Rows as they are found. names: of code mutants, all by default."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        opened, wanted = packs_of(given, checkpoint, Path(directory)), expectations()
        yield from code_rows(opened, wanted, names)
        for name, where in edits(opened[0], Path(directory)):
            yield Row("bytes", name, where is not None, where or "")
        for name, where in layouts(opened[0], Path(directory)):
            yield Row("layout", name, where is not None, where or "")
