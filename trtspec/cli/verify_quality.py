"""The options of ``trtspec verify`` about quality: tasks, a judge, retrieval from long prompts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trtspec.cli.output import UserPath

if TYPE_CHECKING:
    from trtspec.verify.settings import Settings

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = UserPath()


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

    def applied(self, settings: Settings) -> Settings:
        """``settings`` with these; what was not given stays as it is."""
        names = tuple(name.strip() for name in (self.lm_eval or "").split(",") if name.strip())
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
        "--retrieval-tokens", type=click.IntRange(64), help="Longest of them.  [default: max_seq_tokens]"
    ),
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
