"""Laws of text: streaming changes nothing, chat templates render as transformers renders them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.errors import InputError
from trtspec.text import Detokenizer, StopStrings, Tokenizer

tokenizers = pytest.importorskip("tokenizers")

TRAINING = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "def f(x):\n    return x + 1\n",
    "你好，世界。今天天气很好。" * 3,
    "naïve café über straße",
    "🙂🙃 👩‍👩‍👧 family",
]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level() -> Any:
    """As GPT-2, Llama 3, Qwen and SmolLM have it; tokens may end inside a character."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


@cache
def byte_fallback() -> Any:
    """As Llama 2 and Mistral have it: pieces with a leading space mark, and <0xE4> for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁a", "a", "b", "c", "▁cat", "s", ".", "▁▁", "é"]
    model = tokenizers.models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def metaspace() -> Any:
    model = tokenizers.models.BPE(vocab={"▁": 0, "▁the": 1, "a": 2, "▁a": 3, "é": 4}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    return tokenizer


@cache
def word_piece() -> Any:
    """Its decoder joins ``##`` pieces and tidies punctuation: past text changes."""
    vocab = {"[UNK]": 0, "do": 1, "##n": 2, "'": 3, "t": 4, ".": 5, "n't": 6}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer


KINDS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}


class TokenByToken:
    """The naive decoder: each token's own text. Splits characters and loses spaces."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(self._tokenizer.decode([token]) for token in tokens)

    def flush(self) -> str:
        return ""


class WholeEachTime:
    """The second naive decoder: decode everything, return what is new. Shows characters too early."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens)
        new, self._shown = text[len(self._shown) :], text
        return new

    def flush(self) -> str:
        return ""


class HoldsOnlyReplacement(Detokenizer):
    """Knows split characters, not that byte fallback rewrites a whole run of byte tokens."""

    def _ends_in_byte_token(self) -> bool:
        return False


def stream(decoder: Any, pushes: Sequence[Sequence[int]]) -> list[str]:
    return [*(decoder.push(tokens) for tokens in pushes), decoder.flush()]


def pushes_of(tokenizer: Any) -> st.SearchStrategy[list[list[int]]]:
    size = tokenizer.get_vocab_size() + 2  # two ids that only a padded model vocabulary has
    return st.lists(st.lists(st.integers(0, size - 1), max_size=4), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_streaming_equals_decoding_at_once(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    pushes = data.draw(pushes_of(tokenizer))
    parts = stream(Detokenizer(tokenizer), pushes)
    assert "".join(parts) == tokenizer.decode([token for tokens in pushes for token in tokens])


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet="ab 你好世界🙂👩‍👧é\n.", max_size=40), chunk=st.integers(1, 3))
def test_real_text_never_shows_a_broken_character(text: str, chunk: int) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    parts = stream(Detokenizer(tokenizer), [ids[at : at + chunk] for at in range(0, len(ids), chunk)])
    assert "".join(parts) == text
    assert not any("�" in part for part in parts)


@pytest.mark.parametrize(
    ("broken", "kind", "text"),
    [(TokenByToken, "byte_level", "你好🙂"), (WholeEachTime, "byte_level", "你好🙂")],
)
def test_naive_decoders_fail_the_law(broken: Any, kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text).ids
    assert "".join(stream(broken(tokenizer), [[token] for token in ids])) != text


def test_a_run_of_byte_tokens_is_held_until_it_ends() -> None:
    tokenizer = byte_fallback()
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "你好".encode()]
    broken_run = [*run[:5], tokenizer.token_to_id("</s>"), tokenizer.token_to_id("a")]
    whole = tokenizer.decode(broken_run)
    assert whole == "�" * 5 + "a"
    pushes = [[token] for token in broken_run]
    assert stream(Detokenizer(tokenizer), pushes) == [""] * 6 + [whole, ""]
    assert "".join(stream(HoldsOnlyReplacement(tokenizer), pushes)) != whole


def test_special_tokens_leave_no_text() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    a, b = tokenizer.encode("a").ids, tokenizer.encode(" b").ids
    assert stream(Detokenizer(tokenizer), [[end], a, [end, end], b, [end]]) == ["", "a", "", " b", "", ""]


def test_text_is_released_as_soon_as_it_is_final() -> None:
    tokenizer = byte_level()
    parts = stream(Detokenizer(tokenizer), [[token] for token in tokenizer.encode("the lazy dog").ids])
    assert all(parts[:-1])
    assert parts[-1] == ""


