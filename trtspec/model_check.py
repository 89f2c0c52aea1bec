"""Whether a folder holds a model that can be served: configuration, weights and tokenizer, and that they fit.

What can be said from headers costs milliseconds (:func:`check_model_folder`); whether the weights are
numbers costs reading them once (:func:`check_weight_values`). No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from trtspec.errors import InputError, Problem
from trtspec.modelspec import ModelSpec, check_weight_files, read_modelspec
from trtspec.tensor_headers import TensorHeader, read_tensor_headers
from trtspec.text import Tokenizer

_CHUNK_VALUES = 1 << 22
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""Floating dtype -> integers of its size and the bits of its exponent; all set: infinity or no number."""


@dataclass(frozen=True)
class ModelFolder:
    """What is known of a model folder; ``spec`` and ``tokenizer`` are None only when there are problems."""

    spec: ModelSpec | None
    tokenizer: Tokenizer | None
    problems: tuple[Problem, ...]


def check_model_folder(folder: Path) -> ModelFolder:
    """Everything that is wrong with the model in ``folder``, from its JSON files and weight headers.

    Beyond what each file must hold: token ids of the tokenizer that the model does not have, a tokenizer
    far too small for it, a chat template that does not render a plain question. Raises MissingError without
    the package ``tokenizers``.
    """
    problems: list[Problem] = []
    spec: ModelSpec | None = None
    tokenizer: Tokenizer | None = None
    try:
        spec = read_modelspec(folder)
    except InputError as error:
        problems += error.problems
    problems += check_weight_files(folder)
    try:
        tokenizer = Tokenizer.load(folder)
    except InputError as error:
        problems += error.problems
    if tokenizer is not None:
        if spec is not None:
            problems += _vocabulary_problems(folder, spec, tokenizer)
        if tokenizer.has_chat_template:
            try:
                tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
            except InputError as error:
                problems += error.problems
    return ModelFolder(spec, tokenizer, tuple(dict.fromkeys(problems)))


def _vocabulary_problems(folder: Path, spec: ModelSpec, tokenizer: Tokenizer) -> list[Problem]:
    path = str(folder / "tokenizer.json")
    tokens, ids = tokenizer.vocab_size, max(tokenizer.vocab_size, tokenizer.largest_token_id + 1)
    if ids > spec.vocab_size:
        what = f"has {tokens} tokens" if ids == tokens else f"has token ids up to {ids - 1}"
        return [Problem(f"{what}, the model only {spec.vocab_size}; they belong to different models", path)]
    # Vocabularies are padded to round sizes, by a few percent; the model must not speak in ids without text.
    if 2 * tokens < spec.vocab_size:
        message = f"has only {tokens} tokens, the model {spec.vocab_size}; they belong to different models"
        return [Problem(message, path)]
    return []


def check_weight_values(folder: Path) -> list[Problem]:
    """The weights that are infinite or no number, by the bits of their exponents. Reads all floating-point
    weights once. The files must be whole (:func:`~trtspec.modelspec.check_weight_files`)."""
    import numpy as np

    bad: list[tuple[str, TensorHeader]] = []
    for name, header in read_tensor_headers(folder)[0].items():
        count = math.prod(header.shape)
        if header.dtype not in _EXPONENTS or count == 0:
            continue
        integers, mask = _EXPONENTS[header.dtype]
        values = np.memmap(header.file, dtype=integers, mode="r", offset=header.start, shape=(count,))
        chunks = (values[at : at + _CHUNK_VALUES] for at in range(0, count, _CHUNK_VALUES))
        if any(bool(((chunk & mask) == mask).any()) for chunk in chunks):
            bad.append((name, header))
    if not bad:
        return []
    (name, header), more = bad[0], f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
    message = f"holds NaN or infinity{more}; the checkpoint is damaged, download it again"
    return [Problem(message, file=str(header.file), key=name)]
