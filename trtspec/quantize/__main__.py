"""``python -m trtspec.quantize --model DIR --out DIR --quantization JSON``: one quantization, one process.

stdout: JSON lines ``{"progress": {"step", "done", "total"}}`` and lines for people. stderr: ``error: ...``.
Exit codes are those of :mod:`trtspec.errors`; 130 after Ctrl-C, SIGTERM or SIGHUP, which leave nothing
behind.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from trtspec.errors import InputError, Problem
from trtspec.process import as_child
from trtspec.quantize import quantize
from trtspec.recipe import Quantization
from trtspec.recipe_file import parse_section
from trtspec.user_files import parse_json


def parse_quantization(text: str) -> Quantization:
    """The recipe's ``quantization`` mapping from JSON; InputError with every problem."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InputError(Problem(f"not JSON: {error}", key="quantization")) from None
    quantization: Quantization = parse_section("quantization", value)
    return quantization


def _print_progress(step: str, done: int, total: int) -> None:
    print(json.dumps({"progress": {"step": step, "done": done, "total": total}}), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run with ``argv`` (None: the process's own); return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trtspec.quantize", description="Quantize a checkpoint.")
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder, 16 bit"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--quantization", required=True, metavar="JSON", help="the recipe's quantization mapping, as JSON"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args(argv)
    remedy = "not enough memory; free some, or quantize on a larger machine"
    return as_child(lambda: _quantize(arguments), no_memory=remedy)


def _quantize(arguments: argparse.Namespace) -> None:
    quantize(
        arguments.model,
        arguments.out,
        parse_quantization(arguments.quantization),
        progress=_print_progress,
        say=lambda line: print(line, flush=True),
        device=arguments.device,
    )


if __name__ == "__main__":
    # Before torch is imported: spinning OpenMP threads starve each other on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    sys.exit(main())
