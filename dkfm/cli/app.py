"""Define the commands: parse arguments, call the public functions, and print results; print errors to stderr."""

from dkfm.cli import early_interrupt  # noqa: F401  # first: the imports below take a while

# isort: split

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from dkfm import __version__
from dkfm.cli import demo_bench_compare, failures, logging_options, option_parsing, performance_report, process
from dkfm.core.budget import STALL_SECONDS
from dkfm.core.display.terminal_output import print_json, print_result
from dkfm.errors import shorten

if TYPE_CHECKING:
    from distributed import Client

    from dkfm.estimators.planning.plan_report import FitPlan
    from dkfm.scoring.planning import Plan
    from dkfm.scoring.report import ScoreReport


@click.group(
    cls=process.CommandGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=failures.EXPLANATION
)
@click.version_option(__version__, prog_name="dkfm")
def main() -> None:
    """Exact, explicit feature maps of any kernel, built and applied with Dask."""


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a job as Ctrl-C does: finished chunks are kept, and a message is printed.

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


@main.command(epilog="Example: dkfm fit train.npy model --kernel gaussian --param sigma=3 --components 20")
@click.argument("train", type=click.Path())
@click.argument("model", type=click.Path())
@click.option(
    "--method",
    type=click.Choice(["features", "pca", "fisher", "ridge"]),
    default="pca",
    show_default=True,
    help="Model to fit: feature map, kernel PCA, Fisher discriminants, or kernel ridge regression.",
)
@click.option(
    "--basis", type=click.Choice(["symmetric", "spectral", "cholesky"]), help="features: basis of the map. [symmetric]"
)
@click.option("--centered", is_flag=True, help="features: subtract the mean of the features over TRAIN.")
@click.option(
    "--landmarks",
    type=click.Choice(["uniform", "kmeans", "pivots", "random_pivots"]),
    help="features: method that selects the landmarks. [all rows of TRAIN]",
)
@click.option(
    "--n-landmarks", type=click.IntRange(min=1), help="features: number of landmarks to select. [pivots: the rank]"
)
@click.option(
    "--certify",
    type=click.Choice(["all", "sample"]),
    help="features: rows of TRAIN at which the error is measured. A sample is faster, but gives no error bound. [all]",
)
@click.option(
    "--tol",
    type=click.FloatRange(0, 1, max_open=True),
    help="features: error bound; the smallest rank that meets it is kept.",
)
@click.option(
    "--build",
    type=click.Choice(["auto", "gram", "columns", "rounds", "tiled"]),
    help="features: how to find the pivots of the cholesky basis. auto: in rounds over the rows of TRAIN. tiled: keep "
    "all rows, at full rank, with the weights in --workspace. [auto]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32"]),
    default="float64",
    show_default=True,
    help="Precision of MODEL and of its scores.",
)
@click.option("--kernel", help=option_parsing.KERNEL_HELP, shell_complete=option_parsing.complete_kernel_name)
@click.option(
    "--param", multiple=True, metavar="NAME=VALUE", help="Kernel parameter: sigma=5, sigma=1,2,3, sigma=median."
)
@click.option(
    "--map",
    "map_path",
    metavar="MAP",
    help="pca, fisher, ridge: fit in the features of this fitted map, instead of with --kernel.",
)
@click.option(
    "--on-indefinite",
    type=click.Choice(["auto", "raise", "clip"]),
    help="Action if the kernel is not positive semi-definite: raise an error, or clip, which drops its negative part; "
    "auto is for pca only. [pca: auto, else raise]",
)
@click.option(
    "--components",
    callback=option_parsing.parse_components,
    metavar="NUMBER",
    help="pca, fisher: number of components. pca: a number below 1 is the share of the variance to explain. [all]",
)
@click.option("--labels", metavar="FILE", help="fisher, ridge: a .npy file with one class label for each row.")
@click.option("--label-column", metavar="NAME", help="fisher, ridge: table column with labels, instead of --labels.")
@click.option("--targets", metavar="FILE", help="ridge: a .npy file with one or more numbers for each row.")
@click.option("--target-columns", metavar="NAMES", help="ridge: columns, comma-separated, instead of --targets.")
@click.option(
    "--alpha",
    callback=option_parsing.parse_alpha,
    metavar="NUMBER",
    help="ridge: penalty, or loo, which selects it by leave-one-out errors. [1]",
)
@click.option(
    "--alphas",
    callback=option_parsing.parse_alphas,
    metavar="NUMBERS",
    help="ridge: penalties from which --alpha loo selects, comma-separated. [20 from 1e-9 m to N m; m: mean k(x, x)]",
)
@click.option(
    "--solver",
    type=click.Choice(["auto", "dense", "tiled", "cg"]),
    help="fisher, ridge: solver of the linear systems. [auto]",
)
@click.option(
    "--shrinkage",
    callback=option_parsing.parse_shrinkage,
    metavar="NUMBER",
    help="fisher: shrinkage, or auto, which selects it by cross-validation. [0.001]",
)
@click.option("--tile-rows", type=click.IntRange(min=1), help="Rows of a tile of the Gram matrix. [2048]")
@click.option("--columns", metavar="NAMES", help="Table columns, comma-separated. [all but ids, labels, targets]")
@click.option("--exclude-columns", metavar="NAMES", help="Columns that are not features, instead of --columns.")
@click.option("--id-column", metavar="NAME", help="Column of a table with ids, which is not a feature.")
@click.option("--workspace", metavar="DIR", help="Folder for the state of a long fit, so that it can be resumed.")
@click.option(
    "--standardize", is_flag=True, help="Scale each column to (x - mean) / scale. MODEL keeps mean and scale."
)
@click.option("--random-state", type=click.IntRange(min=0), help="features: seed of landmarks and samples.")
@click.option("--dry-run", is_flag=True, help="Print the plan with its memory, disk and time; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace a dkfm model at MODEL. Nothing else is ever replaced.")
@click.option("--json", "as_json", is_flag=True, help="Print the description of the model, or the plan, as JSON.")
@option_parsing.PROGRESS
@option_parsing.SCHEDULER
@option_parsing.WAIT_FOR_WORKERS
@option_parsing.REPORT
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
    """Fit a model to the rows of TRAIN and save it at MODEL.

    TRAIN is a path or a URL: of a .npy file, a Zarr store, a .parquet file or a folder of them, or CSR rows in a .npz
    file. A quoted pattern, such as '2024-??.parquet', selects .parquet files. An option whose help begins with methods,
    such as "ridge:", is for those methods only.
    """
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
        print_json({"model": model, **describe_fitted_model(fitted._to_stored())})
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
    help="Outputs of MODEL to compute, comma-separated, such as scores, features, residual or predict; dkfm info MODEL "
    "lists them. [its main output]",
)
@click.option(
    "--on-invalid",
    type=click.Choice(["raise", "nan"]),
    default="raise",
    show_default=True,
    help="Action for a row that cannot be scored, such as one with NaN: raise an error, or write NaN (null in Parquet, "
    "-1 as a class).",
)
@click.option("--chunk-rows", type=click.IntRange(min=1), help="Rows of a chunk of OUTPUT, which one task scores.")
@click.option("--columns", metavar="NAMES", help="Table columns, comma-separated. [those of the fit, or all]")
@click.option("--id-column", metavar="NAME", help="Column of a table with ids, which OUTPUT keeps.")
@click.option(
    "--stall-timeout",
    type=click.FloatRange(min=1),
    default=STALL_SECONDS,
    show_default=True,
    help="End the job with an error if no task finishes for this number of seconds.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan: chunks, disk, memory and time. A few trial chunks are measured and removed.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier dkfm output at OUTPUT. Nothing else is replaced.")
