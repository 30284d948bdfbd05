"""What the Python functions take: its types, its checks, and how the operators spell it.

Tensors (rank, shape, dtype, device) are checked by the operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Causal: TypeAlias = bool | Literal["upper_left", "lower_right"]
Window: TypeAlias = tuple[int | None, int | None]
EmptyRows: TypeAlias = Literal["zero", "uniform"]


def check_causal(causal: object) -> None:
    """Raises unless ``causal`` is one of the values that `attention` takes."""
    if not isinstance(causal, bool | str):
        raise TypeError(
            f'causal must be False, True, "upper_left" or "lower_right", not {describe(causal)}'
        )
    if isinstance(causal, str) and causal not in ("upper_left", "lower_right"):
        raise ValueError(
            f'causal must be False, True, "upper_left" or "lower_right", not {causal!r}'
        )


def check_window(window: object) -> None:
    """Raises unless ``window`` is None or a pair of counts of keys."""
    if window is None:
        return
    if not isinstance(window, tuple | list):
        raise TypeError(
            f"window must be (left, right) or None, not {describe(window)}; "
            "pass (n, n) for n keys on either side"
        )
    if len(window) != 2:
        raise ValueError(
            f"window must be (left, right), not {len(window)} values; None means unbounded"
        )
    for name, side in zip(("left", "right"), window, strict=True):
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, int | torch.SymInt):
            raise TypeError(
                f"window {name} must be an int or None (unbounded), not {describe(side)}"
            )
        if not 0 <= side < 2**63:
            raise ValueError(
                f"window {name} must be from 0 to 2**63 - 1, not {side}; pass None for an unbounded side"
            )


def check_dropout(name: str, dropout_p: object) -> None:
    """Raises unless ``dropout_p`` is a probability below 1."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise TypeError(f"{name} must be a float in [0, 1), not {describe(dropout_p)}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{name} must be in [0, 1), not {dropout_p}")


def check_flag(name: str, value: object) -> None:
    """Raises unless ``value`` is a bool: "no" would be true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {describe(value)}")


def check_empty_rows(empty_rows: object) -> None:
    """Raises unless ``empty_rows`` is one of the values that `attention` takes."""
    if not isinstance(empty_rows, str):
        raise TypeError(f'empty_rows must be "zero" or "uniform", not {describe(empty_rows)}')
    if empty_rows not in ("zero", "uniform"):
        raise ValueError(f'empty_rows must be "zero" or "uniform", not {empty_rows!r}')


def check_tensors(
    query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, key_lengths: Tensor | None
) -> None:
    if not isinstance(query, Tensor):
        raise TypeError(not_a_tensor("query", query))
    for name, tensor in (("query", query), ("key", key), ("mask", mask), ("bias", bias)):
        check_dense(name, tensor)
        check_holds_values(name, tensor)
    if query.dim() != 4:  # the operators take more, and under vmap they are given one more
        raise ValueError(
            "query must have 4 dimensions [batch, heads, length, head_dim], but has shape "
            f"{list(query.shape)}; "
            + (
                "flatten the leading ones into the batch, or use torch.func.vmap"
                if query.dim() > 4
                else "split the heads with query.unflatten(-1, (heads, head_dim)).transpose(1, 2)"
            )
        )
    if not isinstance(key, Tensor):
        raise TypeError(not_a_tensor("key", key))
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(not_a_tensor("mask", mask))
    if bias is not None and not isinstance(bias, Tensor):
        raise TypeError(not_a_tensor("bias", bias))
    if key_lengths is not None:
        if not isinstance(key_lengths, Tensor):
            raise TypeError(not_a_tensor("key_lengths", key_lengths))
        check_dense("key_lengths", key_lengths)


def check_dense(name: str, tensor: object) -> None:
    """Raises where it is a nested or sparse tensor."""
    if not isinstance(tensor, Tensor):
        return
    if tensor.is_nested:
        raise TypeError(
            f"{name} must be dense, but is a nested tensor; pass torch.nested.to_padded_tensor({name}, 0.0) and "
            "key_lengths"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be dense, but is {tensor.layout}; pass {name}.to_dense()")


def check_holds_values(name: str, tensor: object) -> None:
    """Raises where it is PyTorch's name of a causal mask, whose own memory holds nothing.

    Known by its name, since its module takes seconds to import.
    """
    if type(tensor).__name__ == "CausalBias" and hasattr(tensor, "variant"):
        corner = tensor.variant.name.lower()
        raise TypeError(f'{name} must hold values, but is a CausalBias; pass causal="{corner}"')


def check_all_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
) -> None:
    check_tensors(query, key, mask, bias, key_lengths)
    if not isinstance(value, Tensor):
        raise TypeError(not_a_tensor("value", value))
    check_dense("value", value)
    if seed is not None:
        if not isinstance(seed, Tensor):
            raise TypeError(
                "seed must be an int64 tensor of shape [2] on query's device, "
                f"not {describe(seed)}; pass torch.tensor([seed, 0], device=query.device)"
            )
        check_dense("seed", seed)


def diagonal(
    query: Tensor, key: Tensor, key_lengths: Tensor | None, causal: Causal, window: Window | None
) -> tuple[str | None, int | None, int | None]:
    """(corner, window_left, window_right) as the operators take them; lengths are the last dimension but one."""
    if causal is False and window is None:
        return None, None, None
    check_causal(causal)
    check_window(window)
    left, right = window or (None, None)
    if causal is not False:
        right = 0
    if isinstance(causal, str):
        return causal, left, right
    if causal and key_lengths is not None:
        raise ValueError(
            "causal=True must name its corner where key_lengths is given: "
            'pass "upper_left" (query i sees keys 0 .. i) or "lower_right" (the last query sees the last key)'
        )
    if left is None and right is None or query.dim() != key.dim():
        return None, left, right  # the operators refuse tensors of different dimensions
    queries, keys = query.shape[-2], key.shape[-2]
    if queries != keys and causal:
        raise ValueError(
            f"causal=True must have as many queries as keys, not Lq = {queries} and Lk = {keys}: "
            'pass "upper_left" (query i sees keys 0 .. i) or "lower_right" (the last query sees the last key)'
        )
    if queries != keys:
        raise ValueError(
            "window without a corner must have as many queries as keys, "
            f'not Lq = {queries} and Lk = {keys}: pass causal="upper_left" or "lower_right" with it'
        )
    return None, left, right


def resolved(
    query: Tensor,
    key: Tensor,
    key_lengths: Tensor | None,
    causal: Causal,
    window: Window | None,
    dropout_p: float,
    seed: Tensor | None,
    scale: float | None,
    empty_rows: EmptyRows,
    draw: bool,
) -> tuple[Tensor | None, str | None, int | None, int | None, float | None, bool]:
    """What is not a tensor, checked: seed (drawn where it is needed), corner, left, right, scale, uniform."""
    corner, left, right = None, None, None
    if causal is not False or window is not None:
        corner, left, right = diagonal(query, key, key_lengths, causal, window)
    if type(dropout_p) is not float or not 0.0 <= dropout_p < 1.0:
        check_dropout("dropout_p", dropout_p)
    if scale is not None:
        scale = scale_of(query, scale)
    uniform = empty_rows != "zero" and is_uniform(empty_rows)
    if seed is None and dropout_p > 0.0 and draw:
        seed = torch.randint(0, 2**32, (2,), device=query.device)
    return seed, corner, left, right, scale, uniform


def changed_options(
    corner: str | None,
    left: int | None,
    right: int | None,
    uniform_empty_rows: bool,
    dropout_p: float,
    scale: float,
) -> dict[str, Any]:
    """Those that are not the operators' own defaults: each that is passed costs time, even as None."""
    options: dict[str, Any] = {"scale": scale}
    if corner is not None:
        options["corner"] = corner
    if left is not None:
        options["window_left"] = left
    if right is not None:
        options["window_right"] = right
    if uniform_empty_rows:
        options["uniform_empty_rows"] = True
    if dropout_p:
        options["dropout_p"] = dropout_p
    return options


