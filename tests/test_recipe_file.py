"""Every kind of bad recipe gets its message, all at once, and nothing but InputError ever comes out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from bad_recipes import BAD_RECIPES, HEAD
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtspec.errors import InputError, Problem
from trtspec.recipe import Recipe
from trtspec.recipe_file import (
    dump_recipe,
    lint,
    lint_content,
    load_recipe,
    parse_recipe,
    recipe_digest,
)
from trtspec.recipe_yaml import MAX_FILE_BYTES, dump_plain, read_document, resolve_plain

REFERENCE = Path(__file__).resolve().parents[1] / "recipes" / "reference.yaml"


@pytest.mark.parametrize(
    ("content", "expected"), [case[1:] for case in BAD_RECIPES], ids=[c[0] for c in BAD_RECIPES]
)
def test_a_bad_recipe_gets_exactly_its_messages(
    content: str | bytes, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_bytes(
        content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    )
    with pytest.raises(InputError) as caught:
        load_recipe("r.yaml")
    assert str(caught.value).splitlines() == [f"r.yaml:{line}" for line in expected]
    assert all(problem.file == "r.yaml" and problem.line for problem in caught.value.problems)
    assert caught.value.exit_code == 2
    assert os.listdir() == ["r.yaml"]
    assert "Input should be" not in str(caught.value)


def test_the_head_of_the_bad_recipes_is_good() -> None:
    """Otherwise each message above could be about the head."""
    assert isinstance(parse_recipe(HEAD), Recipe)


def test_there_are_enough_bad_recipes() -> None:
    assert len(BAD_RECIPES) >= 100
    assert len({name for name, _, _ in BAD_RECIPES}) == len(BAD_RECIPES)


def test_problems_come_in_the_order_of_lines() -> None:
    content = HEAD + "limits: {max_batch_size: 0}\nzebra: 1\n"
    content += "gates:\n  lossless: 1\n  lossless: 2\nserving: {host: '!'}\n"
    lines = [problem.line for problem in lint_content(content).errors]
    assert lines == sorted(lines)
    assert lines == [5, 6, 8, 9, 10]


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        (
            b"\xef\xbb\xbf" + HEAD.encode(),
            "f:1: starts with a byte order mark (accepted); save the file as UTF-8 without BOM",
        ),
        (
            HEAD.replace("\n", "\r\n").encode(),
            "f:1: Windows line ends (CRLF) are accepted; save the file with LF to keep its bytes portable",
        ),
    ],
)
def test_what_windows_editors_write_is_accepted_with_a_warning(content: bytes, warning: str) -> None:
    result = lint_content(content, "f")
    assert result.recipe == parse_recipe(HEAD)
    assert [str(problem) for problem in result.warnings] == [warning]


def test_lines_are_counted_as_editors_count_them() -> None:
    for content in (
        HEAD + "description: |\n  a\n  b\nbanana: 1\n",
        (HEAD + "\n# x\n\nbanana: 1\n").replace("\n", "\r\n"),
    ):
        assert [problem.line for problem in lint_content(content).errors] == [8]


# --------------------------------------------------------------------------- files


def _messages(path: Path | str) -> list[str]:
    result = lint(path)
    assert result.recipe is None
    return [problem.message for problem in result.errors]


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    assert _messages(tmp_path / "none.yaml") == [
        "no such file; check the path, or write a recipe with: trtspec init"
    ]
    assert _messages(tmp_path) == ["is a folder; allowed: a recipe file; name the file in it"]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert _messages(fifo) == ["is not a regular file; allowed: a recipe file; copy its content into one"]
    assert _messages("a\0b") == ["the file name holds a NUL character; allowed: a path; check the name"]
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot be read (Too many levels of symbolic links)" in _messages(loop)[0]
    assert "cannot be read (File name too long)" in _messages("a" * 5000)[0]
    assert "cannot be read (Not a directory)" in _messages(REFERENCE / "x.yaml")[0]


def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(HEAD)
    path.chmod(0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root reads everything
    try:
        messages = _messages(path)
    finally:
        os.seteuid(user)
    assert messages == ["cannot be read (Permission denied); check the path and its permissions"]


def test_a_huge_file_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(HEAD + "#" * (MAX_FILE_BYTES - len(HEAD)))
    assert lint(path).recipe is not None
    path.write_text(HEAD + "#" * (MAX_FILE_BYTES - len(HEAD) + 1))
    assert _messages(path) == ["is larger than 1 MB; a recipe has a few kB; is this a recipe?"]


def test_many_problems_are_cut_with_their_number() -> None:
    errors = lint_content(HEAD + "".join(f"k{i}: 1\n" for i in range(80))).errors
    assert len(errors) == 51
    assert errors[-1].message == "30 more problems are not shown; fix these first"


# --------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("yes", "yes"), ("No", "No"), ("off", "off"), ("y", "y"),
        ("~", None),
        ("null", None), ("", None), ("12", 12), ("-3", -3), ("+3", 3), ("010", "010"), ("0o10", "0o10"),
        ("0x1f", "0x1f"), ("0b1", "0b1"), ("1_000", "1_000"), ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1.5", 1.5), ("1e3", 1000.0), (".5", 0.5), ("5.", 5.0), ("-1.5E-2", -0.015), ("1.2.1", "1.2.1"),
        ("e3", "e3"), (".", "."), ("-", "-"), ("=", "="), ("<<", "<<"), ("٣", "٣"),
    ],
)  # fmt: skip
def test_plain_scalars_are_what_they_look_like(text: str, value: object) -> None:
    assert resolve_plain(text) == value
    assert type(resolve_plain(text)) is type(value)


def test_lists_stand_for_tuples_and_whole_numbers_for_fractions() -> None:
    recipe = parse_recipe(
        HEAD
        + "speculation: {kind: medusa, heads: h, choices: [[0], [0, 1]]}\n"
        + "quantization: {kind: w8a8_sq, alpha: 1, exclude: [a]}\n"
    )
    assert recipe.speculation.choices == ((0,), (0, 1))
    assert recipe.quantization.exclude == ("a",)
    assert type(recipe.quantization.alpha) is float


# --------------------------------------------------------------------------- digest and dump


def test_the_digest_is_over_values_alone() -> None:
    digest = recipe_digest(parse_recipe(HEAD))
    reordered = "\n".join(reversed(HEAD.splitlines()))
    same = [
        reordered,
        "# comment\n" + HEAD.replace("{source: x}", "\n  source: 'x'   # y"),
        HEAD + "limits: {max_batch_size: 16}\nspeculation: {kind: none}\n",
        HEAD.replace("\n", "\r\n"),
        "\ufeff" + HEAD,
        dump_recipe(parse_recipe(HEAD)),
    ]
    assert {recipe_digest(parse_recipe(content)) for content in same} == {digest}
    others = [
        HEAD.replace("source: x", "source: y"),
        HEAD + "limits: {max_batch_size: 17}\n",
        HEAD + "description: x\n",
    ]
    assert len({digest, *(recipe_digest(parse_recipe(content)) for content in others)}) == 4


def test_the_digest_is_pinned() -> None:
    """Engines are found by it: a change of the schema that moves it must be meant."""
    assert (
        recipe_digest(parse_recipe(HEAD))
        == "167dd9b52e52bb570febdeb5f389deb2ebde9464dac3dae11e2f35d02924cfe0"
    )


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30))
def test_any_text_survives_a_dump(text: str) -> None:
    document = read_document(
        dump_plain({"a": text, "b": [text], text: 1}).encode("utf-8", "surrogatepass"), "f"
    )
    if document.problems:
        assert "found the character" in document.problems[0].message
    else:
        assert document.data == {"a": text, "b": [text], text: 1}


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False) | st.integers(-(10**30), 10**30) | st.booleans() | st.none())
def test_any_number_survives_a_dump(value: object) -> None:
    data = read_document(dump_plain({"a": value}).encode(), "f").data["a"]
    assert data == value
    assert type(data) is type(value)


def test_dumps_have_no_anchors() -> None:
    shared = {"x": [1]}
    assert read_document(dump_plain({"a": shared, "b": shared}).encode(), "f").data == {
        "a": shared,
        "b": shared,
    }


# --------------------------------------------------------------------------- robustness


def _lint_never_fails(content: bytes) -> None:
    result = lint_content(content, "f")
    assert (result.recipe is None) == bool(result.errors)
    for problem in (*result.errors, *result.warnings):
        assert isinstance(problem, Problem)
        assert problem.message
        assert "\n" not in str(problem)
        assert str(problem).isprintable()
        assert "Input should" not in problem.message
        assert "<refused>" not in problem.message
    if result.recipe is not None:
        assert parse_recipe(dump_recipe(result.recipe)) == result.recipe
        assert len(recipe_digest(result.recipe)) == 64


_REFERENCE_TEXT = REFERENCE.read_text().replace("#| ", "")
_LINES = _REFERENCE_TEXT.splitlines(keepends=True)
_FRAGMENTS = st.sampled_from(
    [
        "\t", "  ", "\n", ":", ": ", "- ", "{", "}", "[", "]", "'", '"', "&a ", "*a", "<<: ",
        "!!int ", "---\n",
        "...\n", "|\n", ">\n", "# ",
        "%YAML 9.9\n", "null", "true", "no", ".nan", "1e999", "010", "9" * 50, "\x00", "\ufeff", "\u2028",
        "kind: ngram", "kind: ", "? ", "\r", "\\U00110000", "\x85",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_mutated_reference_gives_a_recipe_or_problems(data: st.DataObject) -> None:
    lines = [line for line in _LINES if not line.startswith("#")]
    for _ in range(data.draw(st.integers(1, 5))):
        action = data.draw(st.sampled_from(["delete", "repeat", "swap", "indent", "insert", "cut"]))
        at = data.draw(st.integers(0, len(lines) - 1))
        other = data.draw(st.integers(0, len(lines) - 1))
        if action == "delete" and len(lines) > 1:
            del lines[at]
        elif action == "repeat":
            lines.insert(other, lines[at])
        elif action == "swap":
            lines[at], lines[other] = lines[other], lines[at]
        elif action == "indent":
            lines[at] = "  " * data.draw(st.integers(1, 3)) + lines[at]
        else:
            position = data.draw(st.integers(0, len(lines[at])))
            inserted = data.draw(_FRAGMENTS) if action == "insert" else ""
            lines[at] = lines[at][:position] + inserted + lines[at][position + (action == "cut") :]
    _lint_never_fails("".join(lines).encode("utf-8", "surrogatepass"))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
_GOOD = yaml.safe_load(HEAD)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_at_any_key_gives_a_recipe_or_problems(data: st.DataObject) -> None:
    reference = yaml.safe_load(REFERENCE.read_text())
    place = reference
    while True:
        key = data.draw(st.sampled_from(list(place)))
        if not isinstance(place[key], dict) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(_JSON)
    _lint_never_fails(dump_plain(reference).encode("utf-8", "surrogatepass"))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_problems(content: bytes) -> None:
    _lint_never_fails(content)
    _lint_never_fails(HEAD.encode() + content)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("n\u0430me", "it contains U+0430 CYRILLIC SMALL LETTER A; write name"),
        ("nam\u0435", "it contains U+0435 CYRILLIC SMALL LETTER IE; write name"),
        ("nmae", "did you mean name?"),
        ("\u0445\u0443", "it contains U+0445"),
    ],
)
def test_a_key_that_only_looks_right_has_its_character_named(key: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_recipe(f"version: 1\n{key}: x\nmodel: {{source: x}}\nbackend: {{kind: embedded}}\n")
    assert says in str(caught.value)
