"""The structs of csrc/spec/attention.h and of the emulator, for ctypes; `Library` compares their sizes."""

from __future__ import annotations

import ctypes
from typing import Any


def _fields(*layout: tuple[Any, str]) -> list[tuple[str, Any]]:
    kinds = {"p": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32}
    kinds |= {"u32": ctypes.c_uint32, "f64": ctypes.c_double, "bool": ctypes.c_bool}
    return [
        (name, kinds[kind] if isinstance(kind, str) else kind)
        for kind, names in layout
        for name in names.split()
    ]


# csrc/spec/attention.h, field by field.
class Rows(ctypes.Structure):
    _fields_ = _fields(("p", "data"), ("i64", "batch head row"))


class Pairs(ctypes.Structure):
    _fields_ = _fields(
        ("p", "data"), ("i64", "batch head query key"), ("i32", "item_size row_bits")
    )


class Band(ctypes.Structure):
    _fields_ = _fields(("bool", "lower_right left_bounded right_bounded"), ("i64", "left right"))


class Dropout(ctypes.Structure):
    _fields_ = _fields(("p", "seed"), ("u32", "threshold"), ("f64", "keep_scale"))


class Origin(ctypes.Structure):
    _fields_ = _fields(("i64", "batch head query key"))


class Attention(ctypes.Structure):
    _fields_ = _fields(
        ("i32", "dtype"),
        ("i64", "batch heads kv_heads queries keys head_dim value_dim"),
        ("f64", "scale"),
        ("bool", "uniform_empty_rows"),
        (Rows, "query key value"),
        (Pairs, "mask bias"),
        ("bool", "bias_is_float32"),
        ("p", "key_lengths"),
        (Band, "band"),
        (Dropout, "dropout"),
        (Origin, "origin"),
        (Rows, "out"),
        ("p", "lse lse_low"),
    )


class AttentionGrad(ctypes.Structure):
    _fields_ = _fields(
        (Rows, "grad_out"),
        (Pairs, "grad_weights"),
        ("p", "grad_lse delta"),
        (Rows, "grad_query grad_key grad_value"),
        (Pairs, "grad_bias"),
        ("bool", "all_keys"),
    )


class AttentionTangent(ctypes.Structure):
    _fields_ = _fields(
        (Rows, "query key value"),
        (Pairs, "bias"),
        (Rows, "out"),
        ("p", "lse"),
        (Rows, "grad_out"),
        ("p", "grad_lse delta"),
    )


class Options(ctypes.Structure):
    _fields_ = _fields(("i64", "seed shared_limit grid_limit traffic watched hopper processors"))


class Traffic(ctypes.Structure):
    _fields_ = _fields(("i64", "accesses passes conflicts"))


class Report(ctypes.Structure):
    _fields_ = _fields(
        ("i64", "launches blocks threads shared_bytes barriers products"),
        (Traffic, "matrices copies plain"),
    )
