"""Rows of numbers kept as one typed array a column."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

FRESH = 2048
"""Rows that wait to be put into the arrays together: that costs a third of putting in each by itself."""

Row = tuple[Any, ...]


class Columns:
    """`types`: a letter of `array` for each column."""

    def __init__(self, types: str) -> None:
        self._arrays: list[array[Any]] = [array(each) for each in types]
        self._fresh: list[Row] = []
        self._settled = 0

    def __len__(self) -> int:
        return self._settled + len(self._fresh)

    def append(self, row: Row) -> None:
        """Take the next row. A value that its column can't hold raises OverflowError or TypeError, maybe later."""
        fresh = self._fresh
        fresh.append(row)
        if len(fresh) >= FRESH:
            self._settle()

    def rows(self, rows: Sequence[Row]) -> None:
        """Take the next rows."""
        fresh = self._fresh
        fresh += rows
        if len(fresh) >= FRESH:
            self._settle()

    def extend(self, columns: Sequence[Iterable[Any]]) -> None:
        """Take the next rows, given as their columns."""
        self._settle()
        before = len(self._arrays[0])
        for column, values in zip(self._arrays, columns, strict=True):
            column.extend(values)
        self._settled += len(self._arrays[0]) - before

    def column(self, number: int) -> array[Any]:
        """All values of a column; not to be changed."""
        self._settle()
        return self._arrays[number]

    def drain(self) -> list[bytes]:
        """The bytes of each column, which lets go of them: only `len` goes on counting them."""
        self._settle()
        found = [column.tobytes() for column in self._arrays]
        for column in self._arrays:
            del column[:]
        return found

    def merge(self, columns: Sequence[bytes]) -> None:
        """Take the rows that another one was drained of. Raises ValueError if they are no rows of such columns."""
        self._settle()
        before = len(self._arrays[0])
        for column, data in zip(self._arrays, columns, strict=True):
            column.frombytes(data)
        self._settled += len(self._arrays[0]) - before

    def _settle(self) -> None:
        if not self._fresh:
            return
        for column, values in zip(self._arrays, zip(*self._fresh, strict=True), strict=True):
            column.extend(values)
        self._settled += len(self._fresh)
        self._fresh.clear()
