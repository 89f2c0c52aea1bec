"""One question asked to the cost model: what would this plan cost for this case? Answers are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trtspec.cost.acceptance import prior_table
from trtspec.cost.estimate import Deployment, Estimate, Workload, estimate
from trtspec.cost.steps import DEFAULT, Coefficients
from trtspec.hardware import Gpu
from trtspec.known_models import NamedModel
from trtspec.modelspec import ModelSpec
from trtspec.recipe import Acceptance, ExactAcceptance, NoSpeculation, Quantization, Speculation
from trtspec.recommend.evidence import Evidence
from trtspec.recommend.heads import Heads
from trtspec.scenario import Scenario

NO_SPECULATION = NoSpeculation(kind="none")
EXACT = ExactAcceptance(kind="exact")

BackendKind = Literal["embedded", "pytorch", "tensorrt"]


@dataclass(frozen=True)
class Plan:
    """What varies while the tree decides."""

    quantization: Quantization
    speculation: Speculation = NO_SPECULATION
    acceptance: Acceptance = EXACT
    tp: int = 1
    concurrency: int = 1
    input_tokens: int | None = None
    """Another prompt length than the scenario's."""


@dataclass(frozen=True)
class Case:
    """What is given: the scenario, the model, the machine and what is known about them. ``gpu`` None: a
    machine without one. ``draft`` is a published or named smaller model with the target's tokenizer."""

    scenario: Scenario
    model: NamedModel
    gpu: Gpu | None
    count: int
    backend: BackendKind
    heads: Heads | None = None
    draft: NamedModel | None = None
    evidence: Evidence | None = None
    only: tuple[str, ...] | None = None
    """Weights formats that named heads are documented for; None: all."""
    first: str | None = None
    """For a few users: the weights format to try first."""
    coefficients: Coefficients = DEFAULT
    prices: dict[Plan, Estimate] = field(default_factory=dict, compare=False, hash=False)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def copies(self) -> float:
        """The scenario's copy fraction, else the published one of its task."""
        given = self.scenario.copy_fraction
        published = prior_table()["methods"]["ngram"]["tasks"][self.scenario.task]["copy_fraction"]
        return given if given is not None else float(published)

    @property
    def passed_weights(self) -> str | None:
        return self.evidence.passed_weights if self.evidence else None

    @property
    def passed_kv(self) -> str | None:
        return self.evidence.passed_kv if self.evidence else None


def price(case: Case, plan: Plan) -> Estimate:
    """The estimate of ``plan``; ``case.gpu`` must be there."""
    known = case.prices.get(plan)
    if known is None:
        assert case.gpu is not None
        known = estimate(deployment(case, plan), workload(case, plan), case.coefficients)
        case.prices[plan] = known
    return known


def workload(case: Case, plan: Plan) -> Workload:
    scenario = case.scenario
    return Workload(
        input_tokens=plan.input_tokens or scenario.input_tokens,
        output_tokens=scenario.output_tokens,
        concurrency=plan.concurrency,
        temperature=scenario.temperature,
        copy_fraction=scenario.copy_fraction,
        task=scenario.task,
    )


def deployment(case: Case, plan: Plan) -> Deployment:
    assert case.gpu is not None
    kind = plan.speculation.kind
    draft_spec = None
    if kind == "draft_model" and case.draft is not None:
        draft_spec = case.draft.spec
    elif kind in ("eagle", "eagle3") and case.heads is not None and case.heads.method == kind:
        draft_spec = case.heads.spec
    measured = case.evidence.curve if case.evidence is not None and case.evidence.method == kind else None
    return Deployment(
        spec=case.spec,
        gpu=case.gpu,
        tp=plan.tp,
        pp=1,
        quantization=plan.quantization,
        speculation=plan.speculation,
        acceptance=plan.acceptance,
        draft_spec=draft_spec,
        acceptance_curve=measured,
        backend=case.backend,
    )
