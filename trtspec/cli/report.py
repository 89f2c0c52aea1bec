"""``trtspec report``: show a stored report, in other forms and languages, or compute its verdicts again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trtspec.cli.output import UserPath, json_option, print_json
from trtspec.errors import InputError, Problem

if TYPE_CHECKING:
    from trtspec.verify.i18n import Lang
    from trtspec.verify.report import Report

_FILE = UserPath()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def form_options(function: _Function) -> _Function:
    """The forms that a report can be written in, and their language."""
    for option in reversed(
        [
            click.option("--markdown", type=_FILE, help="Write the report as Markdown to this file."),
            click.option("--html", type=_FILE, help="Write it as one HTML file that needs no network."),
            click.option("--junit", type=_FILE, help="Write it as JUnit XML."),
            click.option(
                "--lang",
                type=click.Choice(("en", "zh")),
                default="en",
                help="Language of what is printed and written; the JSON is the same.",
            ),
        ]
    ):
        function = option(function)
    return function


def check_outputs(outputs: Mapping[str, Path | None], reads: Mapping[str, Path | None]) -> None:
    """Raises InputError where an output (by option) is another one too, or would replace or change what is
    read (files, and folders that are sealed), and what :func:`~trtspec.user_files.check_writable` does:
    before minutes of work, and before anything is lost."""
    from trtspec.user_files import check_writable, shown_path

    problems = []
    taken: dict[Path, str] = {}
    kept = {Path(os.path.realpath(path)): what for what, path in reads.items() if path is not None}
    for option, path in sorted(outputs.items(), key=lambda one: one[0] != "--bundle"):
        if path is None:
            continue
        place = Path(os.path.realpath(path))
        found = next((what for one, what in kept.items() if one == place or one in place.parents), None)
        if found is not None:
            message = f"would change {found}, which is read; name another place"
            problems.append(Problem(message, file=shown_path(path), key=option))
        elif any(taken.get(one) == "--bundle" for one in place.parents):
            problems.append(
                Problem("lies in --bundle, a folder of its own", file=shown_path(path), key=option)
            )
        elif place in taken and (place.is_file() or not place.exists()):  # a pipe takes several
            message = f"is the file of {taken[place]} too; name another one"
            problems.append(Problem(message, file=shown_path(path), key=option))
        taken[place] = option
    if problems:
        raise InputError(problems)
    for option, path in outputs.items():
        if path is not None and option != "--bundle":
            check_writable(path)


def rendered(
    report: Report, lang: Lang, *, markdown: Path | None, html: Path | None, junit: Path | None
) -> list[tuple[Path, Callable[[], bytes]]]:
    """The files that were asked for, with what makes their content."""
    from trtspec.verify import render
    from trtspec.verify.html import page
    from trtspec.verify.junit import junit as xml

    forms = ((markdown, render.markdown), (html, page), (junit, xml))

    def made(form: Callable[[Report, Lang], str]) -> bytes:
        # Half of a surrogate pair out of a model's text is no UTF-8.
        return form(report, lang).encode("utf-8", "replace")

    return [(path, partial(made, form)) for path, form in forms if path is not None]


@click.command()
@click.argument("report", type=_FILE, required=False)
@click.option("--recheck", type=_FILE, metavar="DIR", help="Compute every verdict of this bundle again.")
@click.option(
    "--against", type=_FILE, metavar="OLD", help="A stored report or bundle: is REPORT worse than that?"
)
@form_options
@json_option
def report(
    report: Path | None,
    recheck: Path | None,
    against: Path | None,
    markdown: Path | None,
    html: Path | None,
    junit: Path | None,
    lang: Lang,
    as_json: bool,
) -> int:
    """Show the stored REPORT, a file of verify -o or a folder of verify --bundle.

    The exit code is the report's: 0 every gate holds, 1 one does not, 4 undecided. With --recheck
    every verdict is computed again from the bundle's raw records, without model or engine: 1 if one
    differs or a file was changed, 4 if a required one has no records.
    """
    if (report is None) == (recheck is None):
        raise InputError("name a REPORT or a bundle with --recheck DIR, one of them")
    if recheck is not None:
        if any((against, markdown, html, junit)):
            raise InputError("--recheck stands alone; show the report in its folder without it")
        return _recheck(recheck, as_json)
    if report is None:
        raise InputError("name a REPORT")
    from trtspec.user_files import write_user_file
    from trtspec.verify import render
    from trtspec.verify.against import read_old, with_regressions
    from trtspec.verify.report import to_json

    outputs = {"--markdown": markdown, "--html": html, "--junit": junit}
    check_outputs(outputs, {"REPORT": report, "--against": against})
    found = read_old(report)
    if against is not None:
        old = read_old(against, source_digest=found.source_digest)
        found = with_regressions(found, old, str(against))
    for path, content in rendered(found, lang, markdown=markdown, html=html, junit=junit):
        write_user_file(path, content())
    if as_json:
        print_json("report", {"report": to_json(found)})
    else:
        click.echo(render.terminal(found, lang=lang))
    return found.exit_code


def _recheck(folder: Path, as_json: bool) -> int:
    from dataclasses import asdict

    from trtspec.user_files import visible
    from trtspec.verify.recheck import recheck

    result = recheck(folder)
    if as_json:
        print_json("recheck", {"exit_code": result.exit_code, **asdict(result)})
        return result.exit_code
    for problem in result.problems:
        click.echo(f"problem       {visible(problem)}")
    for one in result.findings:
        stored = one.stored or "absent"
        status = "not recomputed" if one.status == "no records" else one.status
        click.echo(f"{status:<14} {visible(one.check)}: {stored}")
        for line in one.differences:
            click.echo(f"               {visible(line)}")
    counts = {kind: sum(one.status == kind for one in result.findings) for kind in ("same", "differs")}
    words = {0: "every verdict follows from its records", 1: "NOT what its records say", 4: "undecided"}
    line = f"{counts['same']} verdicts computed again are the same, {counts['differs']} differ"
    if result.undecided:
        line += f"; required and without records: {visible(', '.join(result.undecided))}"
    click.echo(f"recheck: {words[result.exit_code]} ({line})")
    return result.exit_code
