"""The options of ``trtspec verify`` about speed: two endpoints, the load, and the service level."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from trtspec.cli.output import FloatRange, Progress, UserPath
from trtspec.errors import InputError, Problem

if TYPE_CHECKING:
    from trtspec.recipe import Gates
    from trtspec.verify.endpoint import Endpoint, Protocol
    from trtspec.verify.endpoint_labels import Acceptance
    from trtspec.verify.endpoint_quality import Plan
    from trtspec.verify.endpoint_sampled import DrawSettings
    from trtspec.verify.report import Report
    from trtspec.verify.settings import Settings

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OF_LATENCY = ("requests", "concurrency", "rate", "slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms")
"""Of a load: with endpoints, or with an engine's --latency."""
_NEED_URL = (
    "baseline_url", "model", "baseline_model", "protocol", "draft_tokens", "min_goodput", "min_speedup",
    "timeout", "api_key_env", "driver", "aiperf", "acceptance", "other_weights", "parameters",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SpeedOptions:
    """What the user asked for; None: not given."""

    url: str | None
    baseline_url: str | None
    model: str | None
    baseline_model: str | None
    protocol: Protocol | None
    requests: int | None
    concurrency: int | None
    rate: float | None
    draft_tokens: int | None
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    slo_e2e_ms: float | None
    min_goodput: float | None
    min_speedup: float | None
    timeout: float | None
    api_key_env: str | None
    driver: Literal["own", "aiperf"] | None
    aiperf: Path | None
    acceptance: Acceptance | None
    other_weights: bool | None
    parameters: bool | None
    latency: bool
    load: bool
    load_tokens: int | None
    load_batch: int | None
    scan: bool
    matrix: Path | None
    matrix_dir: Path | None
    heads: tuple[Path, ...]
    draft: str | None

    def applied(self, settings: Settings, *, quick: bool) -> Settings:
        """``settings`` with the load matrix, if it was asked for."""
        from trtspec.verify.settings import QUICK_LOAD, LatencySettings, LoadSettings

        if self.latency:
            latency = LatencySettings(
                self.concurrency,
                self.rate,
                self.requests,
                self.slo_ttft_ms,
                self.slo_tpot_ms,
                self.slo_e2e_ms,
                tails=not quick,
            )
            settings = dataclasses.replace(settings, latency=latency)
        if not self.load:
            return settings
        base = QUICK_LOAD if quick else LoadSettings()
        load = dataclasses.replace(
            base, tokens=self.load_tokens or base.tokens, batch=self.load_batch, file=settings.prompts
        )
        return dataclasses.replace(settings, load=load)

    def check(self, *, engine: Path | None, others: Mapping[str, object]) -> None:
        """Raises InputError where these options do not fit together. ``others``: options that have no meaning
        for endpoints, by name."""
        problems = []
        if self.url is None:
            given = [name for name in _NEED_URL if getattr(self, name) is not None]
            problems += [f"{_flag(name)} belongs to --url URL --baseline-url URL" for name in given]
            given = [name for name in _OF_LATENCY if getattr(self, name) is not None]
            if not self.latency:
                problems += [f"{_flag(name)} belongs to --latency, or to --url URL" for name in given]
            if self.matrix is None:
                own = {"--matrix-dir": self.matrix_dir, "--heads": self.heads, "--draft": self.draft}
                problems += [f"{name} belongs to --matrix" for name, value in own.items() if value]
            elif engine is not None or self.load:
                problems.append("give ENGINE or --matrix RECIPE, not both; --load needs an ENGINE")
            problems += [
                f"{name} needs an ENGINE"
                for name, given_ in (("--scan", self.scan), ("--latency", self.latency))
                if given_ and engine is None
            ]
            if not self.load and (self.load_tokens, self.load_batch) != (None, None):
                problems.append("--load-tokens and --load-batch belong to --load")
        else:
            if self.baseline_url is None:
                problems.append(
                    "--url needs --baseline-url, the same model without speculation, to compare with"
                )
            if engine is not None:
                problems.append("give ENGINE or --url, not both")
            problems += [
                f"{name} measures nothing; leave --url out, or {name}"
                if name in ("--plan", "--self-test")
                else f"{name} needs an ENGINE; endpoints cannot show it"
                for name, value in {
                    **others,
                    "--latency": self.latency,
                    "--load": self.load,
                    "--scan": self.scan,
                    "--matrix": self.matrix,
                }.items()
                if value not in (None, False, ())
            ]
            if self.aiperf is not None and self.driver != "aiperf":
                problems.append("--aiperf belongs to --driver aiperf")
            if self.min_goodput is not None and not (self.slo_ttft_ms or self.slo_tpot_ms or self.slo_e2e_ms):
                problems.append(
                    "--min-goodput needs an objective: --slo-ttft-ms, --slo-tpot-ms, --slo-e2e-ms"
                )
        if self.rate is not None and self.concurrency is not None:
            problems.append("give --rate (open loop) or --concurrency (closed loop), not both")
        if problems:
            raise InputError([Problem(problem) for problem in problems])

    @property
    def alone(self) -> bool:
        """Whether these say what is measured, so that no ENGINE is needed."""
        return self.url is not None or self.matrix is not None

    def measure(
        self,
        progress: Progress,
        *,
        prompts: Path | None,
        num_prompts: int | None,
        max_new_tokens: int | None,
        rounds: int | None,
        quick: bool,
        quality: Plan | None,
        draws: DrawSettings | None,
    ) -> Report:
        """Ask both endpoints, or measure the matrix. Raises what their client, or build, raises."""
        if self.matrix is not None:
            from trtspec.cli.verify_matrix import measure_matrix

            return measure_matrix(
                self.matrix,
                self.matrix_dir,
                draft=self.draft,
                heads=self.heads,
                quick=quick,
                progress=progress,
            )
        from trtspec.artifact import file_sha256
        from trtspec.prompts import PROMPTS_FILE, load_chats
        from trtspec.verify.aiperf import find_aiperf
        from trtspec.verify.endpoint_check import EndpointSettings, verify_endpoints
        from trtspec.verify.served_verdict import with_load_gates

        program = find_aiperf(self.aiperf) if self.driver == "aiperf" else None
        given = {
            "num_prompts": num_prompts,
            "max_new_tokens": max_new_tokens,
            "rounds": rounds,
            "requests": self.requests,
            "concurrency": self.concurrency,
            "rate_per_s": self.rate,
            "draft_tokens": self.draft_tokens,
            "ttft_s": _seconds(self.slo_ttft_ms),
            "tpot_s": _seconds(self.slo_tpot_ms),
            "e2e_s": _seconds(self.slo_e2e_ms),
            "min_goodput": self.min_goodput,
            "min_speedup": self.min_speedup or (None if quality is None else quality.gates.min_speedup),
            "prompts": None if prompts is None else str(prompts),
            "draws": draws,
            "acceptance": self.acceptance,
            "other_weights": self.other_weights,
            "parameters": self.parameters,
        }
        given |= {} if quality is None else self._asked_of_load(quality.gates, prompts, max_new_tokens)
        quicker = EndpointSettings(num_prompts=8, max_new_tokens=32, rounds=1, requests=48, concurrency=4)
        settings = dataclasses.replace(
            quicker if quick else EndpointSettings(),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        path = prompts or PROMPTS_FILE
        chats = load_chats(path, limit=settings.num_prompts, sample=prompts is None)
        url, baseline = (
            self._connect(self.url, self.model),
            self._connect(self.baseline_url, self.baseline_model or self.model),
        )
        result = verify_endpoints(
            url,
            baseline,
            chats,
            settings,
            prompts_sha256=file_sha256(path),
            argv=("trtspec", *sys.argv[1:]),
            on_progress=progress,
            aiperf=program,
            quality=quality,
        )
        return result if quality is None else with_load_gates(result, quality.gates)

    def _asked_of_load(self, gates: Gates, prompts: Path | None, answer: int | None) -> dict[str, Any]:
        """What the recipe of --gates says of the load. Raises InputError where a flag says it too, or its
        prompts cannot be made here."""
        from trtspec.recipe_facts import requests_for_p99
        from trtspec.verify.endpoint_load import lost_to_stretches

        load, slo = gates.load, gates.slo
        if load.concurrency is None and load.rate_per_s is None:
            return {}
        named = [name for name in (*_OF_LATENCY[1:], "min_goodput") if getattr(self, name) is not None]
        problems = [
            Problem("the recipe of --gates says its own load and objectives; leave it out", key=_flag(name))
            for name in named
        ]
        if load.input_tokens is not None and prompts is None:
            message = (
                f"a load with prompts of {load.input_tokens} tokens (gates.load.input_tokens) needs yours"
            )
            problems.append(Problem(message, key="--prompts"))
        if problems:
            raise InputError(problems)
        all_of = requests_for_p99(load) + lost_to_stretches(load.concurrency or 0)
        asked = {
            "concurrency": load.concurrency,
            "rate_per_s": load.rate_per_s,
            "requests": self.requests or load.requests or all_of,
            "max_new_tokens": answer or load.output_tokens,
            "ttft_s": _seconds(slo.ttft_ms),
            "tpot_s": _seconds(slo.tpot_ms),
            "e2e_s": _seconds(slo.e2e_ms),
            "min_goodput": gates.min_goodput,
            "min_tokens_per_s": gates.min_tokens_per_s,
            "min_speedup_under_load": gates.min_speedup_under_load,
        }
        return {name: value for name, value in asked.items() if value is not None}

    def _connect(self, url: str | None, model: str | None) -> Endpoint:
        from trtspec.verify.endpoint import connect

        key = None
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                # What looks like no variable may be the key itself, given where its name belongs.
                name = self.api_key_env if re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env) else ""
                message = f"{name or 'the variable that it names'} is not set; put the endpoint's key there"
                raise InputError(Problem(message, key="--api-key-env"))
        return connect(
            url or "", protocol=self.protocol, model=model, timeout_s=self.timeout or 60.0, api_key=key
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


_POSITIVE = FloatRange(0, min_open=True)
_OPTIONS = (
    click.option(
        "--url", metavar="URL", help="Judge this endpoint, Triton's HTTP or OpenAI-compatible; no ENGINE."
    ),
    click.option("--baseline-url", metavar="URL", help="With --url: the same model without speculation."),
    click.option(
        "--model", metavar="NAME", help="With --url: the model's name there.  [default: the only one]"
    ),
    click.option("--baseline-model", metavar="NAME", help="Its name at the baseline.  [default: as --model]"),
    click.option(
        "--protocol", type=click.Choice(("triton", "openai")), help="With --url.  [default: found out]"
    ),
    click.option(
        "--requests",
        type=click.IntRange(2),
        help="Requests of the load, on each side.  [default: 192; with --latency as many as a p99 needs]",
    ),
    click.option(
        "--concurrency", type=click.IntRange(1), help="Requests in flight.  [default: 8, or max_batch_size]"
    ),
    click.option(
        "--rate",
        type=FloatRange(0.001, 1_000_000),
        help="Requests a second with Poisson arrivals, instead of --concurrency.",
    ),
    click.option(
        "--draft-tokens", type=click.IntRange(1), help="The most that its steps draft, if you know it."
    ),
    click.option("--slo-ttft-ms", type=_POSITIVE, help="Objective for goodput: time to first token."),
    click.option("--slo-tpot-ms", type=_POSITIVE, help="Objective: time per token after it."),
    click.option("--slo-e2e-ms", type=_POSITIVE, help="Objective: the whole answer."),
    click.option(
        "--min-goodput", type=FloatRange(0, 1), help="Gate: share of requests within the objectives."
    ),
    click.option("--min-speedup", type=_POSITIVE, help="Gate for --url: over the baseline, one at a time."),
    click.option(
        "--driver",
        type=click.Choice(("own", "aiperf")),
        help="With --url: what drives the load: this client, or NVIDIA's AIPerf.  [default: own]",
    ),
    click.option(
        "--aiperf", type=UserPath(), metavar="PROGRAM", help="Where AIPerf is.  [default: on the PATH]"
    ),
    click.option(
        "--acceptance",
        type=click.Choice(("strict", "typical", "relaxed", "skipped")),
        help="With --url: how it keeps drafts; what is not strict is never lossless.  [default: strict]",
    ),
    click.option(
        "--other-weights",
        is_flag=True,
        default=None,
        help="The baseline serves other weights (16-bit ones): quality is asked, identity is not.",
    ),
    click.option(
        "--parameters/--no-parameters",
        default=None,
        help="Ask which sampling parameters both honour.  [default: yes]",
    ),
    click.option(
        "--timeout",
        type=FloatRange(0, 86_400, min_open=True),
        help="Seconds that an endpoint may be silent.  [default: 60]",
    ),
    click.option(
        "--latency",
        is_flag=True,
        help="TTFT, TPOT, ITL, throughput, goodput of ENGINE under a load, beside no speculation and 16 bit.",
    ),
    click.option(
        "--load",
        is_flag=True,
        help="The speedup load by load: short and long prompts, five tasks, two languages, batch 1 and N.",
    ),
    click.option(
        "--load-tokens", type=click.IntRange(2), help="Longest answer there.  [default: 32; 16 if quick]"
    ),
    click.option("--load-batch", type=click.IntRange(1), help="N.  [default: max_batch_size, at most 8]"),
    click.option(
        "--scan",
        is_flag=True,
        help="Scan other draft lengths or trees on these prompts; the best is told beside the one in use.",
    ),
    click.option(
        "--matrix",
        type=UserPath(),
        metavar="RECIPE",
        help="Build BF16, FP8, W4A16 and W4A16+KV8 of its model, measure every drafter on each; no ENGINE.",
    ),
    click.option("--matrix-dir", type=UserPath(), help="Its engines and parts; a stopped run goes on there."),
    click.option(
        "--heads", type=UserPath(), multiple=True, help="Trained Medusa or EAGLE heads. Repeatable."
    ),
    click.option("--draft", metavar="MODEL", help="With --matrix: a draft model, as in speculation.model."),
    click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the endpoints' key."),
)


def speed_options(command: _Command) -> _Command:
    """The options, gathered into one argument ``speed``."""

    @functools.wraps(command)
    def gathered(*args: Any, **values: Any) -> Any:
        names = [field.name for field in dataclasses.fields(SpeedOptions)]
        speed = SpeedOptions(**{name: values.pop(name) for name in names})
        return command(*args, speed=speed, **values)

    wrapped: Any = gathered
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]
