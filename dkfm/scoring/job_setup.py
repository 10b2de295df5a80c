"""Prepare a scoring job before anything is written: open model and rows, find an existing output, and plan."""

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dkfm.core import chunking
from dkfm.core.argument_checks import require_flags
from dkfm.core.display.quantities import format_seconds
from dkfm.core.frames import convert_container, validate_columns_argument
from dkfm.core.trusted_functions import validate_trusted_argument
from dkfm.errors import InvalidInputError, warn_caller
from dkfm.execution import memory
from dkfm.execution.clusters.current_client import find_client
from dkfm.execution.executors import Executor, open_executor
from dkfm.execution.job_input import ensure_rows_on_disk, open_input
from dkfm.execution.worker_checks import WorkerRequirements
from dkfm.files import change_detection, temporary_folders
from dkfm.files.location import Location, is_remote, locate, parse_remote, require_disjoint, require_writable
from dkfm.kernels import serialization
from dkfm.kernels.base import Kernel
from dkfm.numerics.model import Model
from dkfm.scoring import appending, output_store, planning
from dkfm.scoring.appending import InputFiles, may_enlarge_chunks
from dkfm.scoring.formats.chunk_files import OutputColumns
from dkfm.scoring.formats.id_array import choose_id_dtype, propose_parquet
from dkfm.scoring.formats.label_column import Label, is_parquet_text
from dkfm.scoring.formats.parquet_chunks import require_pyarrow
from dkfm.scoring.output_store import Output
from dkfm.scoring.planning import Plan, WriteCopies
from dkfm.scoring.receipts import ChunkReceipt
from dkfm.scoring.tasks import HasIds, SharedTaskArguments
from dkfm.sources.base import NamedColumns, Source
from dkfm.storage import remote_stores
from dkfm.storage.model_store import MAX_LABEL_CHARACTERS, Record, load_record

if TYPE_CHECKING:
    from distributed import Client

_NAMED_BY_ESTIMATOR = ("features", "scores", "transform")
"""Outputs whose columns `get_feature_names_out` names if they are the main output of a model."""


@runtime_checkable
class Savable(Protocol):
    """A fitted estimator that can be saved."""

    @property
    def kernel_(self) -> Kernel:
        """Fitted kernel."""

    @property
    def model_(self) -> Model:
        """Model to save."""

    def save(self, path: str | Path) -> None:
        """Save the model."""


@dataclass(frozen=True)
class JobRequest:
    """Arguments of `batch_score`, unchecked; see there."""

    destination: str | Path
    output: str | Sequence[str] | None
    on_invalid: str
    chunk_rows: int | None
    columns: Sequence[str] | None
    id_column: str | None
    overwrite: bool
    trusted: Collection[str]
    append: bool = False


@dataclass(frozen=True, eq=False)
class ScoringJob:
    """A scoring job that is ready to run."""

    model_path: str
    """Path or URL of the model for workers."""
    loaded_model: Record
    """The model."""
    trusted: tuple[str, ...]
    """User functions that the kernel may import."""
    is_model_cacheable: bool
    """Whether this process keeps the prepared model for the next job with the same digest."""
    input_watch: change_detection.Watch
    """Detects changes of the user's input."""
    source: Source
    """Rows where workers can read them."""
    plan: Plan
    """Chunks and memory."""
    output: Output
    """Description of the requested output."""
    existing_output: Output | None
    """Output at the destination that the job resumes, or to which it appends."""
    files: InputFiles | None
    """Files of a folder of Parquet."""
    kept_receipts: list[ChunkReceipt]
    """Receipts of the existing output's chunks that stay if files are appended to it."""
    overwrite: bool
    """Whether to replace what is at the destination."""
    executor: Executor
    """Runs the tasks: on the cluster's workers, or on threads of this process."""

    @property
    def appends(self) -> bool:
        """Whether rows of new files are appended to the existing output."""
        return self.existing_output is not None and self.files is not None and self.files.scored is not None

    def make_task_arguments(
        self, output: Output, requirements: WorkerRequirements | None = None
    ) -> SharedTaskArguments:
        """Return the arguments that the tasks of the job share."""
        source = self.source.with_float32_preserved() if output.compute_dtype == "float32" else self.source
        return SharedTaskArguments(
            *(self.model_path, self.loaded_model.digest, self.trusted),
            *(self.plan.streamed, source, self.plan.piece_rows),
            *(output, str(output.settings["on_invalid"]), requirements),
        )


