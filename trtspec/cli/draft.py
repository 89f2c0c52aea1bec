"""``trtspec draft``: draft heads from training to the recipe that uses them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click

from trtspec.cli.output import FloatRange, Progress, UserPath, human_seconds, json_option, print_json

VERBS: dict[str, tuple[str, str]] = {
    "train": ("trtspec.cli.draft:train", "Train Medusa, EAGLE or EAGLE-3 heads on the target's own answers."),
    "check": ("trtspec.cli.draft_check:check", "Hold heads against a target before anything runs."),
    "convert": ("trtspec.cli.draft_check:convert", "Write heads in the layout that a backend wants."),
    "measure": ("trtspec.cli.draft_measure:measure", "Measure acceptance; choose the tree that pays."),
}
"""Verb -> (module:attribute, short help)."""


class _DraftVerbs(click.Group):
    """A group whose commands are imported only when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _) in VERBS.items() if _exists(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, attribute = VERBS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, VERBS[name][1]) for name in self.list_commands(ctx)])


def _exists(module: str) -> bool:
    return (Path(__file__).parent / f"{module.split(':')[0].rsplit('.', 1)[1]}.py").is_file()


@click.group(cls=_DraftVerbs)
def draft() -> None:
    """Draft heads: train, check, convert, measure."""


@draft.command()
@click.option(
    "--kind", type=click.Choice(["medusa", "eagle", "eagle3"]), required=True, help="What to train."
)
@click.option(
    "--model", required=True, metavar="DIR|ID", help="The target: a folder, sample:NAME or a hub id."
)
@click.option(
    "--data", default="builtin", metavar="FILE", help="Prompts: JSONL with messages or text per line."
)
@click.option("-o", "--output", type=UserPath(), required=True, metavar="HEADS", help="Folder of the heads.")
@click.option("--work", type=UserPath(), help="Answers and checkpoint, to go on from.  [default: HEADS.work]")
@click.option(
    "--answers", type=UserPath(), help="Folder of answers, to share between kinds.  [default: in --work]"
)
@click.option(
    "--target-recipe", type=UserPath(), metavar="RECIPE|ENGINE", help="Imitate its quantized target."
)
@click.option("--max-prompts", type=click.IntRange(1), help="Only the first so many prompts.")
@click.option("--max-tokens", type=click.IntRange(1), help="Learn only the first so many answered tokens.")
@click.option("--new-tokens", type=click.IntRange(8, 2**20), default=160, help="Longest answer.")
@click.option("--batch", type=click.IntRange(1, 4096), default=64, help="Prompts answered at once.")
@click.option("--temperature", type=FloatRange(0), default=0.0, help="Of the answers; 0: greedy.")
@click.option("--epochs", type=FloatRange(0, min_open=True), help="Times that the answers are learnt.")
@click.option("--learning-rate", type=FloatRange(0, min_open=True), default=1e-3, help="Its peak.")
@click.option("--rows", type=click.IntRange(64), default=2048, help="Positions of one training step.")
@click.option(
    "--draft-vocab", type=click.IntRange(16), help="Tokens that EAGLE-3 drafts (others: of the loss)."
)
@click.option("--num-heads", type=click.IntRange(1, 8), default=4, help="Heads of Medusa.")
@click.option("--num-layers", type=click.IntRange(1, 4), default=1, help="Blocks of each Medusa head.")
@click.option(
    "--steps", type=click.IntRange(1, 8), default=3, help="Draft steps unrolled in training (EAGLE)."
)
@click.option(
    "--hard-share",
    type=FloatRange(0, 1),
    default=0.5,
    help="Weight of the said token; the rest is the target's law.",
)
@click.option(
    "--patience",
    type=click.IntRange(0),
    default=4,
    help="Evaluations without gain before stopping; 0: never.",
)
@click.option(
    "--max-minutes", type=FloatRange(0, min_open=True), help="Stop training then, with the best so far."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**62), default=0, help="Of weights, batches and sampled answers."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to compute.")
