"""The acceptance protocol of one built engine: which checks are run, on what, in which order."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from trtspec.artifact import Artifact, file_sha256, machine_summary, tool_versions, utc_now
from trtspec.backends import open_engine
from trtspec.engine import Engine
from trtspec.prompts import HELDOUT_FILE, PROMPTS_FILE, Prompt, load_prompts, load_texts
from trtspec.recipe import NoSpeculation, Recipe
from trtspec.recipe_facts import fidelity, is_for_gpu
from trtspec.ruler import Answer, OnProgress, max_draft, run, stage_of
from trtspec.stats import rate_upper_bound
from trtspec.text import Tokenizer
from trtspec.verify.approximate import check_approximate
from trtspec.verify.divergence import judge_divergence
from trtspec.verify.exact_run import LOSSLESS, exact_run, liveliest, offer_of, speller, why_no_exact_run
from trtspec.verify.gates import Check, raw_as_records, skipped
from trtspec.verify.gpu import ELSEWHERE, check_gpu, gpu_record
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
from trtspec.verify.matrix_load import check_loads, plan_loads
from trtspec.verify.prediction import check_prediction, time_steps
from trtspec.verify.quality import check_quality
from trtspec.verify.report import Report
from trtspec.verify.sampled_run import sampled_checks
from trtspec.verify.sanity import check_evidence
from trtspec.verify.settings import Settings
from trtspec.verify.suite import Plan, Side, check_suite, plan_suite, skipped_suite
from trtspec.verify.tasks import task_files

Say = Callable[[str], None]

BY_URL = "serve both variants and give --url and --baseline-url"


@dataclass(frozen=True)
class _Engines:
    """``recipe`` is ``plain`` when the recipe does not speculate; ``baseline`` is ``plain`` when it
    quantizes nothing."""

    recipe: Engine
    plain: Engine
    baseline: Engine


def verify(
    built: Artifact,
    settings: Settings,
    *,
    argv: Sequence[str] = (),
    say: Say = lambda line: None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Report:
    """Measure ``built`` and judge it by the gates of its recipe.

    ``say`` gets a line or two before the first stage, ``on_progress(stage, done, total)`` counts in it.
    Raises InputError for prompts that do not fit, MissingError for what the machine lacks; a gate that
    fails is a verdict in the report, not an exception.
    """
    began, created = time.monotonic(), utc_now()
    rate_upper_bound(0, 1)  # a missing scipy is said now, not after minutes of measuring
    recipe = built.recipe
    tokenizer = Tokenizer.load(built.target_dir)
    prompts = load_prompts(
        settings.prompts or PROMPTS_FILE,
        tokenizer,
        limit=settings.num_prompts,
        max_tokens=_longest_prompt(recipe, settings),
        sample=settings.prompts is None,
    )
    if is_for_gpu(recipe):
        say("loading with TensorRT-LLM, one variant after another")
        label = fidelity(recipe)
        stop_tokens = tokenizer.eos_token_ids
        checks = check_gpu(built, prompts, stop_tokens, settings, on_progress, lossless=LOSSLESS[label])
        if settings.load is not None:
            checks.append(skipped("speedup_by_load", f"one engine fills the GPU; {BY_URL}", False))
        checks += skipped_suite(recipe.gates, settings, f"needs scores, which are not there; {ELSEWHERE}")
        return _report(built, settings, prompts, checks, argv, began, created)
    plan = plan_suite(settings, recipe.gates, tokenizer, recipe.limits.max_seq_tokens)
    loads = None if settings.load is None else plan_loads(recipe, settings.load, tokenizer)
    texts: list[list[int]] = []
    if built.manifest.target != "baseline":
        texts = load_texts(
            settings.heldout or HELDOUT_FILE,
            tokenizer,
            total_tokens=settings.quality_tokens,
            max_tokens=min(settings.quality_text_tokens, recipe.limits.max_seq_tokens),
        )
    excuse = why_no_exact_run(built)
    label = fidelity(recipe)
    exact_name = f"{LOSSLESS[label]}_float64"
    proof = None if excuse is not None else exact_name
    sampled: list[Prompt] = []
    if label == "approximate":
        sampled = load_prompts(
            settings.prompts or PROMPTS_FILE,
            tokenizer,
            limit=settings.sampled_prompts,
            max_tokens=_longest_prompt(recipe, settings),
            sample=settings.prompts is None,
        )
    with contextlib.ExitStack() as stack:
        say("loading the engines")
        engines = _open(built, stack)
        seconds = _estimate_s(engines, prompts, settings, recipe, exact=proof is not None)
        seconds *= 1 + len(sampled) * settings.samples / (4 * len(prompts))
        say(f"{len(prompts)} prompts; about {seconds:.0f} s to go at the speed that the machine has now")
        checks, answers = _measure(built, engines, prompts, texts, tokenizer, settings, proof, on_progress)
        checks[1:1] = sampled_checks(engines.recipe, engines.plain, prompts, settings, recipe, on_progress)
        if sampled:
            checks[:0] = _approximate(engines, sampled, tokenizer, settings, recipe, on_progress)
        if loads is not None and settings.load is not None:
            three = engines.recipe, engines.plain, engines.baseline
            stop = tokenizer.eos_token_ids
            checks.append(check_loads(three, loads, settings.load, recipe, stop, on_progress))
        checks += _suite(engines, plan, prompts, answers, checks, tokenizer, settings, recipe, on_progress)
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
    return _report(built, settings, prompts, checks, argv, began, created)


def _report(
    built: Artifact,
    settings: Settings,
    prompts: Sequence[Prompt],
    checks: Sequence[Check],
    argv: Sequence[str],
    began: float,
    created: str,
) -> Report:
    recipe, label = built.recipe, fidelity(built.recipe)
    gpu_tools, gpus = gpu_record() if is_for_gpu(recipe) else ({}, {})
    notes = ["1 nat is a factor of 2.72 in probability, 0.1 nat of 1.11"]
    if (wanted := settings.num_prompts) > len(prompts):
        notes.append(f"{wanted} prompts were asked for, {len(prompts)} are there and fit the limits")
    if label == "approximate":
        notes.append(
            f"{recipe.acceptance.kind} acceptance is approximate: sampled output does not have the target's "
            "law; greedy requests, in which acceptance and speed are measured, accept exactly"
        )
    return Report(
        engine=str(built.folder),
        recipe_name=recipe.name,
        recipe_digest=built.manifest.recipe_digest,
        recipe=recipe.model_dump(mode="json"),
        source_digest=built.manifest.source.digest,
        created=created,
        argv=tuple(argv),
        tools={**tool_versions(), **gpu_tools},
        built_with=built.manifest.tools,
        machine={
            **machine_summary(),
            **gpus,
            "threads": getattr(recipe.backend, "threads", None) or "default",
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        },
        settings=_settings_record(settings, prompts),
        seconds=round(time.monotonic() - began, 1),
        checks=tuple(map(raw_as_records, checks)),
        notes=tuple(notes),
        fidelity=label,
    )


def _longest_prompt(recipe: Recipe, settings: Settings) -> int:
    limits = recipe.limits
    fits = min(limits.max_input_tokens, limits.max_seq_tokens - settings.max_new_tokens)
    if settings.prompts is None and settings.max_prompt_tokens is not None:
        return min(fits, settings.max_prompt_tokens)
    return fits


def _settings_record(settings: Settings, prompts: Sequence[Prompt]) -> dict[str, object]:
    prompts_file, heldout = settings.prompts or PROMPTS_FILE, settings.heldout or HELDOUT_FILE
    return {
        **asdict(settings),
        "num_prompts": len(prompts),
        "longest_prompt_tokens": max(len(prompt.tokens) for prompt in prompts),
        "prompts": "builtin" if settings.prompts is None else str(prompts_file),
        "prompts_sha256": file_sha256(prompts_file),
        "heldout": "builtin" if settings.heldout is None else str(heldout),
        "heldout_sha256": file_sha256(heldout),
        "load": None
        if (load := settings.load) is None
        else {**asdict(load), "file": str(load.file or "builtin")},
        "tasks": [str(path) for path in settings.tasks],
        "tasks_sha256": [file_sha256(path) for path in task_files(settings.tasks)],
        "lm_eval": list(settings.lm_eval),
        "lm_eval_path": None if settings.lm_eval_path is None else str(settings.lm_eval_path),
    }


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
    plan: Plan,
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    earlier: Sequence[Check],
    tokenizer: Tokenizer,
    settings: Settings,
    recipe: Recipe,
    on_progress: OnProgress,
) -> list[Check]:
    """Quality beyond perplexity: the recipe's engine against the 16-bit one without speculation."""

    stage = partial(stage_of, on_progress)
    return check_suite(
        plan,
        Side(engines.recipe, engines.plain, max_draft(recipe.speculation)),
        Side(engines.baseline, engines.baseline, 0),
        prompts,
        answers,
        earlier,
        tokenizer=tokenizer,
        settings=settings,
        gates=recipe.gates,
        stage=stage,
    )


