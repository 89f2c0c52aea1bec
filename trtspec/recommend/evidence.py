"""What a report of ``trtspec verify`` proves about a model: formats that passed, acceptance as measured.

Only evidence about the same model counts; the report names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtspec.cost.acceptance import Curve, curve_from_report
from trtspec.errors import InputError, Problem
from trtspec.recipe_yaml import visible
from trtspec.tensor_headers import read_json

SCHEMA = "trtspec.report/1"


@dataclass(frozen=True)
class Evidence:
    """``passed_weights`` and ``passed_kv`` were measured together and met the gate; None: no such check, or
    not passed. ``curve``: the measured acceptance of ``method``."""

    file: str
    model: str
    passed_weights: str | None
    passed_kv: str | None
    quality: str
    method: str | None
    curve: Curve | None


def read_evidence(path: Path, model: str) -> Evidence:
    """The evidence in the report ``path`` about ``model``. Raises InputError for a file that is no report,
    and for a report about another model."""
    problems: list[Problem] = []
    values = read_json(path, problems)
    if values is None:
        raise InputError(
            problems or Problem("no such file; write one with: trtspec verify --report", str(path))
        )
    checks, recipe = values.get("checks"), values.get("recipe")
    if values.get("schema") != SCHEMA or not isinstance(checks, list) or not isinstance(recipe, dict):
        found = visible(str(values.get("schema")))
        raise InputError(Problem(f"found schema {found}; allowed: {SCHEMA} (trtspec verify)", str(path)))
    source = str(recipe.get("model", {}).get("source"))
    same = source.lower() == model.lower() or (path.parent / source).resolve() == Path(model).resolve()
    if not same:
        text = f"is about {visible(source)}, not about {visible(model)}; evidence does not carry over"
        raise InputError(Problem(text, str(path), key="recipe.model.source"))
    named = {str(check.get("name")): check for check in checks if isinstance(check, dict)}
    quality = named.get("quality", {})
    quantization = recipe.get("quantization", {})
    # A gate that is not required compares with nothing: only a bound that was met is a pass.
    passed = quality.get("verdict") == "PASS" and quality.get("bound") is not None
    speculation = recipe.get("speculation", {}).get("kind")
    return Evidence(
        file=str(path),
        model=source,
        passed_weights=str(quantization.get("kind")) if passed else None,
        passed_kv=str(quantization.get("kv_cache")) if passed else None,
        quality=str(quality.get("summary", "no quality check")),
        method=speculation if speculation not in (None, "none") else None,
        curve=curve_from_report(values),
    )
