"""What ``trtspec verify`` does without an engine: plan a sample, and test itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from trtspec.cli.output import Progress, Session, print_json
from trtspec.errors import EXIT_GATE_FAILED, EXIT_PASS, InputError, Problem

if TYPE_CHECKING:
    from trtspec.verify.endpoint_sampled import DrawSettings

_Function = TypeVar("_Function", bound=Callable[..., Any])


def json_file_option(function: _Function) -> _Function:
    """``--json [FILE]`` (parameter ``json_file``): "-" without a file, None where it is not given."""

    def note(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
        ctx.ensure_object(Session).json = value == "-"
        return value

    return click.option(
        "--json",
        "json_file",
        is_flag=False,
        flag_value="-",
        metavar="[FILE]",
        is_eager=True,
        callback=note,
        help="Print JSON for programs, or write it to FILE.",
    )(function)


def mode_options(function: _Function) -> _Function:
    """``--sampled``, ``--sampled-tokens``, ``--plan`` and what belongs to it, ``--self-test``."""
    options = (
        click.option(
            "--sampled/--no-sampled",
            default=None,
            help="Hold sampled answers to the target's law.  [default: yes; quick: if a minute is enough]",
        ),
        click.option(
            "--sampled-tokens",
            type=click.IntRange(10),
            help="Tokens drawn for that.  [default: 1248; --url, a side: as --bias needs]",
        ),
        click.option(
            "--plan", is_flag=True, help="Print how many draws show a bias, and measure nothing; no ENGINE."
        ),
        click.option(
            "--bias",
            type=float,
            help="With --plan, --url: its size w^2.  [default: that of 2026, 0.004979; --url: 0.1]",
        ),
        click.option("--outcomes", type=int, help="With --plan: outcomes of the law.  [default: 3]"),
        click.option("--power", type=float, help="With --plan: the chance to find it.  [default: 0.99]"),
        click.option(
            "--self-test",
            is_flag=True,
            help="Plant faults in a tiny engine: which checks see them? Under a minute, no ENGINE.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def endpoint_draws(
    sampled: bool | None,
    *,
    quick: bool,
    prompts: int | None,
    tokens: int | None,
    bias: float | None,
    temperature: float | None,
) -> DrawSettings | None:
    """What is drawn of two endpoints; None with ``--no-sampled``. Raises InputError for a bias that cannot be
    found."""
    from trtspec.verify.endpoint_sampled import DrawSettings

    if sampled is False:
        return None
    limit = None if sampled else 60.0 if quick else DrawSettings.seconds
    given = {"prompts": prompts, "tokens": tokens, "bias": bias, "temperature": temperature}
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings = DrawSettings(seconds=limit, **known)
    _ = settings.needed
    return settings


def print_plan(bias: float | None, outcomes: int | None, power: float | None, json_file: str | None) -> int:
    """How many draws show a bias at the suite's alpha. Raises InputError for values out of range."""
    from trtspec.verify import power as planning
    from trtspec.verify.endpoint_sampled import DrawSettings

    size = planning.bias_size(planning.INTENDED, planning.PRODUCED) if bias is None else bias
    cells = 3 if outcomes is None else outcomes
    wanted = planning.POWER if power is None else power
    alpha = planning.SUITE_ALPHA
    known = planning.draws_needed(size, cells, alpha=alpha, power=wanted)
    spent = planning.look_levels(planning.LOOKS, alpha)[-1]
    with_looks = planning.draws_needed(size, cells, alpha=spent, power=wanted)
    fields = {
        "bias": size,
        "outcomes": cells,
        "power": wanted,
        "alpha": alpha,
        "draws": known,
        "draws_with_looks": with_looks,
        "draws_a_side_of_two_samples": 2 * known,
        "answers_of_endpoints": DrawSettings(prompts=1, bias=size).needed,
    }
    if json_file == "-":
        print_json("plan", fields)
        return EXIT_PASS
    if json_file is not None:
        write_json(json_file, {"schema": "trtspec.plan/1", **fields})
    named = " (10/60/30 % intended, 10.16/63.04/26.80 % produced)" if bias is None else ""
    click.echo(f"bias w^2 = {size:.6g} on {cells} outcomes{named}, power {wanted:g}, alpha {alpha:g}:")
    click.echo(f"  {known:,} draws against a known law, in one look")
    looks = ", ".join(f"{share:.0%}" for share in planning.LOOKS)
    click.echo(f"  {with_looks:,} at most with looks at {looks} of them")
    click.echo(f"  {2 * known:,} draws a side of two samples, neither law known")
    answers = fields["answers_of_endpoints"]
    click.echo(
        f"  {answers:,} answers a side to one prompt with --url, whatever the law (ten outcomes, four tests)"
    )
    return EXIT_PASS


def run_self_test(json_file: str | None) -> int:
    """Plant every fault; exit code 0 where all are caught and the simulated bias is found, else 1."""
    from trtspec.user_files import check_writable, user_path
    from trtspec.verify import faults

    if json_file not in (None, "-"):
        check_writable(user_path(str(json_file)))
    with Progress(quiet=json_file == "-") as progress:
        found = faults.self_test(on_fault=lambda name, done, total: progress("self-test", done, total))
    value = faults.to_json(found)
    if json_file == "-":
        click.echo(json.dumps(value, indent=2, allow_nan=False))
    else:
        click.echo("\n".join(faults.lines(found)))
        if json_file is not None:
            write_json(json_file, value)
    return EXIT_PASS if found.passed else EXIT_GATE_FAILED


def write_json(json_file: str, value: dict[str, Any]) -> None:
    """``value`` to the file of ``--json FILE``."""
    from trtspec.user_files import user_path, write_user_file

    write_user_file(user_path(json_file), json_bytes(value))


def json_bytes(value: dict[str, Any]) -> bytes:
    """What stands in the file of ``--json FILE``."""
    return (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()


_WITH = {
    "plan": ("bias", "outcomes", "power", "json_file", "lang"),
    "self_test": ("json_file", "lang"),
    "matrix": (
        "matrix_dir", "heads", "draft", "quick", "output", "markdown", "html", "junit", "lang", "bundle",
        "json_file",
    ),
}  # fmt: skip
"""Parameters that a mode without an ENGINE heeds."""


def refuse_stray(ctx: click.Context, **modes: bool) -> None:
    """Raises InputError for options that the mode which is on (by its parameter) would pass over: who asks
    for tasks or a comparison must not take a verdict without them for one with them."""
    for mode, on in modes.items():
        heeded = {mode, "engine", *_WITH[mode]}
        stray = [
            Problem(f"has no meaning with --{mode.replace('_', '-')}; leave it out", key=one.opts[-1])
            for one in ctx.command.params
            if one.name and one.name not in heeded
            if ctx.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
        ]
        if on and stray:
            raise InputError(stray)


def only_one_mode(engine: Path | None, *, plan: bool, self_test: bool, planning: bool) -> None:
    """Raises InputError where an engine, ``--plan`` and ``--self-test`` are given together, or none of
    them."""
    given = [
        name
        for name, on in (("ENGINE", engine is not None), ("--plan", plan), ("--self-test", self_test))
        if on
    ]
    problems = []
    if len(given) != 1:
        found = " and ".join(given) or "nothing"
        problems.append(f"found {found}; give one of ENGINE, --url, --matrix, --plan, --self-test")
    if planning and not plan:
        problems.append("--bias, --outcomes and --power belong to --plan")
    if problems:
        raise InputError([Problem(problem) for problem in problems])
