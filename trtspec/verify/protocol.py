"""The acceptance protocol of one built engine: which checks are run, on what, in which order."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trtspec.artifact import Artifact, file_sha256, machine_summary, tool_versions, utc_now
from trtspec.backends import open_engine
from trtspec.engine import Engine
from trtspec.recipe import NoSpeculation, Recipe
from trtspec.text import Tokenizer
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.load import Contender, Race, check_acceptance, check_speed, race
from trtspec.verify.lossless import Identity, check_lossless, requests_for
from trtspec.verify.quality import check_quality
from trtspec.verify.report import Report
from trtspec.verify.ruler import Answer, max_draft, run
from trtspec.verify.stats import rate_upper_bound
from trtspec.verify.texts import HELDOUT_FILE, PROMPTS_FILE, Prompt, load_prompts, load_texts

OnProgress = Callable[[str, int, int], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How much is measured. More prompts and tokens narrow the intervals and take longer."""

    num_prompts: int = 12
    max_new_tokens: int = 48
    quality_tokens: int = 3000
    quality_text_tokens: int = 128
    race_prompts: int = 6
    race_tokens: int = 32
    rounds: int = 2
    floor_prompts: int = 3
    noise_texts: int = 2
    noise_tokens: int = 64
    exact_prompts: int = 4
    """Prompts of the comparison in float64: those with the most drafts."""
    exact_tokens: int = 24
    prompts: Path | None = None
    """The user's own JSONL file; None: the prompts that ship with trtspec."""
    heldout: Path | None = None