@contextmanager
def open_job(
    model: "str | Path | Savable", source: object, request: JobRequest, client: "Client | None"
) -> Iterator[ScoringJob]:
    """Yield a checked and planned job; temporary copies of its inputs live as long. The destination is not changed."""
    chunk_rows, target, client = _check_request(request), locate(request.destination), find_client(client)
    require_writable(target, "output", allow_parquet=True)
    if isinstance(model, Savable):
        trusted = serialization.function_paths(model.kernel_)
    else:
        trusted = validate_trusted_argument(request.trusted)
    with _ensure_model_on_disk(model) as path, open_executor(client) as executor, ExitStack() as stack:
        record = load_record(path, trusted=trusted, streamed=True)
        names, columns = _resolve_outputs(request.output, record.model), _input_columns(request, record)
        fitted = record.feature_names
        existing = None if request.overwrite else output_store.find_output(target)
        given = stack.enter_context(
            open_input(source, "source", client, columns=columns, id_column=request.id_column, fitted_columns=fitted)
        )
        require_disjoint(target, "output", [path, given.location])
        given, files = appending.order_input_files(given, existing, request.append)
        if columns is None and given.shape[1] == record.model.n_features_in:
            _warn_if_only_one_has_names(source, given, fitted)
        with change_detection.watch(given) as watch, ensure_rows_on_disk(given, client) as shared:
            stamp = _read_unchanged_stamp(given)
            choose = partial(_choose_plan, record.model, names, shared, client, executor.threads, _count_copies(target))
            appends = files is not None and files.scored is not None
            plan = choose(chunk_rows) if chunk_rows is not None else _plan_for_output(choose, existing, appends)
            if chunk_rows is not None and plan.has_small_chunks:
                _warn_about_small_chunks(plan)
            place = parse_remote(model) or path
            output = _build_output(target, str(place), record, names, given, stamp, plan, request)
            kept: list[ChunkReceipt] = []
            if existing is not None:
                kept, done = appending.find_reusable_chunks(existing, output, given, files, watch.stamp_with_ctime)
                plan = replace(plan, done=done)
            where = str(path) if isinstance(place, Path) or client is None else place.url  # threads read the open copy
            # A model of an estimator is in memory already; user functions and a store may change between jobs.
            keeps = not (isinstance(model, Savable) or trusted or plan.streamed)
            yield ScoringJob(
                *(where, record, trusted, keeps, watch, shared, plan, output, existing, files, kept),
                *(request.overwrite, executor),
            )


def _check_request(request: JobRequest) -> int | None:
    """Check arguments that need no model and no rows; return the requested rows of a chunk."""
    if request.on_invalid not in ("raise", "nan"):
        raise InvalidInputError(f'on_invalid must be "raise" or "nan", and is {request.on_invalid!r}.')
    require_flags(overwrite=request.overwrite, append=request.append)
    if request.append and request.overwrite:
        raise InvalidInputError(
            "append keeps the output and overwrite replaces it; overwrite alone writes one to which later jobs append."
        )
    return None if request.chunk_rows is None else chunking.require_count(request.chunk_rows, "chunk_rows")


def _plan_for_output(choose: Callable[[int | None], Plan], existing: Output | None, appends: bool) -> Plan:
    """Plan a job in chunks of the existing output, except where it is scored anew in larger ones."""
    if existing is None:
        return choose(None)
    if appends and may_enlarge_chunks(existing, (plan := choose(None)).chunk_rows):
        return plan
    return choose(existing.chunk_rows)


def _read_unchanged_stamp(given: Source) -> str:
    """Return the stamp of the input; raise an InvalidInputError if it changed since it was opened."""
    stamp = given.stamp()
    if not given.is_opening_valid(stamp):
        raise InvalidInputError(f"{given.name} changed since it was opened; run the job again.")
    return stamp


