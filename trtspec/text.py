"""Text to token ids and back: the tokenizer of a model folder, its chat template, streaming decoding.

Reads what Hugging Face folders hold (``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``,
``generation_config.json``, ``config.json``) with the ``tokenizers`` library and Jinja, without transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, MissingError, Problem
from trtspec.tensor_headers import read_json
from trtspec.user_files import read_user_bytes, read_user_text

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MAX_TEMPLATE_BYTES = 10_000_000
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer of one model folder.

    ``digest`` is the SHA-256 of tokenizer.json: folders with the same digest share token ids.
    ``eos_token_ids`` are those of generation_config.json, else of config.json, and the tokenizer's own
    EOS token: some instruct models end a turn with a token that only one of the files names.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        digest: str,
        eos_token_ids: frozenset[int],
        special_tokens: Mapping[str, Any],
        chat_template: str | None,
        folder: Path,
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens)
        self._chat_template = chat_template
        self._compiled: Any = None
        self._folder = folder
        self.digest = digest
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.largest_token_id: int = max(vocabulary.values())
        self.longest_token_bytes: int = max(len(piece.encode()) for piece in vocabulary)
        """No token stands for more bytes of text than this."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of ``folder``. Raises InputError with every problem found, MissingError without
        the ``tokenizers`` package."""
        try:
            import tokenizers
        except ImportError:
            raise MissingError("package tokenizers is missing; pip install 'trtspec[embedded]'") from None
        path = folder / "tokenizer.json"
        if not path.exists():
            raise InputError(
                Problem("not found; export the model with a fast tokenizer (tokenizer.json)", file=str(path))
            )
        raw = read_user_bytes(path)
        problems: list[Problem] = []
        tokenizer = None
        try:
            tokenizer = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # the library raises plain Exception, and panics that are not even that
            problems.append(Problem(f"not a tokenizer: {_first_line(error)}", file=str(path)))
        config = _read_mapping(folder / "tokenizer_config.json", problems)
        special = _special_tokens(config, folder / "tokenizer_config.json", problems)
        template = _chat_template(folder, config, problems)
        if tokenizer is not None and not tokenizer.get_vocab():
            problems.append(Problem("an empty vocabulary; export the tokenizer again", file=str(path)))
            tokenizer = None
        if tokenizer is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
            eos = _eos_token_ids(folder, tokenizer, special.get("eos_token"), problems)
        if problems or tokenizer is None:
            raise InputError(problems)
        return cls(
            tokenizer,
            digest=hashlib.sha256(raw).hexdigest(),
            eos_token_ids=eos,
            special_tokens=special,
            chat_template=template,
            folder=folder,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer puts around one.

        A text that already begins with the BOS token (a rendered chat template) gets no second one.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        bos = self._special_tokens.get("bos_token")
        if isinstance(bos, str) and bos and text.startswith(bos):
            bos_id = self._tokenizer.token_to_id(bos)
            if len(ids) > 1 and ids[0] == ids[1] == bos_id:
                return ids[1:]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation that the model is to continue; see :meth:`render_chat`."""
        ids: list[int] = self._tokenizer.encode(self.render_chat(messages), add_special_tokens=False).ids
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text, ending where the assistant's next answer begins.

        ``messages`` are ``{"role": ..., "content": ...}``. Raises InputError without a chat template, or
        with the template's own complaint.
        """
        if self._chat_template is None:
            raise InputError(
                Problem(
                    "no chat template; send plain text (--raw) or add chat_template.jinja", str(self._folder)
                )
            )
        if self._compiled is None:
            try:
                self._compiled = _jinja_environment().from_string(self._chat_template)
            except Exception as error:
                raise self._template_problem(error) from None
        try:
            text: str = self._compiled.render(
                **{
                    **self._special_tokens,
                    "messages": [dict(message) for message in messages],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": True,
                }
            )
        except Exception as error:  # a program that came with the model: any error of it is the model's
            raise self._template_problem(error) from None
        return text

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``tokens``; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self) -> Detokenizer:
        """A new streaming decoder (special tokens skipped)."""
        return Detokenizer(self._tokenizer)

    def _template_problem(self, error: Exception) -> InputError:
        return InputError(Problem(f"chat template: {_first_line(error)}", str(self._folder)))


# Words, code, numbers, other scripts, an emoji of several code points, white space that may be merged.
_SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog, isn't it? It's 3:45 p.m.",
    "def f(x):\n    return {'a': [x ** 2, None]}  # comment\n\n\tpass\r\n",
    "3.14159 1,000,000 0xFF 1e-9 2024-01-31 2^10 = 1024",
    "Größe naïve Ünïcode; e\u0301 is e with an accent; ½ № ﬁ",
    "中文分词测试。日本語のテキスト 한국어 العربية עברית ไทย हिन्दी",
    "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER} \N{GRINNING FACE}\u00a0\u3000\u200b",
    "  two  spaces   and    more     \n \n  end ",
)


def same_tokenizer(target: Tokenizer, draft: Tokenizer) -> list[str]:
    """How ``draft`` differs from ``target`` where one model's token ids are read by the other; [] if nowhere.

    Compared are the vocabulary with its ids, the special tokens, and sample texts encoded and decoded. Which
    special token plays which part (end of turn, padding) may differ, as it does between a base and an
    instruct model: only the target ends an answer.
    """
    differences = []
    own, other = target._tokenizer.get_vocab(), draft._tokenizer.get_vocab()
    for what, unlike in (
        ("are missing", sorted(own.keys() - other.keys())),
        ("are not the target's", sorted(other.keys() - own.keys())),
        ("have other ids", sorted(token for token, at in own.items() if other.get(token, at) != at)),
    ):
        if unlike:
            differences.append(f"vocabulary: {len(unlike)} tokens {what}, first {unlike[0]!r}")
    specials, others = (
        {token.content for token in one._tokenizer.get_added_tokens_decoder().values() if token.special}
        for one in (target, draft)
    )
    if specials != others:
        unlike = sorted(specials ^ others)
        differences.append(f"special tokens: {len(unlike)} are special in only one, first {unlike[0]!r}")
    for text in (*_SAMPLE_TEXTS, "".join(sorted(specials & others))):
        ids, others_ids = target._tokenizer.encode(text).ids, draft._tokenizer.encode(text).ids
        if ids != others_ids:
            differences.append(f"round trip: {text!r} has {len(ids)} tokens, here {len(others_ids)} others")
        elif target.decode(ids, False) != draft.decode(ids, False):
            differences.append(f"round trip: the tokens of {text!r} decode to {draft.decode(ids, False)!r}")
    return differences


class Detokenizer:
    """Decodes one growing token sequence; special tokens are skipped.

    The law: what all :meth:`push` calls and the final :meth:`flush` return, concatenated, is
    ``decode(all tokens)``, and text once returned never changes. So text is held back

    * while it ends in U+FFFD: a character whose bytes are spread over tokens (byte-level BPE);
    * while the last token is a ``<0xE4>`` byte token (byte fallback): the decoder turns a whole run of
      them into U+FFFD when any byte in it is wrong, so even finished characters of a run can change;
    * to the end, for decoders that are neither (WordPiece tidies up text that is long past).

    Each push decodes only a short window. It starts at an earlier place where text was released, because
    a decoder treats the first token differently (it drops a leading space).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        """Where the window starts: a place where text was released before, or 0."""
        self._released = 0
        """Tokens whose text was returned."""
        self._before = ""
        """Text of the window's tokens before ``_released``."""
        self._can_stream, byte_fallback = _decoder_kind(tokenizer)
        self._byte_tokens = _byte_tokens(tokenizer) if byte_fallback else frozenset()
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def push(self, tokens: Iterable[int]) -> str:
        """Append ``tokens``; return the text that became final."""
        self._tokens.extend(tokens)
        if not self._can_stream or len(self._tokens) == self._released:
            return ""
        window = self._decode(self._start)
        if window.endswith(_UNFINISHED) or self._ends_in_byte_token():
            return ""
        return self._release(window)

    def flush(self) -> str:
        """What was held back; nothing may be pushed after it."""
        return self._release(self._decode(self._start))

    def _release(self, window: str) -> str:
        text = window[len(self._before) :]
        newest = self._decode(self._released)
        # A window must begin with some text: a decoder treats the first character differently.
        if newest:
            self._start, self._before = self._released, newest
        else:
            self._before = window
        self._released = len(self._tokens)
        return text

    def _decode(self, start: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[start:], skip_special_tokens=True)
        return text

    def _ends_in_byte_token(self) -> bool:
        if not self._byte_tokens:
            return False
        for token in reversed(self._tokens):
            # Special tokens, and ids that only the padded vocabulary of the model has, leave no text.
            if token not in self._special and self._tokenizer.id_to_token(token) is not None:
                return token in self._byte_tokens
        return False


