"""Formats by drafters: {BF16, FP8, W4A16, W4A16+KV8} x {none, n-gram, lookahead, draft model, Medusa, EAGLE}.

Each format is built once; the drafters run over its weights. A cell answers three questions: are greedy
answers in float64 those without drafts (lossless; 16 bit could not tell), how much perplexity does the format
cost against BF16, and how fast is the cell, in one interleaved race a format that BF16 without drafts runs in
too. What this machine or the recipe has nothing for is SKIPPED with the reason.
:mod:`~trtspec.verify.matrix_verdict` judges the records.

Losses of two approximations are compared with their sum: KV8 alone is built and scored for that.

Raw records of each part are kept in the matrix's folder and used again where nothing they rest on changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trtspec.artifact import Artifact, json_digest, tool_versions
from trtspec.backends import open_engine
from trtspec.engine import Engine
from trtspec.errors import InputError, Problem, TrtspecError
from trtspec.modelspec import read_modelspec
from trtspec.prompts import HELDOUT_FILE, PROMPTS_FILE, Prompt, load_prompts, load_texts
from trtspec.recipe import ExactAcceptance, Gates, NoSpeculation, Quantization, Recipe, Speculation
from trtspec.ruler import OnProgress, max_draft, run, stage_of
from trtspec.text import Tokenizer
from trtspec.user_files import read_user_json, write_user_file
from trtspec.verify.load import Contender, race, race_rows
from trtspec.verify.lossless import requests_for
from trtspec.verify.matrix_verdict import DRAFTERS, EXTRA, FORMATS, Matrix
from trtspec.verify.records import Row, rows_of

_HEADS = {"medusa": ("medusa",), "eagle": ("eagle", "eagle3")}


@dataclass(frozen=True)
class MatrixSettings:
    """How much is measured of each cell."""

    exact_prompts: int = 3
    exact_tokens: int = 24
    quality_tokens: int = 3000
    race_prompts: int = 4
    race_tokens: int = 32
    rounds: int = 2


QUICK = MatrixSettings(2, 12, 1000, 3, 12, 1)


def quantization_of(name: str, base: Recipe, inputs: Sequence[int]) -> Quantization:
    """The format of a row for ``base``'s model; calibrated as the recipe says. ``inputs``: input sizes of the
    quantized layers, which the group size must divide."""
    own = base.quantization
    fields: dict[str, Any] = {"kind": "none"}
    if name == "FP8":
        fields = {"kind": "fp8"}
    elif name.startswith("W4A16"):
        group = getattr(own, "group_size", None)
        sizes = [size for size in (group, 128, 64, 32, 16) if size and not any(n % size for n in inputs)]
        fields = {"kind": "w4a16_awq", "group_size": sizes[0] if sizes else 128}
    if name.endswith("KV8"):
        fields["kv_cache"] = own.kv_cache if own.kv_cache in ("fp8", "int8") else "fp8"
    if fields != {"kind": "none"}:
        fields["calibration"] = own.calibration.model_dump()
    made: Quantization = TypeAdapter(Quantization).validate_python(fields)
    return made


def derived(base: Recipe, name: str, quantization: Quantization, draft: Speculation | None) -> Recipe:
    """The recipe of a row's engine: the format, and the draft model if there is one."""
    slug = name.lower().replace("+", "-")
    return base.model_copy(
        update={
            "name": f"{base.name[:40]}-{slug}",
            "quantization": quantization,
            "speculation": draft or NoSpeculation(kind="none"),
            "acceptance": ExactAcceptance(kind="exact"),
            # Its own gates are asked of the cells; a build without drafts is refused gates about drafts.
            "gates": Gates(),
        }
    )


