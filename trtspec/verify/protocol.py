"""The acceptance protocol of one built engine: which checks are run, on what, in which order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trtspec.artifact import Artifact, utc_now
from trtspec.backends import Variant, open_engine
from trtspec.engine import Engine
from trtspec.prompts import HELDOUT_FILE, PROMPTS_FILE, Prompt, load_prompts, load_texts
from trtspec.recipe import NoSpeculation, Recipe
from trtspec.recipe_facts import fidelity, is_for_gpu
from trtspec.ruler import Answer, OnProgress, Run, counter, max_draft, run, stage_of
from trtspec.stats import rate_upper_bound
from trtspec.text import Tokenizer
from trtspec.verify.approximate import check_approximate
from trtspec.verify.divergence import judge_divergence
from trtspec.verify.duration import about, estimate_s
from trtspec.verify.exact_run import LOSSLESS, exact_run, liveliest, offer_of, speller, why_no_exact_run
from trtspec.verify.gates import Check, skipped
from trtspec.verify.gpu import ELSEWHERE, check_gpu
from trtspec.verify.load import (
    Contender,
    Race,
    check_acceptance,
    check_speed,
    compare_acceptance,
    race,
    too_fast,
)
from trtspec.verify.lossless import Identity, check_lossless, requests_for
from trtspec.verify.matrix_load import check_loads, load_settings, plan_loads
from trtspec.verify.pair import Pair, asked_gates
from trtspec.verify.prediction import check_prediction, time_steps
from trtspec.verify.provenance import report_of, settings_record
from trtspec.verify.quality import check_quality
from trtspec.verify.report import Report
from trtspec.verify.sampled_run import sampled_checks
from trtspec.verify.sanity import check_evidence
from trtspec.verify.served_load import check_served, not_served, plan_served
from trtspec.verify.settings import Settings
from trtspec.verify.suite import Plan, Side, check_suite, plan_suite, skipped_suite
from trtspec.verify.versus import (
    OWN,
    VS,
    against_other,
    check_drafts,
    proof_of,
    prove_other,
    why_no_proof,
)

Say = Callable[[str], None]

BY_URL = "serve both variants and give --url and --baseline-url"


@dataclass(frozen=True)
class _Engines:
    """``recipe`` is ``plain`` when the recipe does not speculate; ``baseline`` is ``plain`` when it
    quantizes nothing. With OTHER, ``baseline`` is OTHER's target without drafts, ``plain`` where that is the
    same target."""

    recipe: Engine
    plain: Engine
    baseline: Engine
    other: Engine | None = None
    """OTHER as built."""


def verify(
    built: Artifact,
    settings: Settings,
    *,
    pair: Pair | None = None,
    argv: Sequence[str] = (),
    say: Say = lambda line: None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Report:
    """Measure ``built`` and judge it by the gates of its recipe; against OTHER if there is a ``pair``.

    ``say`` gets a line or two before the first stage, ``on_progress(stage, done, total)`` counts in it.
    Raises InputError for prompts that do not fit, MissingError for what the machine lacks; a gate that
    fails is a verdict in the report, not an exception.
    """
    began, created = time.monotonic(), utc_now()
    rate_upper_bound(0, 1)  # a missing scipy is said now, not after minutes of measuring
    as_built = built
    built = built if pair is None else _asked(built, pair)
    recipe = built.recipe
    tokenizer = Tokenizer.load(built.target_dir)
    longest_sequence = min(one.limits.max_seq_tokens for one in _recipes(recipe, pair))
    longest_prompt = min(longest_prompt_of(one, settings) for one in _recipes(recipe, pair))
    if pair is not None:
        most = min(longest_sequence, settings.retrieval_tokens or longest_sequence)
        settings = replace(settings, retrieval_tokens=most)
    prompts = prompts_asked(tokenizer, settings, longest_prompt)
    recorded = settings_record(settings, prompts)
    finished = partial(
        report_of, as_built, settings, prompts, recorded, argv=argv, began=began, created=created, pair=pair
    )
    if is_for_gpu(recipe):
        say("loading with TensorRT-LLM, one variant after another")
        label = fidelity(recipe)
        stop_tokens = tokenizer.eos_token_ids
        checks = check_gpu(built, prompts, stop_tokens, settings, on_progress, lossless=LOSSLESS[label])
        asked = recipe.gates.min_speedup_by_load is not None
        if settings.load is not None or asked:
            checks.append(skipped("speedup_by_load", f"one engine fills the GPU; {BY_URL}", asked))
        checks += not_served(recipe.gates, settings, f"one engine fills the GPU; {BY_URL}")
        checks += skipped_suite(recipe.gates, settings, f"needs scores, which are not there; {ELSEWHERE}")
        return finished(checks)
    plan = plan_suite(settings, recipe.gates, tokenizer, longest_sequence)
    asked_loads = load_settings(settings, recipe.gates)
    loads = None if asked_loads is None else plan_loads(_tightest(recipe, pair), asked_loads, tokenizer)
    served = plan_served(_tightest(recipe, pair), settings, tokenizer)
    texts: list[list[int]] = []
    if built.manifest.target != "baseline" if pair is None else pair.question == "quality":
        texts = load_texts(
            settings.heldout or HELDOUT_FILE,
            tokenizer,
            total_tokens=settings.quality_tokens,
            max_tokens=min(settings.quality_text_tokens, longest_sequence),
        )
    excuse = why_no_exact_run(built)
    label = fidelity(recipe)
    exact_name = f"{LOSSLESS[label]}_float64"
    proof = None if excuse is not None else exact_name
    excuse_of_other = "" if pair is None else why_no_proof(pair)
    own_proof = proof_of(pair) if pair is not None and excuse_of_other is None else None
    sampled: list[Prompt] = []
    if label == "approximate":
        many = replace(settings, num_prompts=settings.sampled_prompts)
        sampled = prompts_asked(tokenizer, many, longest_prompt)
    with contextlib.ExitStack() as stack:
        say("loading the engines")
        engines = _open(built, pair, stack)
        seconds = estimate_s(
            [engines.recipe, engines.plain, engines.baseline, engines.other or engines.baseline],
            prompts,
            settings,
            recipe,
            exact=proof is not None,
            exact_of_other=own_proof is not None,
        )
        seconds *= 1 + len(sampled) * settings.samples / (4 * len(prompts))
        besides = [
            *(["tasks and retrieval"] if plan.items or plan.harness or plan.retrieval else []),
            *(["the load matrix"] if loads is not None else []),
            *([f"{len(served.requests)} requests of each side under load ({served.told})"] if served else []),
        ]
        more = f", without {', '.join(besides)}" if besides else ""
        say(
            f"{len(prompts)} prompts; about {about(seconds)} to go at the speed that the machine has now"
            f"{more}"
        )
        checks, answers, theirs = _measure(
            built, pair, engines, prompts, texts, tokenizer, settings, proof, own_proof, on_progress
        )
        checks[1:1] = sampled_checks(engines.recipe, engines.plain, prompts, settings, recipe, on_progress)
        if sampled:
            checks[:0] = _approximate(engines, sampled, tokenizer, settings, recipe, on_progress)
        if loads is not None and asked_loads is not None:
            three = engines.recipe, engines.plain, engines.baseline
            stop = tokenizer.eos_token_ids
            other = None if pair is None else _contender(pair, engines)
            by_load = check_loads(three, loads, asked_loads, recipe, stop, on_progress, other=other)
            checks += [by_load] if pair is None else against_other([by_load])
        if served is not None:
            sides = {"recipe": engines.recipe, "no_speculation": engines.plain}
            sides |= {"baseline": engines.baseline} if engines.other is None else {"other": engines.other}
            checks += check_served(sides, served, recipe, on_progress)
        checks += _suite(
            engines, pair, plan, prompts, answers, checks, tokenizer, settings, recipe, on_progress
        )
    if proof is not None:
        # After the others are closed: two more copies of the weights, and in 64 bit.
        livelier = liveliest(prompts, answers, settings)
        exact = exact_run(built, livelier, tokenizer, settings, on_progress)
        at = [check.name for check in checks].index(LOSSLESS[label])
        checks[at] = compare_acceptance(
            checks[at], answers, exact.speculative.answers, required=recipe.gates.lossless
        )
        checks.insert(at + 1, exact.check)
    elif excuse:
        checks.insert(1, skipped(exact_name, excuse, False))
    if pair is not None and theirs is not None and excuse_of_other != "":
        checks = prove_other(
            pair, checks, prompts, theirs.answers, tokenizer, settings, excuse_of_other, on_progress
        )
    return finished(checks)


def _recipes(recipe: Recipe, pair: Pair | None) -> list[Recipe]:
    return [recipe] if pair is None else [recipe, pair.running.recipe]


def _tightest(recipe: Recipe, pair: Pair | None) -> Recipe:
    """``recipe`` with the limits that both engines keep."""
    limits = [one.limits for one in _recipes(recipe, pair)]
    names = ("max_batch_size", "max_input_tokens", "max_seq_tokens")
    least = {name: min(getattr(one, name) for one in limits) for name in names}
    return recipe.model_copy(update={"limits": recipe.limits.model_copy(update=least)})


def _asked(built: Artifact, pair: Pair) -> Artifact:
    """``built`` with the gates that the question of the pair is about."""
    gates = asked_gates(built.recipe.gates, pair.question)
    return replace(built, recipe=built.recipe.model_copy(update={"gates": gates}))


def _contender(pair: Pair, engines: _Engines) -> Contender:
    return Contender("other", engines.other or engines.plain, max_draft(pair.running.recipe.speculation))


def prompts_asked(tokenizer: Tokenizer, settings: Settings, longest: int) -> list[Prompt]:
    """The prompts of greedy answers, of at most ``longest`` tokens."""
    return load_prompts(
        settings.prompts or PROMPTS_FILE,
        tokenizer,
        limit=settings.num_prompts,
        max_tokens=longest,
        sample=settings.prompts is None,
    )


def longest_prompt_of(recipe: Recipe, settings: Settings) -> int:
    limits = recipe.limits
    fits = min(limits.max_input_tokens, limits.max_seq_tokens - settings.max_new_tokens)
    if settings.prompts is None and settings.max_prompt_tokens is not None:
        return min(fits, settings.max_prompt_tokens)
    return fits


def _approximate(
    engines: _Engines,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    settings: Settings,
    recipe: Recipe,
    on_progress: OnProgress,
) -> list[Check]:
    """What is judged instead of losslessness where acceptance is approximate."""
    return check_approximate(
        engines.recipe,
        engines.plain,
        prompts,
        samples=settings.samples,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        stop_tokens=tokenizer.eos_token_ids,
        draft_limit=max_draft(recipe.speculation),
        margin=recipe.gates.max_perplexity_ratio,
        on_progress=stage_of(
            on_progress, "approximate: sampled answers with and without drafts, scored by the target"
        ),
    )


def _suite(
    engines: _Engines,
    pair: Pair | None,
    plan: Plan,
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    earlier: Sequence[Check],
    tokenizer: Tokenizer,
    settings: Settings,
    recipe: Recipe,
    on_progress: OnProgress,
) -> list[Check]:
    """Quality beyond perplexity: the recipe's engine against the 16-bit one without speculation, or against
    OTHER of another quantization."""
    baseline = Side(engines.baseline, engines.baseline, 0)
    of_other = pair is not None and pair.question == "quality"
    if pair is not None and engines.other is not None and of_other:
        baseline = Side(engines.other, engines.baseline, max_draft(pair.running.recipe.speculation))
    found = check_suite(
        plan,
        Side(engines.recipe, engines.plain, max_draft(recipe.speculation)),
        baseline,
        prompts,
        answers,
        [] if of_other else earlier,
        tokenizer=tokenizer,
        settings=settings,
        gates=recipe.gates,
        stage=partial(stage_of, on_progress),
    )
    return against_other(found) if of_other else found


def _open(built: Artifact, pair: Pair | None, stack: contextlib.ExitStack) -> _Engines:
    def opened(artifact: Artifact, variant: Variant) -> Engine:
        return stack.enter_context(contextlib.closing(open_engine(artifact, variant)))

    plain = opened(built, "no_speculation")
    recipe = baseline = plain
    if not isinstance(built.recipe.speculation, NoSpeculation):
        recipe = opened(built, "recipe")
    if pair is None:
        if built.manifest.target != "baseline":
            baseline = opened(built, "baseline")
        return _Engines(recipe, plain, baseline)
    if pair.question == "quality":
        baseline = opened(pair.running, "no_speculation")
        return _Engines(recipe, plain, baseline, opened(pair.running, "recipe") if pair.drafts else baseline)
    return _Engines(recipe, plain, plain, opened(pair.running, "recipe"))


def _measure(
    built: Artifact,
    pair: Pair | None,
    engines: _Engines,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    settings: Settings,
    proof: str | None,
    own_proof: str | None,
    on_progress: OnProgress,
) -> tuple[list[Check], tuple[Answer, ...], Run | None]:
    """All checks in the recipe's own dtype, the answers with speculation, and those of OTHER where it holds
    the same target. ``proof``, ``own_proof``: the checks in float64 that are to follow, OTHER's likewise."""
    recipe, gates = built.recipe, built.recipe.gates
    speculates = engines.recipe is not engines.plain
    quantizes = engines.baseline is not engines.plain
    draft_limit = max_draft(recipe.speculation)

    stage = partial(stage_of, on_progress)
    what = "greedy answers token by token" if speculates else "batching against batch 1"
    identity = check_lossless(
        engines.recipe,
        engines.plain,
        prompts,
        max_new_tokens=settings.max_new_tokens,
        stop_tokens=tokenizer.eos_token_ids,
        draft_limit=draft_limit,
        dtype=recipe.backend.dtype,
        speculates=speculates,
        required=gates.lossless,
        name=LOSSLESS[fidelity(recipe)],
        floor_prompts=settings.floor_prompts,
        noise_texts=settings.noise_texts,
        noise_tokens=settings.noise_tokens,
        offer=offer_of(engines.recipe) if speculates and recipe.backend.dtype == "float64" else None,
        proof=proof,
        spell=speller(tokenizer),
        on_progress=stage(f"{LOSSLESS[fidelity(recipe)]}: {what}"),
    )
    checks = [identity.check]
    against = "the 16-bit baseline" if pair is None else "OTHER"
    theirs: Run | None = None
    if pair is not None and engines.other is not None and pair.question == "speculation":
        theirs = run(
            engines.other,
            requests_for(prompts, settings.max_new_tokens, tokenizer.eos_token_ids),
            draft_limit=max_draft(pair.running.recipe.speculation),
            on_answer=counter(stage("other: greedy answers of OTHER to the same prompts"), len(prompts)),
        )
        checks += check_drafts(
            pair,
            built.recipe,
            engines.plain,
            prompts,
            identity,
            theirs,
            proof=proof,
            own_proof=own_proof,
            spell=speller(tokenizer),
        )

    if quantizes:
        heldout = settings.heldout
        source = "held-out texts that ship with trtspec" if heldout is None else heldout.name
        quality = check_quality(
            engines.plain,
            engines.baseline,
            texts,
            bound=gates.max_perplexity_ratio,
            source=source,
            on_progress=stage(f"quality: perplexity and divergence against {against}"),
        )
        found = [quality]
        if quality.records is not None:
            found += judge_divergence(
                quality.records.tables["tokens"],
                max_mean_kl=gates.max_mean_kl,
                max_p99_kl=gates.max_p99_kl,
                min_same_top_token=gates.min_same_top_token,
                source=source,
            )
        checks += found if pair is None else against_other(found)
    elif pair is not None:
        checks.append(skipped(f"{VS}quality", f"nothing to compare: {pair.differs}", False))
    else:
        reason = "nothing is quantized: the target is the 16-bit baseline"
        checks.append(skipped("quality", reason, False))
        of_laws = ("max_mean_kl", "max_p99_kl", "min_same_top_token")
        checks += [skipped(one[4:], reason, True) for one in of_laws if getattr(gates, one) is not None]

    if speculates:
        checks.append(
            check_acceptance(
                identity.speculative.answers,
                draft_limit=draft_limit,
                bound=gates.min_acceptance_length,
                contradictions=identity.speculative.contradictions,
                tasks=[prompt.task for prompt in prompts],
                held_back_steps=identity.speculative.held_back_steps,
            )
        )
        checks.append(
            check_evidence(
                prompts,
                identity.speculative.answers,
                vocab_size=engines.recipe.vocab_size,
                draft_tokens=draft_limit,
            )
        )
    else:
        reason = "the recipe does not speculate"
        checks.append(skipped("acceptance", reason, gates.min_acceptance_length is not None))
    checks += _speed_checks(built, pair, engines, prompts, identity, settings, stage)
    return checks, identity.speculative.answers, theirs


