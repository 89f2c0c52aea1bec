"""The acceptance protocol of two endpoints: same text? tokens counted alike? how much faster, at which load?

What only an engine shows (logits, so margins and perplexity; float64; drafts by a plan) is not there. A
difference can then not be told from rounding one by one; it is held against the noise floor: the baseline's
answers when it is asked again and when it is asked under load. Both sides are asked alone in pairs next to
each other, in an order that turns, and then under the same load. Judges are functions of rows, one a reply.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from trtspec.artifact import file_sha256, machine_summary, tool_versions, utc_now
from trtspec.prompts import PROMPTS_FILE, Chat
from trtspec.ruler import OnProgress, stage_of
from trtspec.verify.aiperf import AIPERF_NOTES, Driven, drive, refuse_for_aiperf
from trtspec.verify.arrivals import closed_loop, giving_up, open_loop, poisson_times
from trtspec.verify.endpoint import Endpoint, Reply, ask, learn, lost, not_asked, reply_fields
from trtspec.verify.endpoint_labels import Acceptance, check_parameters, fidelity_of
from trtspec.verify.endpoint_load import in_turn
from trtspec.verify.endpoint_margins import margin_rows
from trtspec.verify.endpoint_quality import Plan, check_endpoint_quality
from trtspec.verify.endpoint_sampled import DrawSettings, check_repetition, check_sampled, drafts_by_prompt
from trtspec.verify.endpoint_verdict import SIDES, answers_of, judge_endpoints, same_answer
from trtspec.verify.gates import Check, Verdict, skipped
from trtspec.verify.latency import judge_latency
from trtspec.verify.load_prompts import stream_of_chats
from trtspec.verify.records import Row
from trtspec.verify.report import Report
from trtspec.verify.server_counters import draft_counters, grown
from trtspec.verify.timed import Objectives, Timed, timed_rows

_MOST_MARGINS = 40


@dataclass(frozen=True)
class EndpointSettings:
    """How much two endpoints are asked. ``rate_per_s``: an open loop with Poisson arrivals instead of
    ``concurrency`` requests at a time. ``draft_tokens``: the most that a step may draft, if known.
    ``draws``: sampled answers; None: not asked for. ``acceptance``: of url, as its owner says."""

    num_prompts: int = 20
    max_new_tokens: int = 64
    rounds: int = 2
    requests: int = 192
    concurrency: int = 8
    rate_per_s: float | None = None
    draft_tokens: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    min_goodput: float | None = None
    min_speedup: float | None = None
    min_tokens_per_s: float | None = None
    min_speedup_under_load: float | None = None
    prompts: str = "builtin"
    draws: DrawSettings | None = None
    parameters: bool = True
    acceptance: Acceptance | None = None
    other_weights: bool = False
    """Whether the baseline serves others, so that quality is asked and identity is not."""


def verify_endpoints(
    url: Endpoint,
    baseline: Endpoint,
    chats: Sequence[Chat],
    settings: EndpointSettings,
    *,
    prompts_sha256: str = "",
    argv: Sequence[str] = (),
    on_progress: OnProgress = lambda stage, done, total: None,
    aiperf: str | None = None,
    quality: Plan | None = None,
) -> Report:
    """Ask both and judge. ``aiperf``: the program that drives the load, instead of this client. ``quality``:
    tasks and texts that are asked besides.

    Raises MissingError if one does not answer, InputError for what AIPerf cannot ask; what fails later is in
    the report."""
    began, created = time.monotonic(), utc_now()
    if aiperf is not None:
        for one in (url, baseline):
            refuse_for_aiperf(replace(one, raw=url.raw or baseline.raw))
    raw = url.raw or baseline.raw  # a chat template on one side only would be another prompt
    endpoints = {
        side: learn(replace(one, raw=raw), chats[0]) for side, one in zip(SIDES, (url, baseline), strict=True)
    }
    clock = time.perf_counter
    counters = {side: [draft_counters(one)] for side, one in endpoints.items()}
    rows: list[dict[str, Any]] = []

    def senders(asked: Sequence[Chat]) -> dict[str, Callable[[int, float | None], Reply]]:
        """Of each side what asks ``asked`` by number, until nobody answers any more."""

        def sender(side: str) -> Callable[[int, float | None], Reply]:
            return giving_up(
                lambda number, due: ask(
                    endpoints[side], asked[number], max_tokens=settings.max_new_tokens, clock=clock, due_s=due
                ),
                lost,
                lambda number, due, why: not_asked(asked[number], clock(), due, why),
            )

        return {side: sender(side) for side in SIDES}

    send = senders(chats)

    total = settings.rounds * len(chats) * 2
    for number in range(settings.rounds):
        for place in range(len(chats)):
            for side in SIDES if (number + place) % 2 else reversed(SIDES):
                rows.append(reply_row(send[side](place, None), side, "alone", number))
                on_progress("one request at a time, in pairs", len(rows), total)
    load = f"{settings.concurrency} at a time"
    if settings.rate_per_s:
        load = f"{settings.rate_per_s:g} requests/s (Poisson)"
    checks: list[Check] = []
    timed: dict[str, Sequence[Timed]] = {}
    driven: dict[str, Driven] = {}
    if aiperf is not None:
        load += ", driven by AIPerf"
        for side, one in endpoints.items():  # its tokens are not among the rows
            counters[side].append(draft_counters(one))
    tag = secrets.token_hex(2)
    fresh = stream_of_chats(chats, settings.requests, tag)
    if aiperf is not None:
        for side in reversed(SIDES):
            driven[side] = drive(
                aiperf,
                endpoints[side],
                fresh,
                max_tokens=settings.max_new_tokens,
                requests=settings.requests,
                concurrency=None if settings.rate_per_s else settings.concurrency,
                rate_per_s=settings.rate_per_s,
            )
            timed[side] = driven[side].timed
    else:
        crowd = min(settings.concurrency, len(chats))
        # url is held to the baseline twice, alone and here; so is the baseline to itself, if need be here.
        for side, number in (("url", 0), ("baseline", 0), ("baseline", 1))[
            : 3 if settings.rounds == 1 else 2
        ]:
            progress = stage_of(on_progress, f"the same prompts, {crowd} at a time: {side}")
            replies = closed_loop(send[side], len(chats), crowd, progress)
            rows += [reply_row(reply, side, "load", number) for reply in replies]
        for side, found in _under_load(senders(fresh), settings, load, on_progress).items():
            timed[side] = [replace(reply.timed, stretch=stretch) for stretch, reply in found]
            rows += [reply_row(reply, side, "timed", 0) for _, reply in found]
        for side, one in endpoints.items():
            counters[side].append(draft_counters(one))
    stopped = False

    def unless_stopped(name: str, asked: Callable[[], list[Check]]) -> list[Check]:
        """What ``asked`` finds. Ctrl-C ends the asking, not the report: what was asked before is judged."""
        nonlocal stopped
        if not stopped:
            try:
                return asked()
            except KeyboardInterrupt:
                stopped = True
        return [skipped(name, "stopped by Ctrl-C before it was done", True)]

    asked_quality: list[Check] = []
    if quality is not None:
        stage, plan = partial(stage_of, on_progress), quality
        asked_quality = unless_stopped(
            "quality",
            lambda: check_endpoint_quality(
                plan, endpoints, rows, concurrency=settings.concurrency, stage=stage
            ),
        )
    sampled = unless_stopped("sampled", lambda: _sampled(endpoints, chats, settings, rows, on_progress))
    # Last: vLLM 0.32 with n-grams on a CPU dies of top_k 1 at temperature 2.
    honoured = [skipped("sampling_parameters", "not asked for (--no-parameters)")]
    if settings.parameters:
        honoured = unless_stopped(
            "sampling_parameters", lambda: [_parameters(endpoints, chats, settings, on_progress)]
        )
    objectives = asdict(Objectives(settings.ttft_s, settings.tpot_s, settings.e2e_s))
    for side in SIDES:
        checks += judge_latency(
            timed_rows(timed[side]),
            name=side,
            side=side,
            load=load,
            concurrency=None if settings.rate_per_s else settings.concurrency,
            rate_per_s=settings.rate_per_s,
            objectives=objectives,
            bound=settings.min_goodput if side == "url" else None,
        )
    first = judge_endpoints(
        rows,
        margins=[] if stopped else _ask_margins(endpoints["baseline"], chats, rows, settings.max_new_tokens),
        load=load,
        max_new_tokens=settings.max_new_tokens,
        draft_tokens=settings.draft_tokens,
        min_speedup=settings.min_speedup,
        counters={side: grown(*both) for side, both in counters.items()},
        acceptance=settings.acceptance or "strict",
        servers={side: one.server for side, one in endpoints.items()},
        one_server=_place(url) == _place(baseline),
        other_weights=settings.other_weights,
        timed={side: timed_rows(found) for side, found in timed.items()},
        concurrency=None if settings.rate_per_s else settings.concurrency,
        min_tokens_per_s=settings.min_tokens_per_s,
        min_speedup_under_load=settings.min_speedup_under_load,
    )
    approximate = fidelity_of(settings.acceptance, "sampled").fidelity == "approximate"
    unasked = not any(one.required and one.verdict is not Verdict.SKIPPED for one in asked_quality)
    if unasked and (approximate or settings.other_weights):
        what = "approximate acceptance is" if approximate else "other weights are"
        gate = "no gate on a check that ran asks for it: --tasks with --max-task-loss"
        reason = f"{what} judged by quality, and {gate}"
        sampled.append(skipped("approximate" if approximate else "gates_of_quality", reason, True))
    assumed = "" if settings.acceptance else ", which is assumed (--acceptance says otherwise)"
    return Report(
        engine=f"{url.url} against {baseline.url}",
        recipe_name=url.model,
        recipe_digest="",
        recipe={},
        source_digest="",
        created=created,
        argv=tuple(argv),
        tools={**tool_versions(), **({"aiperf": driven["url"].version} if driven else {})},
        built_with={},
        machine=machine_summary(),
        settings={
            **{key: value for key, value in asdict(settings).items() if key != "draws"},
            **{f"sampled_{key}": value for key, value in _draws(settings).items()},
            "num_prompts": len(chats),
            "load_tag": tag,
            "prompts_sha256": prompts_sha256 or file_sha256(PROMPTS_FILE),
            **({} if quality is None else quality.record()),
            **{
                f"{side}_endpoint": f"{one.protocol} {one.model}"
                + (f" ({one.server})" if one.server else "")
                + (" (no chat template)" if one.raw else "")
                for side, one in endpoints.items()
            },
            **{f"{side}_aiperf": shlex.join(one.argv) for side, one in driven.items()},
        },
        seconds=round(time.monotonic() - began, 1),
        checks=(*first, *sampled, *honoured, *asked_quality, *_not_shown(quality is None), *checks),
        notes=(
            "two endpoints, by the clock of this client: the machine named here is the client's",
            f"acceptance of url: {settings.acceptance or 'strict'}{assumed}",
            *(
                ("the baseline serves other weights, as told: quality is asked, identity is not",)
                if settings.other_weights
                else ()
            ),
            *(("stopped by Ctrl-C: what was not asked by then is SKIPPED",) if stopped else ()),
            *(AIPERF_NOTES if driven else ()),
        ),
        fidelity="approximate" if approximate else "strict",
    )


def _under_load(
    send: Mapping[str, Callable[[int, float | None], Reply]],
    settings: EndpointSettings,
    load: str,
    on_progress: OnProgress,
) -> dict[str, list[tuple[int, Reply]]]:
    """(stretch, reply) of each side. A load at a rate is not cut: a queue that grows shows only in time."""
    if settings.rate_per_s is None:
        progress = stage_of(on_progress, f"load, {load}, both in turn")
        return in_turn(send, settings.requests, settings.concurrency, progress)
    found = {}
    for side in reversed(SIDES):
        times = poisson_times(settings.requests, settings.rate_per_s, seed=1)
        progress = stage_of(on_progress, f"load, {load}: {side}")
        found[side] = [(0, reply) for reply in open_loop(send[side], times, time.perf_counter, progress)]
    return found


def _place(endpoint: Endpoint) -> tuple[str, int, str, str]:
    host = endpoint.host.lower()
    host = "localhost" if host in ("127.0.0.1", "::1") else host
    return host, endpoint.port, endpoint.prefix, endpoint.model


def _draws(settings: EndpointSettings) -> dict[str, Any]:
    return {} if settings.draws is None else asdict(settings.draws)


def _drafted(url: Endpoint) -> Callable[[], float | None]:
    return lambda: (draft_counters(url) or {}).get("drafted")


def _parameters(
    endpoints: Mapping[str, Endpoint],
    chats: Sequence[Chat],
    settings: EndpointSettings,
    on_progress: OnProgress,
) -> Check:
    return check_parameters(
        endpoints,
        chats,
        acceptance=settings.acceptance,
        drafted=_drafted(endpoints["url"]),
        on_progress=stage_of(on_progress, "sampling_parameters: both sides"),
    )


def _sampled(
    endpoints: Mapping[str, Endpoint],
    chats: Sequence[Chat],
    settings: EndpointSettings,
    rows: Sequence[Row],
    on_progress: OnProgress,
) -> list[Check]:
    """What is asked of sampled answers: the baseline's law, or of approximate acceptance that it does not
    repeat itself."""
    if settings.draws is None:
        return [skipped("sampled", "not asked for (--no-sampled)")]
    if settings.other_weights:
        return [skipped("sampled", "not claimed: other weights have a law of their own")]
    label = fidelity_of(settings.acceptance, "sampled")
    if label.fidelity == "approximate":
        return [
            skipped(
                "sampled", f"not claimed: {label.acceptance} acceptance is approximate ({label.because})"
            ),
            check_repetition(
                endpoints,
                chats,
                temperature=settings.draws.temperature,
                max_tokens=settings.max_new_tokens,
                concurrency=settings.concurrency,
                on_progress=stage_of(on_progress, "approximate: sampled answers"),
            ),
        ]
    found = check_sampled(
        endpoints,
        chats,
        settings.draws,
        concurrency=settings.concurrency,
        drafted=_drafted(endpoints["url"]),
        greedy=drafts_by_prompt(rows),
        stage=partial(stage_of, on_progress),
    )
    return [found]


def _not_shown(quality: bool) -> list[Check]:
    reasons = {"lossless_float64": "an endpoint does not compute in float64: verify the engine's folder"}
    if quality:
        reasons = {"quality": "not asked for probabilities of a given text", **reasons}
    return [skipped(name, reason) for name, reason in reasons.items()]


def reply_row(reply: Reply, side: str, at: str, number: int) -> dict[str, Any]:
    """A reply as JSON values: ``at`` alone, load (the same prompts, several at a time) or timed (prompts of
    the load's own), ``round`` of the first two."""
    return {
        "side": side,
        "at": at,
        "round": number,
        "request_id": reply.timed.request_id,
        **reply_fields(reply),
        "pieces": len(reply.timed.arrivals_s),
        "tokens_per_step": reply.tokens_per_step,
        "emitted": None if reply.emitted is None else list(reply.emitted),
        "prompt_tokens": reply.prompt_tokens,
        # Once for each prompt and side is enough.
        "prompt_token_ids": list(reply.prompt_token_ids)
        if reply.prompt_token_ids is not None and (at, number) == ("alone", 0)
        else None,
    }


def _ask_margins(
    baseline: Endpoint, chats: Sequence[Chat], rows: Sequence[Row], max_tokens: int
) -> list[dict[str, Any]]:
    """The baseline's margins on prompts that any run answered otherwise, where it shows them."""
    reference = answers_of(rows, "baseline", "alone")
    parted = {
        row["request_id"]
        for row in rows
        if row["at"] != "timed"  # those are other prompts
        and not row["error"]
        and row["request_id"] in reference
        and not same_answer(row, reference[row["request_id"]])
    }
    found: list[dict[str, Any]] = []
    for chat in [chat for chat in chats if chat.id in parted][:_MOST_MARGINS]:
        found += margin_rows(baseline, chat, reference[chat.id], max_tokens=max_tokens)
    return found