def _warn_if_only_one_has_names(source: object, given: Source, fitted: Sequence[str] | None) -> None:
    """Warn if only the rows, or only the fitted columns, have names, so that columns are taken in their order."""
    given_names = given.columns if isinstance(given, NamedColumns) else None
    is_frame = hasattr(convert_container(source), "columns")
    if (given_names is None) == (fitted is None) or (given_names is None and is_frame):
        return  # names are matched, or there are none, or opening a frame whose names are no text has warned
    named = given_names or fitted or ()
    names = ", ".join(named[:5]) + (", ..." if len(named) > 5 else "")
    if fitted is None:
        warn_caller(
            f"The model was fitted without names of columns; they are taken in the order of the table: {names}. Say "
            "which with columns= (--columns), or fit from a table."
        )
    else:
        warn_caller(
            f"{given.name} has no names of columns, and the model was fitted with names; its columns must be in their "
            f"order: {names}."
        )


def _warn_about_small_chunks(plan: planning.Plan) -> None:
    enough = min(math.ceil(10 * plan.chunk_seconds / plan.row_seconds), plan.rows)
    warn_caller(
        f"{plan.chunks:,} chunks of {plan.chunk_rows:,} rows are as many files, which alone take about "
        f"{format_seconds(plan.file_seconds)}; choose a chunk_rows (--chunk-rows) of {enough:,} or more, or "
        "leave the choice to dkfm."
    )


def _input_columns(request: JobRequest, record: Record) -> list[str] | None:
    """Return the requested columns, in the order of the fit if the fit had names."""
    requested, fitted = validate_columns_argument(request.columns), record.feature_names
    if requested is None or fitted is None:
        return None if requested is None else list(requested)
    if sorted(requested) != sorted(fitted):
        raise InvalidInputError(
            f"columns are {', '.join(map(repr, requested))}, and the model was fitted with "
            f"{', '.join(map(repr, fitted))}."
        )
    return fitted


def _resolve_outputs(output: str | Sequence[str] | None, model: Model) -> list[str]:
    if output is None:
        return [main_output_name(model)]
    names = [output] if isinstance(output, str) else list(output) if isinstance(output, Iterable) else []
    for name in names:
        model.head(name)
    if len(set(names)) != len(names) or not names:
        raise InvalidInputError(f"output must name each output once, and is {output!r}.")
    return names


def main_output_name(model: Model) -> str:
    """Return the name of the main output of a model, which is its first."""
    return next(iter(model.heads))


def _build_output(
    target: Location,
    model_name: str,
    record: Record,
    names: list[str],
    given: Source,
    stamp: str,
    plan: Plan,
    request: JobRequest,
) -> Output:
    """Return the output that a job requests, after all checks of its columns and its form."""
    heads, main = record.model.heads, main_output_name(record.model)
    is_named = main in _NAMED_BY_ESTIMATOR
    prefixes = {name: record.estimator.lower() if name == main and is_named else name for name in names}
    is_table = _is_table(target)
    if is_table:
        require_pyarrow()
    if request.id_column == "" or (request.id_column is not None and not isinstance(given, HasIds)):
        raise InvalidInputError(f"id_column names a column of a table, and is {request.id_column!r} of {given.name}.")
    columns = tuple(
        OutputColumns(
            *(name, heads[name].width, prefixes[name], heads[name].output_dtype.name),
            output_store.name_columns(record, name, is_table),
        )
        for name in names
    )
    has_labels = is_table and any(entry.has_codes for entry in columns)
    if has_labels or any(entry.labels for entry in columns):
        _require_text_of_parquet(record.classes)
    if is_table and request.id_column in [*names, *(name for entry in columns for name in entry.names)]:
        raise InvalidInputError(f"The ids are called {request.id_column!r}, as scores or a column of them; rename it.")
    return Output(
        root=target,
        columns=columns,
        rows=plan.rows,
        chunk_rows=plan.chunk_rows,
        compute_dtype=str(record.model.dtype),
        model={"path": model_name, "digest": record.digest},
        input={"name": given.name, "stamp": stamp},
        settings={
            "on_invalid": request.on_invalid,
            "columns": json.dumps(given.columns) if isinstance(given, NamedColumns) else None,
            "id_column": request.id_column,
            "form": output_store.PARQUET if is_table else None,
            "chunk_rows": str(plan.chunk_rows),
            **({"predictions": output_store.LABELS} if has_labels else {}),
            **({} if is_table else _make_id_settings(request.id_column, given, columns, target)),
        },
        classes=record.classes,
    )


