"""Every verdict of an evidence bundle computed again from its raw records: no engine, no torch, no network.

What a check then says (verdict, numbers, evidence) must be what the report says; numbers to a relative
1e-9, because another processor may add in another order. Wording may differ between versions of trtspec, and
only then. A report altered together with its records and its manifest is another report: against that, keep
the manifest's SHA-256 that ``verify --bundle`` prints.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtspec.artifact import tool_versions
from trtspec.errors import EXIT_GATE_FAILED, EXIT_INCONCLUSIVE, EXIT_PASS, TrtspecError
from trtspec.recipe_file import recipe_digest
from trtspec.ruler import Run
from trtspec.verify import (
    approximate,
    blackbox,
    degenerate,
    gpu,
    labels,
    load,
    lossless,
    quality,
    retrieval,
    sampled,
    suite,
)
from trtspec.verify.bundle import Bundle, open_bundle
from trtspec.verify.divergence import judge_divergence
from trtspec.verify.gates import Check, Verdict, raw_as_records
from trtspec.verify.pair import question_of
from trtspec.verify.recheck_gates import equal, gates_asked, other_gates, recipe_of, short, unanswered
from trtspec.verify.records import Records, Row, answers_from
from trtspec.verify.report import VERDICT_WORDS, check_fields, pitfall_fields, pitfalls, plain

Status = Literal["same", "differs", "no records"]
_DAMAGE = (TrtspecError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What records make of the code that reads them once somebody changed them: it must end as a finding."""
_WORDING = ("summary", "how", "warnings", "details")


@dataclass(frozen=True)
class Finding:
    """What computing one check again gave. ``differences``: a line each."""

    check: str
    stored: str
    """The verdict in the report; "" if it has no such check."""
    status: Status
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recheck:
    """``problems``: of the bundle's files and of the report as a whole."""

    findings: tuple[Finding, ...]
    problems: tuple[str, ...]
    undecided: tuple[str, ...]
    """Required checks without records: their verdicts must be believed."""

    @property
    def exit_code(self) -> int:
        if self.problems or any(one.status == "differs" for one in self.findings):
            return EXIT_GATE_FAILED
        return EXIT_INCONCLUSIVE if self.undecided else EXIT_PASS


def recheck(folder: Path) -> Recheck:
    """Compute every verdict of the bundle in ``folder`` again. Raises InputError where it is no bundle."""
    bundle = open_bundle(folder)
    same_version = bundle.report.tools.get("trtspec") == tool_versions()["trtspec"]
    problems = [*bundle.problems]
    problems += [*_problems("report.json", _whole, bundle), *_problems("records", _books, bundle)]
    stored = {check.name: check for check in bundle.report.checks}
    findings: dict[str, Finding] = {}
    for judged in bundle.judged:
        fresh: dict[str, Check] = {}
        failure = "its records are missing or broken"
        if judged.records is not None:
            asked = gates_asked(bundle, judged.records)
            problems += _problems(", ".join(judged.checks), other_gates, judged.checks, judged.records, asked)
            fresh, failure = _again(judged.records)
        for name in judged.checks:
            findings[name] = _finding(name, stored.get(name), fresh.get(name), failure, same_version)
    for name, check in stored.items():
        if name not in findings:
            findings[name] = Finding(name, check.verdict.value, "no records")
    undecided = [
        name
        for name, check in stored.items()
        if findings[name].status == "no records" and check.required and check.verdict is not Verdict.SKIPPED
    ]
    order = [*stored, *(name for name in findings if name not in stored)]
    return Recheck(tuple(findings[name] for name in order), tuple(problems), tuple(undecided))


def _problems(place: str, find: Callable[..., list[str]], *given: Any) -> list[str]:
    """What ``find`` finds, or that nothing can be found in what is there."""
    try:
        return find(*given)
    except _DAMAGE as error:
        return [f"{place}: cannot be read: {type(error).__name__}: {error}"]


