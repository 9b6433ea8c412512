"""`Columns` for numba: a pointer to a struct in memory, whose arrays are (data, length) without reference counts.

The struct holds eight-byte slots in the order of the fields: an array takes two, a number one. It never changes
while its object lives, which the loads say (`invariant.load`), so that LLVM may keep pointers in registers.
Indexing is that of lists: a negative index counts from the end, and nothing checks bounds.
"""

from __future__ import annotations

import operator
from dataclasses import fields
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import (
    NativeValue,
    lower_builtin,
    lower_getattr_generic,
    register_model,
    typeof_impl,
    unbox,
)
from llvmlite import ir

from sim.columns import Columns

WORD = 8
ELEMENTS = {np.dtype(np.int64): types.int64, np.dtype(np.float64): types.float64}


class Flat(types.Type):
    """A field of a `Columns` that is an array."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(f"Flat({dtype})")


class ColumnsType(types.Type):
    """A `Columns` class by name, with the type of each field."""

    def __init__(self, name: str, members: tuple[tuple[str, Any], ...]) -> None:
        self.members = members
        self.slots: dict[str, tuple[int, Any]] = {}
        at = 0
        for field, kind in members:
            self.slots[field] = (at, kind)
            at += 2 if isinstance(kind, Flat) else 1
        super().__init__(f"{name}({', '.join(f'{field}: {kind}' for field, kind in members)})")


FLAT = {element: Flat(element) for element in ELEMENTS.values()}
_kinds: dict[tuple[Any, ...], ColumnsType] = {}


def _describe(value: Columns) -> None:
    """Give the object its numba type and its struct."""
    members, words = [], []
    for field in fields(value):  # type: ignore[arg-type]
        held = getattr(value, field.name)
        if isinstance(held, np.ndarray):
            if held.ndim != 1 or not held.flags.c_contiguous or held.dtype not in ELEMENTS:
                raise TypeError(f"{type(value).__name__}.{field.name} is no flat array of int64 or float64")
            members.append((field.name, FLAT[ELEMENTS[held.dtype]]))
            words += [held.ctypes.data, len(held)]
        elif isinstance(held, float):
            members.append((field.name, types.float64))
            words.append(int(np.float64(held).view(np.int64)))
        elif isinstance(held, int | np.integer):
            members.append((field.name, types.int64))
            words.append(int(held))
        else:
            raise TypeError(f"{type(value).__name__}.{field.name}: compiled code takes no {type(held).__name__}")
    key = (type(value).__name__, *members)
    kind = _kinds.setdefault(key, ColumnsType(type(value).__name__, tuple(members)))
    struct = np.array(words, np.int64)
    object.__setattr__(value, "_struct", struct)
    object.__setattr__(value, "_address", struct.ctypes.data)
    object.__setattr__(value, "_kind", kind)


@typeof_impl.register(Columns)
def _typeof(value: Columns, context: Any) -> ColumnsType:
    try:
        return value._kind  # type: ignore[no-any-return]
    except AttributeError:
        _describe(value)
        return value._kind  # type: ignore[no-any-return]


register_model(ColumnsType)(models.OpaqueModel)


@register_model(Flat)
class _FlatModel(models.StructModel):
    def __init__(self, manager: Any, kind: Flat) -> None:
        super().__init__(manager, kind, [("data", types.CPointer(kind.dtype)), ("length", types.intp)])


@unbox(ColumnsType)
def _unbox(kind: ColumnsType, value: Any, c: Any) -> NativeValue:
    number = c.pyapi.object_getattr_string(value, "_address")
    address = c.pyapi.long_as_ulonglong(number)
    c.pyapi.decref(number)
    pointer = c.builder.inttoptr(address, c.context.get_value_type(kind))
    return NativeValue(pointer, is_error=c.pyapi.c_api_error())


@infer_getattr
class _Fields(AttributeTemplate):
    key = ColumnsType

    def generic_resolve(self, kind: ColumnsType, name: str) -> Any:
        return kind.slots[name][1] if name in kind.slots else None


@lower_getattr_generic(ColumnsType)
def _get_field(context: Any, builder: Any, kind: ColumnsType, pointer: Any, name: str) -> Any:
    at, member = kind.slots[name]
    if not isinstance(member, Flat):
        return _load(builder, pointer, at, context.get_value_type(member))
    flat = cgutils.create_struct_proxy(member)(context, builder)
    flat.data = _load(builder, pointer, at, context.get_value_type(types.CPointer(member.dtype)))
    flat.length = _load(builder, pointer, at + 1, context.get_value_type(types.intp))
    return flat._getvalue()


def _load(builder: Any, pointer: Any, at: int, of: Any) -> Any:
    """The slot's content as a value of that LLVM type, in memory that does not change."""
    slots = builder.bitcast(pointer, of.as_pointer())
    loaded = builder.load(builder.gep(slots, [ir.Constant(ir.IntType(64), at)]))
    loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
    return loaded


@infer_global(len)
class _Length(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Flat):
            return signature(types.intp, args[0])
        return None


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        if len(args) == 2 and isinstance(args[0], Flat) and isinstance(args[1], types.Integer):
            return signature(args[0].dtype, args[0], types.intp)
        return None


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        if len(args) == 3 and isinstance(args[0], Flat) and isinstance(args[1], types.Integer):
            return signature(types.none, args[0], types.intp, args[0].dtype)
        return None


@lower_builtin(len, Flat)
def _length(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0]).length


def _element(context: Any, builder: Any, kind: Flat, value: Any, index: Any) -> Any:
    flat = cgutils.create_struct_proxy(kind)(context, builder, value=value)
    if not (isinstance(index, ir.Constant) and index.constant >= 0):
        below = builder.icmp_signed("<", index, ir.Constant(index.type, 0))
        index = builder.select(below, builder.add(index, flat.length), index)
    return builder.gep(flat.data, [index])


@lower_builtin(operator.getitem, Flat, types.Integer)
def _getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.load(_element(context, builder, sig.args[0], args[0], args[1]))


@lower_builtin(operator.setitem, Flat, types.Integer, types.Any)
def _setitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    builder.store(args[2], _element(context, builder, sig.args[0], args[0], args[1]))
    return context.get_dummy_value()
