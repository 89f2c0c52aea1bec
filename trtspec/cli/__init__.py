"""The command line: a table of verbs, and the one place where exceptions become exit codes.

Verbs are imported when they are called, so ``trtspec --help`` needs neither torch nor pydantic nor yaml.
Exit codes: 0 pass, 1 a gate failed, 2 bad input, 3 the machine lacks something, 4 inconclusive (see
:mod:`trtspec.errors`); 70 a bug, 130 interrupted, 141 the reader of a pipe went away.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from trtspec import __version__
from trtspec.cli.output import Session, print_error, print_error_json
from trtspec.errors import EXIT_BAD_INPUT, EXIT_MISSING, InputError, Problem, TrtspecError

EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

COMMANDS: dict[str, tuple[str, str]] = {
    "recommend": ("trtspec.cli.recommend:recommend", "Recommend a recipe for a scenario, model and GPU."),
    "estimate": ("trtspec.cli.estimate:estimate", "Price a recipe on a GPU: memory, latency, throughput."),
    "sweep": ("trtspec.cli.estimate:sweep", "Vary alpha, K, batch, context ...; tables and plots."),
    "explain": ("trtspec.cli.estimate:explain", "Trace a number to its formula, inputs and source."),
    "init": ("trtspec.cli.recipe:init", "Write a starter recipe, every key explained."),
    "lint": ("trtspec.cli.recipe:lint", "Check recipes; report every problem with line and key."),
    "schema": ("trtspec.cli.recipe:schema", "Print the recipe's JSON Schema or its reference."),
    "fetch": ("trtspec.cli.fetch:fetch", "Put a small sample model into the cache."),
    "quantize": ("trtspec.cli.build:quantize", "Quantize a checkpoint with ModelOpt."),
    "build": ("trtspec.cli.build:build", "Build a recipe's engine into engines/NAME."),
    "list": ("trtspec.cli.build:list_engines", "List built engines."),
    "inspect": ("trtspec.cli.build:inspect", "Show what an engine holds and check its hashes."),
    "serve": ("trtspec.cli.serve:serve", "Serve an engine with Triton."),
    "generate": ("trtspec.cli.serve:generate", "Generate text with a served engine, streamed."),
    "verify": ("trtspec.cli.verify:verify", "Check an engine: lossless, good enough, faster."),
    "completion": ("trtspec.cli.completion:completion", "Print a shell completion script."),
}
"""Verb -> (module:attribute, short help), in the order of ``trtspec --help``."""

_EXTRA_OF_PACKAGE = {
    "torch": "embedded", "numpy": "embedded", "safetensors": "embedded", "tokenizers": "embedded",
    "jinja2": "embedded", "modelopt": "quantize", "transformers": "quantize", "accelerate": "quantize",
    "gguf": "sample", "pytriton": "triton", "tritonclient": "triton", "grpc": "triton", "scipy": "eval",
}  # fmt: skip


class _Verbs(click.Group):
    """A group whose commands are imported only when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            remedy = f"did you mean {close[0]}?" if close else "see trtspec --help"
            ctx.fail(f"no verb {args[0]!r}; {remedy}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, short) for name, (_, short) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        verbs = [
            CompletionItem(name, help=short)
            for name, (_, short) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=_Verbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, envvar="TRTSPEC_DEBUG", help="Show the traceback of a bug.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """One recipe from checkpoint to verdict: quantize, speculate, serve and verify LLMs around TensorRT-LLM.

    One YAML recipe drives build, serve and verify; start with trtspec init or recommend.
    """
    ctx.ensure_object(Session).debug = debug


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; the messages of errors go to stderr (or, with
    ``--json``, as JSON to stdout). Never raises, except SystemExit for shell completion."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    session = Session(
        debug=os.environ.get("TRTSPEC_DEBUG", "") not in ("", "0", "false"),
        json="--json" in arguments,  # known before parsing, for errors of the parsing itself
    )
    stdout = sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        result = cli.main(
            arguments, prog_name="trtspec", standalone_mode=False, obj=session, color=session.color
        )
        sys.stdout.flush()
    except TrtspecError as error:
        return _report(session, error)
    except click.ClickException as error:
        return _report_usage(session, error)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _quiet_pipe()
    except SystemExit as error:
        if sys.stdout is not stdout:  # click wraps it when a pipe breaks
            return _quiet_pipe()
        return error.code if isinstance(error.code, int) else EXIT_BUG
    except Exception as error:
        return _report_other(session, error)
    return int(result) if isinstance(result, int) else 0


def _report(session: Session, error: TrtspecError) -> int:
    if session.json:
        problems = error.problems if isinstance(error, InputError) else (Problem(str(error)),)
        print_error_json(error.exit_code, problems)
    else:
        for line in str(error).splitlines():
            print_error(session, line)
    return error.exit_code


def _report_usage(session: Session, error: click.ClickException) -> int:
    if session.json:
        print_error_json(EXIT_BAD_INPUT, (Problem(error.format_message()),))
    else:
        error.show()
    return EXIT_BAD_INPUT


def _report_other(session: Session, error: Exception) -> int:
    """A package that is not installed, else a bug."""
    package = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, ModuleNotFoundError) and package in _EXTRA_OF_PACKAGE:
        code = EXIT_MISSING
        message = (
            f"the Python package {package} is not installed; "
            f"run: pip install 'trtspec[{_EXTRA_OF_PACKAGE[package]}]'"
        )
    else:
        code = EXIT_BUG
        text = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"{text}; this is a bug; --debug shows the traceback"
    if session.debug:
        traceback.print_exception(error)
    if session.json:
        print_error_json(code, (Problem(message),))
    else:
        print_error(session, message)
    return code


def _quiet_pipe() -> int:
    """Whoever read our output has enough; nothing may be written at exit either."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass  # stdout is not a file
    finally:
        os.close(devnull)
    return EXIT_PIPE
