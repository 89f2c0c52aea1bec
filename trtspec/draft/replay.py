"""What any smaller chain or tree would have accepted, from one run that drafts a large one for every token.

With greedy requests an answer does not depend on what is drafted, and what a drafter offers behind a prefix
depends on that prefix alone (n-grams, draft models, Medusa, EAGLE; not lookahead, whose pool remembers). So
it is enough to write down a large draft behind every token of the answers, verified by nobody: the steps that
a smaller chain or tree takes are found by going through the answer with it. Nothing is extrapolated: where
steps start, which a draft's length changes, is where they would have started.

A node of a static tree beyond what was written down counts as refused, so lengths of trees that reach further
are lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trtspec.draft.acceptance import Answered, Step
from trtspec.draft.measure import path_of
from trtspec.embedded.drafters.recorder import Recorded
from trtspec.embedded.tree import Draft, children, depths
from trtspec.prompts import Prompt
from trtspec.ruler import Answer


@dataclass(frozen=True)
class Chain:
    """The most likely token of every level, ``length`` of them."""

    length: int

    @property
    def levels(self) -> int:
        return self.length

    @property
    def nodes(self) -> int:
        return self.length


@dataclass(frozen=True)
class Static:
    """A tree of paths of ranks, as a recipe's ``choices``."""

    choices: tuple[tuple[int, ...], ...]

    @cached_property
    def paths(self) -> frozenset[tuple[int, ...]]:
        return frozenset(self.choices)

    @property
    def levels(self) -> int:
        return max(map(len, self.choices), default=0)

    @property
    def nodes(self) -> int:
        return len(self.choices)


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree: ``top_k`` children of the ``top_k`` best nodes of ``levels`` levels, the ``nodes`` best
    of all kept."""

    top_k: int
    levels: int
    nodes: int


@dataclass(frozen=True)
class First:
    """The first ``nodes`` nodes that were drafted: prompt lookup takes the likeliest one after another."""

    nodes: int


Shape = Chain | Static | Dynamic | First


class Probe:
    """A large draft behind one token, and where the answer goes in it. ``free_ranks``: the ranks of a level's
    candidates are the same below every node (Medusa), so the draft need not hold each of them everywhere."""

    def __init__(self, draft: Draft, said: Sequence[int], *, free_ranks: bool = False) -> None:
        self.draft = draft
        self.said = said
        self._levels = depths(draft)[: draft.num_candidates]
        self.levels = max(self._levels, default=0)
        self._path, self.ranks = path_of(draft, said)
        if free_ranks:
            self.ranks = _free_ranks(draft, said)
        self._grown: dict[int, tuple[list[float], list[int], list[int]]] = {}

    def outcome(self, shape: Shape) -> tuple[int, int, int]:
        """(accepted, nodes, levels) of a step that drafts ``shape`` here."""
        if isinstance(shape, First):
            kept = self._levels[: shape.nodes]
            return sum(node < shape.nodes for node in self._path), len(kept), max(kept, default=0)
        levels = min(shape.levels, self.levels)
        match shape:
            case Chain():
                accepted = next(
                    (at for at, rank in enumerate(self.ranks[:levels]) if rank), min(levels, len(self.ranks))
                )
                return accepted, levels, levels
            case Static():
                if levels == 0:
                    return 0, 0, 0
                accepted = 0
                while accepted < min(levels, len(self.ranks)):
                    if self.ranks[: accepted + 1] not in shape.paths:
                        break
                    accepted += 1
                return accepted, sum(len(path) <= levels for path in shape.choices), levels
            case Dynamic():
                return self._dynamic(shape, levels)

    def _dynamic(self, shape: Dynamic, levels: int) -> tuple[int, int, int]:
        values, level_of, path = self._growth(shape.top_k)
        kept = [value for value, level in zip(values, level_of, strict=True) if level <= levels]
        accepted = 0
        for node in path[:levels]:
            # Ties go to the node that was grown first, which a stable sort keeps first.
            better = sum(value > values[node] for value in kept)
            if better + 1 > shape.nodes:
                break
            accepted += 1
        return accepted, min(len(kept), shape.nodes), levels

    def _growth(self, top_k: int) -> tuple[list[float], list[int], list[int]]:
        """(value and level of each node, nodes of the answer's path) of the tree grown with ``top_k``."""
        if top_k in self._grown:
            return self._grown[top_k]
        confidence, below = self.draft.confidence, children(self.draft)
        if confidence is None:
            raise ValueError("a dynamic tree is grown by the drafter's probabilities; these drafts have none")
        values: list[float] = []
        levels: list[int] = []
        tokens: list[int] = []
        parents: list[int] = []
        frontier: list[tuple[int, int]] = [(-1, -1)]
        """(node of the recorded draft, node of this tree)"""
        level = 0
        while frontier:
            level += 1
            new: list[tuple[int, int]] = []
            for recorded, grown in frontier:
                above = 0.0 if grown < 0 else values[grown]
                for child in below[recorded + 1][:top_k]:
                    new.append((child, len(values)))
                    values.append(above + math.log(max(confidence[child], 1e-30)))
                    levels.append(level)
                    tokens.append(self.draft.tokens[child])
                    parents.append(grown)
            frontier = sorted(new, key=lambda pair: -values[pair[1]])[:top_k]
        path = list(path_of(Draft(tuple(tokens), tuple(parents)), self.said)[0])
        self._grown[top_k] = values, levels, path
        return self._grown[top_k]


def _free_ranks(draft: Draft, said: Sequence[int]) -> tuple[int, ...]:
    """The rank of each said token among the candidates of its level, below the node that has most of them."""
    widest: dict[int, list[int]] = {}
    below, level_of = children(draft), (0, *depths(draft))
    for row, nodes in enumerate(below):
        if len(nodes) > len(widest.get(level_of[row], ())):
            widest[level_of[row]] = nodes
    ranks: list[int] = []
    for level, token in enumerate(said):
        tokens = [draft.tokens[node] for node in widest.get(level, ())]
        if token not in tokens:
            break
        ranks.append(tokens.index(token))
    return tuple(ranks)


@dataclass(frozen=True)
class Probed:
    """One answer with a draft behind each of its tokens but the last: ``probes[t]`` behind the first t."""

    prompt: str
    task: str
    tokens: tuple[int, ...]
    probes: Mapping[int, Probe]


def probed(
    prompt: Prompt, answer: Answer, rounds: Mapping[int, Recorded], *, free_ranks: bool = False
) -> Probed:
    """The drafts of a run in which nothing was verified, set beside its answer."""
    start = len(prompt.tokens)
    probes = {
        known - start: Probe(recorded.draft, answer.tokens[known - start :], free_ranks=free_ranks)
        for known, recorded in rounds.items()
    }
    return Probed(prompt.id, prompt.task, answer.tokens, probes)


def replay(answer: Probed, shape: Shape | None) -> Answered:
    """Go through ``answer`` as a drafter of ``shape`` would have; None drafts nothing."""
    at, length = 1, len(answer.tokens)
    steps: list[Step] = []
    while at < length:
        probe = None if shape is None else answer.probes.get(at)
        accepted, nodes, levels = (0, 0, 0) if probe is None or shape is None else probe.outcome(shape)
        accepted = min(accepted, length - at)
        ranks = () if probe is None else probe.ranks[:accepted]
        emitted = min(accepted + 1, length - at)
        steps.append(Step(emitted, nodes, levels, accepted, ranks, nodes))
        at += emitted
    return Answered(answer.prompt, answer.task, answer.tokens, tuple(steps))


def rank_accuracies(answers: Sequence[Probed], levels: int, ranks: int) -> list[list[float]]:
    """``[levels][ranks]``: how often the answer takes the candidate of that rank at that level, of the places
    where it took offered candidates so far; over all tokens of the answers, not only where steps started."""
    found = []
    for level in range(levels):
        tried = 0
        hits = [0] * ranks
        for answer in answers:
            for probe in answer.probes.values():
                if len(probe.ranks) < level or min(probe.levels, len(probe.said)) <= level:
                    continue
                tried += 1
                if len(probe.ranks) > level and probe.ranks[level] < ranks:
                    hits[probe.ranks[level]] += 1
        found.append([hit / tried if tried else 0.0 for hit in hits])
    return found
