"""The commands, and what the process says at its end.

Exit codes: 0 done; 2 the request was wrong, with one line on standard error that says what was
got, the limit and the option; 1 a fault of ours or of the machine (a full disk); 130 Ctrl-C. A
reader that closes the pipe (`| head -1`) has what it wanted: 0. A command's body is where the code
it needs is imported, so that asking for help costs none of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import typer.main

from nanoserve import __version__
from nanoserve.cli.options import (
    Dtype,
    EngineOptions,
    KVCacheDtype,
    Model,
    SamplingOptions,
    ServerOptions,
    integer,
    one_of,
    spread,
)
from nanoserve.cli.prompts import read_prompts
from nanoserve.cli.terminal import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    PROGRAM,
    LateProgress,
    abandon_stdout,
    be_verbose,
    let_interrupts_raise,
    logger,
    manners,
    printable,
    remark,
    show,
)
from nanoserve.config import QuantizationOption

DEFAULTS = EngineOptions()

EXTRAS = {
    "torch": "torch",
    "matplotlib": "bench",
    "plotly": "bench",
    "fastapi": "server",
    "uvicorn": "server",
    "prometheus_client": "server",
    "jinja2": "server",
}
"""Which extra brings a library that a command may miss."""

Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", callback=be_verbose, help="Say more on standard error.", is_eager=True
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help never cuts an option's name, and is there at once
    context_settings={"help_option_names": ["--help", "-h"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def nanoserve(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """A GPT-2 inference engine that measures what a KV cache buys and what it costs."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@spread
def generate(
    *,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT...", help="Text to continue; - reads standard input."),
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            metavar="F",
            help="One prompt a line; in .jsonl each is an object with prompt (text or token ids) "
            "and, if wanted, id. - reads standard input. Empty lines are passed over.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="F.jsonl", help="Append a line of JSON as each prompt is finished."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an --out that was interrupted.")
    ] = False,
    as_json: AsJson = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Then say on standard error what it cost.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write steps and requests as a trace for Perfetto."),
    ] = None,
    verbose: Verbose = False,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> None:
    """Continue a prompt, printed as it comes, or many prompts as one batch."""
    wanted = read_prompts(prompts or [], prompts_file)
    from nanoserve.cli.generate import generate_many, generate_one, keep_trace

    if trace:
        from nanoserve.bench.trace_events import check_trace_path

        check_trace_path(trace)
    if len(wanted) == 1 and prompts_file is None and out is None and not (as_json or resume):
        done = generate_one(wanted[0], engine, sampling)
    else:
        done = generate_many(wanted, engine, sampling, out=out, resume=resume, as_json=as_json)
    if trace:
        keep_trace(trace, done)
    if stats and done.engine:
        from nanoserve.cli.stats import describe_stats

        # Where a pipe took the text, both may yet meet in one place: 2>&1.
        newline = "\n" if done.is_mid_line else ""
        lines = describe_stats(done.engine, done.first_text_s)
        typer.echo(newline + "\n".join(lines), err=True)
    if done.num_broken:
        remark(broken_words(done.num_broken, len(wanted)))
        raise typer.Exit(EXIT_FAULT)


def broken_words(num_broken: int, num_prompts: int) -> str:
    return (
        f"{num_broken} of {num_prompts} ended early: the model's logits are not finite "
        "(damaged weights, or a --dtype too narrow for them)"
    )


@app.command()
@spread
def serve(*, verbose: Verbose = False, server: ServerOptions, engine: EngineOptions) -> None:
    """Serve OpenAI's HTTP API until SIGTERM or Ctrl-C."""
    from nanoserve.cli.serve import serve_until_stopped

    serve_until_stopped(server, engine)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def bench(context: typer.Context) -> None:
    """Measure what a KV cache buys and costs (--list says what there is to ask)."""
    from nanoserve.bench.runner import main as run_benchmarks

    let_interrupts_raise()
    raise typer.Exit(run_benchmarks(context.args))