class StopStrings:
    """Cuts a text at the first stop string, whatever pieces it arrives in.

    The first is the one that is complete first; of two that end together, the longer. ``matched`` is that
    string once it was found. Text that may be the start of a stop string is held back.

    Each stop string is searched by Knuth, Morris and Pratt's automaton, whose state is the length of its
    longest prefix that the text ends with: constant time per character on average, whatever a client sends.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise InputError("an empty stop string would stop before the first character; leave it out")
        # The longest first: of two that end together it wins.
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._failures = [_prefix_function(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Append ``text``; return what can be shown. After a match, nothing more."""
        if self.matched is not None:
            return ""
        held = self._held + text
        states = self._states
        for end, character in enumerate(text, start=len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                length = states[index]
                while length and stop[length] != character:
                    length = self._failures[index][length - 1]
                if stop[length] == character:
                    length += 1
                    if length == len(stop):
                        self.matched = stop
                        self._held = ""
                        return held[: end - length]
                states[index] = length
        keep = max(states, default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """The text held back, now that no more comes."""
        text, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return text


def _prefix_function(word: str) -> list[int]:
    """For each beginning of ``word``: the length of its longest proper prefix that it also ends with."""
    lengths = [0] * len(word)
    length = 0
    for index in range(1, len(word)):
        while length and word[length] != word[index]:
            length = lengths[length - 1]
        if word[length] == word[index]:
            length += 1
        lengths[index] = length
    return lengths


# --------------------------------------------------------------------------- reading the folder


def _read_mapping(path: Path, problems: list[Problem]) -> dict[str, Any]:
    return (read_json(path, problems) or {}) if path.exists() else {}


def _special_tokens(config: Mapping[str, Any], path: Path, problems: list[Problem]) -> dict[str, Any]:
    """``bos_token`` and so on as a chat template sees them: strings, also when written as objects."""
    special: dict[str, Any] = {}
    for name in _SPECIAL_NAMES:
        key = f"{name}_token"
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            special[key] = value
        elif value is not None:
            problems.append(Problem(f"{value!r} is neither a string nor an object", file=str(path), key=key))
    extra = config.get("additional_special_tokens", config.get("extra_special_tokens"))
    if isinstance(extra, list):
        contents = [token.get("content") if isinstance(token, dict) else token for token in extra]
        special["additional_special_tokens"] = [token for token in contents if isinstance(token, str)]
    if isinstance(extra, dict):
        special.update({name: token for name, token in extra.items() if isinstance(token, str)})
    return special


def _chat_template(folder: Path, config: Mapping[str, Any], problems: list[Problem]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_user_text(path, max_bytes=_MAX_TEMPLATE_BYTES)
        except InputError as error:
            problems.extend(error.problems)
            return None
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    where = str(folder / "tokenizer_config.json")
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        named = {item.get("name"): item.get("template") for item in value}
        default = named.get("default")
        if isinstance(default, str):
            return default
        names = ", ".join(map(str, named))
        problems.append(Problem(f"no template named default (found: {names})", where, key="chat_template"))
        return None
    problems.append(Problem("must be a string or a list of named templates", where, key="chat_template"))
    return None


def _eos_token_ids(
    folder: Path, tokenizer: Any, eos_token: str | None, problems: list[Problem]
) -> frozenset[int]:
    found: set[int] = set()
    if eos_token is not None:
        token_id = tokenizer.token_to_id(eos_token)
        if token_id is None:
            where = str(folder / "tokenizer_config.json")
            problems.append(Problem(f"{eos_token!r} is not in the vocabulary", where, key="eos_token"))
        else:
            found.add(token_id)
    for name in ("generation_config.json", "config.json"):
        value = _read_mapping(folder / name, problems).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            where = str(folder / name)
            problems.append(Problem(f"{value!r}: not a token id", where, key="eos_token_id"))
            continue
        found.update(ids)
        break
    return frozenset(found)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --------------------------------------------------------------------------- decoders


def _decoder_kind(tokenizer: Any) -> tuple[bool, bool]:
    """(whether text can be released early, whether byte fallback can rewrite a run of byte tokens)."""
    if tokenizer.decoder is None:
        return True, False
    # The part of tokenizer.json that describes it; writing out the whole tokenizer would take 70 ms.
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    strips_the_end = any(step["type"] == "Strip" and step.get("stop", 0) for step in steps)
    known = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    return kinds <= known and not strips_the_end, "ByteFallback" in kinds


def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)


# --------------------------------------------------------------------------- chat templates


def _jinja_environment() -> Any:
    """Jinja as chat templates expect it: the environment that transformers renders them in."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """``{% generation %} ... {% endgeneration %}`` marks the assistant's text for training; only the
        text matters here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes <, > and & for HTML.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