QUICK = Settings(
    num_prompts=6,
    max_new_tokens=24,
    quality_tokens=1000,
    race_prompts=4,
    race_tokens=16,
    rounds=1,
    floor_prompts=2,
    noise_texts=1,
    noise_tokens=48,
    exact_prompts=2,
    exact_tokens=16,
)


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

    ``say`` gets a line about each stage, ``on_progress(stage, done, total)`` counts within it. Raises
    InputError for prompts that do not fit, MissingError for what the machine lacks; a gate that fails is
    a verdict in the report, not an exception.
    """
    began, created = time.monotonic(), utc_now()
    rate_upper_bound(0, 1)  # a missing scipy is said now, not after minutes of measuring
    recipe = built.recipe
    tokenizer = Tokenizer.load(built.target_dir)
    prompts = load_prompts(
        settings.prompts or PROMPTS_FILE,
        tokenizer,
        limit=settings.num_prompts,
        max_tokens=min(
            recipe.limits.max_input_tokens, recipe.limits.max_seq_tokens - settings.max_new_tokens
        ),
        sample=settings.prompts is None,
    )
    texts: list[list[int]] = []
    if built.manifest.target != "baseline":
        texts = load_texts(
            settings.heldout or HELDOUT_FILE,
            tokenizer,
            total_tokens=settings.quality_tokens,
            max_tokens=min(settings.quality_text_tokens, recipe.limits.max_seq_tokens),
        )
    with contextlib.ExitStack() as stack:
        say("loading the engines")
        engines = _open(built, stack)
        say(f"{len(prompts)} prompts; about {_estimate_s(engines, prompts, settings, recipe):.0f} s to go")
        checks, answers = _measure(built, engines, prompts, texts, tokenizer, settings, say, on_progress)
    # After the others are closed: two more copies of the weights, and in 64 bit.
    drafted = {answer.request_id: answer.drafted for answer in answers}
    livelier = sorted(prompts, key=lambda prompt: drafted[prompt.id], reverse=True)
    checks[1:1] = _exact(built, livelier[: settings.exact_prompts], tokenizer, settings, say, on_progress)
    notes = []
    if (wanted := settings.num_prompts) > len(prompts):
        notes.append(f"{wanted} prompts were asked for, {len(prompts)} are there and fit the limits")
    return Report(
        engine=str(built.folder),
        recipe_name=recipe.name,
        recipe_digest=built.manifest.recipe_digest,
        recipe=recipe.model_dump(mode="json"),
        source_digest=built.manifest.source.digest,
        created=created,
        argv=tuple(argv),
        tools=tool_versions(),
        built_with=built.manifest.tools,
        machine={
            **machine_summary(),
            "threads": getattr(recipe.backend, "threads", None) or "default",
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        },
        settings=_settings_record(settings, prompts),
        seconds=round(time.monotonic() - began, 1),
        checks=tuple(checks),
        notes=tuple(notes),
    )


def _settings_record(settings: Settings, prompts: Sequence[Prompt]) -> dict[str, object]:
    prompts_file, heldout = settings.prompts or PROMPTS_FILE, settings.heldout or HELDOUT_FILE
    return {
        **asdict(settings),
        "num_prompts": len(prompts),
        "prompts": "builtin" if settings.prompts is None else str(prompts_file),
        "prompts_sha256": file_sha256(prompts_file),
        "heldout": "builtin" if settings.heldout is None else str(heldout),
        "heldout_sha256": file_sha256(heldout),
    }


def _exact(
    built: Artifact,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    settings: Settings,
    say: Say,
    on_progress: OnProgress,
) -> list[Check]:
    """Identity in float64, where rounding excuses nothing; [] when the recipe does not speculate or
    computes in float64 anyway."""
    recipe, name = built.recipe, "lossless_float64"
    if isinstance(recipe.speculation, NoSpeculation) or recipe.backend.dtype == "float64":
        return []
    weights = sum(path.stat().st_size for path in built.baseline_dir.glob("*.safetensors"))
    if 2 * 4 * weights > _available_bytes() // 2:  # two engines, 16 bit to 64 bit
        reason = f"two copies of the weights in float64 ({8 * weights / 1e9:.0f} GB) do not fit this machine"
        return [_skipped(name, reason, False)]
    say("lossless_float64: greedy answers token by token, in float64")
    limits = recipe.limits.model_copy(update={"max_batch_size": len(prompts), "kv_cache_bytes": None})
    small = replace(built, recipe=recipe.model_copy(update={"limits": limits}))
    with contextlib.ExitStack() as stack:
        plain, speculative = (
            stack.enter_context(contextlib.closing(open_engine(small, variant, dtype="float64")))
            for variant in ("no_speculation", "recipe")
        )
        identity = check_lossless(
            speculative,
            plain,
            prompts,
            max_new_tokens=min(settings.exact_tokens, settings.max_new_tokens),
            stop_tokens=tokenizer.eos_token_ids,
            draft_limit=max_draft(recipe.speculation),
            dtype="float64",
            speculates=True,
            required=recipe.gates.lossless,
            name=name,
            floor_prompts=0,
            noise_texts=0,
            on_progress=lambda done, total: on_progress(name, done, total),
        )
    return [identity.check]


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _open(built: Artifact, stack: contextlib.ExitStack) -> _Engines:
    plain = stack.enter_context(contextlib.closing(open_engine(built, "no_speculation")))
    recipe = baseline = plain
    if not isinstance(built.recipe.speculation, NoSpeculation):
        recipe = stack.enter_context(contextlib.closing(open_engine(built, "recipe")))
    if built.manifest.target != "baseline":
        baseline = stack.enter_context(contextlib.closing(open_engine(built, "baseline")))
    return _Engines(recipe, plain, baseline)


def _estimate_s(engines: _Engines, prompts: Sequence[Prompt], settings: Settings, recipe: Recipe) -> float:
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
    # Batched steps cost about three single ones; locating divergences a prefill or two each.
    seconds = plain * (batches * tokens * 4 * (1 + speculates) + alone * tokens + noise)
    if engines.baseline is not engines.plain:
        seconds += settings.quality_tokens / 8 * (plain + baseline) / 2
    runs = settings.rounds * min(settings.race_prompts, len(prompts)) * min(settings.race_tokens, tokens)
    if speculates:
        seconds += runs * plain * 2
        if recipe.backend.dtype != "float64":
            seconds += plain * settings.exact_tokens * 2 * 12
    if engines.baseline is not engines.plain:
        seconds += runs * (baseline + (0 if speculates else plain))
    return seconds


def _measure(
    built: Artifact,
    engines: _Engines,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    settings: Settings,
    say: Say,
    on_progress: OnProgress,
) -> tuple[list[Check], tuple[Answer, ...]]:
    """All checks in the recipe's own dtype, and the answers with speculation."""
    recipe, gates = built.recipe, built.recipe.gates
    speculates = engines.recipe is not engines.plain
    quantizes = engines.baseline is not engines.plain
    draft_limit = max_draft(recipe.speculation)

    def stage(name: str) -> Callable[[int, int], None]:
        return lambda done, total: on_progress(name, done, total)

    say("lossless: greedy answers token by token" if speculates else "lossless: batching against batch 1")
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
        floor_prompts=settings.floor_prompts,
        noise_texts=settings.noise_texts,
        noise_tokens=settings.noise_tokens,
        on_progress=stage("lossless"),
    )
    checks = [identity.check]

    if quantizes:
        say("quality: perplexity against the 16-bit baseline")
        checks.append(
            check_quality(
                engines.plain,
                engines.baseline,
                texts,
                bound=gates.max_perplexity_ratio,
                source="held-out texts that ship with trtspec"
                if settings.heldout is None
                else settings.heldout.name,
                on_progress=stage("quality"),
            )
        )
    else:
        checks.append(_skipped("quality", "nothing is quantized: the target is the 16-bit baseline", False))

    if speculates:
        checks.append(
            check_acceptance(
                identity.speculative.answers,
                draft_limit=draft_limit,
                bound=gates.min_acceptance_length,
                contradictions=identity.speculative.contradictions,
                tasks=[prompt.task for prompt in prompts],
            )
        )
    else:
        reason = "the recipe does not speculate"
        checks.append(_skipped("acceptance", reason, gates.min_acceptance_length is not None))
    checks += _speed_checks(built, engines, prompts, identity, settings, say, stage("speed"))
    return checks, identity.speculative.answers