def _require_text_of_parquet(classes: Sequence[Label]) -> None:
    for label in classes:
        if not is_parquet_text(label):
            raise InvalidInputError(
                f"Parquet cannot hold the class {label!r:.100}, which is no Unicode text of at most "
                f"{MAX_LABEL_CHARACTERS:,} characters without NUL; write a Zarr output, which holds codes of classes."
            )


def _make_id_settings(
    name: str | None, given: Source, columns: Sequence[OutputColumns], target: Location
) -> dict[str, str | None]:
    """Return the setting of a Zarr output with the data type of its ids; nothing if there are none."""
    if name is None or not isinstance(given, HasIds):
        return {}
    taken = {taken.casefold() for entry in columns for taken in (entry.output, f"{entry.output}_column")}
    instead = propose_parquet(target)
    if name.casefold() in taken or not output_store.is_array_name(name):
        # A folder has the name, and some file systems tell no capitals from small letters.
        why = "is the name of its scores; rename them"
        if name.casefold() not in taken:
            why = f"is no word of letters, digits and _; rename them, or {instead}"
        raise InvalidInputError(f"A Zarr output cannot keep ids as {name!r}, which {why}.")
    if (file := given.find_file_with_missing_ids()) is not None:
        raise InvalidInputError(f"Rows of {file} have no {name!r}; give each row an id, or {instead}.")
    return {"id_dtype": choose_id_dtype(name, given.read_ids(slice(0, 0)), target)}


def _count_copies(target: Location) -> WriteCopies:
    """Return the copies that a task holds: columns and pages of a row group; an object that is sent and read back."""
    return WriteCopies(group_copies=3 if _is_table(target) else 0, chunk_copies=2 if is_remote(target) else 0)


def _is_table(target: Location) -> bool:
    return str(target).endswith(".parquet")


def _choose_plan(
    model: Model,
    names: list[str],
    source: Source,
    client: "Client | None",
    threads: int,
    write_copies: WriteCopies,
    chunk_rows: int | None,
) -> Plan:
    """Plan a job with the weights in memory, or streamed if they do not fit, and add the memory for a task.

    On a cluster that is the memory of the smallest worker that can hold a task; smaller workers get none.
    """
    plan = in_memory = planning.plan_with_model_in_memory(model, names, source, chunk_rows, threads, write_copies)
    budgets: Mapping[str, Callable[[int], int]]
    if client is None:
        budgets = {"": partial(memory.task_budget, None, threads, needed=plan.task_bytes)}
    else:
        budgets = memory.worker_task_budget_functions(client, plan.model_bytes)
    for worker, have in budgets.items():
        plan = in_memory
        if plan.task_bytes > have(plan.model_bytes) and model.n_stored_head_elements:
            plan = planning.plan_with_streamed_weights(model, names, source, have, chunk_rows, threads, write_copies)
        plan = replace(plan, available_bytes=have(plan.model_bytes), worker=worker)
        if plan.task_bytes <= plan.available_bytes:
            break
    return plan


@contextmanager
def _ensure_model_on_disk(model: "str | Path | Savable") -> Iterator[Path]:
    if isinstance(model, str | os.PathLike):
        with remote_stores.open_model_folder(model) as path:
            yield path.absolute()
        return
    if not isinstance(model, Savable):
        if hasattr(model, "fit") and hasattr(model, "save") and not isinstance(model, type):
            from sklearn.utils.validation import check_is_fitted

            check_is_fitted(model, "model_")
        what = type(model).__name__
        if hasattr(model, "steps"):  # a pipeline of scikit-learn
            instead = "fit(X, standardize=True) or kernels.Standardize"
            what += f"; {instead} take the place of a StandardScaler, and dkfm.fold takes linear models"
        raise InvalidInputError(f"model must be a path or a fitted estimator of dkfm's, and is {what}.")
    with temporary_folders.open_temporary_folder(
        "model", need=model.model_.total_nbytes, what="The model for the tasks"
    ) as folder:
        copy(model).save(folder / "model")  # a copy: the estimator remembers where the user saved it
        yield folder / "model"
