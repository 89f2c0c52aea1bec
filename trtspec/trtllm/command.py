"""A command for TensorRT-LLM's tools, and the folders that commands and files name."""

from __future__ import annotations

from dataclasses import dataclass

VARIABLES = ("MODEL_DIR", "DRAFT_DIR", "HEADS_DIR", "WORK_DIR", "EXAMPLES_DIR", "CALIB_DATASET")
"""The variables of a rendered script, as ``${NAME}`` in arguments and files; nothing else is expanded."""


@dataclass(frozen=True)
class Paths:
    """Folders as commands and files name them; the defaults are variables that a script sets.

    ``model``: the 16-bit target checkpoint. ``draft``: the draft model's. ``heads``: the trained heads.
    ``work``: where everything is made, see :mod:`trtspec.trtllm.plan`; ``files``: where the plan's files are,
    the work folder itself in a script. ``examples``: TensorRT-LLM's ``examples`` folder. ``calibration``:
    what quantize.py calibrates on: a data set of the hub or a folder of JSONL with ``text``.
    """

    model: str = "${MODEL_DIR}"
    draft: str = "${DRAFT_DIR}"
    heads: str = "${HEADS_DIR}"
    work: str = "${WORK_DIR}"
    files: str = "${WORK_DIR}"
    examples: str = "${EXAMPLES_DIR}"
    calibration: str = "${CALIB_DATASET}"


@dataclass(frozen=True)
class Command:
    """One command. ``program``: its name in the tables (``trtllm-build``, ``quantize.py`` ...), ``trtspec
    quantize``, or ``test`` for a file that somebody else makes. ``output``: the folder it makes, if any.

    ``options`` is the part of ``argv`` that the table checks."""

    program: str
    argv: tuple[str, ...]
    what: str
    output: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        first = next((i for i, word in enumerate(self.argv) if word.startswith("--")), len(self.argv))
        return self.argv[first:]
