"""Define the commands: parse arguments, call the public functions, and print; errors are one sentence on stderr."""

from dkfm.cli import early_interrupt  # noqa: F401  # first: the imports below take a while

# isort: split

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from dkfm import __version__
from dkfm.cli import demo_bench_compare, failures, logging_options, option_parsing, performance_report, process
from dkfm.core.budget import STALL_SECONDS
from dkfm.core.terminal_output import print_result
from dkfm.errors import shorten

if TYPE_CHECKING:
    from distributed import Client

    from dkfm.estimators.planning.plan_report import FitPlan
    from dkfm.scoring.planning import Plan
    from dkfm.scoring.report import ScoreReport


_SCHEDULER = click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="host:port, tcp://host:port, tls://host:port, the path of a scheduler file, slurm:FILE (workers as jobs of "
    "Slurm) or ssh:HOSTS (a file of hosts); without it, threads.",
)

_REPORT = click.option(
    "--report", "page", metavar="PAGE", help="Of a cluster: write Dask's report of the job here, as HTML."
)

_PROGRESS = click.option(
    "--progress/--no-progress",
    default=True,
    show_default=True,
    help="Bars on standard error, where it is a terminal; elsewhere a line every 30 seconds.",
)


_TRUSTED = click.option(
    "--trusted", multiple=True, metavar="MODULE:FUNCTION", help="A function of yours that MODEL may run as its kernel."
)


@click.group(
    cls=process.CommandGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=failures.EXPLANATION
)
@click.version_option(__version__, prog_name="dkfm")
def main() -> None:
    """Exact, explicit feature maps of any kernel, built and applied with Dask."""


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a job as Ctrl-C does: finished chunks are kept, and a message says so.

    A signal that is ignored, as under nohup, stays ignored.
    """
    handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    interrupt = signal.getsignal(signal.SIGINT)
    for number in handled:
        signal.signal(number, interrupt if callable(interrupt) else signal.default_int_handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _connect(address: str | None, wait_for_workers: float | None, report_path: str | None) -> "Iterator[Client | None]":
    """Connect to a scheduler if `address` is given, and write Dask's report of the job if `report_path` is given."""
    if address is None:
        yield None
        return
    from dkfm.execution.clusters.connect import connect

    with (
        _terminate_as_interrupt(),
        connect(address, wait_for_workers=wait_for_workers) as client,
        performance_report.record_report(client, report_path),
    ):
        yield client


