"""All that is known of a scoring job before anything is written: model, rows, plan, and what lies at its output."""

import json
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from dkfm.core import chunking
from dkfm.core.rows import Array
from dkfm.errors import DamagedStoreError, DkfmWarning, IncompleteStoreError, InvalidInputError
from dkfm.execution import memory
from dkfm.execution.clusters.client import find_client
from dkfm.execution.executors import Executor, open_executor
from dkfm.files import change_detection, temporary
from dkfm.files.change_detection import Watch
from dkfm.files.local import translate_write_errors
from dkfm.files.location import Location, at_url, is_remote, locate, require_apart
from dkfm.kernels import serialization
from dkfm.kernels.base import Kernel
from dkfm.numerics.model import Model
from dkfm.scoring import completion, outputs, planning
from dkfm.scoring.chunk_files import OutputColumns
from dkfm.scoring.outputs import Output
from dkfm.scoring.parquet_chunks import require_pyarrow
from dkfm.scoring.planning import Plan, WriteBuffers
from dkfm.scoring.receipts import Receipt
from dkfm.scoring.tasks import HasIds
from dkfm.sources.base import Named, Source
from dkfm.sources.memory import FrameSource, MemorySource
from dkfm.sources.opening import open_source
from dkfm.sources.stored_csr import StoredCsr
from dkfm.storage import csr, model_transfer
from dkfm.storage.model_store import Record, load_record
from dkfm.storage.zarr_store import new_store

if TYPE_CHECKING:
    from distributed import Client

_SAVED_TOGETHER = 4096
"""Rows of an array that are written for the workers at a time."""

_NAMED_BY_ESTIMATOR = ("features", "scores", "transform")
"""Outputs whose columns `get_feature_names_out` names, where they are what a model is for."""


@runtime_checkable
class Savable(Protocol):
    """An estimator that writes itself to a store."""

    @property
    def kernel_(self) -> Kernel:
        """The kernel as fitted."""

    @property
    def model_(self) -> Model:
        """The model that is written."""

    def save(self, path: str | Path) -> None:
        """Write the model."""


@dataclass(frozen=True)
class JobRequest:
    """What the user asked for, as it came."""

    destination: str | Path
    output: str | Sequence[str] | None
    on_invalid: str
    chunk_rows: int | None
    columns: Sequence[str] | None
    id_column: str | None
    overwrite: bool
    trusted: Collection[str]


@dataclass(frozen=True, eq=False)
class ScoringJob:
    """All that is known before anything is written."""

    model: str
    """The path or the URL that workers open."""
    record: Record
    trusted: tuple[str, ...]
    watch: Watch
    """What the user gave, watched since before it was stamped."""
    rows: Source
    """Where the rows are for the workers."""
    plan: Plan
    wanted: Output
    found: Output | None
    overwrite: bool
    running: Executor


@contextmanager
def prepare_job(
    model: "str | Path | Savable", source: object, request: JobRequest, client: "Client | None"
) -> Iterator[ScoringJob]:
    """Open, plan and check all that a job needs; nothing is written at its output."""
    if request.on_invalid not in ("raise", "nan"):
        raise InvalidInputError(f'on_invalid must be "raise" or "nan", and is {request.on_invalid!r}.')
    chunk_rows = request.chunk_rows
    if chunk_rows is not None:
        chunk_rows = chunking.require_count(chunk_rows, "chunk_rows")
    target, client = locate(request.destination), find_client(client)
    trusted = (
        serialization.function_paths(model.kernel_)
        if isinstance(model, Savable)
        else serialization.check_trusted(request.trusted)
    )
    with _saved(model) as path, open_executor(client) as running:
        record = load_record(path, trusted=trusted, streamed=True)
        names, columns = _names(request.output, record.model), _columns(request, record)
        given = open_source(source, "source", columns=columns, id_column=request.id_column, fitted=record.feature_names)
        if isinstance(given, Named) and columns is None and record.feature_names is None:
            _warn_of_order(given)
        require_apart(target, "output", [path, given.location])
        found = None if request.overwrite else outputs.find_output(target)
        with change_detection.watch(given) as watch, _on_disk(given, client) as rows:
            stamp = _stamped(given)
            if found is not None and chunk_rows is None:
                chunk_rows = found.chunk_rows
            plan = _planned(record.model, names, rows, chunk_rows, client, running.threads, _writing(target))
            remote = at_url(model)
            name = str(path) if remote is None else remote.name
            wanted = _wanted(target, name, record, names, given, stamp, plan, request)
            if found is not None:
                outputs.require_same_job(found, wanted)
                told = {receipt.chunk: receipt for receipt in known_receipts(found, watch.state)[0]}
                plan = replace(plan, done=plan.chunks - len(completion.missing_chunks(found, told)))
            where = str(path) if remote is None else remote.url
            yield ScoringJob(where, record, trusted, watch, rows, plan, wanted, found, request.overwrite, running)