def _speed_checks(
    built: Artifact,
    pair: Pair | None,
    engines: _Engines,
    prompts: Sequence[Prompt],
    identity: Identity,
    settings: Settings,
    stage: Callable[[str], Callable[[int, int], None]],
) -> list[Check]:
    gates = built.recipe.gates
    speculates = engines.recipe is not engines.plain
    quantizes = engines.baseline is not engines.plain
    contenders = [Contender("recipe", engines.recipe, max_draft(built.recipe.speculation))]
    if speculates:
        contenders.append(Contender("no_speculation", engines.plain, 0))
    if pair is not None:
        contenders.append(_contender(pair, engines))
    elif quantizes:
        contenders.append(Contender("baseline", engines.baseline, 0))
    result: Race | None = None
    retimed = False
    steps: list[dict[str, Any]] = []
    if len(contenders) > 1:
        name = f"speed: {', '.join(one.name for one in contenders)}, one request at a time"
        count = min(settings.race_prompts, len(prompts))
        answers = identity.reference.answers[:count]
        lengths = [min(len(answer.tokens), settings.race_tokens) for answer in answers]
        result = race(contenders, prompts[:count], lengths, rounds=settings.rounds, on_progress=stage(name))
        if speculates and too_fast(result):
            retimed = True
            again = "speed again: the first times are impossible, machine busy?"
            result = race(
                contenders, prompts[:count], lengths, rounds=settings.rounds, on_progress=stage(again)
            )
        if speculates:
            sides = {"recipe": engines.recipe, "no_speculation": engines.plain}
            requests = requests_for(prompts[:count], lengths, frozenset())
            steps = time_steps(sides, requests, stage("prediction: the same requests, timed step by step"))
    checks = []
    speed = partial(check_speed, name="recipe", retimed=retimed)
    if result is not None and speculates:
        bound = gates.min_speedup
        checks.append(speed(result, check_name="speedup", over="no_speculation", bound=bound))
        checks.append(check_prediction(result, steps, identity.speculative.answers))
    else:
        reason = "the recipe does not speculate"
        checks.append(skipped("speedup", reason, gates.min_speedup is not None))
    bound = gates.min_speedup_over_baseline
    if pair is not None:
        if result is not None:
            checks.append(speed(result, check_name=f"{VS}speedup", over="other", bound=bound))
            if speculates and pair.drafts and pair.question == "speculation":
                own, plain = f"{OWN}speedup", "no_speculation"
                checks.append(speed(result, check_name=own, name="other", over=plain, bound=None))
        return checks
    if result is not None and (quantizes or bound is not None):
        # Without quantization the baseline is the engine without speculation itself.
        over = "baseline" if quantizes else "no_speculation"
        checks.append(speed(result, check_name="speedup_over_baseline", over=over, bound=bound))
    elif bound is not None:
        reason = "the recipe neither speculates nor quantizes: it is the baseline"
        checks.append(skipped("speedup_over_baseline", reason, True))
    return checks