def _again(records: Records) -> tuple[dict[str, Check], str]:
    """The checks that the records give, by name, or why they give none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sums over what is no number
            return {check.name: check for check in rejudge(records)}, ""
    except _DAMAGE as error:
        return {}, f"its records cannot be judged: {type(error).__name__}: {error}"


def _finding(
    name: str, stored: Check | None, fresh: Check | None, failure: str, same_version: bool
) -> Finding:
    if stored is None:
        return Finding(name, "", "differs", ("the report has no such check, the bundle has its records",))
    if fresh is None:
        why = failure or "its records give no such check"
        return Finding(name, stored.verdict.value, "differs", (why,))
    mine, theirs = check_fields(stored), check_fields(fresh)
    differences = []
    for key in mine:
        if key in _WORDING and not same_version:
            continue
        if key == "evidence" and not same_version:
            theirs[key] = {inner: theirs[key].get(inner) for inner in mine[key] if inner in theirs[key]}
            mine[key] = {inner: mine[key][inner] for inner in theirs[key]}
        for place, left, right in _different(mine[key], theirs[key], key):
            differences.append(f"{place}: {short(left)} in the report, {short(right)} from the records")
    return Finding(name, stored.verdict.value, "differs" if differences else "same", tuple(differences))


def _different(left: Any, right: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys((*left, *right)):
            yield from _different(left.get(key), right.get(key), f"{place}.{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _different(one, other, f"{place}[{number}]")
    elif not equal(left, right):
        yield place, left, right


# --------------------------------------------------------------------------- the report as a whole


def _whole(bundle: Bundle) -> list[str]:
    """What the report says beyond its checks, held against what follows from them."""
    problems = []
    report = bundle.report
    for key, value in (("verdict", VERDICT_WORDS[report.exit_code]), ("exit_code", report.exit_code)):
        if bundle.stored.get(key) != value:
            found = short(bundle.stored.get(key))
            problems.append(f"report.json: {key}: {found} in the report, {value!r} follows from its checks")
    wanted = plain([pitfall_fields(one) for one in pitfalls(report)])
    statuses = [[(one.get("id"), one.get("status")) for one in side] for side in (_pitfalls(bundle), wanted)]
    if statuses[0] != statuses[1]:
        problems.append("report.json: pitfalls: not those that follow from its checks")
    if not report.recipe and not report.recipe_digest:
        return problems  # two endpoints: no recipe is known
    if report.other and report.other.get("question") != question_of(report):
        problems.append("report.json: other.question: not what the two targets make it")
    problems += [f"report.json: {line}" for line in unanswered(report)]
    sides: list[tuple[str, Any, Any]] = [("", report.recipe, report.recipe_digest)]
    if report.other:
        sides.append(("other.", report.other.get("recipe", {}), report.other.get("recipe_digest")))
    for place, stored, digest in sides:
        recipe = recipe_of(stored)
        if recipe is None or recipe_digest(recipe) != digest:
            problems.append(f"report.json: {place}recipe: its digest is not {place}recipe_digest")
    return problems


_SAME = (
    (("lossless", "other"), ("greedy", "other"), ("acceptance", "requests"), ("evidence", "answers")),
    (("quality", "tokens"), ("mean_kl", "tokens"), ("p99_kl", "tokens"), ("same_top_token", "tokens")),
)
"""Tables, by check, that hold what one and the same run gave."""


def _books(bundle: Bundle) -> list[str]:
    """What the records say twice and not alike: counts of an answer and its tokens, one run in two checks."""
    found: dict[tuple[str, str], Sequence[Row]] = {}
    problems: list[str] = []
    for judged in bundle.judged:
        records = judged.records
        if records is None:
            continue
        if records.arguments.get("contradictions"):
            return []  # the ruler saw it, and the verdict says so
        for table, rows in records.tables.items():
            found[judged.checks[0] if judged.checks else "", table] = rows
            problems += [
                f"{', '.join(judged.checks)}: {table}: {row['request_id']}: its steps do not make its tokens"
                for row in rows
                if not _adds_up(row)
            ]
        asked, answered = (
            [row.get(key) for row in records.tables.get(table, ())]
            for table, key in (("prompts", "id"), ("reference", "request_id"))
        )
        if records.judge == "lossless" and asked != answered:
            problems.append(f"{', '.join(judged.checks)}: prompts: not those that reference answers")
    for group in _SAME:
        there = [(place, found[place]) for place in group if place in found]
        for (left, rows), (right, others) in itertools.pairwise(there):
            if [_common(*pair) for pair in zip(rows, others, strict=False)] != [True] * max(
                len(rows), len(others)
            ):
                problems.append(f"{right[0]}: {right[1]}: not what {left[0]}: {left[1]} has of the same run")
    return problems


def _common(left: Row, right: Row) -> bool:
    return all(equal(left[key], right[key]) for key in left if key in right)


def _adds_up(row: Row) -> bool:
    """Whether an answer's steps are those of its tokens; rows of another kind do."""
    lists: list[Any] = [row.get(key) for key in ("tokens", "emitted", "drafted_by_step", "accepted_by_step")]
    if "request_id" not in row or not all(isinstance(one, list) for one in lists):
        return True
    tokens, emitted, drafted, accepted = lists
    try:
        steps = list(zip(emitted, drafted, accepted, strict=True)) if drafted else []
        return (
            sum(emitted) == len(tokens)
            and sum(drafted) <= row["drafted"]
            and (not steps or sum(accepted) == row["accepted"])
            and all(kept <= offered and count <= kept + 1 for count, offered, kept in steps)
        )
    except (TypeError, ValueError, KeyError):
        return False


def _pitfalls(bundle: Bundle) -> list[Mapping[str, Any]]:
    found = bundle.stored.get("pitfalls")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


# --------------------------------------------------------------------------- judges


