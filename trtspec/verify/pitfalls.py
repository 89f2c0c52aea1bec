"""Nine ways in which measurements of quantization and drafting mislead, as questions to a report.

Each is answered, open (with what to run), or does not apply to the recipe. The answers follow from checks,
recipe and settings alone, so any rendering or reader can derive them again. They decide no verdict: an
open one says what the verdict does not cover.

A check of any module answers a pitfall by listing its id under ``pitfalls`` in its evidence; it counts unless
it was skipped, undecided or contradicts itself.

Why each misleads is derived in ``docs/math.md`` (acceptance length, round time, break-even batch, context).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trtspec.verify.gates import Check, Verdict, finite
from trtspec.verify.i18n import TEXTS, Say

IDS = (
    "wrong-baseline",
    "alpha-without-tau",
    "unquantized-draft",
    "untested-together",
    "one-load",
    "tail-ignored",
    "lazy-lossless",
    "untuned-draft",
    "long-context",
)
Status = Literal["answered", "open", "does not apply"]
_VOID = (Verdict.SKIPPED, Verdict.ERROR, Verdict.INCONCLUSIVE)
_TREES = ("medusa", "eagle", "eagle3", "ngram", "draft_model", "lookahead")
LONG = 0.5
"""Share of limits.max_seq_tokens that the longest measured sequence must reach."""


@dataclass(frozen=True)
class Pitfall:
    """``key`` and ``run`` name sentences of :mod:`trtspec.verify.i18n`; ``values`` go into the first."""

    id: str
    status: Status
    key: str
    values: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    engine: str = ""
    """As a command takes it."""
    to_build: bool = False
    """Whether ``engine`` is to be built from the recipe first."""

    def command(self, say: Say) -> str:
        """What to run where it is open, else ""."""
        if not self.run:
            return ""
        text = say(self.run, engine=self.engine)
        builds = self.to_build and "{engine}" in TEXTS[self.run][0]
        return say("pitfall.build-first", text=text) if builds else text


@dataclass(frozen=True)
class _Known:
    """What the questions look at."""

    checks: Mapping[str, Check]
    recipe: Mapping[str, Any]
    settings: Mapping[str, Any]
    approximate: bool
    endpoints: bool
    """Two endpoints, one of which is taken to speculate; what they hold is not known."""

    def at(self, *keys: str) -> Any:
        """A value of the recipe; None where it has none."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def speculates(self) -> bool:
        return self.endpoints or self.at("speculation", "kind") not in (None, "none")

    @property
    def quantizes(self) -> bool:
        kinds = (self.at("quantization", "kind"), self.at("quantization", "kv_cache"))
        return any(kind not in (None, "none") for kind in kinds)

    def sound(self, name: str) -> Check | None:
        """The check, if it was measured and does not contradict itself."""
        check = self.checks.get(name)
        return None if check is None or check.verdict in (Verdict.SKIPPED, Verdict.ERROR) else check


_Answer = tuple[Status, str, dict[str, str]]
"""Status, key of the sentence after the id and a dot, values."""


def answer_pitfalls(
    checks: Sequence[Check],
    recipe: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    engine: str,
    fidelity: str,
) -> tuple[Pitfall, ...]:
    """One answer for each of :data:`IDS`, in that order."""
    endpoints = re.fullmatch(r"(https?://\S+) against (https?://\S+)", engine)
    if endpoints is not None:  # as options, or what the answers tell to run would not be a command
        engine = f"--url {endpoints[1]} --baseline-url {endpoints[2]}"
    of_matrix = "matrix" in settings
    if of_matrix:  # whose folder is no engine
        engine = f"engines/{recipe.get('name', 'NAME')}"
    known = _Known(
        {check.name: check for check in checks},
        recipe,
        settings,
        fidelity == "approximate",
        endpoints is not None,
    )
    questions: dict[str, Callable[[_Known], _Answer]] = {
        "wrong-baseline": _wrong_baseline,
        "alpha-without-tau": _alpha_without_tau,
        "unquantized-draft": _unquantized_draft,
        "untested-together": _untested_together,
        "one-load": _one_load,
        "tail-ignored": _tail_ignored,
        "lazy-lossless": _lazy_lossless,
        "untuned-draft": _untuned_draft,
        "long-context": _long_context,
    }
    found = []
    for name in IDS:
        status, key, values = questions[name](known)
        claimed = [check.name for check in checks if _claims(check, name)]
        if status == "open" and claimed:
            found.append(
                Pitfall(name, "answered", "pitfall.by-check", {"checks": ", ".join(claimed)}, engine=engine)
            )
            continue
        run = f"pitfall.{name}.run" if status == "open" else ""
        if known.endpoints and f"{run}.url" in TEXTS:
            run = f"{run}.url"
        found.append(Pitfall(name, status, f"pitfall.{name}.{key}", values, run, engine, of_matrix))
    return tuple(found)


def _claims(check: Check, name: str) -> bool:
    listed = check.evidence.get("pitfalls")
    return check.verdict not in _VOID and isinstance(listed, (list, tuple)) and name in listed