def _stamped(given: Source) -> str:
    """Return the stamp of rows; raise where they changed between opening and this."""
    stamp = given.stamp()
    if not given.is_of(stamp):
        raise InvalidInputError(f"{given.name} changed since it was opened; run the job again.")
    return stamp


def _warn_of_order(given: Named) -> None:
    told = ", ".join(given.columns[:5]) + (", ..." if len(given.columns) > 5 else "")
    warnings.warn(
        f"The model was fitted without names of columns; they are taken in the order of the table: {told}. Say which "
        "with columns= (--columns), or fit from a table.",
        DkfmWarning,
        stacklevel=5,
    )


def _columns(request: JobRequest, record: Record) -> list[str] | None:
    """Return the columns that are asked for, in the order of the fit if that had names."""
    asked, fitted = request.columns, record.feature_names
    if asked is None or fitted is None:
        return None if asked is None else list(asked)
    if sorted(asked) != sorted(fitted):
        raise InvalidInputError(
            f"columns are {', '.join(map(repr, asked))}, and the model was fitted with {', '.join(map(repr, fitted))}."
        )
    return fitted


def _names(output: str | Sequence[str] | None, model: Model) -> list[str]:
    if output is None:
        return [main_output(model)]
    names = [output] if isinstance(output, str) else list(output)
    for name in names:
        model.head(name)
    if len(set(names)) != len(names) or not names:
        raise InvalidInputError(f"output must name each output once, and is {output!r}.")
    return names


def main_output(model: Model) -> str:
    """Return the first output of a model, the one it is made for."""
    return next(iter(model.heads))


def _wanted(
    target: Location,
    where: str,
    record: Record,
    names: list[str],
    given: Source,
    stamp: str,
    plan: Plan,
    request: JobRequest,
) -> Output:
    heads, main = record.model.heads, main_output(record.model)
    named = main in _NAMED_BY_ESTIMATOR
    prefixes = {name: record.estimator.lower() if name == main and named else name for name in names}
    table = _is_table(target)
    if table:
        require_pyarrow()
    elif request.id_column is not None:
        raise InvalidInputError(f"id_column is kept in a table: name the output {target}.parquet.")
    if request.id_column is not None and not isinstance(given, HasIds):
        raise InvalidInputError(f"id_column is of a table, and {given.name} is none.")
    columns = tuple(OutputColumns(name, heads[name].width, prefixes[name], heads[name].dtype.name) for name in names)
    if request.id_column in [name for some in columns for name in some.names]:
        raise InvalidInputError(f"The ids are called {request.id_column!r}, as a column of the scores is; rename it.")
    return Output(
        root=target,
        columns=columns,
        rows=plan.rows,
        chunk_rows=plan.chunk_rows,
        dtype=str(record.model.dtype),
        model={"path": where, "digest": record.digest},
        input={"name": given.name, "stamp": stamp},
        settings={
            "on_invalid": request.on_invalid,
            "columns": json.dumps(given.columns) if isinstance(given, Named) else None,
            "id_column": request.id_column,
            "form": outputs.PARQUET if table else None,
            "chunk_rows": str(plan.chunk_rows),
        },
        classes=record.classes,
    )


