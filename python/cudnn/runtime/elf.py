"""Puts an object file of the CuTe DSL into memory, ready to call: in a millisecond, with no linker.

The DSL exports its host functions for x86-64 in the large code model, so six kinds of relocation occur. Their formulas
are those of the System V ABI, AMD64 supplement, section 4.4; any other kind is refused.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")

_RELOCATABLE, _X86_64 = 1, 62
_PROGBITS, _SYMTAB, _RELA, _NOBITS = 1, 2, 4, 8
_WRITE, _ALLOC = 1, 2
_UNDEFINED = 0
_GOT = "_GLOBAL_OFFSET_TABLE_"

_R_64, _R_PC64, _R_GOTOFF64, _R_GOT64, _R_GOTPC64, _R_PLTOFF64 = 1, 24, 25, 27, 29, 31


class ObjectError(RuntimeError):
    """The bytes are no object file that can be loaded here."""


@dataclass(frozen=True)
class _Section:
    name: str
    section_type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


class LoadedObject:
    """An object file in executable memory, which lives as long as this does.

    ``find`` gives the address of a symbol that the object lacks. Address of a symbol that it has: ``symbols[name]``.
    The object's finalizers (``.fini_array``) are left out: what they release goes with the process.
    """

    def __init__(self, content: bytes, find: Callable[[str], int]) -> None:
        try:
            sections = _sections(content)
            symbols = _symbols(content, sections)
        except (struct.error, IndexError, ValueError) as error:
            raise ObjectError(f"the object file is damaged: {error}") from None
        # Code and constants, the global offset table with a slot for every symbol, then, on separate pages, data.
        offsets, table = _place(sections, 0, writable=False)
        data = _up(table + 8 * len(symbols), mmap.PAGESIZE)
        more, end = _place(sections, data, writable=True)
        offsets |= more
        self._memory = mmap.mmap(-1, _up(end, mmap.PAGESIZE) or mmap.PAGESIZE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for index, offset in offsets.items():
            section = sections[index]
            if section.section_type != _NOBITS:
                self._memory[offset : offset + section.size] = content[section.offset : section.offset + section.size]
        addresses: list[int] = []
        for name, index, value in symbols:
            if index in offsets:
                addresses.append(base + offsets[index] + value)
            elif index == _UNDEFINED and name:
                addresses.append(base + table if name == _GOT else find(name))
            else:
                addresses.append(0)  # file names and sections that are left out
        struct.pack_into(f"<{len(addresses)}Q", self._memory, table, *addresses)
        for section in sections:
            if section.section_type == _RELA and section.info in offsets:
                self._relocate(content, section, base, offsets[section.info], table, addresses)
        self.symbols = {name: addresses[i] for i, (name, index, _) in enumerate(symbols) if name and index in offsets}
        _make_executable(base, data)

    def _relocate(
        self, content: bytes, section: _Section, base: int, target: int, table: int, addresses: list[int]
    ) -> None:
        end = section.offset + section.size
        for offset, info, addend in _RELOCATION.iter_unpack(content[section.offset : end]):
            symbol, relocation = info >> 32, info & 0xFFFFFFFF
            address = target + offset
            if relocation == _R_64:
                value = addresses[symbol] + addend
            elif relocation == _R_PC64:
                value = addresses[symbol] + addend - (base + address)
            elif relocation in (_R_GOTOFF64, _R_PLTOFF64):
                value = addresses[symbol] + addend - (base + table)
            elif relocation == _R_GOT64:
                value = 8 * symbol + addend
            elif relocation == _R_GOTPC64:
                value = table + addend - address
            else:
                raise ObjectError(f"relocation of kind {relocation} in an object file: this loader does not know it")
            struct.pack_into("<Q", self._memory, address, value & 0xFFFFFFFFFFFFFFFF)


def _sections(content: bytes) -> list[_Section]:
    header = _HEADER.unpack_from(content)
    if header[0][:6] != b"\x7fELF\x02\x01" or header[1] != _RELOCATABLE or header[2] != _X86_64:
        raise ValueError("no 64-bit x86-64 ELF object")
    offset, count, names = header[6], header[12], header[13]
    raw = [_SECTION.unpack_from(content, offset + i * _SECTION.size) for i in range(count)]
    strings = raw[names][4]
    return [
        _Section(_text(content, strings + name), section_type, flags, offset, size, link, info, alignment)
        for name, section_type, flags, _, offset, size, link, info, alignment, _ in raw
    ]


def _symbols(content: bytes, sections: list[_Section]) -> list[tuple[str, int, int]]:
    """Name, section and value of every symbol."""
    table = next(section for section in sections if section.section_type == _SYMTAB)
    strings = sections[table.link].offset
    entries = _SYMBOL.iter_unpack(content[table.offset : table.offset + table.size])
    return [(_text(content, strings + entry[0]), entry[3], entry[4]) for entry in entries]


def _text(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode()


def _place(sections: list[_Section], start: int, writable: bool) -> tuple[dict[int, int], int]:
    """Where each of these sections goes from ``start`` on, and the first offset after them, a multiple of 8."""
    offsets: dict[int, int] = {}
    for index, section in enumerate(sections):
        if (
            section.section_type in (_PROGBITS, _NOBITS)
            and section.flags & _ALLOC
            and bool(section.flags & _WRITE) == writable
        ):
            offsets[index] = _up(start, section.alignment)
            start = offsets[index] + section.size
    return offsets, _up(start, 8)


def _up(offset: int, alignment: int) -> int:
    return -(-offset // max(1, alignment)) * max(1, alignment)


def _make_executable(address: int, size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    read_execute = 1 | 4
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), read_execute) != 0:
        raise ObjectError(f"this system refuses executable memory (mprotect: errno {ctypes.get_errno()})")