def _wrong_baseline(known: _Known) -> _Answer:
    needed = ["speedup"] if known.speculates else []
    if "vs_other.speedup" in known.checks:
        needed.append("vs_other.speedup")
    elif known.quantizes:
        needed.append("speedup_over_baseline")
    if not needed:
        return "does not apply", "none", {}
    found = [check for check in map(known.sound, needed) if check is not None]
    if len(found) < len(needed):
        missing = [name for name in needed if known.sound(name) is None]
        return "open", "missing", {"checks": ", ".join(missing)}
    if not all(check.evidence.get("interleaved") for check in found):
        return "open", "apart", {}
    return "answered", "yes", {"checks": ", ".join(needed)}


def _alpha_without_tau(known: _Known) -> _Answer:
    if not known.speculates:
        return "does not apply", "none", {}
    check = known.sound("acceptance")
    rate, length = (
        None if check is None else finite(check.evidence.get(name))
        for name in ("acceptance_rate", "acceptance_length")
    )
    if rate is None or length is None:
        return "open", "missing", {}
    return "answered", "yes", {"rate": f"{rate:.1%}", "length": f"{length:.2f}"}


def _unquantized_draft(known: _Known) -> _Answer:
    kind = known.at("speculation", "kind")
    if not known.quantizes:
        return "does not apply", "plain", {}
    if kind in (None, "none", "ngram", "lookahead"):
        return "does not apply", "none", {}
    if kind == "draft_model":
        drafts = known.at("speculation", "quantization", "kind")
        if drafts not in (None, "none"):
            return "answered", "yes", {"format": str(drafts)}
        return "open", "model", {}
    # Heads are small beside the target and TensorRT-LLM keeps them in 16 bit.
    return "answered", "heads", {"kind": str(kind)}


def _untested_together(known: _Known) -> _Answer:
    quality = known.sound("quality") or known.sound("vs_other.quality")
    if known.approximate and known.quantizes:
        return "open", "both", {}
    kinds = (known.at("quantization", "kind"), known.at("quantization", "kv_cache"))
    if all(kind not in (None, "none") for kind in kinds):
        return ("answered", "kv", {}) if quality is not None else ("open", "kv-missing", {})
    return "does not apply", "none", {}


def _one_load(known: _Known) -> _Answer:
    loads = {
        str(load)
        for check in known.checks.values()
        if check.verdict not in _VOID and isinstance(check.evidence.get("loads"), (list, tuple))
        for load in check.evidence["loads"]
    }
    if len(loads) > 1:
        return "answered", "yes", {"count": str(len(loads))}
    if not known.speculates and not known.quantizes:
        return "does not apply", "none", {}
    return "open", "one", {}


def _tail_ignored(known: _Known) -> _Answer:
    for check in known.checks.values():
        if check.verdict not in _VOID and _has_key(check.evidence, "p99"):
            return "answered", "yes", {"check": check.name}
    return "open", "missing", {}


def _lazy_lossless(known: _Known) -> _Answer:
    if known.approximate:
        judged = [name for name in known.checks if name.startswith("approximate") and known.sound(name)]
        if judged:
            return "answered", "approximate", {"checks": ", ".join(judged)}
        return "open", "approximate-missing", {}
    if not known.speculates:
        return "does not apply", "none", {}
    for name in ("lossless_float64", "lossless"):
        check = known.sound(name)
        if check is None or check.verdict is Verdict.INCONCLUSIVE:
            continue
        near = check.evidence.get("near_misses")
        refused = finite(near.get("refused")) if isinstance(near, Mapping) else None
        if check.verdict is Verdict.FAIL or refused:
            return "answered", "yes", {"check": name, "refused": f"{refused or 0:.0f}"}
    return "open", "missing", {}


def _untuned_draft(known: _Known) -> _Answer:
    if not known.endpoints and known.at("speculation", "kind") not in _TREES:
        return "does not apply", "none", {}
    for check in known.checks.values():
        if check.verdict not in _VOID and "scan" in check.evidence:
            return "answered", "yes", {"check": check.name}
    if known.at("speculation", "adaptive"):
        return "answered", "adaptive", {}
    return "open", "served" if known.endpoints else "given", {}


def _long_context(known: _Known) -> _Answer:
    limit = finite(known.at("limits", "max_seq_tokens"))
    prompt = finite(known.settings.get("longest_prompt_tokens"))
    new = finite(known.settings.get("max_new_tokens"))
    if limit is None or prompt is None or new is None:
        return "open", "unknown", {}
    longest = prompt + new
    retrieval = known.sound("retrieval") or known.sound("vs_other.retrieval")
    if retrieval is not None and not known.speculates:
        # Nothing but the quality of the KV cache can suffer there.
        lengths = retrieval.evidence.get("lengths")
        longest = max([longest, *filter(None, map(finite, lengths if isinstance(lengths, list) else []))])
    values = {"longest": f"{longest:.0f}", "limit": f"{limit:.0f}"}
    return ("answered", "yes", values) if longest >= LONG * limit else ("open", "short", values)


def _has_key(value: object, wanted: str) -> bool:
    if isinstance(value, Mapping):
        return any(
            (str(key) in (wanted, f"{wanted}_ms", f"{wanted}_s") and inner is not None)
            or _has_key(inner, wanted)
            for key, inner in value.items()
        )
    return isinstance(value, (list, tuple)) and any(_has_key(inner, wanted) for inner in value)
