"""``trtspec completion``: the shell's own script, to be sourced."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell completion script.

    \b
    bash  trtspec completion bash > ~/.local/share/bash-completion/completions/trtspec
    zsh   trtspec completion zsh > "${fpath[1]}/_trtspec"
    fish  trtspec completion fish > ~/.config/fish/completions/trtspec.fish
    """
    found = get_completion_class(shell)
    if found is None:  # click.Choice admits only shells that click knows
        raise click.UsageError(f"no completion for {shell}")
    script = found(ctx.find_root().command, {}, "trtspec", "_TRTSPEC_COMPLETE")
    # Not script.source(): it starts a shell to look at its version.
    click.echo(script.source_template % script.source_vars())
