"""The account of a migration: what became of each key of a recipe, derived from the recipes themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trtspec.recipe import Recipe
from trtspec.recipe_file import plain_recipe
from trtspec.recipe_yaml import dump_plain, visible

Outcome = Literal["kept", "renamed", "replaced", "lost"]
OUTCOMES: tuple[Outcome, ...] = ("kept", "renamed", "replaced", "lost")
ABSENT = object()


@dataclass(frozen=True)
class Change:
    """What became of one key of the source. ``to`` and ``value``: the key and value in the result, None for
    a lost one. ``why`` is empty exactly for a kept one. ``default``: the source had the key's default."""

    key: str
    found: Any
    outcome: Outcome
    to: str | None
    value: Any
    why: str
    default: bool


@dataclass(frozen=True)
class Added:
    """A key of the result that no key of the source became. ``why`` is empty for a default."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Migration:
    """``changes`` holds every key of ``source`` once, in its order; ``added`` what else ``recipe`` has."""

    source: Recipe
    recipe: Recipe
    changes: tuple[Change, ...]
    added: tuple[Added, ...]

    def of(self, outcome: Outcome) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.outcome == outcome)


@dataclass
class Work:
    """The recipe under migration as plain data, with the reason of every step."""

    data: dict[str, Any]
    why: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    """Keys that stay in the schema but are put back to their default: lost, not replaced."""

    def get(self, path: str) -> Any:
        return get(self.data, path)

    def set(self, path: str, value: Any, why: str) -> None:
        """A key that stays gets another value."""
        section, _, key = path.rpartition(".")
        place = get(self.data, section) if section else self.data
        if place.get(key) != value:
            place[key] = value
            self.why[path] = why

    def drop(self, path: str, default: Any, why: str) -> None:
        """What the key asked for does not exist on the target; the key goes back to its default."""
        if self.get(path) != default:
            self.set(path, default, why)
            self.dropped.add(path)

    def exchange(self, section: str, new: Mapping[str, Any], why: str, lost: str) -> None:
        """Another kind in place of a section: ``why`` for keys whose value differs, ``lost`` for those that
        are gone."""
        for key, _ in leaves(self.get(section)):
            gone = get(new, key, ABSENT) is ABSENT
            self.why.setdefault(f"{section}.{key}", lost if gone else why)
        above, _, last = section.rpartition(".")
        (self.get(above) if above else self.data)[last] = dict(new)


def get(data: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path of plain data, ``default`` where there is none."""
    for part in path.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return default
        data = data[part]
    return data


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each (dotted key, value) of plain data; a list is a value."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def account(source: Recipe, result: Recipe, work: Work) -> Migration:
    """Every key of ``source`` against ``result``. RuntimeError for a difference that has no reason."""
    before, after = plain_recipe(source), plain_recipe(result)
    changes = []
    for key, found in leaves(before):
        to: str | None = work.renamed.get(key, key)
        value = get(after, to or "", ABSENT)
        outcome: Outcome = "replaced"
        if to != key:
            outcome = "renamed"
        elif value is ABSENT or key in work.dropped:
            outcome, to, value = "lost", None, None
        elif value == found and type(value) is type(found):
            outcome = "kept"
        if outcome != "kept" and key not in work.why:
            raise RuntimeError(f"no reason was given for what became of {key}")
        why = "" if outcome == "kept" else work.why[key]
        changes.append(Change(key, found, outcome, to, value, why, _default(source, key) == found))
    reached = {change.to for change in changes} | work.dropped
    added = [Added(key, value, work.why.get(key, "")) for key, value in leaves(after) if key not in reached]
    return Migration(source, result, tuple(changes), tuple(added))


def _default(recipe: Recipe, path: str) -> Any:
    """The schema's default of a key of ``recipe``; :data:`ABSENT` where there is none."""
    model: Any = recipe
    *sections, last = path.split(".")
    for part in sections:
        model = getattr(model, part)
    info = type(model).model_fields[last]
    if info.is_required():
        return ABSENT
    default = info.get_default()
    return list(default) if isinstance(default, tuple) else default


# --------------------------------------------------------------------------- writing


def migrated_yaml(migration: Migration, file: str) -> str:
    """The migrated recipe as YAML, keys at their defaults left out, headed by what was replaced and lost.

    The comments of the source's file are not in it."""
    backend = migration.source.backend.kind
    head = [
        f"Migrated from {visible(file, limit=200)} (backend {backend}) by trtspec migrate; "
        "its comments did not come along."
    ]
    for change in migration.changes:
        if change.outcome != "kept" and not (change.outcome == "lost" and change.default):
            head.append(f"{change.outcome}: {describe(change)}")
    head += [f"new: {one.key} {shown(one.value)}: {one.why}" for one in migration.added if one.why]
    return headed_yaml(head, migration.recipe)


def headed_yaml(head: list[str], recipe: Recipe) -> str:
    """``head`` as comments, then the keys that differ from their defaults and always the versions meant."""
    chosen = recipe.model_dump(mode="json", exclude_defaults=True)
    if "version" in (backend := recipe.backend.model_dump(mode="json")):
        chosen["backend"]["version"] = backend["version"]
    return "".join(f"# {line}\n" for line in head) + dump_plain(_kind_first(chosen))


def describe(change: Change) -> str:
    """``quantization.kv_cache: int8 -> fp8: why`` and the like."""
    found, value = shown(change.found), shown(change.value)
    if change.outcome == "renamed":
        return f"{change.key} ({found}) -> {change.to} ({value}): {change.why}"
    if change.outcome == "lost":
        return f"{change.key} ({found}): {change.why}"
    return f"{change.key}: {found} -> {value}: {change.why}"


def shown(value: Any) -> str:
    """A value as YAML has it, on one line and not long."""
    return visible(dump_plain([value]).strip()[1:-1], limit=80)


def _kind_first(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {
        key: _kind_first(value) for key, value in sorted(data.items(), key=lambda item: item[0] != "kind")
    }
