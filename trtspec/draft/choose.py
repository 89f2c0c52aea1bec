"""The chain or tree that the measured acceptance and the measured step costs make fastest.

One run drafts a large tree behind every token (:mod:`trtspec.draft.replay`), one times steps by rows and
drafts by levels (:mod:`trtspec.draft.step_cost`). Every candidate shape is then replayed on every answer and
priced:

    seconds of an answer = sum over its steps of T(1 + nodes drafted) + D(levels drafted)

and the one with the least seconds for the same answers wins: tokens per second after the first token, one
sequence at a time. The best of many looks better than it is, so its predicted speed is cross-fitted: the
prompts are split in two, each half priced with what the other half chose. Intervals are over prompts; the
step costs are taken as they are.

Static trees come from the accuracy of each level's candidates by rank (Medusa, arXiv 2401.10774, section
2.3.3), dynamic ones (EAGLE-2, arXiv 2406.16858) from a grid of children, levels and nodes. Lookahead
remembers, so it cannot be replayed: a few windows are run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import Any

from trtspec.draft.acceptance import Acceptance, Answered, Value, summarize
from trtspec.draft.measure import Cell, Progress, answer_all, measure_cell, open_cell
from trtspec.draft.replay import (
    Chain,
    Dynamic,
    First,
    Probed,
    Shape,
    Static,
    probed,
    rank_accuracies,
    replay,
)
from trtspec.draft.step_cost import ROW_SIZES, Costs, family, time_levels, time_rows
from trtspec.embedded.drafters.choice import StepCost
from trtspec.embedded.drafters.feature_drafter import FeatureDrafter
from trtspec.embedded.drafters.medusa import MedusaDrafter
from trtspec.embedded.drafters.trees import (
    DynamicTree,
    StaticTree,
    best_choices,
    chain_tree,
    default_choices,
    static_tree,
)
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.heads_opening import tree_shape
from trtspec.errors import InputError
from trtspec.prompts import Prompt
from trtspec.recipe import (
    DraftModelSpeculation,
    Eagle3Speculation,
    EagleSpeculation,
    LookaheadSpeculation,
    MedusaSpeculation,
    NgramSpeculation,
    Speculation,
)
from trtspec.recipe_facts import tree_nodes
from trtspec.ruler import counter
from trtspec.stats import ratio_of_sums
from trtspec.text import Tokenizer

WORTH = 1.02
"""A shape must promise so much more than the recipe's own to replace it: below that it is noise."""
_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63)
_TOP_K = 8
_RANKS = 10
_MOST_DRAFT = 8
_MOST_LEVELS = 6
_MOST_NGRAM = 16
_WINDOWS = ((2, 3, 2), (3, 3, 3), (4, 3, 4), (5, 3, 5), (7, 3, 7), (4, 4, 4), (5, 5, 5))
"""(window, ngram, verification_set) of lookahead."""


@dataclass(frozen=True)
class Option:
    """One way to draft and what it comes to. ``changes``: of the recipe's speculation; None: draft nothing.

    ``tokens_per_s`` after the first token, one sequence at a time, from measured acceptance and step costs.
    """

    label: str
    changes: Mapping[str, Any] | None
    length: float
    nodes: float
    tokens_per_s: Value


@dataclass(frozen=True)
class Paired:
    """One answer: its prompt, its tokens after the first step, and the seconds of its steps as the recipe
    drafts and as was chosen (by the other half of the prompts where cross-fitted)."""

    prompt: str
    tokens: int
    current_s: float
    best_s: float


@dataclass(frozen=True)
class Choice:
    """``best``: with the speed predicted for prompts it was not chosen on where ``cross_fitted``. ``gain``:
    its speed over the recipe's own, paired. ``keep``: the recipe's own is as good. ``options``: the best few.
    ``costs``: (rows, ms of a step), ``draft_costs``: (levels, ms of drafting). ``paired``: the seconds of
    each answer that ``gain`` is made of; ``priced``: how many shapes were."""

    current: Option
    best: Option
    none: Option
    gain: Value
    keep: bool
    cross_fitted: bool
    options: tuple[Option, ...]
    replayed: Acceptance
    costs: tuple[tuple[int, float], ...]
    draft_costs: tuple[tuple[int, float], ...]
    paired: tuple[Paired, ...]
    priced: int


