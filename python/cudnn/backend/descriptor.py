"""Backend descriptors as Python objects: attributes by name, types from the table, destruction by reference count."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from ctypes import c_bool, c_char, c_double, c_float, c_int32, c_int64, c_void_p
from struct import Struct, pack
from typing import Any

from cudnn.backend import library
from cudnn.backend.attributes import Attribute, AttributeType
from cudnn.backend.enums import DescriptorType

_ELEMENT: dict[AttributeType, Any] = {
    AttributeType.HANDLE: c_void_p,
    AttributeType.BOOLEAN: c_bool,
    AttributeType.INT64: c_int64,
    AttributeType.INT32: c_int32,
    AttributeType.FLOAT: c_float,
    AttributeType.DOUBLE: c_double,
    AttributeType.VOID_PTR: c_void_p,
    AttributeType.CHAR: c_char,
    AttributeType.BACKEND_DESCRIPTOR: c_void_p,
}  # everything else is an enumeration of four bytes
_FORMAT = {kind: _ELEMENT.get(kind, c_int32)._type_ for kind in AttributeType}  # as ``struct`` calls it
_CHAR, _INT64, _DESCRIPTOR = AttributeType.CHAR, AttributeType.INT64, AttributeType.BACKEND_DESCRIPTOR
_ADDRESSES = frozenset({_DESCRIPTOR, AttributeType.HANDLE, AttributeType.VOID_PTR})
_NUMBER = {kind: Struct(code).pack for kind, code in _FORMAT.items() if kind not in _ADDRESSES and kind is not _CHAR}
_pack_address = Struct("P").pack
_SEQUENCES: tuple[type[Any], ...] = (list, tuple, range)
_RNG_SEED = Attribute.OPERATION_RNG_SEED


class Descriptor:
    """A cuDNN backend descriptor. It keeps the objects that it refers to (descriptors, handles, constants) alive."""

    __slots__ = ("_argument", "_keep", "_library", "kind", "pointer")

    def __init__(self, kind: DescriptorType) -> None:
        lib = library.load()
        if lib.version < kind.since:
            lib.require(kind.since, f"the backend descriptor {kind.name}")
        pointer = c_void_p()
        status = lib.create_unchecked(kind, ctypes.byref(pointer))
        if status:
            raise lib.error(status, f"creating the descriptor {kind.name}")
        self.kind = kind
        self.pointer: int = pointer.value or 0
        self._argument = pointer
        self._keep: list[Any] = []
        self._library = lib

    @classmethod
    def make(cls, kind: DescriptorType, attributes: Mapping[Attribute, Any]) -> Descriptor:
        """Creates a descriptor, sets the attributes in order (a value of None is skipped) and finalizes it."""
        descriptor = cls(kind)
        for attribute, value in attributes.items():
            descriptor.set(attribute, value)
        return descriptor.finalize()

    def set(self, attribute: Attribute, value: Any) -> None:
        """Sets an attribute.

        Args:
            value: One element or a sequence of them, by the attribute's type: numbers, enumeration members,
                descriptors, handles, ``str`` or ``bytes`` for text; for pointers an address, or a ctypes object, whose
                address is taken. None: not set.

        Raises:
            CudnnError: cuDNN refuses the value.
            cudnnGraphNotSupportedError: the loaded cuDNN is older than the attribute.
        """
        if value is None:
            return
        lib = self._library
        if lib.version < attribute.since:
            lib.require(attribute.since, f"the attribute {attribute.name} of {self.kind.name}")
        kind: AttributeType = attribute.type
        number = _NUMBER.get(kind)
        count = 1
        if isinstance(value, _SEQUENCES):
            count = len(value)
            values = value if number else [self._address(kind, item) for item in value]
            elements = pack(f"{count}{_FORMAT[kind]}", *values)
        elif number:
            elements = number(value)
        elif kind is _CHAR:
            elements = (value.encode() if isinstance(value, str) else bytes(value)) + b"\0"  # the NUL counts
            count = len(elements)
        elif attribute is _RNG_SEED and isinstance(value, int):
            kind, elements = _INT64, _NUMBER[_INT64](value)  # the one attribute of two types: a seed tensor or a number
        else:
            elements = _pack_address(self._address(kind, value))
        # The message is built only on failure: a graph sets a hundred attributes.
        status = lib.set_unchecked(self._argument, attribute, kind, count, elements)
        if status:
            raise lib.error(status, f"setting {attribute.name} of the descriptor {self.kind.name}")

    def _address(self, kind: AttributeType, value: Any) -> Any:
        """The address of an object that is passed by address; the descriptor keeps the object alive."""
        self._keep.append(value)
        if kind is _DESCRIPTOR:
            return value.pointer
        return int(value) if kind is not AttributeType.VOID_PTR or isinstance(value, int) else ctypes.addressof(value)

    def finalize(self) -> Descriptor:
        """Closes the descriptor to further changes; cuDNN checks it here. Returns itself."""
        status = self._library.finalize_unchecked(self._argument)
        if status:
            raise self._library.error(status, f"finalizing the descriptor {self.kind.name}")
        return self

    def count(self, attribute: Attribute) -> int:
        """How many elements an attribute has."""
        return self._read(attribute, 0, None)

    def get(self, attribute: Attribute) -> Any:
        """The value of an attribute: a number, a list if it can have several, ``bytes`` (without NUL) for text."""
        element = _ELEMENT.get(attribute.type, c_int32)
        count = self.count(attribute) if attribute.many else 1
        elements = (element * max(count, 1))()
        count = self._read(attribute, count, elements) if count else 0
        if attribute.type is AttributeType.CHAR:
            return bytes(elements[:count]).rstrip(b"\0")
        return list(elements[:count]) if attribute.many else elements[0]

    def get_descriptors(self, attribute: Attribute, kind: DescriptorType, capacity: int = 0) -> list[Descriptor]:
        """The descriptors of the given kind that an attribute holds.

        Args:
            capacity: Upper bound of their number, for attributes whose count cuDNN does not report. 0: query it.
        """
        count = capacity or (self.count(attribute) if attribute.many else 1)
        children = [Descriptor(kind) for _ in range(count)]
        if not children:
            return []
        pointers = (c_void_p * len(children))(*[child.pointer for child in children])
        return children[: self._read(attribute, len(children), pointers)]

    def _read(self, attribute: Attribute, requested: int, elements: ctypes.Array[Any] | None) -> int:
        lib = self._library
        if lib.version < attribute.since:
            lib.require(attribute.since, f"the attribute {attribute.name} of {self.kind.name}")
        got = c_int64()
        address = None if elements is None else ctypes.addressof(elements)
        status = lib.get_attribute(self.pointer, attribute, attribute.type, requested, got, address)
        if status:
            raise lib.error(status, f"reading {attribute.name} of the descriptor {self.kind.name}")
        return got.value if elements is None else min(got.value, requested)

    def close(self) -> None:
        """Destroys the descriptor. It may be closed twice."""
        pointer, self.pointer = self.pointer, 0
        self._argument = c_void_p()
        if pointer:
            self._library.destroy(pointer)
        self._keep.clear()

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        # When the interpreter ends, libcudnn and the driver may be gone before this object.
        if getattr(self, "pointer", 0) and not is_finalizing():
            self._library.destroy_unchecked(self._argument)

    def __repr__(self) -> str:
        return f"<{self.kind.name} descriptor at {self.pointer:#x}>"