@click.option("--force", is_flag=True, help="Replace HEADS.")
@click.option("--dry-run", is_flag=True, help="Print what would be done.")
@json_option
def train(
    kind: Any,
    model: str,
    data: str,
    output: Path,
    work: Path | None,
    answers: Path | None,
    target_recipe: Path | None,
    max_prompts: int | None,
    max_tokens: int | None,
    new_tokens: int,
    batch: int,
    temperature: float,
    epochs: float | None,
    learning_rate: float,
    rows: int,
    draft_vocab: int | None,
    num_heads: int,
    num_layers: int,
    steps: int,
    hard_share: float,
    patience: int,
    max_minutes: float | None,
    seed: int,
    device: str,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train draft heads on the target's own answers.

    The embedded engine answers the prompts, then the heads learn what the target said, in the forward that
    will draft. Both go on where an interrupted run stopped. The curve of the training is written beside the
    weights; "acceptance" is measured on answers kept back.
    """
    from trtspec.model_source import resolve_model

    folder = resolve_model(model, Path.cwd())
    work = work or output.with_name(output.name + ".work")
    if dry_run:
        _plan(kind, folder, data, output, work, answers, target_recipe, as_json)
        return
    from trtspec.draft.answers import AnswerSettings
    from trtspec.draft.curves import curve_text
    from trtspec.draft.run import DEFAULT_EPOCHS, TrainingJob, run_training
    from trtspec.draft.training import TrainSettings

    job = TrainingJob(
        kind=kind,
        model=folder,
        data=data,
        out=output,
        work=work,
        answers=answers,
        target_recipe=target_recipe,
        max_prompts=max_prompts,
        max_tokens=max_tokens,
        vocab=draft_vocab,
        num_heads=num_heads,
        num_layers=num_layers,
        num_steps=steps,
        hard_share=hard_share,
        max_minutes=max_minutes,
        device=device,
        replace=force,
        answer_settings=AnswerSettings(
            max_new_tokens=new_tokens, batch_size=batch, temperature=temperature, seed=seed
        ),
        train_settings=TrainSettings(
            epochs=epochs or DEFAULT_EPOCHS[kind],
            learning_rate=learning_rate,
            rows=rows,
            seed=seed,
            patience=patience or None,
        ),
    )
    with Progress() as progress:
        record = run_training(job, progress, progress.say)
    if as_json:
        from dataclasses import asdict

        print_json("draft_train", {"heads": str(output), **asdict(record)})
        return
    click.echo(curve_text(kind, record.curve))
    rates = ", ".join(f"{rate:.3f}" for rate in record.acceptance)
    click.echo(
        f"{output}: {kind} heads, {record.trained_tokens:,} tokens seen ({record.epochs:.1f} epochs) in "
        f"{human_seconds(record.training_s)} ({human_seconds(record.training_cpu_s)} of CPU)"
    )
    click.echo(
        f"acceptance length {record.acceptance_length:.2f} as a chain (tokens per target step, greedy, on "
        f"answers kept back; by level {rates}); a tree accepts more"
    )


def _plan(
    kind: str,
    model: Path,
    data: str,
    out: Path,
    work: Path,
    answers: Path | None,
    recipe: Path | None,
    as_json: bool,
) -> None:
    from trtspec.text import Tokenizer

    digest = Tokenizer.load(model).digest
    steps = [
        f"answer the prompts of {data} with {recipe or model} into {answers or work / 'answers'}",
        f"train {kind} heads, checkpoint {work / f'{kind}.checkpoint'}",
        f"write {out}",
    ]
    if as_json:
        print_json(
            "draft_train_plan", {"kind": kind, "model": str(model), "tokenizer": digest, "steps": steps}
        )
    else:
        for step in steps:
            click.echo(f"would {step}")