# --------------------------------------------------------------------------- shapes and recipes


def current_shape(speculation: Speculation, num_heads: int = 0) -> Shape:
    """What the recipe drafts; ``num_heads`` of Medusa. Raises ValueError for lookahead, which has none."""
    match speculation:
        case NgramSpeculation(num_draft_tokens=most):
            return First(most)
        case DraftModelSpeculation(num_draft_tokens=most):
            return Chain(most)
        case MedusaSpeculation(choices=choices):
            return Static(_in_order(choices or default_choices(num_heads)))
        case EagleSpeculation(choices=choices) if choices is not None:
            return Static(_in_order(choices))
        case EagleSpeculation() | Eagle3Speculation():
            tree = tree_shape(speculation)
            if isinstance(tree, DynamicTree):
                return Dynamic(tree.top_k, tree.depth, tree.num_nodes)
            return Chain(tree.depth)
    raise ValueError(f"{speculation.kind} drafts no chain or tree of its own")


def _in_order(choices: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(path) for path in choices)


def changes_of(shape: Shape, speculation: Speculation) -> dict[str, Any]:
    """The keys of ``speculation`` that make it draft ``shape``."""
    third = isinstance(speculation, Eagle3Speculation)
    match shape:
        case First(nodes=nodes):
            return {"num_draft_tokens": nodes}
        case Chain(length=length) if isinstance(speculation, DraftModelSpeculation):
            return {"num_draft_tokens": length}
        case Chain(length=length):
            return {"top_k": 1, "num_draft_tokens": length, "depth": None if third else length}
        case Dynamic(top_k=top_k, levels=levels, nodes=nodes):
            return {"top_k": top_k, "num_draft_tokens": nodes, "depth": levels}
        case Static(choices=choices) if isinstance(speculation, MedusaSpeculation):
            return {"choices": choices}
        case Static(choices=choices):
            return {"choices": choices, "depth": shape.levels}


def label_of(shape: Shape) -> str:
    match shape:
        case First(nodes=nodes):
            return f"up to {nodes} tokens"
        case Chain(length=length):
            return f"a chain of {length}"
        case Static(choices=choices):
            return f"a static tree of {len(choices)} nodes, {shape.levels} deep"
        case Dynamic(top_k=top_k, levels=levels, nodes=nodes):
            return f"a dynamic tree of {nodes} nodes, top_k {top_k}, {levels} deep"


def candidates(speculation: Speculation, answers: Sequence[Probed], room: int) -> list[Shape]:
    """The shapes to price, of at most ``room`` nodes; static trees from the accuracies in ``answers``."""
    deepest = max((probe.levels for one in answers for probe in one.probes.values()), default=0)
    if not deepest:
        return []
    match speculation:
        case NgramSpeculation():
            return [First(nodes) for nodes in range(1, min(_MOST_NGRAM, room) + 1)]
        case DraftModelSpeculation():
            return [Chain(length) for length in range(1, min(deepest, room) + 1)]
        case EagleSpeculation(choices=None) | Eagle3Speculation():
            found: list[Shape] = [Chain(length) for length in range(1, min(deepest, room) + 1)]
            for top_k in sorted({2, 4, _TOP_K, max(2, min(speculation.top_k, _TOP_K))}):
                for levels in range(1, deepest + 1):
                    most = min(tree_nodes(top_k, levels), room)
                    found += [Dynamic(top_k, levels, size) for size in _SIZES if levels < size <= most]
            return found
        case _:
            accuracies = rank_accuracies(answers, deepest, _RANKS)
            largest = best_choices(accuracies, min(max(_SIZES), room))
            trees = [largest[:size] for size in _SIZES if size <= len(largest)]
            return [Static(tree) for tree in dict.fromkeys(trees)]