@click.option("--append", is_flag=True, help="Score files added to a folder of Parquet files since OUTPUT was written.")
@click.option("--json", "as_json", is_flag=True, help="Print the report, or the plan, as JSON.")
@option_parsing.TRUSTED
@option_parsing.PROGRESS
@option_parsing.SCHEDULER
@option_parsing.WAIT_FOR_WORKERS
@option_parsing.REPORT
@logging_options.add_logging_options
def score(
    model: str,
    input: str,  # noqa: A002  # click names the argument after what the user reads
    output: str,
    names: str | None,
    columns: str | None,
    stall_timeout: float,
    dry_run: bool,
    as_json: bool,
    progress: bool,
    scheduler: str | None,
    wait_for_workers: float | None,
    page: str | None,
    **options: Any,  # those of `plan_score`, which click checks
) -> None:
    """Score the rows of INPUT with MODEL and write OUTPUT, or resume an unfinished OUTPUT.

    INPUT is a path or a URL: of a .npy file, a Zarr store, a .parquet file or a folder of them, or CSR rows in a .npz
    file. A quoted pattern, such as '2024-??.parquet', selects .parquet files. OUTPUT is a folder of Parquet files if
    its name ends in .parquet, else a Zarr store.
    """
    with process.disable_gc_during_imports():
        from dkfm.scoring.run import batch_score, plan_score

    if options["append"] and options["overwrite"]:
        raise click.UsageError("--append keeps OUTPUT; --overwrite alone writes one to which later jobs append.")
    option_parsing.allow_user_imports(*options["trusted"])
    option_parsing.require_scheduler(scheduler, wait_for_workers)
    performance_report.require_report(page, scheduler, model, input, output)
    connection = _connect(scheduler, wait_for_workers, None if dry_run else page)
    with _terminate_as_interrupt(), connection as client:
        options |= {"output": option_parsing.parse_list(names), "columns": option_parsing.parse_list(columns)}
        if dry_run:
            _print_plan(plan_score(model, input, output, client=client, **options), as_json)
            return
        progress = progress and not logging_options.is_quiet()
        report = batch_score(
            model, input, output, client=client, stall_timeout=stall_timeout, progress=progress, **options
        )
    if as_json:
        print_result(report.to_json())
        return
    logging_options.print_summary(f"{output}: {_summarize_report(report)}")


