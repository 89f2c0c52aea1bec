"""Every error a user can meet, and the exit code it ends with.

    TrtspecError                      (never raised itself)
    ├── GateFailed             1      a check ran and its gate was not met
    ├── InputError             2      a recipe, file, folder, flag or request is wrong
    ├── MissingError           3      this machine lacks something (package, memory, disk, port, GPU)
    └── InconclusiveError      4      the evidence does not decide; more data would

Anything else that escapes is a bug and keeps its traceback.

A message names the place, what was found, what is allowed and what to do:
``recipes/chat.yaml:14: speculation.num_draft_tokens: 40 exceeds 32; lower it``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_PASS = 0
EXIT_GATE_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_MISSING = 3
EXIT_INCONCLUSIVE = 4
EXIT_BUG = 70
"""Of a process that a bug ended."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at one place.

    ``file`` and ``line`` (1-based) locate it when it came from a file; ``key`` is the dotted path
    inside the file (``speculation.num_draft_tokens``); ``message`` says found, allowed, remedy.
    """

    message: str
    file: str | None = None
    line: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        place = self.file or ""
        if self.file and self.line is not None:
            place = f"{self.file}:{self.line}"
        text = ": ".join(part for part in (place, self.key or "", self.message) if part)
        # What is wrong at a place is told in one line; and messages hold words of other people's files,
        # which must not steer a terminal.
        kept = "" if place or self.key else "\n\t"
        return "".join(
            c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii") for c in text
        )


class TrtspecError(Exception):
    """Base of the errors that are shown to a user as plain lines, without a traceback."""

    exit_code: int = EXIT_BAD_INPUT


class GateFailed(TrtspecError):
    exit_code = EXIT_GATE_FAILED


class InputError(TrtspecError):
    """Bad input. Carries every problem found, not only the first; ``str()`` gives one line each."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, problems: str | Problem | Sequence[Problem]) -> None:
        if isinstance(problems, str):
            problems = [Problem(problems)]
        elif isinstance(problems, Problem):
            problems = [problems]
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class MissingError(TrtspecError):
    """The machine lacks something; the message says what and how to get it."""

    exit_code = EXIT_MISSING


class InconclusiveError(TrtspecError):
    exit_code = EXIT_INCONCLUSIVE
