"""Lookahead decoding (arXiv 2402.02057): n-grams from parallel Jacobi iterations, found and verified at once.

With window W, n-gram size N and verification set G, one forward of the target does two things.

*The lookahead branch* carries N - 1 levels of W guesses each: level l, column c is a guess for the position
c + l after the current token, which is itself level 0, column 0. Level 0 is one chain; the deeper levels
hang below it column by column, so that column c's last guess sees level 0 up to c and then its own column.
That is the mask of the paper's figure 2, and it is a tree, so these rows are nodes of an ordinary draft.
What the target says after the last level completes W n-grams of N tokens for the pool, and becomes the new
last level while the others move up by one (a Jacobi step on every column).

*The verification branch* are up to G n-grams of the pool that start with the current token: candidates of
N - 1 tokens, chosen without randomness, hence point masses.

Equal tokens under the same parent are one node. The lookahead branch's other nodes are there to be observed
(:attr:`Draft.num_observed`), never to be accepted. Only its last level is read: that is the Jacobi step, for
which each of its columns needs the target's argmax. The levels above are there to be attended to, so they get
no output projection (:attr:`Draft.silent`). At most (N - 2) + (W - 1 + G)(N - 1) nodes, which is
TensorRT-LLM's own sizing, and at most N - 1 tokens are accepted, as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, PrefixTree, subset
from trtspec.errors import InputError, Problem


class NgramPool:
    """Of each first token, the latest ``per_token`` different n-grams that start with it."""

    def __init__(self, per_token: int) -> None:
        self.per_token = per_token
        self._found: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: tuple[int, ...]) -> None:
        """Enter an n-gram, or make it the latest."""
        rest = self._found.setdefault(ngram[0], {})
        rest.pop(ngram[1:], None)
        rest[ngram[1:]] = None
        if len(rest) > self.per_token:
            del rest[next(iter(rest))]

    def continuations(self, token: int) -> list[tuple[int, ...]]:
        """What followed ``token``, latest first."""
        return list(self._found.get(token, ()))[::-1]


@dataclass
class _State:
    """What is kept of one sequence."""

    pool: NgramPool
    levels: list[list[int]]
    """Up to N - 1 levels of W guesses; fewer in the first steps. Level 0 starts with a place for the
    current token."""
    pooled: int = 0
    """n-grams of the known text that end at or before this position are in the pool."""
    ends: list[int] = field(default_factory=list)
    """Of the last draft, the nodes of the window's last level (-1: the current token)."""
    rows: list[int] = field(default_factory=list)
    """Of the last draft, the rows of the logits after the window's last level; [] if it held no window."""