def _speed_checks(
    built: Artifact,
    engines: _Engines,
    prompts: Sequence[Prompt],
    identity: Identity,
    settings: Settings,
    say: Say,
    on_progress: Callable[[int, int], None],
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
    if len(contenders) > 1:
        say(f"speed: {', '.join(one.name for one in contenders)}, one request at a time")
        count = min(settings.race_prompts, len(prompts))
        answers = identity.reference.answers[:count]
        lengths = [min(len(answer.tokens), settings.race_tokens) for answer in answers]
        result = race(contenders, prompts[:count], lengths, rounds=settings.rounds, on_progress=on_progress)
    checks = []
    if result is not None and speculates:
        checks.append(
            check_speed(
                result, check_name="speedup", name="recipe", over="no_speculation", bound=gates.min_speedup
            )
        )
    else:
        reason = "the recipe does not speculate"
        checks.append(_skipped("speedup", reason, gates.min_speedup is not None))
    bound = gates.min_speedup_over_baseline
    if result is not None and (quantizes or bound is not None):
        # Without quantization the baseline is the engine without speculation itself.
        over = "baseline" if quantizes else "no_speculation"
        checks.append(
            check_speed(result, check_name="speedup_over_baseline", name="recipe", over=over, bound=bound)
        )
    elif bound is not None:
        reason = "the recipe neither speculates nor quantizes: it is the baseline"
        checks.append(_skipped("speedup_over_baseline", reason, True))
    return checks


def _skipped(name: str, reason: str, required: bool) -> Check:
    return Check(name, Verdict.SKIPPED, reason, required=required)
