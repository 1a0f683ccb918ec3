# SPDX-License-Identifier: Apache-2.0
"""What the vendor's compiler refuses or does badly, found in a captured graph (docs/neuron-graph.md 8). Codes are the compiler's, where one is known.

`refused` stops a compilation or gives wrong results; `doubtful` compiles, as far as is known, but costs time or was never seen to work.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from v41.backends.neuron.capture import Captured
from v41.backends.neuron.graph_passes import Node, tensors_of, value_of
from v41.backends.neuron.wires import GATHER, REDUCE, WAIT

HOST = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "is_nonzero")
MEETS = (REDUCE, GATHER, WAIT, torch.ops._c10d_functional.reduce_scatter_tensor.default, torch.ops._c10d_functional.all_to_all_single.default)
SCATTERS = ("scatter_reduce", "scatter_add", "index_add", "index_reduce")
# Lowerings that are known to work (matmul, elementwise, reductions, softmax, cat, where, gather, sort, cumsum) and plain views.
FINE = set(
    "add sub mul div neg exp log log1p sqrt rsqrt reciprocal abs square sign minimum maximum clamp clamp_min clamp_max where eq ne lt le gt ge "
    "logical_and logical_or logical_not bitwise_and bitwise_or bitwise_xor bitwise_not rsub pow sum mean amax amin max min any all cumsum mm bmm "
    "addmm cat stack index_select gather embedding index sort view reshape expand unsqueeze squeeze select slice permute transpose t split "
    "split_with_sizes unbind clone copy_ _to_copy full zeros ones arange scalar_tensor full_like zeros_like ones_like new_zeros _softmax "
    "repeat alias detach lift_fresh_copy remainder sigmoid silu relu".split()
)


class Finding(NamedTuple):
    """One thing that is wrong with a graph."""

    severity: str  # refused or doubtful
    code: str
    node: str
    text: str


def short(node: Node) -> str:
    """aten.topk.default -> topk."""
    return str(node.target).removeprefix("aten.").split(".")[0]


def given(node: Node) -> Iterator[torch.Tensor]:
    """Every fake tensor that a node reads."""
    for n in node.all_input_nodes:
        yield from tensors_of(n)


def dtypes(node: Node) -> set[torch.dtype]:
    """Of what it reads and gives."""
    return {t.dtype for t in [*given(node), *tensors_of(node)]}


def whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def host(node: Node) -> tuple[str, str] | None:
    if short(node) in HOST or (node.op == "call_method" and node.target in ("item", "tolist", "nonzero")):
        return "host read", "needs the values of a tensor on the host, or makes a shape of them"
    return None


def chosen(node: Node) -> tuple[str, str] | None:
    if short(node) == "topk" and any(whole(t.dtype) for t in given(node)):
        return "NCC_EVRF013", "topk of integers"
    if short(node) == "topk" and (list(node.args) + [-1, True])[2] not in (-1,):
        return "topk", "topk along another dim than the last"
    return None


def scattered(node: Node) -> tuple[str, str] | None:
    if any(short(node).startswith(s) for s in SCATTERS) and any(whole(t.dtype) for t in given(node)):
        return "NCC_EVRF016", "scatter that reduces integers"
    return None


def narrow(node: Node) -> tuple[str, str] | None:
    if node.op == "call_function" and getattr(node.target, "namespace", "") != "v41" and torch.float8_e4m3fn in dtypes(node):
        return "NCC_EVRF051", "float8_e4m3fn outside a kernel; bytes travel as uint8"
    return None


def long(node: Node) -> tuple[str, str] | None:
    if not any(t.dtype == torch.int64 for t in tensors_of(node)):
        return None
    code = "NCC_ESFH001" if node.op == "get_attr" else "int64"
    return code, "a 64-bit integer: products, scatters, powers and collectives of them are refused, older compilers cut them to 32 bits"


def double(node: Node) -> tuple[str, str] | None:
    bad = [t.dtype for t in tensors_of(node) if t.dtype == torch.float64 or t.dtype.is_complex]
    return ("dtype", f"{bad[0]} does not exist on the device") if bad else None


def meets(node: Node) -> tuple[str, str] | None:
    if getattr(node.target, "namespace", "") in ("_c10d_functional", "c10d") and node.target not in MEETS:
        return "collective", f"{node.target}: a graph has all_reduce, all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single"
    return None


def drawn(node: Node) -> tuple[str, str] | None:
    seeded = node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return ("random", "random numbers are drawn on the host") if seeded else None


REFUSED: tuple[Callable[[Node], tuple[str, str] | None], ...] = (host, chosen, scattered, narrow, long, double, meets, drawn)


def copies(node: Node) -> str | None:
    """Why a kernel's argument would have to be copied first; None where it lies as a kernel reads it."""
    if getattr(node.target, "namespace", "") != "v41":
        return None
    for t in given(node):
        if not t.is_contiguous():
            return f"reads a tensor {list(t.shape)} that is not contiguous"
        if t.storage_offset():
            return f"reads a tensor {list(t.shape)} that begins {t.storage_offset()} elements into its storage"
    return None


def doubts(node: Node) -> tuple[str, str] | None:
    """What is not refused, but not known to be good either."""
    if why := copies(node):
        return "copy", why
    if str(node.target) == "aten.view.dtype":
        return "bits", "bits of one dtype read as another"
    if node.op == "call_function" and getattr(node.target, "namespace", "") == "aten" and short(node) not in FINE:
        return "lowering", f"{node.target} was not seen to be lowered"
    return None


def of_graph(captured: Captured) -> Iterator[Finding]:
    """What only the whole graph shows."""
    nodes = list(captured.graph.graph.nodes)
    holders = dict(zip(captured.inputs, (n for n in nodes if n.op == "placeholder"), strict=True))
    if any(n.target in (REDUCE, GATHER) for n in nodes) and "rank" in holders and not holders["rank"].users:
        yield Finding(
            "refused", "rank", "rank", "the graph has collectives and does not read its rank: what depends on it is a constant, and every rank needs a graph"
        )
    for path, why in captured.fresh.items():
        yield Finding("refused", "cache", path, f"a cache that is not donated: {why}")
    writes: dict[str, int] = {}
    for n in nodes:
        if n.target is torch.ops.v41.write_rows_.default:
            writes[n.args[0].name] = writes.get(n.args[0].name, 0) + 1
    for name, times in writes.items():
        if times > 1:
            yield Finding("refused", "cache", name, f"{times} writes to one buffer in a graph: all but one are lost")
    for path, node in holders.items():
        if value_of(node).dtype == torch.float8_e4m3fn:
            yield Finding("doubtful", "NCC_EVRF051", path, "float8_e4m3fn argument: it must be handed over as uint8")


def lint(captured: Captured) -> list[Finding]:
    """Every finding, refused ones first."""
    found = list(of_graph(captured))
    for node in captured.graph.graph.nodes:
        if node.op == "output":
            continue
        for rule in REFUSED:
            if (said := rule(node)) is not None:
                found.append(Finding("refused", said[0], node.name, said[1]))
        if (said := doubts(node)) is not None:
            found.append(Finding("doubtful", said[0], node.name, said[1]))
    return sorted(found, key=lambda f: f.severity != "refused")
