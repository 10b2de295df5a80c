"""Define `FitPlan`, the plan of a fit: its method, its memory, the files that it writes, and its time."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dkfm.core import budget
from dkfm.core.display.quantities import format_bytes, format_seconds
from dkfm.execution import memory


@dataclass(frozen=True)
class FitPlan:
    """Plan of a fit, made before it starts; `str` gives a summary.

    Attributes
    ----------
    rows, columns : int
        Training rows and their columns.
    landmarks : int
        Largest number of rows that the model keeps; an estimate if `is_forecast`.
    method : str
        Description of what is computed.
    memory_bytes : int
        Memory that this process needs, in bytes; the fit is refused if it has less.
    available_bytes : int
        Memory that this process has, in bytes.
    peak_bytes : int
        Largest memory that this process takes if it is available, in bytes.
    disk_bytes : int
        Size of the temporary files, Gram matrix or factor that the fit writes before the model, in bytes.
    place : str
        Folder of these files; empty if there are none.
    task_bytes : int
        Memory of a task on a worker of a cluster, in bytes; 0 if no workers are used.
    model_bytes : int
        Largest size of the model on disk, in bytes; an estimate if `is_forecast`. A plan does not read labels or
        targets: it assumes ten classes, or one target.
    seconds : float
        Predicted seconds; an upper bound if only the fit finds the rank.
    alternatives : tuple of FitPlan
        Plans of other methods for the same model, which need another time or memory.
    is_forecast : bool
        Whether the rank, and so memory, model size and time, are estimated from a sample of the rows. The fit may then
        take more or less.
    """

    rows: int
    columns: int
    landmarks: int
    method: str
    memory_bytes: int
    available_bytes: int
    peak_bytes: int
    disk_bytes: int
    place: str
    task_bytes: int
    model_bytes: int
    seconds: float
    alternatives: "tuple[FitPlan, ...]" = ()
    is_forecast: bool = False

    def require(self) -> None:
        """Raise a BudgetError if this process has too little memory, or the disk too little space."""
        remedy = "fit fewer rows, few components (--components), or a map with landmarks= (--landmarks) or tol= (--tol)"
        budget.require_fits(self.memory_bytes, self.available_bytes, f"A fit of {self.rows:,} rows", remedy)
        if self.disk_bytes:
            memory.require_disk(Path(self.place), self.disk_bytes, "What the fit writes")

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        size = format_bytes
        limit = ", estimated from a sample of the rows" if self.is_forecast else " at most"
        peak = f", up to {size(self.peak_bytes)}" if self.peak_bytes > self.memory_bytes else ""
        lines = [
            ("rows", f"{self.rows:,} of {self.columns:,} columns, {self.landmarks:,} landmarks{limit}"),
            ("method", self.method),
            ("memory", f"{size(self.memory_bytes)}{peak}; {size(self.available_bytes)} are available"),
            ("disk", f"{size(self.disk_bytes)} in {self.place}" if self.disk_bytes else "nothing but the model"),
            ("model", f"{size(self.model_bytes)}{'' if self.is_forecast else ' at most'}"),
            ("time", f"about {format_seconds(self.seconds)}"),
        ]
        if self.task_bytes:
            lines.append(("task", f"{size(self.task_bytes)} of memory on a worker"))
        for other in self.alternatives:
            disk = f", {size(other.disk_bytes)} of disk" if other.disk_bytes else ""
            cost = f"{format_seconds(other.seconds)}, {size(other.memory_bytes)} of memory{disk}"
            fits = "" if other.memory_bytes <= self.available_bytes else ", more than available"
            lines.append(("or", f"{other.method}: about {cost}{fits}"))
        return "\n".join(f"{name:<7} {line}" for name, line in lines)