def _writing(target: Location) -> WriteBuffers:
    """Return what a task holds to write: columns and pages of a table, and an object that travels and comes back."""
    return WriteBuffers(pieces=3 if _is_table(target) else 0, chunks=2 if is_remote(target) else 0)


def _is_table(target: Location) -> bool:
    return str(target).endswith(".parquet")


def _planned(
    model: Model,
    names: list[str],
    source: Source,
    chunk_rows: int | None,
    client: "Client | None",
    threads: int,
    writing: WriteBuffers,
) -> Plan:
    """Plan a job with its weights in the memory of every worker, or, where that is too little, read from the store."""

    def have(shared: int) -> int:
        return memory.task_budget(client, threads, shared)

    plan = planning.plan_in_memory(model, names, source, chunk_rows, threads, writing)
    if plan.task_bytes > have(plan.model_bytes) and model.stored_values:
        plan = planning.plan_streamed(model, names, source, have, chunk_rows, threads, writing)
    room, worker = (
        (have(plan.model_bytes), "") if client is None else memory.smallest_worker_budget(client, plan.model_bytes)
    )
    return replace(plan, have_bytes=room, worker=worker)


def known_receipts(output: Output, state: str) -> tuple[list[Receipt], bool]:
    """Return the receipts of an output that was begun, and whether it was completed with them; else of its journal.

    The journal's are those of rows of the input in its present state alone.
    """
    try:
        return list(completion.marker_receipts(output).values()), True
    except (IncompleteStoreError, DamagedStoreError):
        return list(completion.journal_receipts(output, state)), False


@contextmanager
def _saved(model: "str | Path | Savable") -> Iterator[Path]:
    if isinstance(model, str | os.PathLike):
        with model_transfer.fetch_model(model) as path:
            yield path.absolute()
        return
    if not isinstance(model, Savable):
        raise InvalidInputError(f"model must be a path or a fitted estimator of dkfm's, and is {model!r:.100}.")
    with temporary.temporary_folder("model", need=model.model_.nbytes, what="The model for the tasks") as folder:
        copy(model).save(folder / "model")  # the estimator itself remembers where the user saved it
        yield folder / "model"


@contextmanager
def _on_disk(rows: Source, client: "Client | None") -> Iterator[Source]:
    """Yield the rows; those of an array in memory are put where the workers of a client can read them."""
    if client is None or not isinstance(rows, MemorySource):
        yield rows
        return
    array = rows.array
    parts = [array] if isinstance(array, np.ndarray) else [array.data, array.indices, array.indptr]
    need = sum(part.nbytes for part in parts)
    with temporary.temporary_folder("rows", need=need, what="The rows for the workers") as folder:
        if isinstance(rows, FrameSource) and rows.id_column is not None:
            with translate_write_errors(folder):
                rows.save(folder / "rows.parquet")
            yield open_source(folder / "rows.parquet", columns=rows.columns, id_column=rows.id_column)
            return
        if isinstance(array, np.ndarray):
            with translate_write_errors(folder):
                _save(folder / "rows.npy", array)
            yield open_source(folder / "rows.npy")
            return
        with new_store(folder / "rows.zarr", "rows", {}, csr.array_names("rows")) as group:
            csr.write_csr(group, "rows", array)
        yield StoredCsr(folder / "rows.zarr", rows.shape, rows.row_values, rows.runs, "rows")


def _save(path: Path, array: Array) -> None:
    """Write rows one after another, whatever their order in memory: a task reads some of them."""
    described = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    with path.open("xb") as file:
        np.lib.format.write_array_header_1_0(file, described)
        for part in chunking.row_slices(len(array), _SAVED_TOGETHER):
            file.write(np.ascontiguousarray(array[part]).data)
