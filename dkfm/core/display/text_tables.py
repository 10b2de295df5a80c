"""Format rows of named cells as aligned text, and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from math import isfinite
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Cell: TypeAlias = "str | int | float | DataclassInstance"
Row: TypeAlias = Mapping[str, Cell]


@dataclass(frozen=True)
class Table:
    """Rows with the same columns, under a title."""

    title: str
    rows: Sequence[Row]

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of the table as text, columns aligned to the right.

        >>> squares = [{"a_number": 4, "its_square": 16}, {"a_number": 30, "its_square": 900}]
        >>> for line in Table("Squares", squares).format_lines():
        ...     print(line)
        Squares
          a number  its square
                 4          16
                30         900
        """
        texts = self.format_cells()
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        yield self.title
        for row in texts:
            yield "  " + "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))

    def format_cells(self) -> list[list[str]]:
        """Return the column names, then the cells of each row, as text."""
        header = [name.replace("_", " ") for name in self.rows[0]]
        return [header, *([_format_cell(cell) for cell in row.values()] for row in self.rows)]

    def to_json_rows(self) -> list[dict[str, object]]:
        """Return the rows for JSON, with None for numbers that are not finite."""
        return [{name: _to_json_value(cell) for name, cell in row.items()} for row in self.rows]


def _format_cell(cell: Cell) -> str:
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _to_json_value(cell: Cell) -> object:
    if is_dataclass(cell):
        return asdict(cell)
    return cell if not isinstance(cell, float) or isfinite(cell) else None