@app.command()
def plan(
    *,
    model: Model = DEFAULTS.model,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Of the GPU, as 24GiB.", show_default="what is free on this machine"),
    ] = None,
    dtype: Dtype = DEFAULTS.dtype,
    kv_cache_dtype: KVCacheDtype = DEFAULTS.kv_cache_dtype,
    quantization: Annotated[
        str,
        typer.Option(
            help="Of the weights, as generate has it.",
            parser=one_of(get_args(QuantizationOption)),
            metavar="|".join(get_args(QuantizationOption)),
        ),
    ] = DEFAULTS.quantization,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of each sequence.",
            show_default="all the model has",
            parser=integer,
            metavar="INTEGER",
        ),
    ] = None,
    ceilings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What the machine can do: JSON, or records of bench ceilings.",
            show_default="as measured here",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what fits into a memory, and how fast a step should be; nothing is loaded."""
    from nanoserve.cli.plan import plan_asked_for
    from nanoserve.planner.plan import plan_json, plan_tables

    made = plan_asked_for(
        model,
        gpu_memory=gpu_memory,
        context=context,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        quantization=quantization,
        ceilings=ceilings,
    )
    if as_json:
        typer.echo(json.dumps(plan_json(made), indent=2, allow_nan=False))
        return
    for table in plan_tables(made):
        show(table)


@app.command()
def models(*, as_json: AsJson = False) -> None:
    """List the models that are at hand without a network."""
    from rich import box
    from rich.table import Table

    from nanoserve.model.hub import list_models
    from nanoserve.planner.memory import format_bytes

    found = list_models()
    if as_json:
        typer.echo(json.dumps([asdict(model) for model in found], indent=2, default=str))
        return
    table = Table("model", "kind", "size", "revision", box=box.SIMPLE_HEAD)
    table.add_column("folder", overflow="fold")  # a path that was cut short is of no use
    for model in found:
        table.add_row(
            printable(model.name),
            model.kind if model.complete else f"{model.kind}, incomplete",
            "" if model.size_bytes is None else format_bytes(model.size_bytes),
            printable(model.revision or ""),
            "built-in shape, random weights"
            if model.folder is None
            else printable(str(model.folder)),
        )
    show(table)


@app.command()
@spread
def verify(*, as_json: AsJson = False, verbose: Verbose = False, engine: EngineOptions) -> None:
    """Prove on this machine that every way of generating gives the tokens of the naive one."""
    from rich import box
    from rich.table import Table

    from nanoserve.llm import engine_config
    from nanoserve.verify import WAYS
    from nanoserve.verify import verify as prove

    config = engine_config(**engine.values())
    with LateProgress("verifying", len(WAYS) + 1) as bar:
        found = prove(config, progress=lambda _name: bar.advance())
    if as_json:
        typer.echo(json.dumps({**asdict(found), "ok": found.ok}, indent=2))
    else:
        table = Table(
            "way", "tokens that differ", "largest error", "it happened", "", box=box.SIMPLE
        )
        for way in found.ways:
            table.add_row(
                way.name,
                f"{way.num_different} of {way.num_tokens}",
                "none: equal bits" if way.bit_equal else f"{way.max_error:.1e} nats",
                way.evidence or "no",
                "ok" if found.passed(way) else "FAILED",
            )
        show(table)
        setting = ", ".join(f"{name} {value}" for name, value in found.setting.items())
        allowed = f"may differ by {found.bound:g} nats" if found.bound else "must be equal bits"
        typer.echo(f"{setting}; log-probabilities {allowed}")
    if not found.ok:
        remark("not every way agrees with the naive one: see above")
        raise typer.Exit(EXIT_FAULT)


@app.command()
def report(
    *,
    root: Annotated[
        Path, typer.Option(help="The project: its results/ are read, its texts written.")
    ] = Path(),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a text differs.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page for a browser, all in one file.",
            show_default="results/report.html of the project",
        ),
    ] = None,
) -> None:
    """Render RESULTS.md, the README's numbers, the plots and a page from what was recorded."""
    from nanoserve.bench import page
    from nanoserve.bench import report as rendering

    results = rendering.load(root / "results")
    for line in results.skipped:
        remark(line)
    if check:
        differing = rendering.check(root, results)
        for line in differing:
            remark(line)
        raise typer.Exit(EXIT_FAULT if differing else EXIT_OK)
    let_interrupts_raise()
    for path in rendering.write(root, results):
        typer.echo(path)
    typer.echo(page.write(html or root / rendering.RESULTS_FOLDER / page.PAGE_FILE, results))


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: run one command and exit with its code."""
    with manners():
        code = run(sys.argv[1:] if arguments is None else arguments)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. What is no error of the user or the machine passes."""
    try:
        code = invoke(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        abandon_stdout()
        return EXIT_OK
    except typer.TyperException as error:
        remark(error.format_message())
        return error.exit_code
    except ValueError as error:
        remark(str(error))
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        return missing(error)
    except (OSError, MemoryError, RuntimeError) as error:
        abandon_stdout()
        remark(describe_fault(error))
        logger.info("where it happened:", exc_info=error)
        return EXIT_FAULT
    return code


def invoke(arguments: Sequence[str]) -> int:
    """Parse and run; not by typer's own `main`, which treats Ctrl-C and closed pipes its way."""
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    return EXIT_OK


def missing(error: ModuleNotFoundError) -> int:
    """A library that an extra brings is not installed; anything else is a fault to be seen."""
    if error.name not in EXTRAS:
        raise error
    remark(f"{error.name} is not installed: pip install 'nanoserve[{EXTRAS[error.name]}]'")
    return EXIT_FAULT


def describe_fault(error: OSError | MemoryError | RuntimeError) -> str:
    """What failed, and for a step that failed also why."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    words = str(error) or type(error).__name__
    return words if error.__cause__ is None else f"{words}: {error.__cause__}"