# --------------------------------------------------------------------------- stop strings


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def cut_in_pieces(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    cutter = StopStrings(stops)
    shown = "".join(cutter.push(piece) for piece in pieces)
    return shown + cutter.flush(), cutter.matched


class NoHolding(StopStrings):
    """Broken: looks for a stop string in each piece alone."""

    def push(self, text: str) -> str:
        shown = super().push(text)
        return shown + super().flush()


@settings(deadline=None, max_examples=500)
@given(
    text=st.text(alphabet="ab\n", max_size=30),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_pieces_do_not_matter_to_stop_strings(text: str, stops: list[str], cuts: list[int]) -> None:
    shown, matched = cut_in_pieces(stops, pieces_of(text, cuts))
    assert (shown, matched) == cut_in_pieces(stops, [text])
    # One character at a time, the definition: stop as soon as the text ends with a stop string.
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            assert (shown, matched) == (text[: end - len(longest)], longest)
            break
    else:
        assert (shown, matched) == (text, None)


def test_without_holding_back_a_split_stop_string_is_missed() -> None:
    pieces = ["one\n", "\nUser:"]
    assert cut_in_pieces(["\n\n"], pieces) == ("one", "\n\n")
    broken = NoHolding(["\n\n"])
    assert "".join(broken.push(piece) for piece in pieces) != "one"


def test_only_a_possible_start_is_held_back() -> None:
    cutter = StopStrings(["###"])
    assert [cutter.push(text) for text in ("a#", "b", "##", "c")] == ["a", "#b", "", "##c"]


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="empty stop string"):
        StopStrings(["a", ""])


# --------------------------------------------------------------------------- model folders


def write_folder(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **files.pop("tokenizer_config", {})}))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_round_trip_and_facts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    text = "The fox, 你好 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == byte_level().get_vocab_size()
    assert tokenizer.has_chat_template
    assert len(tokenizer.digest) == 64
    assert Tokenizer.load(tmp_path).digest == tokenizer.digest


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {2}),
        ({"config": {"eos_token_id": 7}}, {2, 7}),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [0, 9]}}, {0, 2, 9}),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": None}}, {2, 7}),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>", "lstrip": False}}}, {0}),
        ({"tokenizer_config": {"eos_token": None}}, set()),
    ],
)
def test_eos_tokens(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    assert Tokenizer.load(write_folder(tmp_path, **files)).eos_token_ids == expected


def test_a_rendered_template_gets_no_second_bos(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_config={"bos_token": "<|end|>"})
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a") == tokenizer.encode("<|end|>a")
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.encode("<|end|><|end|>a")[:2] == [0, 0]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}])[0] == 1


MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind: 'é' \"你\""},
    {"role": "user", "content": "Hi\n  there"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "chatml": CHATML,
    "blocks": "{% for m in messages %}\n"
    "  {% if m.role == 'system' %}\n  [{{ m.content }}]\n  {% endif %}\n{% endfor %}\nx",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}"
    "{{ m.role }}{% endfor %}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ messages[0]['content'] | trim }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "none tools": "{% if tools is not none %}tools{% endif %}{% if not add_generation_prompt %}x{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    template = TEMPLATES[name]
    config = {"chat_template": template, "bos_token": {"content": "<|end|>"}}
    tokenizer = Tokenizer.load(write_folder(tmp_path, tokenizer_config=config))
    expected, _ = render_jinja_template(
        conversations=[MESSAGES],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<|end|>",
        eos_token="<|im_end|>",
    )
    assert tokenizer.render_chat(MESSAGES) == expected[0]


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES) == "file"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        (
            "{{ messages[0].content.__class__.__mro__ }}{{ ''.__class__.__bases__[0].__subclasses__() }}",
            "unsafe",
        ),
        ("{% for %}", "chat template: "),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 + 'a' }}", "chat template: unsupported operand"),
    ],
)
def test_template_problems(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, tokenizer_config={"chat_template": template}))
    with pytest.raises(InputError, match=message):
        tokenizer.render_chat(MESSAGES)


def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, tokenizer_config={"chat_template": None}))
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match="no chat template; send plain text"):
        tokenizer.render_chat(MESSAGES)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"tokenizer\.json: not found; export the model with a fast tokenizer"
    ):
        Tokenizer.load(tmp_path)


def test_every_problem_of_a_folder_at_once(tmp_path: Path) -> None:
    write_folder(
        tmp_path,
        tokenizer_config={"bos_token": 3, "eos_token": "<none>", "chat_template": 5},
        generation_config={"eos_token_id": "x"},
    )
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError) as caught:
        Tokenizer.load(tmp_path)
    keys = [(Path(problem.file or "").name, problem.key) for problem in caught.value.problems]
    assert keys == [
        ("tokenizer_config.json", "bos_token"),
        ("tokenizer_config.json", "chat_template"),
        ("tokenizer_config.json", "eos_token"),
        ("generation_config.json", "eos_token_id"),
        ("config.json", None),
    ]


def test_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "make", "says"),
    [
        ("tokenizer.json", os.mkfifo, "is not a regular file"),
        ("tokenizer.json", os.mkdir, "is a folder"),
        ("tokenizer.json", lambda path: path.write_text(""), "not a tokenizer"),
        ("tokenizer.json", lambda path: path.write_text("[" * 100_000), "not a tokenizer"),
        ("tokenizer.json", lambda path: path.write_bytes(b"\xff"), "not a tokenizer"),
        (
            "tokenizer.json",
            lambda path: tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path)),
            "empty vocabulary",
        ),
        ("tokenizer_config.json", lambda path: path.write_text("[" * 100_000), "nested too deeply"),
        ("tokenizer_config.json", lambda path: path.write_text('{"a": "\\ud800"}'), "surrogate"),
        ("tokenizer_config.json", os.mkfifo, "is not a regular file"),
        ("chat_template.jinja", os.mkfifo, "is not a regular file"),
        ("chat_template.jinja", lambda path: path.write_bytes(b"\xff"), "is not UTF-8"),
    ],
)
def test_files_that_are_no_tokenizer(
    tmp_path: Path, name: str, make: Callable[[Path], Any], says: str
) -> None:
    write_folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(InputError) as caught:
        Tokenizer.load(tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{{ 1 // 0 }}",
        "{{ messages[99].content.x }}",
        "{% if %}",
        "{{ '%' % 1 }}",
    ],
)
def test_whatever_a_template_does_is_its_own_error(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, tokenizer_config={"chat_template": template}))
    with pytest.raises(InputError, match="chat template: "):
        tokenizer.render_chat(MESSAGES)
