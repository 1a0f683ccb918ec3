# SPDX-License-Identifier: Apache-2.0
"""Every kernel is started with the same dense tensors however its arguments lie in memory, since a kernel sees the storage."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from bounds import check_equal

from v41.backends.neuron.bench.linear import foldable
from v41.backends.neuron.kernels import KERNELS, experts_layout, folded
from v41.backends.neuron.prepare import tiled
from v41.conformance.primitives import EDGES
from v41.golden.pack_numbers import Inputs
from v41.spec.numerics import Numerics

TRN2 = Numerics("trn2")
BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OTHER = 3  # fills the memory around and between elements


class Started(Exception):
    """The arguments of the first launch."""


def stop(kernel, cores, *args):
    raise Started(*args)


def behind(t):
    """t as a slice that begins one element into its storage."""
    wide = torch.full((t.numel() + 1,), OTHER, dtype=BYTES[t.element_size()])
    wide[1:] = t.contiguous().view(wide.dtype).flatten()
    return wide[1:].view(t.shape).view(t.dtype)


def apart(t):
    """t with another element between any two neighbors of a row."""
    wide = torch.full((*t.shape, 2), OTHER, dtype=BYTES[t.element_size()])
    wide[..., 0] = t.contiguous().view(wide.dtype)
    return wide.view(t.dtype)[..., 0]


def across(t):
    """t whose first dimension runs fastest."""
    return t.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1) if t.ndim else behind(t)


def laid(value, layout):
    """An argument with every tensor in it laid out anew."""
    if isinstance(value, torch.Tensor):
        return layout(value)
    if isinstance(value, tuple):
        return tuple(laid(v, layout) for v in value)
    if is_dataclass(value) and not isinstance(value, Numerics):
        return replace(value, **{f.name: laid(getattr(value, f.name), layout) for f in fields(value) if f.init})
    return value


def launch(name, args, named):
    """What the first launch is given."""
    with pytest.raises(Started) as found:
        KERNELS[name](stop, *args, **named)
    return found.value.args


def more():
    """(kernel, arguments) with weights as a load prepares them, which the cases of the definitions do not have."""
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    fp8 = Inputs("w", TRN2).fp8("w", 128, 256)
    plain = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    yield from (("linear", (x, w, TRN2)) for w in (tiled(fp8), foldable(128, 256), plain))
    yield from (("grouped_linear", (x.view(1, 5, 2, 128), w, 2, TRN2)) for w in (tiled(fp8), foldable(128, 256)))
    yield "plain_linear", (torch.cat([x] * 8, 1), torch.cat([plain[:4]] * 8, 1), TRN2)
    yield "gate", (x, folded.one_block(plain), torch.zeros(128), 6, "sigmoid", True, 1.5, TRN2)
    i = Inputs("experts", TRN2)
    stacks, own = (i.fp4("w1", 3, 32, 64), i.fp4("w2", 3, 64, 32), i.fp4("w3", 3, 32, 64)), (i.fp8("s1", 32, 64), i.fp8("s2", 64, 32), i.fp8("s3", 32, 64))
    ids, weights = torch.tensor([[0, 2], [1, -1], [4, 2]], dtype=torch.int32), i.wide("weights", 3, 2)
    for tiles in (experts_layout.prepared(*stacks, TRN2), experts_layout.prepared(*stacks, TRN2, own)):
        yield "experts", (x[:3, :64], weights, ids, tiles, None, None, 10.0, TRN2)
    yield "shared_expert", (x[:3, :64], experts_layout.prepared_shared(*own, TRN2), None, None, 10.0, TRN2)


CASES = (
    *((e.name, e.primitive, *e.build(Inputs(e.name, TRN2))) for e in EDGES if e.primitive in KERNELS and e.name != "softmax_pool.no_group"),
    *((f"{name} prepared {n}", name, args, {}) for n, (name, args) in enumerate(more())),
)


@pytest.mark.parametrize("layout", [behind, apart, across])
@pytest.mark.parametrize(("name", "args", "named"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_kernel_is_started_with_dense_tensors_whatever_it_was_given(name, args, named, layout):
    want = launch(name, args, named)
    got = launch(name, laid(args, layout), {k: laid(v, layout) for k, v in named.items()})
    assert len(got) == len(want)
    for n, (one, other) in enumerate(zip(got, want, strict=True)):
        if isinstance(other, torch.Tensor):
            assert one.is_contiguous() and one.storage_offset() == 0 and other.is_contiguous() and other.storage_offset() == 0, f"{name}: argument {n}"
            check_equal(one, other, f"{name}: argument {n}")
        else:
            assert one == other


def test_every_kernel_has_a_case():
    assert {c[1] for c in CASES} == set(KERNELS)