@main.command()
@click.argument("train", type=click.Path())
@click.argument("model", type=click.Path())
@click.option("--method", type=click.Choice(["features", "pca", "fisher", "ridge"]), default="pca", show_default=True)
@click.option("--basis", type=click.Choice(["symmetric", "spectral", "cholesky"]), help="Of features. [symmetric]")
@click.option("--centered", is_flag=True, help="Of features: take their mean over TRAIN from them.")
@click.option("--landmarks", type=click.Choice(["uniform", "kmeans", "pivots", "random_pivots"]), help="Of features.")
@click.option("--n-landmarks", type=click.IntRange(min=1), help="How many landmarks are chosen; all rows by default.")
@click.option(
    "--certify",
    type=click.Choice(["all", "sample"]),
    help="Of features: the rows of TRAIN whose error is measured. A sample is fast, and gives no error bound. [all]",
)
@click.option(
    "--tol", type=click.FloatRange(0, 1, max_open=True), help="Of features: the error bound to be content with."
)
@click.option(
    "--build",
    type=click.Choice(["auto", "gram", "columns", "rounds", "tiled"]),
    help="Of features: how pivots are found. auto: in rounds over stored rows, else as is faster. tiled: all rows, "
    "of full rank, with weights that stay on disk. [auto]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32"]),
    default="float64",
    show_default=True,
    help="What MODEL scores in.",
)
@click.option("--kernel", help=option_parsing.KERNEL_HELP, shell_complete=option_parsing.complete_kernel_name)
@click.option("--param", multiple=True, metavar="NAME=VALUE", help="As sigma=5, sigma=1,2,3, sigma=median.")
@click.option(
    "--map",
    "map_path",
    metavar="MAP",
    help="In place of --kernel, of a pca, fisher or ridge: fit in the features of a map that was fitted before.",
)
@click.option(
    "--on-indefinite", type=click.Choice(["auto", "raise", "clip"]), help="[raise; of a pca: auto, as in KernelPCA]"
)
@click.option(
    "--components",
    callback=option_parsing.parse_components,
    metavar="NUMBER",
    help="Of a pca: how many, or below 1 the share of variance they explain; of fisher: how many; all by default.",
)
@click.option("--labels", metavar="FILE", help="Of fisher, or a ridge that classifies: a .npy file of a label a row.")
@click.option(
    "--label-column", metavar="NAME", help="In place of --labels: a column of a table, of text or whole numbers."
)
@click.option("--targets", metavar="FILE", help="Of ridge: a .npy file of one or more numbers for each row of TRAIN.")
@click.option("--target-columns", metavar="NAMES", help="In place of --targets: columns of a table, with commas.")
@click.option(
    "--alpha", callback=option_parsing.parse_alpha, metavar="NUMBER", help="Of ridge: the penalty, or loo. [1]"
)
@click.option("--solver", type=click.Choice(["auto", "dense", "tiled", "cg"]), help="Of fisher and ridge. [auto]")
@click.option(
    "--shrinkage",
    callback=option_parsing.parse_shrinkage,
    metavar="NUMBER",
    help="Of fisher: the ridge, or auto. [0.001]",
)
@click.option("--tile-rows", type=click.IntRange(min=1), help="Rows of a Gram tile.")
@click.option("--columns", metavar="NAMES", help="Of a table, with commas; by default all but ids, labels, targets.")
@click.option("--id-column", metavar="NAME", help="Of a table: column of ids, which is no feature.")
@click.option("--workspace", metavar="DIR", help="Keep a Gram matrix, or how far a long fit is, here.")
@click.option("--standardize", is_flag=True, help="Make (x - mean) / scale of each column first; MODEL keeps both.")
@click.option("--random-state", type=click.IntRange(min=0), help="Of features: seed of landmarks and samples.")
@click.option("--dry-run", is_flag=True, help="Say what would be computed, its memory, disk and time; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace a model of dkfm at MODEL; nothing else is ever replaced.")
@click.option("--json", "as_json", is_flag=True, help="Print what was fitted, or the plan, for machines.")
@_PROGRESS
@_SCHEDULER
@option_parsing.WAIT_FOR_WORKERS
@_REPORT
@logging_options.add_logging_options
def fit(
    train: str,
    model: str,
    scheduler: str | None,
    wait_for_workers: float | None,
    page: str | None,
    dry_run: bool,
    as_json: bool,
    **options: object,
) -> None:
    """Fit a model to the rows of TRAIN (what dkfm score takes) and save it at MODEL."""
    with process.disable_gc_during_imports():
        from dkfm.cli.fit import FitOptions, make_fit_plan, run_fit
        from dkfm.cli.verify import describe_fitted_model, format_model_size

    option_parsing.require_scheduler(scheduler, wait_for_workers)
    performance_report.require_report(page, scheduler, train, model)
    options["progress"] = bool(options["progress"]) and not logging_options.is_quiet()
    connection = _connect(scheduler, wait_for_workers, None if dry_run else page)
    checked = FitOptions(**options)  # type: ignore[arg-type]  # click checks them
    if dry_run:
        _print_plan(make_fit_plan(train, model, checked, connection), as_json)
        return
    fitted = run_fit(train, model, checked, connection)
    if as_json:
        print_result(json.dumps({"model": model, **describe_fitted_model(fitted._to_stored())}))
        return
    size = format_model_size(fitted._to_stored())
    logging_options.print_summary(
        f"{model}: {shorten(repr(fitted.kernel_))}, {size}, certificate {fitted.certificate_}"
    )
    if getattr(fitted, "landmarks", None) is not None:
        logging_options.print_summary(f"{model}: pairs of training points: {fitted.training_certificate_}")


@main.command()
@click.argument("model", type=click.Path())
@click.argument("input", type=click.Path())
@click.argument("output", type=click.Path())
@click.option(
    "--output",
    "names",
    metavar="NAMES",
    help="Some of scores, reconstruction_error, features, residual, predict, decision_function, predict_proba, "
    "transform, with commas; by default what MODEL is for.",
)
@click.option("--on-invalid", type=click.Choice(["raise", "nan"]), default="raise", show_default=True)
@click.option("--chunk-rows", type=click.IntRange(min=1), help="Rows of a task and of a chunk of the output.")
@click.option("--columns", metavar="NAMES", help="Of a table, with commas; by default those of the fit, or all.")
@click.option("--id-column", metavar="NAME", help="Of a table: column of ids, which are kept in OUTPUT.")
@click.option(
    "--stall-timeout",
    type=click.FloatRange(min=1),
    default=STALL_SECONDS,
    show_default=True,
    help="Seconds without a finished task after which the job ends.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan: chunks, disk, memory and time, measured with a few trial chunks; leave nothing.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier output of dkfm's at OUTPUT.")
