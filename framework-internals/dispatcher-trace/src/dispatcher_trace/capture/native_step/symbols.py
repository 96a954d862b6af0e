"""Function names and source files of the shared libraries in this process, from their ELF symbol tables."""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_SYMTAB, _DYNSYM = 2, 11  # section types
_LOAD = 1  # a segment that is mapped
_FUNCTION, _FILE, _INDIRECT = 2, 4, 10  # symbol types


@dataclass(frozen=True)
class Symbol:
    """One function.

    Attributes:
        name: Demangled name; empty if the library has none for the address.
        file: Source file: the file entry before the function in the symbol table. Empty for a global function.
        library: File name of the library; ``generated code`` for memory that belongs to no file.
    """

    name: str
    file: str
    library: str


class Library:
    """The symbol table of an ELF file: ``.symtab`` if it has one, else ``.dynsym``."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        sections = self._headers(0x28, 0x3A, "<IIQQQQIIQQ")
        tables = [s for s in sections if s[1] == _SYMTAB] or [s for s in sections if s[1] == _DYNSYM]
        if not tables:
            self._table: NDArray[np.void] = np.empty(0, _SYMBOL)
            return
        _, _, _, _, offset, size, link, *_ = tables[0]
        self._strings: int = sections[link][4]
        self._strings_size: int = sections[link][5]
        table = np.frombuffer(self._bytes, _SYMBOL, size // _SYMBOL.itemsize, offset)
        kind = table["info"] & 15
        position = np.where(kind == _FILE, np.arange(len(table)), 0)
        file_of = np.maximum.accumulate(position)
        wanted = np.flatnonzero(np.isin(kind, (_FUNCTION, _INDIRECT)) & (table["value"] != 0))
        wanted = wanted[np.argsort(table["value"][wanted], kind="stable")]
        self._table = table[wanted]
        is_local = (table["info"][wanted] >> 4) == 0
        self._files = np.where(is_local & (file_of[wanted] > 0), table["name"][file_of[wanted]], 0)
        # (offset in the file, address it is mapped for, size)
        segments = self._headers(0x20, 0x36, "<IIQQQQQQ")
        self._segments = [(s[2], s[3], s[5]) for s in segments if s[0] == _LOAD]

    def _headers(self, at: int, sizes_at: int, layout: str) -> list[tuple[int, ...]]:
        """The section headers or program headers of the file."""
        (start,) = struct.unpack_from("<Q", self._bytes, at)
        size, count = struct.unpack_from("<HH", self._bytes, sizes_at)
        return [struct.unpack_from(layout, self._bytes, start + index * size) for index in range(count)]

    def address_of(self, offset: int) -> int:
        """The virtual address of an offset in the file; 0 if no segment has it."""
        segments = self._segments
        return next((at + offset - start for start, at, size in segments if start <= offset < start + size), 0)

    def find(self, address: int) -> tuple[str, str]:
        """Mangled name and source file of the function at a virtual address; empty texts if there is none."""
        values = self._table["value"]
        index = int(np.searchsorted(values, address, side="right")) - 1
        if index < 0:
            return "", ""
        entry = self._table[index]
        if int(entry["size"]) and address >= int(entry["value"]) + int(entry["size"]):
            return "", ""
        file = int(self._files[index])
        return self._text(int(entry["name"])), self._text(file) if file else ""

    def _text(self, offset: int) -> str:
        start = self._strings + offset
        return self._bytes[start : self._bytes.find(b"\0", start)].decode(errors="replace")

    def addresses_named(self, pattern: bytes) -> list[int]:
        """Addresses of the functions whose mangled name matches, sorted."""
        view = memoryview(self._bytes)[self._strings : self._strings + self._strings_size]
        names = [match.start(1) for match in re.finditer(rb"\0(" + pattern + rb")(?=\0)", view)]
        return [int(value) for value in self._table["value"][np.isin(self._table["name"], names)]]


@dataclass(frozen=True)
class Mapping:
    """One executable mapping of this process."""

    low: int
    high: int
    offset: int
    path: str


class Process:
    """The executable mappings of this process when the object is made."""

    def __init__(self) -> None:
        self.mappings = []
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            span, rights, offset, _, _, *path = line.split(None, 5)
            if "x" in rights:
                low, high = (int(part, 16) for part in span.split("-"))
                self.mappings.append(Mapping(low, high, int(offset, 16), path[0] if path else ""))
        self._lows = [mapping.low for mapping in self.mappings]

    def of_library(self, name: str) -> list[Mapping]:
        """The mappings of files whose name contains ``name``."""
        return [mapping for mapping in self.mappings if name in Path(mapping.path).name]

    def symbol_at(self, address: int) -> Symbol:
        """The function at an address."""
        index = bisect.bisect_right(self._lows, address) - 1
        if index < 0 or address >= self.mappings[index].high:
            return Symbol("", "", "")
        mapping = self.mappings[index]
        if not mapping.path.startswith("/"):
            return Symbol("", "", mapping.path or "generated code")
        known = library(mapping.path)
        name, file = known.find(known.address_of(address - mapping.low + mapping.offset))
        return Symbol(demangled(name), file, Path(mapping.path).name)


@functools.cache
def library(path: str) -> Library:
    """The library at a path, read once."""
    return Library(Path(path))


@functools.lru_cache(maxsize=65536)
def demangled(name: str) -> str:
    """The readable form of a mangled C++ name; any other name unchanged."""
    if not name.startswith("_Z"):
        return name
    runtime = _cxx_runtime()
    status = ctypes.c_int()
    pointer = runtime.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value or not pointer:
        return name
    text = ctypes.string_at(pointer).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(pointer))
    return text


@functools.cache
def _cxx_runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL("libstdc++.so.6")  # the one that torch has loaded
    runtime.__cxa_demangle.restype = ctypes.c_void_p
    return runtime


def absolute(mappings: Sequence[Mapping], addresses: Sequence[int]) -> list[int]:
    """Virtual addresses of a file as addresses in this process, sorted."""
    known = library(mappings[0].path)
    base = {mapping.low - known.address_of(mapping.offset) for mapping in mappings}
    (shift,) = base  # every segment of a library is relocated by the same offset
    return sorted(address + shift for address in addresses)