# --------------------------------------------------------------------------- probing


def _probing(speculation: Speculation) -> dict[str, Any]:
    """Changes of ``speculation`` that make it draft as much as is worth writing down; Medusa's tree is set
    once its heads are known (:func:`_medusa_probe`)."""
    match speculation:
        case NgramSpeculation(num_draft_tokens=most):
            return {"num_draft_tokens": max(most, _MOST_NGRAM)}
        case DraftModelSpeculation(num_draft_tokens=most):
            return {"num_draft_tokens": max(most, _MOST_DRAFT)}
        case EagleSpeculation() | Eagle3Speculation():
            current = current_shape(speculation)
            top_k = max(_TOP_K, speculation.top_k, _num_ranks(current))
            levels = max(_MOST_LEVELS, _levels(current))
            changes = {"top_k": top_k, "depth": levels, "num_draft_tokens": tree_nodes(top_k, levels)}
            return {**changes, "choices": None} if isinstance(speculation, EagleSpeculation) else changes
    return {}


def _num_ranks(shape: Shape) -> int:
    return 1 + max(map(max, shape.choices)) if isinstance(shape, Static) else 1


def _medusa_probe(drafter: MedusaDrafter, current: Shape) -> StaticTree:
    """Medusa's heads offer the same below every node of a level, so one node of each has all candidates.
    What Hydra's offer depends on the branch: of those a large tree."""
    if drafter.grounded:
        return static_tree(default_choices(drafter.num_heads, 255))
    ranks = max(_RANKS, _num_ranks(current))
    return static_tree([(*(0,) * level, r) for level in range(drafter.num_heads) for r in range(ranks)])


