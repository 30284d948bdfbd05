"""What goes wrong on one rank is an error on every rank, and no rank hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import mha_ext
import mha_ext.distributed.ring
from mha_ext.distributed import parallelize_attention, ring_attention, sequence_parallel_attention

PATIENCE = 8  # seconds, of the process group where a rank is gone


def numbers(rows: int = 8) -> Tensor:
    return torch.randn(1, 4, rows, 8, dtype=torch.float64)


def refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as found:
        assert text in str(found), found
    else:
        raise AssertionError(f"no {error.__name__} with {text!r}")


def last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def shapes() -> None:
    x = numbers(10 if last() else 8)
    refused(ValueError, "query must be the same on every rank", lambda: ring_attention(x, x, x))


def options() -> None:
    x = numbers()
    for name, mine, theirs in (
        ("causal", True, False),
        ("window", (1, 1), (2, 1)),
        ("dropout_p", 0.1, 0.2),
        ("order", "zigzag", "contiguous"),
        ("seed", torch.tensor([1, 2]), torch.tensor([1, 3])),
        ("key_lengths", torch.tensor([3]), torch.tensor([4])),
        ("return_lse", True, False),
        ("origin", (0, 0), (0, 4)),
    ):
        chosen: dict[str, Any] = {name: theirs if last() else mine}
        text = f"{name} must be the same on every rank"
        refused(ValueError, text, lambda chosen=chosen: ring_attention(x, x, x, **chosen))


def modes() -> None:
    """What a rank does with the result, and how, is part of the problem."""
    x = numbers().float().requires_grad_()
    text = "needing a gradient must be the same on every rank"
    with torch.set_grad_enabled(last()):
        refused(ValueError, text, lambda: sequence_parallel_attention(x, x, x))
    with torch.autocast("cpu", torch.bfloat16, enabled=last()):
        refused(ValueError, "dtype must be the same", lambda: ring_attention(x, x, x))
    layer = mha_ext.MultiHeadAttention(32, 4, dropout=0.1)
    parallelize_attention(layer, sequence=dist.group.WORLD).train(last())
    text = "dropout_p must be the same on every rank"
    refused(ValueError, text, lambda: layer(torch.randn(1, 8, 32)))
    parallelize_attention(layer, sequence=dist.group.WORLD, batch=dist.group.WORLD)
    refused(ValueError, text, lambda: layer(torch.randn(1, 8, 32)))


def outside() -> None:
    """A rank that is not of the group."""
    first = dist.new_group([0])
    x = numbers()
    if dist.get_rank():
        text = "group must have this process among its ranks"
        refused(ValueError, text, lambda: ring_attention(x, x, x, group=first))
        layer = parallelize_attention(mha_ext.MultiHeadAttention(32, 4), sequence=first)
        refused(ValueError, text, lambda: layer(torch.randn(1, 8, 32)))
    else:
        assert ring_attention(x, x, x, group=first).isfinite().all()


def arguments() -> None:
    """One rank is refused: it says why, the others say which."""
    x = numbers()
    wrong: Any = "nonsense" if last() else x
    text = "key must be a tensor"
    refused(TypeError if last() else ValueError, text, lambda: ring_attention(x, wrong, x))
    odd = numbers(7)
    refused(ValueError, "even number of rows", lambda: ring_attention(odd, odd, odd))
    long = torch.tensor([8 * dist.get_world_size() + 1])
    refused(ValueError, "key_lengths must be", lambda: ring_attention(x, x, x, key_lengths=long))
    for name, sparse in (("query", x.to_sparse()), ("bias", x[0, 0].to_sparse())):
        given = {"query": x, "key": x, "value": x} | ({name: sparse} if last() else {})
        refused(
            TypeError if last() else ValueError,
            f"{name} must be dense",
            lambda given=given: ring_attention(**given),
        )
    few = x[:, :1]
    refused(
        ValueError,
        'method must be "ring"',
        lambda: sequence_parallel_attention(x, few, few, method="all_to_all"),
    )
    where: Any = (np.int64(0), 0)
    assert ring_attention(x, x, x, origin=where).isfinite().all()
    for wrong in ((-1, 0), (0,), (0.5, 0), None):
        refused(
            ValueError, "origin must be", lambda wrong=wrong: ring_attention(x, x, x, origin=wrong)
        )
    bias = torch.zeros(7, 8 * dist.get_world_size(), dtype=torch.float64)
    refused(ValueError, "bias must broadcast", lambda: ring_attention(x, x, x, bias=bias))


def goes_on() -> None:
    """After a refusal the group is as good as before."""
    shapes()
    x = numbers()
    assert ring_attention(x, x, x).isfinite().all()


def silent() -> None:
    """A rank that never calls: the others end by the group's timeout. Leaves the group broken."""
    x = numbers().requires_grad_()
    if last():
        time.sleep(PATIENCE + 4)
    else:
        refused(RuntimeError, "", lambda: ring_attention(x, x, x))


def dies(after: float = 0.0) -> None:
    """A rank that dies in the middle of the ring: forward or backward of the others ends with an error."""
    x = numbers().requires_grad_()
    if last():

        def kernel(*args: Any, **options: Any) -> None:
            time.sleep(after)
            os._exit(0)

        mha_ext.distributed.ring._forward = kernel
    refused(RuntimeError, "", lambda: ring_attention(x, x, x).sum().backward())


def stalls() -> None:
    """A rank that stops in the middle of the ring, alive."""
    dies(PATIENCE + 4)


CASES: dict[str, Callable[[], None]] = {
    "shapes": shapes,
    "options": options,
    "modes": modes,
    "outside": outside,
    "arguments": arguments,
    "goes on": goes_on,
}
