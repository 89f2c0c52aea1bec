"""What a recommendation says: the chosen recipe, the path that led there, and what lost by what number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trtspec.cost.estimate import Estimate
from trtspec.recipe import Recipe
from trtspec.scenario import Scenario

Step = Literal["fidelity", "backend", "serving", "memory", "weights", "kv_cache", "parallel", "speculation",
               "acceptance", "length", "limits", "slo"]  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """One leaf of the tree that was taken. ``numbers`` are (name, value, unit) that decided it."""

    step: Step
    choice: str
    because: str
    numbers: tuple[tuple[str, float, str], ...] = ()

    def __str__(self) -> str:
        shown = "; ".join(
            f"{name} {show(value)}{' ' + unit if unit else ''}" for name, value, unit in self.numbers
        )
        return f"{self.step}: {self.choice}: {self.because}" + (f" [{shown}]" if shown else "")


@dataclass(frozen=True)
class Rejected:
    """An alternative that was looked at. ``estimate`` prices it; None where a rule decided."""

    step: Step
    what: str
    because: str
    estimate: Estimate | None = None

    @property
    def tpot_ms(self) -> float | None:
        return self.estimate.tpot_ms if self.estimate else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.estimate.tokens_per_s if self.estimate else None


@dataclass
class Path:
    """Collects what the tree decides, in order."""

    because: list[Reason] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def take(self, step: Step, choice: str, because: str, *numbers: tuple[str, float, str]) -> None:
        self.because.append(Reason(step, choice, because, numbers))

    def reject(self, step: Step, what: str, because: str, estimate: Estimate | None = None) -> None:
        if any(other.what == what and other.step == step for other in self.rejected):
            return
        self.rejected.append(Rejected(step, what, because, estimate))

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


@dataclass(frozen=True)
class Recommendation:
    """``estimate``, ``plain`` and ``baseline`` price one engine of ``parallel.tp`` GPUs: the recipe, the same
    weights without speculation, and 16-bit weights without speculation (which may not fit). None without a
    GPU: step times of a CPU are measured, not estimated. ``replicas`` engines share the scenario's requests.
    """

    recipe: Recipe
    scenario: Scenario
    model: str
    gpu: str
    replicas: int
    estimate: Estimate | None
    plain: Estimate | None
    baseline: Estimate | None
    because: tuple[Reason, ...]
    rejected: tuple[Rejected, ...]
    warnings: tuple[str, ...]


def show(value: float) -> str:
    """A number with three significant digits, large ones whole."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