def choose(
    cell: Cell,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    on_progress: Progress = lambda stage, done, total: None,
) -> Choice:
    """The fastest shape for the drafter of ``cell`` on ``prompts``, beside what its recipe says.

    Steps are timed for one sequence, on the prompt of median length. Raises what opening an engine raises.
    """
    speculation = cell.artifact.recipe.speculation
    if isinstance(speculation, LookaheadSpeculation):
        return _choose_window(cell, speculation, prompts, max_new_tokens, on_progress)
    stop_tokens = Tokenizer.load(cell.artifact.target_dir).eos_token_ids
    on_answer = counter(partial(on_progress, "a large draft behind every token"), len(prompts))
    timed = _median_prompt(prompts)
    with contextlib.closing(open_cell(cell.artifact, verified=False, **_probing(speculation))) as engine:
        medusa = engine._drafter if isinstance(engine._drafter, MedusaDrafter) else None
        current = current_shape(speculation, medusa.num_heads if medusa else 0)
        if medusa:
            medusa.tree = _medusa_probe(medusa, current)
        on_progress("a large draft behind every token", 0, len(prompts))
        answers, rounds, _ = answer_all(
            engine, prompts, max_new_tokens, stop_tokens, verified=False, on_answer=on_answer
        )
        free = medusa is not None and not medusa.grounded
        probes = [
            probed(prompt, answer, rounds.get(prompt.id, {}), free_ranks=free)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        on_progress("steps by rows, drafts by levels", 0, 0)
        room = _room(cell)
        branching = not isinstance(current, Chain | First)
        sizes = sorted({*(size for size in ROW_SIZES if size <= room), min(current.nodes, room)})
        costs = Costs(time_rows(engine, timed, sizes, branching=branching))
        for shape in _timed_shapes(speculation, current):
            costs.drafter[family(shape)] = _time_drafts(engine, timed, shape)
    return pick(speculation, current, probes, costs, room)


def _room(cell: Cell) -> int:
    return min(255, cell.artifact.recipe.limits.max_num_tokens - 1)


def _median_prompt(prompts: Sequence[Prompt]) -> Prompt:
    length = median_low([len(prompt.tokens) for prompt in prompts])
    return next(prompt for prompt in prompts if len(prompt.tokens) == length)


def _timed_shapes(speculation: Speculation, current: Shape) -> list[Shape]:
    if isinstance(speculation, EagleSpeculation | Eagle3Speculation) and not isinstance(current, Static):
        found: list[Shape] = [Chain(_MOST_LEVELS)]
        found += [Dynamic(top_k, _MOST_LEVELS, 31) for top_k in (2, 4, _TOP_K)]
        return [*found, *([current] if isinstance(current, Dynamic) and current.top_k > _TOP_K else [])]
    return [current]


def _time_drafts(engine: EmbeddedEngine, prompt: Prompt, shape: Shape) -> StepCost:
    drafter = engine._drafter
    levels = getattr(drafter, "num_draft_tokens", 0)
    if isinstance(drafter, FeatureDrafter):
        before, drafter.shape = drafter.shape, _tree(shape)
        try:
            return time_levels(engine, prompt, range(1, _levels(shape) + 1))
        finally:
            drafter.shape = before
    if isinstance(drafter, MedusaDrafter):
        drafter.tree, tree = _static(shape), drafter.tree
        try:
            return time_levels(engine, prompt, range(1, drafter.num_heads + 1))
        finally:
            drafter.tree = tree
    return time_levels(engine, prompt, range(1, levels + 1))


def _levels(shape: Shape) -> int:
    return shape.nodes if isinstance(shape, First) else shape.levels


def _tree(shape: Shape) -> StaticTree | DynamicTree:
    if isinstance(shape, Dynamic):
        return DynamicTree(shape.top_k, shape.levels, shape.nodes)
    return _static(shape)


def _static(shape: Shape) -> StaticTree:
    return static_tree(shape.choices) if isinstance(shape, Static) else chain_tree(_levels(shape))


# --------------------------------------------------------------------------- picking


@dataclass(frozen=True)
class _Priced:
    """A shape with the seconds and the steps of each answer."""

    label: str
    changes: Mapping[str, Any] | None
    answers: tuple[Answered, ...]
    seconds: tuple[float, ...]

    def option(self, tokens_per_s: Value | None = None) -> Option:
        tokens = [float(answer.emitted) for answer in self.answers]
        found = summarize(self.answers)
        steps = [step for answer in self.answers for step in answer.steps]
        nodes = sum(step.rows for step in steps) / len(steps) if steps else 0.0
        rate = tokens_per_s or Value(*ratio_of_sums(tokens, self.seconds))
        return Option(self.label, self.changes, found.length.value, nodes, rate)


def pick(
    speculation: Speculation, current: Shape, answers: Sequence[Probed], costs: Costs, room: int
) -> Choice:
    """The fastest of :func:`candidates` for ``answers`` at these costs. InputError if none has a step."""
    answers = [answer for answer in answers if len(answer.tokens) > 1]
    if not answers:
        raise InputError(
            "no answer is longer than one token: there is nothing to choose by; give other prompts"
        )

    def price(shape: Shape, some: Sequence[Probed]) -> _Priced:
        steps = tuple(replay(answer, shape) for answer in some)
        seconds = tuple(costs.seconds(one, family(shape)) for one in steps)
        return _Priced(label_of(shape), changes_of(shape, speculation), steps, seconds)

    def fastest(some: Sequence[Probed]) -> list[tuple[float, Shape]]:
        shapes = dict.fromkeys([current, *candidates(speculation, some, room)])
        priced = [(sum(price(shape, some).seconds), shape) for shape in shapes]
        return sorted(priced, key=lambda pair: pair[0])

    own = price(current, answers)
    order = fastest(answers)
    best = price(order[0][1], answers)
    plain = tuple(replay(answer, None) for answer in answers)
    none = _Priced("no drafts", None, plain, tuple(costs.seconds(one, "") for one in plain))
    halves = (answers[0::2], answers[1::2])
    crossed = len(answers) >= 4
    seconds = best.seconds
    if crossed:
        shapes = [fastest(half)[0][1] for half in halves]
        held_out = [price(shapes[1 - at % 2], [answer]).seconds[0] for at, answer in enumerate(answers)]
        seconds = tuple(held_out)
    tokens = [float(answer.emitted) for answer in own.answers]
    gain = Value(*ratio_of_sums(own.seconds, seconds))
    keep = order[0][1] == current or gain.value < WORTH
    first_family = family(order[0][1])
    return Choice(
        current=own.option(),
        best=own.option() if keep else best.option(Value(*ratio_of_sums(tokens, seconds))),
        none=none.option(),
        gain=gain,
        keep=keep,
        cross_fitted=crossed,
        options=tuple(price(shape, answers).option() for _, shape in order[:6]),
        replayed=summarize(own.answers),
        costs=_curve(costs.target, [1 + size for size in ROW_SIZES]),
        draft_costs=_curve(costs.drafter.get(first_family), range(1, _MOST_LEVELS + 1)),
        paired=_paired(own, seconds),
        priced=len(order),
    )


def _paired(own: _Priced, best_s: Sequence[float]) -> tuple[Paired, ...]:
    return tuple(
        Paired(answer.prompt, answer.emitted, mine, best)
        for answer, mine, best in zip(own.answers, own.seconds, best_s, strict=True)
    )


def _curve(cost: StepCost | None, at: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """(size, ms) within what was measured."""
    if cost is None or not cost.most:
        return ()
    return tuple((size, 1000 * cost.at(size)) for size in at if cost.fewest <= size <= cost.most)


def _choose_window(
    cell: Cell,
    speculation: LookaheadSpeculation,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    on_progress: Progress,
) -> Choice:
    """Lookahead: a few windows, each run on all prompts; no cross-fitting, the windows are few."""
    current = (speculation.window, speculation.ngram, speculation.verification_set)
    room = _room(cell)
    with contextlib.closing(open_cell(cell.artifact)) as engine:
        sizes = [size for size in ROW_SIZES if size <= room]
        costs = Costs(time_rows(engine, _median_prompt(prompts), sizes, branching=True))
    priced: dict[tuple[int, int, int], _Priced] = {}
    windows = dict.fromkeys([current, *_WINDOWS])
    for number, (window, ngram, guesses) in enumerate(windows, start=1):
        if (ngram - 2) + (window - 1 + guesses) * (ngram - 1) > room:
            continue
        changes: dict[str, Any] = {"window": window, "ngram": ngram, "verification_set": guesses}
        measured = measure_cell(cell, prompts, max_new_tokens=max_new_tokens, **changes)
        on_progress("windows", number, len(windows))
        answers = tuple(answer for answer in measured.answers if answer.steps)
        seconds = tuple(costs.seconds(answer, "") for answer in answers)
        label = f"window {window}, ngram {ngram}, verification_set {guesses}"
        priced[window, ngram, guesses] = _Priced(label, changes, answers, seconds)
    order = sorted(priced, key=lambda key: sum(priced[key].seconds))
    own, best = priced[current], priced[order[0]]
    plain = tuple(
        replay(Probed(answer.prompt, answer.task, answer.tokens, {}), None) for answer in own.answers
    )
    none = _Priced("no drafts", None, plain, tuple(costs.seconds(one, "") for one in plain))
    gain = Value(*ratio_of_sums(own.seconds, best.seconds))
    keep = order[0] == current or gain.value < WORTH
    return Choice(
        current=own.option(),
        best=own.option() if keep else best.option(),
        none=none.option(),
        gain=gain,
        keep=keep,
        cross_fitted=False,
        options=tuple(priced[key].option() for key in order[:6]),
        replayed=summarize(own.answers),
        costs=_curve(costs.target, [1 + size for size in ROW_SIZES]),
        draft_costs=(),
        paired=_paired(own, best.seconds),
        priced=len(order),
    )