@click.option("--append", is_flag=True, help="Score the files that are new in a folder of Parquet since OUTPUT.")
@click.option("--json", "as_json", is_flag=True, help="The report, or the plan, for machines.")
@_TRUSTED
@_PROGRESS
@_SCHEDULER
@option_parsing.WAIT_FOR_WORKERS
@_REPORT
@logging_options.add_logging_options
def score(
    model: str,
    input: str,  # noqa: A002  # click names the argument after what the user reads
    output: str,
    names: str | None,
    on_invalid: str,
    chunk_rows: int | None,
    columns: str | None,
    id_column: str | None,
    stall_timeout: float,
    dry_run: bool,
    overwrite: bool,
    append: bool,
    as_json: bool,
    trusted: tuple[str, ...],
    progress: bool,
    scheduler: str | None,
    wait_for_workers: float | None,
    page: str | None,
) -> None:
    """Score the rows of INPUT through MODEL into OUTPUT, or go on with what was begun there.

    INPUT is a .npy file, a Zarr store, a .parquet file or a folder of them, or CSR rows in a .npz; OUTPUT is a folder
    of Parquet where it ends in .parquet, else a Zarr store.
    """
    with process.disable_gc_during_imports():
        from dkfm.scoring.run import batch_score, plan_score

    option_parsing.allow_user_imports(*trusted)
    option_parsing.require_scheduler(scheduler, wait_for_workers)
    performance_report.require_report(page, scheduler, model, input, output)
    connection = _connect(scheduler, wait_for_workers, None if dry_run else page)
    with _terminate_as_interrupt(), connection as client:
        arguments = {
            "output": option_parsing.parse_list(names),
            "client": client,
            "on_invalid": on_invalid,
            "chunk_rows": chunk_rows,
            "columns": option_parsing.parse_list(columns),
            "id_column": id_column,
            "overwrite": overwrite,
            "append": append,
            "trusted": trusted,
        }
        if dry_run:
            plan = plan_score(model, input, output, **arguments)  # type: ignore[arg-type]  # a dict of different types
            _print_plan(plan, as_json)
            return
        report = batch_score(
            model,
            input,
            output,
            stall_timeout=stall_timeout,
            progress=progress and not logging_options.is_quiet(),
            **arguments,  # type: ignore[arg-type]  # a dict of different types
        )
    if as_json:
        print_result(report.to_json())
        return
    logging_options.print_summary(f"{output}: {_summarize_report(report)}")


def _print_plan(plan: "Plan | FitPlan", as_json: bool) -> None:
    """Print a plan; raise a BudgetError if it does not fit, in place of its JSON."""
    if not as_json:
        print_result(*str(plan).splitlines())
    plan.require()
    if as_json:
        print_result(plan.to_json())


def _summarize_report(report: "ScoreReport") -> str:
    invalid = f", {report.invalid_rows:,} of them invalid" if report.invalid_rows else ""
    existing = report.chunks - report.scored_chunks
    resumed = f", {existing:,} of {report.chunks:,} chunks were there" if existing else ""
    retried = f", {report.retries:,} tasks were started again" if report.retries else ""
    speed = f", {report.rows_per_second:,.0f} rows per second" if report.scored_rows else ""
    return f"{report.rows:,} rows{invalid}{resumed}{retried}{speed}"


@main.command()
@click.argument("path", type=click.Path())
@click.option("--against", metavar="INPUT", help="Rows of an output to score anew, or to measure a feature map on.")
@click.option(
    "--sample", type=click.IntRange(min=1), default=1000, show_default=True, help="How many of these rows, about."
)
@click.option("--model", metavar="MODEL", help="Of an output: where its model is, if it moved.")
@_TRUSTED
@_PROGRESS
@logging_options.add_logging_options
def verify(
    path: str, against: str | None, sample: int, model: str | None, trusted: tuple[str, ...], progress: bool
) -> None:
    """Measure a model's certificate anew, or hold an output against its receipts, and its input's rows."""
    with process.disable_gc_during_imports():
        from dkfm.cli.verify import iter_model_verification, iter_output_verification
        from dkfm.storage import remote_stores

    option_parsing.allow_user_imports(*trusted)
    if remote_stores.read_store_kind(path) == "scores":
        progress = progress and not logging_options.is_quiet()
        logging_options.print_summary(*iter_output_verification(path, against, sample, model, trusted, progress))
    else:
        logging_options.print_summary(*iter_model_verification(path, against, trusted))


@main.command()
@click.argument("path", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def info(path: str, as_json: bool) -> None:
    """Say what a store of dkfm's is."""
    with process.disable_gc_during_imports():
        from dkfm.cli.inspection import describe_store

    facts = describe_store(path)
    if as_json:
        print_result(json.dumps(facts))
        return
    width = max(len(key) for key in facts)
    texts = {key: json.dumps(value) if isinstance(value, dict | list) else value for key, value in facts.items()}
    print_result(*(f"{key:<{width}}  {text}" for key, text in texts.items()))


for _command in (demo_bench_compare.demo, demo_bench_compare.bench, demo_bench_compare.compare):
    main.add_command(_command)
