"""Which ways of accepting drafts keep the target's law, and which sampling parameters an engine obeys.

*Labels* are facts about methods, engines and modes, told in advance: strict (the output has the target's law,
whatever is drafted) or approximate (it has not, and no check calls it lossless). The *truth table* is
measured: what a running engine makes of temperature, top-k, top-p, seed, stop tokens and the token limit
while it drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trtspec.engine import Engine, Request, Sampling
from trtspec.errors import MissingError
from trtspec.prompts import Prompt
from trtspec.recipe import NoSpeculation, Recipe
from trtspec.recipe_facts import ACCEPTANCE_ON, EMBEDDED_SPECULATION, Fidelity
from trtspec.ruler import Answer, run
from trtspec.verify.gates import Check, Verdict

Mode = Literal["greedy", "sampled"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Label:
    """What one way of drafting does to the output of one engine in one mode of sampling."""

    engine: str
    """A backend of recipes: embedded, tensorrt, pytorch."""
    method: str
    acceptance: str
    mode: Mode
    fidelity: Fidelity
    because: str


def label(engine: str, method: str, acceptance: str, mode: Mode) -> Label:
    """The label of a combination; ``acceptance`` may also be ``relaxed`` or ``skipped``, which no recipe
    names and servers offer. Raises ValueError for an acceptance that is not known."""
    fidelity, because = _judged(engine, method, acceptance, mode)
    return Label(engine, method, acceptance, mode, fidelity, because)


def _judged(engine: str, method: str, acceptance: str, mode: Mode) -> tuple[Fidelity, str]:
    if acceptance == "skipped":
        return "approximate", "drafts are kept without verification"
    if acceptance == "relaxed":
        return "approximate", "a draft among the target's best few is kept, though it is not the one drawn"
    if method == "none":
        return "strict", "nothing is drafted"
    if mode == "sampled" and engine == "tensorrt" and method in ("medusa", "eagle") and acceptance == "exact":
        return "approximate", "these engines decode greedily: a request's temperature has no effect"
    match acceptance:
        case "exact":
            return "strict", "the target's own token is drawn; a draft is kept where it equals it"
        case "rejection":
            return "strict", "kept with min(1, p/q), redrawn from max(p - q, 0)"
        case "typical" if mode == "greedy":
            return "strict", "at temperature 0 only the most likely token is typical"
        case "typical":
            return "approximate", "plausible drafts are kept, which changes the law"
    raise ValueError(f"acceptance {acceptance!r} is not known")


def labels() -> list[Label]:
    """Every combination that a recipe can ask for."""
    ways = [("embedded", method, kind) for method in EMBEDDED_SPECULATION for kind in _embedded_kinds(method)]
    for engine, methods in ACCEPTANCE_ON.items():
        ways += [(engine, method, kind) for method, kinds in methods.items() for kind in kinds]
    return [label(*way, mode) for way in ways for mode in MODES]


def _embedded_kinds(method: str) -> tuple[str, ...]:
    return ("exact",) if method == "none" else ("exact", "rejection", "typical")


def recipe_labels(recipe: Recipe) -> list[Label]:
    """Of a recipe, one for each mode."""
    method = recipe.speculation.kind
    kind = "exact" if isinstance(recipe.speculation, NoSpeculation) else recipe.acceptance.kind
    return [label(recipe.backend.kind, method, kind, mode) for mode in MODES]


# --------------------------------------------------------------------------- the truth table

_TOKENS = 12
_PROMPTS = 4
_HOT, _COLD = 2.0, 0.001
_AGREES = 0.8
"""Share of tokens that are the target's most likely ones, from which a law of one token counts as obeyed:
16-bit ties cost a few, an engine that draws at temperature 1 instead has about half."""
_FAR_NATS = 1.0
"""So far below the best token no 16-bit tie lies, nor one of an 8-bit cache: one such token was drawn from
another law, however many others agree."""
_TIES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Obeyed:
    """One parameter. ``honoured`` None: the probe does not tell."""

    parameter: str
    honoured: bool | None
    found: str


def check_parameters(
    engine: Engine,
    plain: Engine,
    prompts: Sequence[Prompt],
    *,
    draft_limit: int | None,
    dtype: str,
    required: bool,
    labelled: Sequence[Label] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Check:
    """Which sampling parameters ``engine`` obeys while it drafts; ``plain``: the same weights without
    drafts."""
    probes = _Probes(engine, plain, prompts[:_PROMPTS], draft_limit, on_progress)
    table = [
        _temperature(probes),
        _cut(probes, "top_k", Sampling(_HOT, top_k=1)),
        _cut(probes, "top_p", Sampling(_HOT, top_p=1e-6)),
        _seed(probes, dtype),
        _stop(probes),
        _limit(probes),
    ]
    return judge_parameters(
        table=[asdict(row) for row in table],
        labelled=[asdict(one) for one in labelled],
        drafted=probes.drafted,
        required=required,
    )


def judge_parameters(
    *, table: Sequence[dict[str, Any]], labelled: Sequence[dict[str, Any]], drafted: int, required: bool
) -> Check:
    """The verdict over the truth table (fields of :class:`Obeyed`) as it stands in a report: FAIL where a
    parameter is ignored."""
    raw = dict(locals())
    rows = [Obeyed(**row) for row in table]
    words = {True: "honoured", False: "IGNORED", None: "not told"}
    ignored = [row.parameter for row in rows if row.honoured is False]
    untold = [row.parameter for row in rows if row.honoured is None]
    if ignored:
        verdict = Verdict.FAIL
        summary = f"ignored while drafting: {', '.join(ignored)}"
    elif untold:
        verdict, required = Verdict.MEASURED, False
        summary = f"honoured while drafting, as far as it shows; not told: {', '.join(untold)}"
    else:
        verdict = Verdict.PASS
        summary = f"honoured while drafting: {', '.join(row.parameter for row in rows)}"
    warnings = () if drafted else ("nothing was drafted in these answers",)
    details = [f"{row.parameter}: {words[row.honoured]}; {row.found}" for row in rows]
    details += [
        f"{one['mode']}: {one['fidelity']} ({one['engine']}, {one['method']}, {one['acceptance']}: "
        f"{one['because']})"
        for one in labelled
    ]
    return Check(
        "sampling_parameters",
        verdict,
        summary,
        required=required,
        n=len(rows),
        n_unit="parameters",
        how=(
            "short answers with drafts: near temperature 0, top-k 1 and a tiny top-p must give the target's "
            "most likely "
            "tokens, seeds must matter and repeat, stop tokens and the token limit must end an answer"
        ),
        warnings=warnings,
        details=tuple(details),
        evidence={"raw": raw},
    )


class _Probes:
    """Runs short answers on the engine under test and counts what it drafted for them."""

    def __init__(
        self,
        engine: Engine,
        plain: Engine,
        prompts: Sequence[Prompt],
        draft_limit: int | None,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self.plain, self.prompts = plain, prompts
        self._engine, self._limit, self._on_progress = engine, draft_limit, on_progress
        self.drafted = self._done = 0

    def ask(
        self,
        sampling: Sampling,
        *,
        tokens: int = _TOKENS,
        stop: frozenset[int] = frozenset(),
        prompts: Sequence[Prompt] | None = None,
    ) -> tuple[Answer, ...]:
        asked = self.prompts if prompts is None else prompts
        requests = [Request(one.id, one.tokens, tokens, sampling, stop) for one in asked]
        found = run(self._engine, requests, draft_limit=self._limit).answers
        self.drafted += sum(one.drafted for one in found)
        self._done += 1
        self._on_progress(min(self._done, 13), 13)
        return found

    def most_likely(self, answers: Sequence[Answer]) -> tuple[float, float]:
        """Share of the tokens that the target finds most likely, and how many nats the least likely of the
        others, compared with what is best in its place, lies below."""
        right = total = 0
        farthest = 0.0
        for prompt, answer in zip(self.prompts, answers, strict=True):
            scores = self.plain.score((*prompt.tokens, *answer.tokens))
            best = scores.top_tokens[len(prompt.tokens) - 1 :]
            said = scores.logprobs[len(prompt.tokens) - 1 :]
            for at, (token, top) in enumerate(zip(answer.tokens, best, strict=True)):
                right += token == top
                if token != top:
                    there = self.plain.score((*prompt.tokens, *answer.tokens[:at], top)).logprobs[-1]
                    farthest = max(farthest, there - said[at])
            total += len(best)
        return right / total if total else 0.0, farthest


def _temperature(probes: _Probes) -> Obeyed:
    try:
        cold, far = probes.most_likely(probes.ask(Sampling(_COLD, seed=1)))
    except MissingError as error:
        return Obeyed("temperature", None, str(error))
    hot = {tuple(one.tokens for one in probes.ask(Sampling(_HOT, seed=seed))) for seed in (1, 2)}
    share = f"at temperature {_COLD:g} {_likely(cold, far)}"
    found = f"{share}; at temperature {_HOT:g} {'both seeds differ' if len(hot) > 1 else 'both seeds agree'}"
    return Obeyed("temperature", cold >= _AGREES and far < _FAR_NATS and len(hot) > 1, found)


def _likely(share: float, far: float) -> str:
    rest = f" ({_AGREES:.0%} needed: near ties cost a few)" if share < 1 else ""
    if far >= _FAR_NATS:
        rest = f", one is {far:.1f} nats below the best, which is no tie"
    return f"{share:.0%} of the tokens are the most likely ones{rest}"


def _cut(probes: _Probes, name: str, sampling: Sampling) -> Obeyed:
    try:
        share, far = probes.most_likely(probes.ask(sampling))
    except MissingError as error:
        return Obeyed(name, None, str(error))
    value = getattr(sampling, name)
    found = f"at temperature {_HOT:g} with {name} {value:g} {_likely(share, far)}"
    return Obeyed(name, share >= _AGREES and far < _FAR_NATS, found)


def _seed(probes: _Probes, dtype: str) -> Obeyed:
    first, again, other = (
        tuple(one.tokens for one in probes.ask(Sampling(1.0, seed=seed))) for seed in (11, 11, 12)
    )
    same = sum(a == b for a, b in zip(first, again, strict=True))
    found = f"{same} of {len(first)} answers repeat with the same seed"
    if first == other:
        return Obeyed("seed", False, f"{found}; another seed changes nothing")
    if same == len(first):
        return Obeyed("seed", True, f"{found}; another seed gives others")
    return Obeyed("seed", None if dtype in _TIES and same else False, found)


def _stop(probes: _Probes) -> Obeyed:
    every = probes.ask(Sampling())
    answer, place = next(
        ((one, place) for one in every if (place := _inside(one)) is not None), (every[0], None)
    )
    prompt = [one for one in probes.prompts if one.id == answer.request_id][:1]
    if len(answer.tokens) < 2:
        return Obeyed("stop", None, "the answer was too short to stop")
    token = answer.tokens[len(answer.tokens) // 2 if place is None else place]
    first = answer.tokens.index(token)
    where = ", outside any draft that is kept" if place is None else ", inside a draft that is kept"
    stopped = probes.ask(Sampling(), prompts=prompt, stop=frozenset({token}))[0]
    given = f"{len(stopped.tokens)} tokens ({stopped.finish_reason})"
    found = f"stop token expected as token {first + 1}{where}, the answer has {given}"
    if token not in stopped.tokens:
        # Rounding may have led elsewhere; an answer that is cut short all the same was not.
        return Obeyed("stop", None if len(stopped.tokens) == _TOKENS else False, found)
    ended = stopped.tokens.index(token) == len(stopped.tokens) - 1 and stopped.finish_reason == "stop"
    return Obeyed("stop", ended, found)


def _inside(answer: Answer) -> int | None:
    """The place of a token that is new in ``answer`` and was a draft that others of its step came after: a
    stop token there must end the answer, and the rest of the draft is void."""
    at = 0
    for emitted in answer.emitted:
        for place in range(at, at + emitted - 1):
            if place > 0 and answer.tokens.index(answer.tokens[place]) == place:
                return place
        at += emitted
    return None


def _limit(probes: _Probes) -> Obeyed:
    lengths = {
        n: len(probes.ask(Sampling(), tokens=n, prompts=probes.prompts[:1])[0].tokens) for n in (1, 3, 7)
    }
    told = ", ".join(f"{n} asked, {found} given" for n, found in lengths.items())
    return Obeyed("max_new_tokens", all(n == found for n, found in lengths.items()), told)