def scale_of(query: Tensor, scale: float | None) -> float:
    if scale is None:
        head_dim = query.shape[-1] if query.dim() else 0
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0  # no head_dim: the operator refuses
    if isinstance(scale, torch.SymInt | torch.SymFloat):
        raise TypeError(
            "scale must be a number that depends on no dynamic size, where sizes are; multiply query by it"
        )
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(
            f"scale must be a float or None (1 / sqrt(D)), not {describe(scale)}; "
            "to learn it, multiply query by it"
        )
    largest = 1.7976931348623157e308 if query.dtype == torch.float64 else 3.4028234663852886e38
    if not -largest <= scale <= largest:
        raise ValueError(
            f"scale must be finite in {'float64' if query.dtype == torch.float64 else 'float32'}, in which scores are "
            f"computed, not {describe(scale)}"
        )
    return scale


def is_uniform(empty_rows: EmptyRows) -> bool:
    if empty_rows == "zero":
        return False
    check_empty_rows(empty_rows)
    return True


def is_integer(value: object) -> bool:
    """An int, one that stands for a dynamic size, or another library's."""
    if isinstance(value, int | torch.SymInt):  # the compiler knows no attributes of a size
        return not isinstance(value, bool)
    return not isinstance(value, Tensor) and hasattr(value, "__index__")


def indices(name: str, values: Sequence[int], query: Tensor, dim: int) -> list[int]:
    if isinstance(values, Tensor | str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of ints, not {describe(values)}; pass a list")
    for index in values:
        if not is_integer(index):
            raise TypeError(f"{name} must be a sequence of ints, not of {describe(index)}")
    if query.dim() == 4:
        size = query.shape[dim]
        for index in values:
            if not 0 <= index < size:
                raise ValueError(
                    f"{name} must lie in [0, {size}), not {index}; count from the start"
                )
    return list(values)


def not_a_tensor(name: str, value: object) -> str:
    return f"{name} must be a tensor, not {describe(value)}; pass torch.as_tensor({name})"


def describe(value: object) -> str:
    """A value for an error message: its type and, where short, what it is."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text}" if len(text) <= 40 else type(value).__name__