def _print_plan(plan: "Plan | FitPlan", as_json: bool) -> None:
    """Print a plan; if it does not fit, raise a BudgetError instead of printing its JSON."""
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
@click.option(
    "--against",
    metavar="INPUT",
    help="For an output, its input; for a map, new rows; for a precomputed kernel, the Gram matrix.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    help="Approximate number of rows of an output to score again, with --against. [1000]",
)
@click.option("--model", metavar="MODEL", help="Model of an output, with --against, if it was moved.")
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
@option_parsing.TRUSTED
@option_parsing.PROGRESS
@logging_options.add_logging_options
def verify(
    path: str,
    against: str | None,
    sample: int | None,
    model: str | None,
    as_json: bool,
    trusted: tuple[str, ...],
    progress: bool,
) -> None:
    """Measure the certificate of the model at PATH again, or compare the output at PATH with its receipts and input."""
    with process.disable_gc_during_imports():
        from dkfm.cli.verify import verify_model, verify_output
        from dkfm.storage import remote_stores

    option_parsing.allow_user_imports(*trusted)
    is_output = remote_stores.read_store_kind(path) == "scores"
    if (sample, model) != (None, None) and (against is None or not is_output):
        raise click.UsageError("--sample and --model belong to an output and --against.")
    if is_output:
        progress = progress and not logging_options.is_quiet()
        facts, lines = verify_output(path, against, sample or 1000, model, trusted, progress)
    else:
        facts, lines = verify_model(path, against, trusted)
    if as_json:
        print_json(facts)
    else:
        logging_options.print_summary(*lines)


@main.command()
@click.argument("path", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the description as JSON.")
def info(path: str, as_json: bool) -> None:
    """Describe a model, an output or another dkfm store."""
    with process.disable_gc_during_imports():
        from dkfm.cli.inspection import describe_store, format_fact

    facts = describe_store(path)
    if as_json:
        print_json(facts)
        return
    width = max(len(key) for key in facts)
    print_result(*(f"{key:<{width}}  {format_fact(value)}" for key, value in facts.items()))


for _command in (demo_bench_compare.demo, demo_bench_compare.bench, demo_bench_compare.compare):
    main.add_command(_command)