def rejudge(records: Records) -> list[Check]:
    """The checks that follow from ``records``, made by the very functions that made the report's.

    Raises ValueError for a judge that this version does not know, and what rows that do not fit make of it.
    """
    arguments, tables = records.arguments, records.tables
    match records.judge:
        case "lossless":
            return [_lossless(arguments, tables)]
        case "quality":
            return [quality.judge_rows(tables["tokens"], **arguments)]
        case "divergence":
            return judge_divergence(tables["tokens"], **arguments)
        case "degenerate":
            return [degenerate.judge_degenerate(tables["answers"], **arguments)]
        case "retrieval":
            return [retrieval.judge_retrieval(tables["items"], **arguments)]
        case "task":
            return [suite.judge_task(rows=tables["items"], **arguments)]
        case "sampled":
            return [raw_as_records(sampled.judge_sampled(**tables["raw"][0]))]
        case "blackbox":
            return [raw_as_records(blackbox.judge_blackbox(**tables["raw"][0]))]
        case "parameters":
            return [raw_as_records(labels.judge_parameters(**tables["raw"][0]))]
        case "acceptance":
            return [load.check_acceptance(answers_from(tables["requests"]), **arguments)]
        case "speed":
            race = load.race_from(tables["runs"], arguments["contradictions"])
            names = {key: arguments[key] for key in ("check_name", "name", "over", "bound")}
            return [load.check_speed(race, **names, retimed=arguments.get("retimed", False))]
        case "acceptances":
            from trtspec.verify.versus import judge_acceptances

            return [judge_acceptances(tables["recipe"], tables["other"], **arguments)]
        case "against_other":
            from trtspec.verify.versus import against_other, inner_records

            return against_other(rejudge(inner_records(records)))
        case "approximate":
            return _approximate(arguments, tables)
        case "matrix":
            from trtspec.verify.matrix_verdict import judge_matrix

            rows = [tables[name] for name in ("answers", "tokens", "runs")]
            return judge_matrix(*rows, **arguments)
        case "loads":
            from trtspec.verify.matrix_load import judge_loads

            return [judge_loads(tables["runs"], **arguments)]
        case "prediction":
            from trtspec.verify.prediction import judge_prediction

            return [judge_prediction(tables["runs"], tables["steps"], tables["answers"])]
        case "scan":
            from trtspec.verify.scan import judge_scan

            return [judge_scan(tables["prompts"], **arguments)]
        case "evidence":
            from trtspec.verify.sanity import judge_evidence

            return [judge_evidence(tables["prompts"], tables["answers"], **arguments)]
        case "latency":
            from trtspec.verify.latency import judge_latency

            return judge_latency(tables["requests"], **arguments)
        case "tails":
            from trtspec.verify.served_verdict import judge_tails

            return judge_tails(tables["requests"], **arguments)
        case "served":
            from trtspec.verify.served_verdict import judge_served

            return judge_served(tables["requests"], tables["slices"], **arguments)
        case "endpoints":
            from trtspec.verify.endpoint_verdict import judge_endpoints

            timed = {
                name.removeprefix("load_"): rows for name, rows in tables.items() if name.startswith("load_")
            }
            return judge_endpoints(tables["replies"], margins=tables["margins"], timed=timed, **arguments)
        case "endpoint_sampled":
            from trtspec.verify.endpoint_sampled import judge_draws

            return [judge_draws(tables["draws"], **arguments)]
        case "endpoint_repetition":
            from trtspec.verify.endpoint_sampled import judge_repetition

            return [judge_repetition(tables["draws"], **arguments)]
        case "endpoint_parameters":
            from trtspec.verify.endpoint_labels import judge_endpoint_parameters

            return [judge_endpoint_parameters(tables["probes"], **arguments)]
        case "gpu_same":
            return [_gpu_same(arguments, tables)]
        case "gpu_acceptance":
            return [gpu.check_acceptance(gpu.completions_from(tables["requests"]), **arguments)]
        case "gpu_speed":
            sides = ([row[side] for row in tables["seconds"]] for side in ("recipe", "other"))
            names = {key: arguments[key] for key in ("tokens", "bound")}
            return [gpu.check_speed(arguments["name"], *sides, **names)]
        case unknown:
            raise ValueError(f"this version knows no judge {unknown!r}")


def _lossless(arguments: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]) -> Check:
    check = lossless.judge_rows(arguments, tables)
    if "float64" in tables:
        here, exact = (answers_from(tables[name]) for name in ("other", "float64"))
        check = load.compare_acceptance(check, here, exact, required=arguments["compare_required"])
    return check


def _gpu_same(arguments: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]) -> Check:
    answers = {name: gpu.completions_from(rows) for name, rows in tables.items()}
    return gpu.check_same(
        arguments["name"],
        answers["reference"],
        answers["other"],
        (answers["floor_batch_1"], answers["floor_batch"]) if arguments["floor"] else None,
        drafts=arguments["drafts"],
        required=arguments["required"],
    )


def _approximate(arguments: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]) -> list[Check]:
    mine, strict = (approximate.sampled_from(tables[name]) for name in ("approximate", "strict"))
    answers = tuple(answer for row in mine.answers for answer in row)
    drafting = Run(answers, 0.0, 0, tuple(arguments["contradictions"]))
    return approximate.judge_approximate(
        mine, strict, drafting, temperature=arguments["temperature"], margin=arguments["margin"]
    )
