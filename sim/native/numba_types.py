"""`Columns` for numba: a pointer to a struct in memory, whose arrays are (data, length) without reference counts.

The struct is that of `Columns.struct`. It never changes while its object lives, which the loads say
(`invariant.load`), so that LLVM may keep pointers in registers. Indexing is that of lists: a negative index counts from
the end, and nothing checks bounds.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_getattr,
    infer_global,
    signature,
)
from numba.extending import lower_builtin, lower_getattr_generic, register_model

from sim.columns import FLOAT, FLOATS, INTEGER, INTEGERS


class Flat(types.Type):
    """An array: in a field of `Columns`, or an argument of its own."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(f"Flat({dtype})")


class ColumnsType(types.Type):
    """A `Columns` class by name, with the type of each field."""

    def __init__(self, name: str, members: tuple[tuple[str, Any], ...]) -> None:
        self.slots: dict[str, tuple[int, Any]] = {}
        at = 0
        for field, kind in members:
            self.slots[field] = (at, kind)
            at += 2 if isinstance(kind, Flat) else 1
        # part of every compiled function's name, hence short
        super().__init__(f"{name}_{hashlib.sha256(repr(members).encode()).hexdigest()[:8]}")


KINDS = {
    INTEGER: types.int64,
    FLOAT: types.float64,
    INTEGERS: Flat(types.int64),
    FLOATS: Flat(types.float64),
}


def type_of(argument: Any) -> Any:
    """numba's type of an argument as `sim.native.store` describes it."""
    if isinstance(argument, str):
        return KINDS[argument]
    name, members = argument
    return ColumnsType(name, tuple((field, KINDS[kind]) for field, kind in members))


register_model(ColumnsType)(models.OpaqueModel)


@register_model(Flat)
class _FlatModel(models.StructModel):
    def __init__(self, manager: Any, kind: Flat) -> None:
        super().__init__(manager, kind, [("data", types.CPointer(kind.dtype)), ("length", types.intp)])


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
    """The word at that place as a value of that LLVM type, from memory that does not change."""
    words = builder.bitcast(pointer, of.as_pointer())
    loaded = builder.load(builder.gep(words, [ir.Constant(ir.IntType(64), at)]))
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
