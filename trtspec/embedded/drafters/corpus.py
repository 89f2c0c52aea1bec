"""A text corpus as a source of drafts: what followed these tokens in a user's own texts.

REST (arXiv 2311.08252) looks the longest suffix of the known text up in a datastore and verifies its most
frequent continuations as a tree. The store here is a suffix array over the tokens of the corpus, sorted by
their first :data:`SORT_DEPTH` tokens, built once and memory-mapped: opening it costs nothing and pages of it
are read as they are met. ``min_count`` above 1 leaves out the places whose first ``min_ngram`` tokens occur
less often, which is most of them: after CREST (arXiv 2408.04678), which keeps only the common short n-grams.

``python -m trtspec.embedded.drafters.corpus --tokenizer FOLDER --data FILE --out FOLDER`` builds one; the
build of an engine runs it when the recipe has ``speculation.corpus``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtspec.errors import InputError, Problem
from trtspec.process import as_child
from trtspec.text import Tokenizer
from trtspec.user_files import parse_json, read_user_text

SORT_DEPTH = 16
"""Tokens by which places are sorted, and so the longest suffix that can be looked up."""
MAX_DEPTH = 32
"""Tokens that a continuation has at most."""
MAX_PLACES = 64
"""Places whose continuations are read in one look-up; more are sampled evenly."""
MAX_DATA_BYTES = 2_000_000_000

_VERSION = 1


@dataclass(frozen=True)
class Found:
    """The places of the longest suffix that the corpus has."""

    length: int
    """Tokens of the suffix."""
    continuations: list[tuple[int, ...]]
    """What follows them, never nothing; of more than MAX_PLACES places so many, spread evenly over all."""


class Corpus:
    """A store made by :func:`build_corpus`; read-only, shared by all sequences."""

    def __init__(
        self, tokens: NDArray[Any], places: NDArray[Any], starts: NDArray[Any], min_ngram: int
    ) -> None:
        """``tokens`` end with MAX_DEPTH separators (the value vocab_size, also between texts); ``places``
        are positions in it, sorted by the tokens there; ``starts[t]`` is the first place of token t."""
        self._tokens, self._places, self._starts = tokens, places, starts
        self.separator = len(starts) - 1
        self.min_ngram = min_ngram

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Map the store in ``folder``. InputError if it is none, or of another version."""
        try:
            facts = json.loads((folder / "corpus.json").read_bytes())
            if facts["version"] != _VERSION:
                raise ValueError(f"version {facts['version']}")
            tokens, places, starts = (
                np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                for name in ("tokens", "places", "starts")
            )
            return cls(tokens, places, starts, int(facts["min_ngram"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"not a corpus store of this version ({error}); build the engine again"
            raise InputError(Problem(message, file=str(folder), key="speculation.corpus")) from None

    def __len__(self) -> int:
        """Places that can be found."""
        return len(self._places)

    def find(self, tokens: Sequence[int], shortest: int, longest: int, depth: int) -> Found | None:
        """The places of the longest suffix of ``tokens``, of ``longest`` down to ``shortest`` tokens, and up
        to ``depth`` tokens after each. A suffix below the store's own ``min_ngram`` is not looked up."""
        for length in range(min(longest, SORT_DEPTH, len(tokens)), max(shortest, self.min_ngram) - 1, -1):
            first, stop = self._range(tokens[len(tokens) - length :])
            if first < stop and (ways := self._continuations(first, stop, length, depth)):
                return Found(length, ways)
        return None

    def _range(self, pattern: Sequence[int]) -> tuple[int, int]:
        """The places, from the first to before the second, that start with ``pattern``."""
        if not 0 <= pattern[0] < self.separator:
            return 0, 0
        first, stop = int(self._starts[pattern[0]]), int(self._starts[pattern[0] + 1])
        for offset, token in enumerate(pattern[1:], start=1):
            if stop - first <= 0:
                break
            if stop - first <= 2048:
                here = self._tokens[self._places[first:stop] + offset]
                low, high = np.searchsorted(here, [token, token + 1])
                first, stop = first + int(low), first + int(high)
            else:
                places = range(first, stop)

                def at(place: int, offset: int = offset) -> int:
                    return int(self._tokens[int(self._places[place]) + offset])

                first, stop = (
                    first + bisect_left(places, token, key=at),
                    first + bisect_right(places, token, key=at),
                )
        return first, stop

    def _continuations(self, first: int, stop: int, length: int, depth: int) -> list[tuple[int, ...]]:
        chosen = np.linspace(first, stop - 1, min(stop - first, MAX_PLACES)).round().astype(np.int64)
        after = self._places[chosen].astype(np.int64)[:, None] + np.arange(
            length, length + min(depth, MAX_DEPTH)
        )
        found = []
        for row in self._tokens[after].tolist():
            end = row.index(self.separator) if self.separator in row else len(row)
            if end > 0:  # else the text ends with the suffix
                found.append(tuple(row[:end]))
        return found


# --------------------------------------------------------------------------- building


def build_corpus(
    texts: Sequence[Sequence[int]], folder: Path, *, vocab_size: int, min_ngram: int = 1, min_count: int = 1
) -> Corpus:
    """Write the store of ``texts`` (token ids) to ``folder``, which must not exist, and open it.

    Places with fewer than ``min_ngram`` tokens and one more after them in their text are left out, and those
    whose first ``min_ngram`` tokens occur fewer than ``min_count`` times. Sorting doubles the compared length
    in each pass (Manber and Myers, 1993) and takes about 40 bytes of memory a token. Raises InputError for
    token ids outside the vocabulary and when nothing is left.
    """
    kind = np.uint16 if vocab_size < 2**16 - 1 else np.int32
    pieces = []
    for number, text in enumerate(texts, start=1):
        ids = np.asarray(text, dtype=np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            raise InputError(f"text {number} has token ids outside the vocabulary of {vocab_size}")
        pieces += [ids, np.full(1, vocab_size, dtype=np.int64)]
    tokens = np.concatenate([*pieces, np.full(MAX_DEPTH, vocab_size, dtype=np.int64)])
    places = _sorted_places(tokens)
    inside = np.ones(len(tokens), dtype=np.bool_)
    for offset in range(min_ngram + 1):
        inside &= np.roll(tokens != vocab_size, -offset)
    places = places[inside[places]]
    if min_count > 1 and len(places):
        starts_group = np.zeros(len(places), dtype=np.bool_)
        starts_group[0] = True
        for offset in range(min_ngram):
            here = tokens[places + offset]
            starts_group[1:] |= here[1:] != here[:-1]
        group = np.cumsum(starts_group) - 1
        places = places[np.bincount(group)[group] >= min_count]
    if not len(places):
        often = "is in it" if min_count == 1 else f"is in it {min_count} times"
        message = f"no run of {min_ngram} tokens with one after it {often}; give more text"
        if max(min_count, min_ngram) > 1:
            message += ", or lower corpus_min_count or min_ngram"
        raise InputError(Problem(message, key="speculation.corpus"))
    starts = np.searchsorted(tokens[places], np.arange(vocab_size + 1))
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        np.save(partial / "tokens.npy", tokens.astype(kind))
        np.save(partial / "places.npy", places.astype(np.int32 if len(tokens) < 2**31 else np.int64))
        np.save(partial / "starts.npy", starts.astype(np.int64))
        facts = {
            "version": _VERSION,
            "texts": len(texts),
            "tokens": int(sum(len(text) for text in texts)),
            "places": len(places),
            "min_ngram": min_ngram,
            "min_count": min_count,
        }
        (partial / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Corpus.open(folder)


def _sorted_places(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """All positions, sorted by the SORT_DEPTH tokens there, then by position."""
    rank = tokens
    order = np.argsort(rank, kind="stable")
    length = 1
    while length < SORT_DEPTH:
        later = np.full(len(rank), rank.max(), dtype=np.int64)
        later[:-length] = rank[length:]
        key = rank * (int(rank.max()) + 1) + later
        order = np.argsort(key, kind="stable")
        ranked = key[order]
        rank = np.empty_like(key)
        rank[order] = np.concatenate(([0], np.cumsum(ranked[1:] != ranked[:-1])))
        length *= 2
    return order


def read_corpus(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """The texts of a corpus file as token ids. By the name's end:

    * ``.jsonl``: an object with ``text`` or ``messages`` a line, or ``tokens``, a list of ids;
    * ``.npy``: a one-dimensional array of whole numbers, token ids; negative ones stand between texts;
    * anything else: one plain text.

    Raises InputError with every bad line.
    """
    if path.suffix == ".npy":
        return _read_token_file(path)
    text = read_user_text(path, max_bytes=MAX_DATA_BYTES).removeprefix("\ufeff")
    if path.suffix != ".jsonl":
        return [tokenizer.encode(text)]
    found: list[list[int]] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                found.append(_read_line(line, tokenizer))
            except (ValueError, InputError) as error:
                problems.append(Problem(str(error), str(path), number))
    if problems:
        raise InputError(problems)
    return found


def _read_line(line: str, tokenizer: Tokenizer) -> list[int]:
    match parse_json(line):
        case {"text": str(text)}:
            return tokenizer.encode(text)
        case {"messages": [*messages]} if all(_is_message(message) for message in messages):
            return tokenizer.encode_chat(messages)
        case {"tokens": [*tokens]} if all(type(token) is int for token in tokens):
            return tokens
    raise ValueError(
        'must be a JSON object with "text" (a string), "messages" (a list of {"role", "content"}) or '
        '"tokens" (a list of whole numbers)'
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _read_token_file(path: Path) -> list[list[int]]:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(Problem(f"not an array of numbers ({error})", file=str(path))) from None
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        found = f"an array of shape {list(ids.shape)} and type {ids.dtype}"
        raise InputError(Problem(f"{found}; allowed: one dimension of whole numbers", file=str(path)))
    texts = np.split(ids.astype(np.int64), np.flatnonzero(ids < 0))
    return [text[text >= 0].tolist() for text in texts if (text >= 0).any()]


def main(argv: Sequence[str]) -> int:
    """Build a store; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trtspec.embedded.drafters.corpus")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help=".jsonl, .npy or plain text")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--min-ngram", type=int, default=1)
    parser.add_argument("--min-count", type=int, default=1)
    options = parser.parse_args(argv)
    return as_child(lambda: _build(options), no_memory="not enough memory to sort the corpus; give less text")


def _build(options: argparse.Namespace) -> None:
    tokenizer = Tokenizer.load(options.tokenizer)
    texts = read_corpus(options.data, tokenizer)
    corpus = build_corpus(
        texts,
        options.out,
        vocab_size=tokenizer.vocab_size,
        min_ngram=options.min_ngram,
        min_count=options.min_count,
    )
    print(f"{len(texts)} texts, {len(corpus)} places")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