def _open(built: Artifact, stack: contextlib.ExitStack) -> _Engines:
    plain = stack.enter_context(contextlib.closing(open_engine(built, "no_speculation")))
    recipe = baseline = plain
    if not isinstance(built.recipe.speculation, NoSpeculation):
        recipe = stack.enter_context(contextlib.closing(open_engine(built, "recipe")))
    if built.manifest.target != "baseline":
        baseline = stack.enter_context(contextlib.closing(open_engine(built, "baseline")))
    return _Engines(recipe, plain, baseline)


def _estimate_s(
    engines: _Engines, prompts: Sequence[Prompt], settings: Settings, recipe: Recipe, *, exact: bool
) -> float:
    """Seconds that the protocol should take, from the time of a few steps of each engine (which also
    warms them up)."""
    step_s = {}
    for engine in {id(engine): engine for engine in (engines.plain, engines.baseline)}.values():
        requests = requests_for(prompts[:1], 5, frozenset())
        run(engine, requests, draft_limit=0)
        step_s[id(engine)] = run(engine, requests, draft_limit=0).seconds / 5
    plain, baseline = step_s[id(engines.plain)], step_s[id(engines.baseline)]
    tokens = settings.max_new_tokens
    speculates = engines.recipe is not engines.plain
    batches = -(-len(prompts) // recipe.limits.max_batch_size)
    alone = min(settings.floor_prompts, len(prompts)) if speculates else len(prompts)
    noise = settings.noise_texts * settings.noise_tokens * 1.3
    # The factors are fitted to the processor time of each stage on two cores with SmolLM2-135M.
    seconds = 1.75 * plain * (batches * tokens * 4 * (1 + speculates) + alone * tokens + noise)
    if engines.baseline is not engines.plain:
        seconds += settings.quality_tokens / 4.4 * (plain + baseline) / 2
        seconds += 1.75 * baseline * batches * tokens * 4  # the baseline's answers, for degenerate_text
    runs = settings.rounds * min(settings.race_prompts, len(prompts)) * min(settings.race_tokens, tokens)
    if speculates:
        seconds += 1.3 * (runs + runs / settings.rounds) * plain * 2
    if engines.baseline is not engines.plain:
        seconds += 1.3 * runs * (baseline + (0 if speculates else plain))
    if exact:
        chosen = min(settings.exact_prompts, len(prompts))
        length = sum(len(prompt.tokens) for prompt in prompts) / len(prompts)
        new = min(settings.exact_tokens, tokens)
        # Three passes over prompts and answers, and the steps of two and a half runs.
        seconds += plain * (3 * 0.55 * chosen * (length + new) + 2.5 * new * 2.5 * chosen)
    return seconds


def _measure(
    built: Artifact,
    engines: _Engines,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    settings: Settings,
    proof: str | None,
    on_progress: OnProgress,
) -> tuple[list[Check], tuple[Answer, ...]]:
    """All checks in the recipe's own dtype, and the answers with speculation. ``proof``: the check in
    float64 that is to follow."""
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

    if quantizes:
        heldout = settings.heldout
        source = "held-out texts that ship with trtspec" if heldout is None else heldout.name
        quality = check_quality(
            engines.plain,
            engines.baseline,
            texts,
            bound=gates.max_perplexity_ratio,
            source=source,
            on_progress=stage("quality: perplexity and divergence against the 16-bit baseline"),
        )
        checks.append(quality)
        if quality.records is not None:
            checks += judge_divergence(
                quality.records.tables["tokens"],
                max_mean_kl=gates.max_mean_kl,
                max_p99_kl=gates.max_p99_kl,
                min_same_top_token=gates.min_same_top_token,
                source=source,
            )
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
    checks += _speed_checks(built, engines, prompts, identity, settings, stage)
    return checks, identity.speculative.answers


def _speed_checks(
    built: Artifact,
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
    if quantizes:
        contenders.append(Contender("baseline", engines.baseline, 0))
    result: Race | None = None
    steps: list[dict[str, Any]] = []
    if len(contenders) > 1:
        name = f"speed: {', '.join(one.name for one in contenders)}, one request at a time"
        count = min(settings.race_prompts, len(prompts))
        answers = identity.reference.answers[:count]
        lengths = [min(len(answer.tokens), settings.race_tokens) for answer in answers]
        result = race(contenders, prompts[:count], lengths, rounds=settings.rounds, on_progress=stage(name))
        if speculates and too_fast(result):
            again = "speed again: the first times are impossible, machine busy?"
            result = race(
                contenders, prompts[:count], lengths, rounds=settings.rounds, on_progress=stage(again)
            )
        if speculates:
            sides = {"recipe": engines.recipe, "no_speculation": engines.plain}
            requests = requests_for(prompts[:count], lengths, frozenset())
            steps = time_steps(sides, requests, stage("prediction: the same requests, timed step by step"))
    checks = []
    if result is not None and speculates:
        checks.append(
            check_speed(
                result, check_name="speedup", name="recipe", over="no_speculation", bound=gates.min_speedup
            )
        )
        checks.append(check_prediction(result, steps, identity.speculative.answers))
    else:
        reason = "the recipe does not speculate"
        checks.append(skipped("speedup", reason, gates.min_speedup is not None))
    bound = gates.min_speedup_over_baseline
    if result is not None and (quantizes or bound is not None):
        # Without quantization the baseline is the engine without speculation itself.
        over = "baseline" if quantizes else "no_speculation"
        checks.append(
            check_speed(result, check_name="speedup_over_baseline", name="recipe", over=over, bound=bound)
        )
    elif bound is not None:
        reason = "the recipe neither speculates nor quantizes: it is the baseline"
        checks.append(skipped("speedup_over_baseline", reason, True))
    return checks
