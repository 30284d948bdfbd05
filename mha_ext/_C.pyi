"""The compiled module: importing it registers the operators torch.ops.mha_ext.*."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    corner: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    uniform_empty_rows: bool = False,
    origin: Sequence[int] = (0, 0, 0, 0),
    with_lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch.ops.mha_ext.attention_forward: (out [B, H, Lq, Dv], lse [B, H, Lq], lse_low: its rounding error)."""

def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    corner: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    uniform_empty_rows: bool = False,
    origin: Sequence[int] = (0, 0, 0, 0),
    output_mask: Sequence[bool] = (True, True, True, True),
    all_keys: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """torch.ops.mha_ext.attention_backward: gradients of query, key, value, bias; [0] where not wanted."""

def attention_forward_tangent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None = None,
    query_tangent: Tensor | None = None,
    key_tangent: Tensor | None = None,
    value_tangent: Tensor | None = None,
    bias_tangent: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    corner: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    uniform_empty_rows: bool = False,
    origin: Sequence[int] = (0, 0, 0, 0),
) -> tuple[Tensor, Tensor]:
    """torch.ops.mha_ext.attention_forward_tangent: (out_tangent [B, H, Lq, Dv], lse_tangent [B, H, Lq])."""

def attention_backward_tangent(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None = None,
    out_tangent: Tensor | None = None,
    lse_tangent: Tensor | None = None,
    query_tangent: Tensor | None = None,
    key_tangent: Tensor | None = None,
    value_tangent: Tensor | None = None,
    bias_tangent: Tensor | None = None,
    grad_out_tangent: Tensor | None = None,
    grad_lse_tangent: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    corner: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    uniform_empty_rows: bool = False,
    origin: Sequence[int] = (0, 0, 0, 0),
    output_mask: Sequence[bool] = (True, True, True, True),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """torch.ops.mha_ext.attention_backward_tangent: tangents of the gradients; [0] where not wanted."""

def attention_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None = None,
    lse_low: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    *,
    corner: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    scale: float | None = None,
    uniform_empty_rows: bool = False,
    origin: Sequence[int] = (0, 0, 0, 0),
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """torch.ops.mha_ext.attention_weights: P [B, H, Lq, Lk], or of the heads and rows asked for."""

def is_direct(rank: int, query: object, key: object, value: object, *optional: object) -> bool:
    """Whether the next two take them: plain tensors, query of that rank, no function mode active."""

def attention_direct(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    corner: str | None,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    scale: float | None,
    uniform_empty_rows: bool,
    origin: Sequence[int] | None,
    only_out: bool,
    /,
) -> Any:
    """torch.ops.mha_ext.attention_forward for what is_direct(4, ...) accepts; only_out: out alone."""

def merged_attention_direct(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    corner: str | None,
    window_left: int | None,
    window_right: int | None,
    dropout_p: float,
    scale: float | None,
    uniform_empty_rows: bool,
    head_dim: int,
    value_head_dim: int,
    /,
) -> Tensor:
    """The same on [B, L, heads · head_dim], for what is_direct(3, ...) accepts: out [B, Lq, H · value_head_dim]."""

def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    num_kv_heads: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    corner: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    uniform_empty_rows: bool = False,
) -> Tensor:
    """Split, attend, merge: [B, Lq, H·D], [B, Lk, Hkv·D], [B, Lk, Hkv·Dv] -> [B, Lq, H·Dv]."""

def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    corner: str | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    dropout_p: float = 0.0,
    scale: float = 1.0,
    uniform_empty_rows: bool = False,
    origin: Sequence[int] = (0, 0, 0, 0),
    output_mask: Sequence[bool] = (True, True),
) -> dict[str, Any]:
    """What attention_forward and its derivatives would do: passes, hidden pairs, copied bytes."""

def compiled_isas() -> list[str]:
    """The instruction sets this build has kernels for, best first."""

def supported_isas() -> list[str]:
    """Those of them that this processor can run, best first."""

def active_isa() -> str:
    """The instruction set in use."""

def whole_vectors() -> bool:
    """Whether this is one of AMD's processors that take 512 bits at once, from Zen 5 on."""

def set_whole_vectors(yes: bool) -> None:
    """Takes it for one, or for none: how K and V are read, which changes no bit."""

def ask_huge_pages(tensor: Tensor) -> None:
    """Asks for huge pages in a dense tensor on the CPU, before anything is written to it: what it holds is lost."""

def set_isa(name: str | None) -> None:
    """Use this instruction set; None = the best supported one."""

def build_info() -> dict[str, str]:
    """What was built: version, torch, compiler, cuda, isas."""

def fma_peak(dtype: str, seconds: float = 0.1) -> float:
    """FLOP/s of one thread in registers: the ceiling of the instruction that the active ISA uses for dtype."""

def copy_bandwidth(bytes: int, seconds: float = 0.1, threads: int = 1) -> float:
    """bytes/s, read and written, of threads that copy at the same time, each a part of a buffer of this size."""

def read_bandwidth(bytes: int, seconds: float = 0.1, threads: int = 1) -> float:
    """bytes/s of threads that read at the same time, each a part of a buffer of this size."""