def run_matrix(
    base: Recipe,
    folder: Path,
    settings: MatrixSettings,
    build: Callable[[Recipe], Artifact],
    *,
    draft: Speculation | None,
    heads: Sequence[Path],
    formats: Sequence[str] = FORMATS,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> tuple[Matrix, Artifact]:
    """Build and measure every cell; ``build`` makes an engine of a recipe. Also returns the BF16 engine.

    Raises InputError or MissingError where BF16 cannot be built: then there is nothing to compare with.
    """
    plain = build(derived(base, "BF16", quantization_of("BF16", base, ()), draft))
    spec = read_modelspec(plain.target_dir)
    inputs = (spec.hidden_size, spec.intermediate_size)
    tokenizer = Tokenizer.load(plain.target_dir)
    prompts, texts = _material(plain, settings, tokenizer)
    answers: list[Row] = []
    tokens: list[Row] = []
    runs: list[Row] = []
    skipped: dict[str, str] = {}
    for name in [*formats, *([EXTRA] if "W4A16+KV8" in formats else [])]:
        on_progress(f"{name}: building", 0, 0)
        try:
            wanted = derived(base, name, quantization_of(name, base, inputs), draft)
            built = plain if name == "BF16" else build(wanted)
        except (TrtspecError, ValidationError) as error:
            skipped[name] = str(error).splitlines()[0]
            continue
        state = _State(folder / "parts", _key(built, plain, base, prompts, texts, settings, heads))

        def scored(name: str = name, built: Artifact = built) -> list[dict[str, Any]]:
            on_progress(f"{name}: perplexity", 0, 0)
            return _score(name, built, texts)

        tokens += state.part(f"quality-{name}", scored)
        if name == EXTRA:
            continue
        cells = _cells(built, base.speculation, heads, skipped, name)

        def exact(
            drafter: str,
            name: str = name,
            built: Artifact = built,
            cells: Mapping[str, Artifact] = cells,
        ) -> list[dict[str, Any]]:
            on_progress(f"{name} {drafter}: greedy answers in float64", 0, 0)
            return _exact(name, drafter, cells[drafter], prompts, settings, tokenizer)

        for drafter in cells:
            answers += state.part(f"exact-{name}-{drafter}", partial(exact, drafter))

        def raced(
            name: str = name, cells: Mapping[str, Artifact] = cells, built: Artifact = built
        ) -> list[dict[str, Any]]:
            progress = stage_of(on_progress, f"{name}: race of {len(cells)} drafters")
            return _race(name, cells, plain, prompts, settings, progress)

        runs += state.part(f"race-{name}", raced)
    return Matrix(tuple(answers), tuple(tokens), tuple(runs), skipped), plain


def _material(
    built: Artifact, settings: MatrixSettings, tokenizer: Tokenizer
) -> tuple[list[Prompt], list[list[int]]]:
    limits = built.recipe.limits
    most = max(settings.exact_tokens, settings.race_tokens)
    longest = min(limits.max_input_tokens, limits.max_seq_tokens - most)
    count = max(settings.exact_prompts, settings.race_prompts)
    prompts = load_prompts(PROMPTS_FILE, tokenizer, limit=count, max_tokens=min(longest, 160), sample=True)
    texts = load_texts(
        HELDOUT_FILE,
        tokenizer,
        total_tokens=settings.quality_tokens,
        max_tokens=min(128, limits.max_seq_tokens),
    )
    return prompts, texts


def _cells(
    built: Artifact, mine: Speculation, heads: Sequence[Path], skipped: dict[str, str], name: str
) -> dict[str, Artifact]:
    """Drafter -> the engine that runs it; why not goes into ``skipped``. ``mine``: the recipe's own method,
    which its cell runs as it stands there; the others have their defaults."""
    cells = {}
    own = built.recipe.speculation
    limits = built.recipe.limits.model_copy(update={"kv_cache_bytes": None})
    for drafter in DRAFTERS:
        found: Artifact | None = None
        reason = ""
        if drafter in ("none", "ngram", "lookahead"):
            speculation: Any = (
                mine if mine.kind == drafter else TypeAdapter(Speculation).validate_python({"kind": drafter})
            )
            found = replace(built, recipe=built.recipe.model_copy(update={"speculation": speculation}))
        elif drafter == "draft_model":
            if own.kind == "draft_model":
                found = built
            else:
                reason = "no draft model; --draft MODEL names one, or a recipe with speculation draft_model"
        else:
            for place in heads:
                kind = _heads_kind(place, built)
                if kind in _HEADS[drafter]:
                    speculation = (
                        mine.model_copy(update={"heads": str(place)})
                        if mine.kind == kind
                        else TypeAdapter(Speculation).validate_python({"kind": kind, "heads": str(place)})
                    )
                    recipe = built.recipe.model_copy(update={"speculation": speculation})
                    found = replace(built, recipe=recipe, heads_dir=place)
            reason = f"no {drafter} heads; --heads DIR names trained ones (trtspec draft train)"
        if found is None:
            skipped[f"{name} {drafter}"] = reason
        else:
            cells[drafter] = replace(found, recipe=found.recipe.model_copy(update={"limits": limits}))
    return cells


def _heads_kind(folder: Path, built: Artifact) -> str:
    from trtspec.embedded.heads import inspect_heads  # torch

    target = read_modelspec(built.target_dir)
    reasons: list[Problem] = []
    for kind in ("medusa", "eagle", "eagle3"):
        problems: list[Problem] = []
        if inspect_heads(folder, kind, target, problems) is not None:  # type: ignore[arg-type]
            return kind
        reasons += [one for one in problems if not one.message.startswith("these are ")]
    raise InputError(list(dict.fromkeys(reasons)))


# --------------------------------------------------------------------------- measuring


class _State:
    """Parts that were measured before, by name; each file holds the key of what it rests on."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key

    def part(self, name: str, measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        path = self._folder / f"{name}.json"
        if path.is_file():
            with contextlib.suppress(InputError):  # a damaged part is measured again
                found = read_user_json(path)
                kept = found.get("rows") if isinstance(found, dict) else None
                # Verdicts rest on these rows: a part that was cut or edited is no part.
                if isinstance(kept, list) and self._written(kept) == found:
                    return kept
        rows: list[dict[str, Any]] = json.loads(json.dumps(measure()))  # as a resumed run reads it
        self._folder.mkdir(parents=True, exist_ok=True)
        write_user_file(path, json.dumps(self._written(rows)).encode())
        return rows

    def _written(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"key": self._key, "rows": rows, "rows_sha256": json_digest(rows)}


def _key(
    built: Artifact,
    plain: Artifact,
    base: Recipe,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[int]],
    settings: MatrixSettings,
    heads: Sequence[Path],
) -> str:
    """What the parts of one format rest on."""
    files = [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for place in heads
        for path in sorted(place.iterdir())
        if path.is_file()
    ]
    rests = [
        built.manifest.recipe_digest,
        plain.manifest.recipe_digest,
        built.manifest.source.digest,
        base.speculation.model_dump(mode="json"),
        [prompt.tokens for prompt in prompts],
        texts,
        asdict(settings),
        files,
        tool_versions(),
    ]
    return hashlib.sha256(json.dumps(rests).encode()).hexdigest()


def _score(name: str, built: Artifact, texts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    with contextlib.closing(open_engine(built, "no_speculation")) as engine:
        return [
            {"format": name, "text": number, "logprob": value}
            for number, text in enumerate(texts)
            for value in engine.score(text).logprobs
        ]


def _exact(
    name: str,
    drafter: str,
    cell: Artifact,
    prompts: Sequence[Prompt],
    settings: MatrixSettings,
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    limits = cell.recipe.limits.model_copy(update={"max_batch_size": settings.exact_prompts})
    small = replace(cell, recipe=cell.recipe.model_copy(update={"limits": limits}))
    chosen = prompts[: settings.exact_prompts]
    requests = requests_for(chosen, settings.exact_tokens, tokenizer.eos_token_ids)
    with contextlib.closing(open_engine(small, "recipe", dtype="float64")) as engine:
        result = run(engine, requests, draft_limit=max_draft(cell.recipe.speculation))
    return [
        {"format": name, "drafter": drafter, "contradictions": list(result.contradictions), **row}
        for row in rows_of(result.answers)
    ]


def _race(
    name: str,
    cells: Mapping[str, Artifact],
    plain: Artifact,
    prompts: Sequence[Prompt],
    settings: MatrixSettings,
    on_progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    chosen = prompts[: settings.race_prompts]
    with contextlib.ExitStack() as stack:

        def opened(cell: Artifact, variant: Any) -> Engine:
            return stack.enter_context(contextlib.closing(open_engine(cell, variant)))

        contenders = [
            Contender(
                "no_speculation" if drafter == "none" else drafter,
                opened(cell, "recipe"),
                max_draft(cell.recipe.speculation),
            )
            for drafter, cell in cells.items()
        ]
        if name != "BF16":
            contenders.append(Contender("baseline", opened(plain, "no_speculation"), 0))
        lengths = [settings.race_tokens] * len(chosen)
        result = race(contenders, chosen, lengths, rounds=settings.rounds, on_progress=on_progress)
    rows = race_rows(result, [one.name for one in contenders])
    return [{"format": name, "contradictions": list(result.contradictions), **row} for row in rows]
