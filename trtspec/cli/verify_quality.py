"""The options of ``trtspec verify`` about quality: tasks, a judge, retrieval from long prompts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trtspec.cli.output import FloatRange, UserPath
from trtspec.errors import InputError, Problem

if TYPE_CHECKING:
    from trtspec.recipe import Gates
    from trtspec.verify.endpoint_quality import Plan
    from trtspec.verify.settings import Settings

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = UserPath()
_LIMITS = ("max_perplexity_ratio", "max_task_loss", "max_retrieval_loss", "max_degenerate_rise")
_AT_ENDPOINTS = (*_LIMITS, "gates", "tokenizer")


@dataclasses.dataclass(frozen=True)
class QualityOptions:
    """What the user asked for."""

    tasks: tuple[Path, ...]
    task_limit: int | None
    lm_eval: str | None
    lm_eval_path: Path | None
    judge: str | None
    retrieval: bool
    retrieval_copies: int | None
    retrieval_tokens: int | None
    tokenizer: Path | None
    gates: Path | None
    max_perplexity_ratio: float | None
    max_task_loss: float | None
    max_retrieval_loss: float | None
    max_degenerate_rise: float | None

    def check(self, *, endpoints: bool) -> None:
        """Raises InputError for what belongs to endpoints where there are none."""
        given = [name for name in _AT_ENDPOINTS if getattr(self, name) is not None]
        if given and not endpoints:
            text = (
                "belongs to --url URL --baseline-url URL; the gates of an ENGINE stand in its recipe: change "
                "them there and trtspec build again, which keeps the weights"
            )
            raise InputError([Problem(text, key=f"--{name.replace('_', '-')}") for name in given])

    def at_endpoints(self, settings: Settings) -> Plan:
        """What two endpoints are asked about quality. Raises what the plan of it does."""
        from trtspec.verify.endpoint_quality import plan_quality

        return plan_quality(settings, self._gates(), self.tokenizer)

    def _gates(self) -> Gates:
        """The gates of ``--gates``, with those that were given one by one in their place."""
        from trtspec.recipe import Gates
        from trtspec.recipe_file import load_recipe

        gates = Gates(max_perplexity_ratio=None) if self.gates is None else load_recipe(self.gates).gates
        given = {name: getattr(self, name) for name in _LIMITS}
        return gates.model_copy(update={name: one for name, one in given.items() if one is not None})

    def applied(self, settings: Settings) -> Settings:
        """``settings`` with these; what was not given stays as it is."""
        names = tuple(name.strip() for name in (self.lm_eval or "").split(",") if name.strip())
        if self.lm_eval is not None and not names:
            raise InputError(Problem("names no task; give them separated by commas", key="--lm-eval"))
        given = {
            "tasks": self.tasks or None,
            "task_limit": self.task_limit,
            "lm_eval": names or None,
            "lm_eval_path": self.lm_eval_path,
            "judge": self.judge,
            "retrieval": self.retrieval or None,
            "retrieval_copies": self.retrieval_copies,
            "retrieval_tokens": self.retrieval_tokens,
        }
        found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(settings, **found)


_LOSS = FloatRange(0, 0.5, min_open=True)
_OPTIONS = (
    click.option(
        "--tasks",
        type=_FILE,
        multiple=True,
        metavar="FILE",
        help="JSONL file of tasks whose answers can be checked (docs/quality.md); builtin: ours. Repeatable.",
    ),
    click.option("--task-limit", type=click.IntRange(1), help="Most items of each task.  [default: all]"),
    click.option("--lm-eval", metavar="TASKS", help="Tasks of lm-evaluation-harness, separated by commas."),
    click.option("--lm-eval-path", type=_FILE, metavar="DIR", help="Folder of its task files of your own."),
    click.option(
        "--judge",
        metavar="CMD",
        help="Command that scores answers of kind judge: reads a JSON file, prints a number from 0 to 1.",
    ),
    click.option(
        "--retrieval", is_flag=True, help="Look for numbers hidden in long prompts (quantized KV cache)."
    ),
    click.option(
        "--retrieval-copies", type=click.IntRange(1), help="Prompts of each length and depth.  [default: 1]"
    ),
    click.option(
        "--retrieval-tokens",
        type=click.IntRange(64),
        help="Longest of them.  [default: max_seq_tokens; --url: 1500]",
    ),
    click.option(
        "--tokenizer",
        type=_FILE,
        metavar="DIR",
        help="With --url: a folder with the model's tokenizer; counts tokens and renders chats.",
    ),
    click.option(
        "--gates", type=_FILE, metavar="RECIPE", help="With --url: judge quality and speed by its gates."
    ),
    click.option(
        "--max-perplexity-ratio", type=FloatRange(1, min_open=True), help="Gate for --url: perplexity."
    ),
    click.option("--max-task-loss", type=_LOSS, help="Gate for --url: loss of each task, 0.05: 5 points."),
    click.option("--max-retrieval-loss", type=_LOSS, help="Gate for --url: loss of --retrieval."),
    click.option("--max-degenerate-rise", type=_LOSS, help="Gate for --url: more answers that are no text."),
)


def quality_options(command: _Command) -> _Command:
    """The options, gathered into one argument ``quality``."""

    @functools.wraps(command)
    def gathered(*args: Any, **values: Any) -> Any:
        names = [field.name for field in dataclasses.fields(QualityOptions)]
        quality = QualityOptions(**{name: values.pop(name) for name in names})
        return command(*args, quality=quality, **values)

    wrapped: Any = gathered
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]
