"""The command line: a table of verbs, and the one place where exceptions become exit codes.

Verbs are imported when they are called, so ``trtspec --help`` needs neither torch nor pydantic nor yaml.
Exit codes: 0 pass, 1 a gate failed, 2 bad input, 3 the machine lacks something, 4 inconclusive (see
:mod:`trtspec.errors`); 70 a bug, 130 interrupted, 141 the reader of a pipe went away.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import TextIO

import click
from click.shell_completion import CompletionItem

from trtspec import __version__
from trtspec.cli.output import Session, print_error, print_error_json
from trtspec.errors import EXIT_BAD_INPUT, EXIT_BUG, EXIT_MISSING, InputError, Problem, TrtspecError
from trtspec.user_files import explain_os_error

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
    "migrate": ("trtspec.cli.migrate:migrate", "Move a recipe to another backend; account for every key."),
    "import": ("trtspec.cli.migrate:import_", "Make a recipe from an engine or an LLM API options file."),
    "fetch": ("trtspec.cli.fetch:fetch", "Put a small sample model into the cache."),
    "quantize": ("trtspec.cli.build:quantize", "Quantize a checkpoint with ModelOpt."),
    "draft": ("trtspec.cli.draft:draft", "Draft heads: train, check, convert, measure."),
    "build": ("trtspec.cli.build:build", "Build a recipe's engine into engines/NAME."),
    "list": ("trtspec.cli.engines:list_engines", "List built engines."),
    "inspect": ("trtspec.cli.engines:inspect", "Show what an engine holds and check its hashes."),
    "serve": ("trtspec.cli.serve:serve", "Serve an engine with Triton."),
    "generate": ("trtspec.cli.serve:generate", "Generate text with a served engine, streamed."),
    "verify": ("trtspec.cli.verify:verify", "Check an engine: lossless, good enough, faster."),
    "report": ("trtspec.cli.report:report", "Show a stored report; recheck its evidence."),
    "bench": ("trtspec.cli.bench:bench", "Measure speed side by side with peers, in one run."),
    "doctor": ("trtspec.cli.doctor:doctor", "Look at this machine: which backends can run, what is lacking."),
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
    try:
        return _main(argv)
    finally:
        # What could not be written would be tried again by Python at exit, which then ends with 120.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                _discard(stream)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    session = Session(
        debug=os.environ.get("TRTSPEC_DEBUG", "") not in ("", "0", "false"),
        json="--json" in arguments,  # known before parsing, for errors of the parsing itself
    )
    _open_closed_streams()
    stdout = sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with _terminable() as received:
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
            with contextlib.suppress(OSError):
                click.echo("interrupted", err=True)
            return 128 + received[0] if received else EXIT_INTERRUPTED
        except BrokenPipeError:
            return _quiet_pipe()
        except SystemExit as error:
            if sys.stdout is not stdout:  # click wraps it when a pipe breaks
                return _quiet_pipe()
            return error.code if isinstance(error.code, int) else EXIT_BUG
        except Exception as error:
            return _report_other(session, error, arguments)
    return int(result) if isinstance(result, int) else 0


def _open_closed_streams() -> None:
    """Give a standard stream that the caller closed to /dev/null: the next file to be opened would get its
    number, and what is meant for the user would be written into that file."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


@contextlib.contextmanager
def _terminable() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP end the work as Ctrl-C does, so that nothing is left half written; yields the
    list of what was received. A signal that the caller ignores (nohup) or handles stays so."""
    received: list[int] = []

    def end(signum: int, _frame: object) -> None:
        received.append(signum)
        if len(received) == 1:  # a second one must not cut short the tidying up
            raise KeyboardInterrupt

    handled = []
    if threading.current_thread() is threading.main_thread():
        handled = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for signum in handled:
        signal.signal(signum, end)
    try:
        yield received
    finally:
        for signum in handled:
            signal.signal(signum, signal.SIG_DFL)


def _report(session: Session, error: TrtspecError) -> int:
    problems = error.problems if isinstance(error, InputError) else (Problem(str(error)),)
    return _tell(session, error.exit_code, problems)


def _tell(session: Session, code: int, problems: Sequence[Problem]) -> int:
    """Print the problems where they are wanted, or where they can be; return ``code``."""
    if session.json:
        try:
            print_error_json(code, problems)
            sys.stdout.flush()
            return code
        except OSError:
            _discard(sys.stdout)
    for problem in problems:
        for line in str(problem).splitlines():
            print_error(session, line)
    return code


def _report_usage(session: Session, error: click.ClickException) -> int:
    if session.json:
        return _tell(session, EXIT_BAD_INPUT, (Problem(error.format_message()),))
    with contextlib.suppress(OSError):
        error.show()
    return EXIT_BAD_INPUT


def _report_other(session: Session, error: Exception, arguments: Sequence[str]) -> int:
    """What the operating system refused, bytes that are no text, a package that is not installed, else a
    bug."""
    package = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, OSError) and error.errno is not None:
        known = _os_error(session, error)
        return _tell(session, known.exit_code, (Problem(str(known)),))
    if isinstance(error, UnicodeError) and (found := _undecodable(error, arguments)):
        return _tell(session, EXIT_BAD_INPUT, (Problem(found),))
    if isinstance(error, MemoryError):
        return _tell(session, EXIT_MISSING, (Problem("not enough memory; free some"),))
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
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    return _tell(session, code, (Problem(message),))


def _os_error(session: Session, error: OSError) -> TrtspecError:
    if error.filename is None:
        try:
            os.getcwd()
        except FileNotFoundError:
            return InputError("the current folder does not exist any more; cd to one that does")
        try:
            # Writes that fail do not say into what; an empty one would succeed.
            os.write(sys.stdout.fileno(), b"\n")
        except (OSError, ValueError, AttributeError) as refused:
            if isinstance(refused, OSError) and refused.errno == error.errno:
                _discard(sys.stdout)
                session.json = False
                return explain_os_error(refused, "standard output")
    return explain_os_error(error)


def _undecodable(error: UnicodeError, arguments: Sequence[str]) -> str | None:
    """For bytes of the user's that are not UTF-8: where they are. Python keeps those of arguments as lone
    surrogates, which nothing can encode."""
    for argument in arguments:
        raw = os.fsencode(argument)
        if raw.decode("utf-8", "replace") != argument:
            return f"the argument {ascii(raw)[1:]} is not UTF-8; write it in UTF-8"
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return f"the input is not UTF-8: byte 0x{byte:02x} at {error.start}; write it in UTF-8"
    return None


def _quiet_pipe() -> int:
    """Whoever read our output has enough."""
    _discard(sys.stdout)
    return EXIT_PIPE


def _discard(stream: TextIO) -> None:
    """Nothing more may be written to ``stream``, not by Python at exit either."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, stream.fileno())
    except (OSError, ValueError, AttributeError):
        pass  # not a file
    finally:
        os.close(devnull)