class LookaheadDrafter:
    """Drafts pool n-grams, and carries the window that fills the pool. State per sequence: the window and
    the pool, both of tokens only, so a rejection, a preemption or a prefix hit cannot make them wrong.

    The pool starts with the n-grams of the prompt and takes those of the answer as well. The first guesses
    are the last tokens of the prompt (the paper draws them at random from it); no step is random. The
    guesses are the target's most likely tokens also for requests that sample.

    When a draft is cut short (the end of an answer, a full batch) the window stays as it was.
    Raises InputError when a size is out of range.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, window: int, ngram: int, verification_set: int) -> None:
        problems = [
            Problem(f"{found} is below {least}", key=f"speculation.{key}")
            for key, found, least in (
                ("window", window, 1),
                ("ngram", ngram, 2),
                ("verification_set", verification_set, 1),
            )
            if found < least
        ]
        if problems:
            raise InputError(problems)
        self.window = window
        self.ngram = ngram
        self.verification_set = verification_set
        self._states: dict[str, _State] = {}

    @property
    def max_nodes(self) -> int:
        """The most nodes of a draft."""
        return (self.ngram - 2) + (self.window - 1 + self.verification_set) * (self.ngram - 1)

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        return [self._propose(view) for view in sequences]

    def _propose(self, view: DraftView) -> Draft:
        tokens = view.tokens
        state = self._states.get(view.id)
        if state is None:
            state = self._states[view.id] = self._new_state(tokens)
        self._pool_text(state, tokens)
        state.rows = []
        if view.max_draft < 1 or view.room < 1:
            return EMPTY_DRAFT
        tree = PrefixTree()
        for guess in state.pool.continuations(tokens[-1]):
            tree.add_path(guess[: view.max_draft])
        candidates = tree.draft()
        deepest = self.window - 1 + len(state.levels) - 1
        if deepest > view.max_draft:
            return candidates
        state.levels[0][0] = tokens[-1]
        ends = _add_window(tree, state.levels)
        if len(tree) > view.room:
            return candidates
        draft = tree.draft(
            num_observed=len(tree) - len(candidates),
            silent=sorted(set(range(len(candidates), len(tree))) - set(ends)),
        )
        state.rows = _logit_rows(draft, ends)
        state.ends = ends
        return draft

    def window_nodes(self, sequence_id: str) -> list[int]:
        """The nodes of the sequence's last draft that the next window is read from; [] if it held none."""
        state = self._states[sequence_id]
        return [node for node in state.ends if node >= 0] if state.rows else []

    def cut(self, sequence_id: str, draft: Draft, kept: Sequence[int]) -> None:
        """Of the sequence's last ``draft`` the target will see the nodes ``kept`` only, ascending. With the
        end of a column gone, the window stays as it was."""
        state = self._states[sequence_id]
        place = {-1: -1} | {node: at for at, node in enumerate(kept)}
        if state.rows and all(node in place for node in state.ends):
            state.rows = _logit_rows(subset(draft, kept), [place[node] for node in state.ends])
        else:
            state.rows = []

    def _new_state(self, tokens: Sequence[int]) -> _State:
        start = max(0, len(tokens) - self.window)
        last = list(tokens[start:])
        guesses = [last[at % len(last)] for at in range(self.window)]
        return _State(NgramPool(self.verification_set), [guesses])

    def _pool_text(self, state: _State, tokens: Sequence[int]) -> None:
        for end in range(max(state.pooled + 1, self.ngram), len(tokens) + 1):
            state.pool.add(tuple(tokens[end - self.ngram : end]))
        state.pooled = max(state.pooled, len(tokens))

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        """Take the guesses that the window's last level gave: n-grams for the pool, and the next window."""
        for view, rows in zip(sequences, logits, strict=True):
            state = self._states.get(view.id)
            if state is None or rows is None or not state.rows:
                continue
            last, state.rows = state.rows, []
            if max(last) < len(rows):  # else the scheduler cut the window off
                self._advance(state, rows[last].argmax(-1).tolist())

    def _advance(self, state: _State, guessed: list[int]) -> None:
        """The window one position on: ``guessed[c]`` stands after the last level of column c.

        The paper advances by one position whatever was accepted, and so does this: a window that is behind
        still holds n-grams of the text, one that skipped columns would have to invent new ones.
        """
        levels = state.levels
        if len(levels) == self.ngram - 1:
            for column in zip(*levels, guessed, strict=True):
                state.pool.add(column)
            state.levels = [*levels[1:], guessed]
        else:
            # Still filling: a level is added instead of dropped, so every column takes its neighbour's place.
            state.levels = [[*level[1:], level[-1]] for level in (*levels, guessed)]

    def release(self, sequence_id: str) -> None:
        self._states.pop(sequence_id, None)


def _logit_rows(draft: Draft, nodes: Sequence[int]) -> list[int]:
    """The rows of the draft's logits after ``nodes``: silent nodes have none."""
    return [node + 1 - sum(silent < node for silent in draft.silent) for node in nodes]


def _add_window(tree: PrefixTree, levels: Sequence[Sequence[int]]) -> list[int]:
    """The nodes of the last level, having added every guess as a node under the guesses that it sees; -1 is
    the current token, the first column of a window of one level."""
    nodes = [-1]  # the current token
    for token in levels[0][1:]:
        nodes.append(tree.add(nodes[-1], token))
    for level in levels[1:]:
        nodes = [tree.add(above, token) for above, token in zip(nodes, level, strict=True)]
    return nodes
