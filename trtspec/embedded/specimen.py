"""A tiny random target with drafters, and the faults that ``trtspec verify --self-test`` plants in it.

The specimen is a Llama of one layer in float64: small enough to be made in milliseconds, real enough that
every part of the engine runs. Each fault is one that speculative decoding was seen to have somewhere: an
acceptance that draws from the wrong law, a cache that keeps what was refused, a mask or a position that takes
a tree for a chain. None of them is reachable from a recipe.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trtspec.embedded import engine as engine_module
from trtspec.embedded.acceptance import Accepted, rejection
from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.drafters import Drafter, DraftView, Stateless
from trtspec.embedded.drafters.draft_model import DraftModelDrafter
from trtspec.embedded.engine import Accept, EmbeddedEngine
from trtspec.embedded.kvstore import INT8_MAX, KvFormat, KvStore
from trtspec.embedded.layers import DenseLinear, RmsNorm
from trtspec.embedded.model import Decoder, DecoderLayer
from trtspec.embedded.sampling import Draw, TargetLaw
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, chain, children, path_to, truncate
from trtspec.modelspec import ModelSpec
from trtspec.recipe import Limits

VOCAB = 64
DRAFT_TOKENS = 2
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _INNER = 32, 1, 4, 2, 64
_PAGE, _BATCH, _MOST = 8, 16, 128
_EPS = 1e-5
_NOISE = 0.3
"""Of the draft model's weights against the target's, as a share of their spread: right often, not always."""


# --------------------------------------------------------------------------- models


def _spec() -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        family="llama",
        num_layers=_LAYERS,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_heads=_HEADS,
        num_kv_heads=_KV_HEADS,
        head_dim=_HIDDEN // _HEADS,
        vocab_size=VOCAB,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_norm_eps=_EPS,
        max_positions=2 * _MOST,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        sliding_window=None,
        eos_token_ids=(),
        dtype="float64",
        quant=None,
    )


@functools.cache
def specimen(seed: int = 0, noise: float = 0.0, head_bits: int | None = None) -> Decoder:
    """The target of ``seed``. ``noise`` disturbs its weights, ``head_bits`` rounds its output projection to
    integers of that many bits with one scale."""
    generator, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)

    def weight(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        values, disturbed = (
            torch.randn(rows, columns, generator=one, dtype=torch.float64) for one in (generator, other)
        )
        found: Tensor = (values + noise * disturbed) * gain / columns**0.5
        return found

    def norm() -> RmsNorm:
        return RmsNorm(torch.ones(_HIDDEN, dtype=torch.float64), _EPS)

    embedding = weight(VOCAB, _HIDDEN, _HIDDEN**0.5)
    dim = _HIDDEN // _HEADS
    blocks = [
        DecoderLayer(
            input_norm=norm(),
            # Keys and values well below 1: an 8-bit cache with a scale of 1 has nothing of them left.
            qkv=DenseLinear(
                torch.cat((weight(_HEADS * dim, _HIDDEN, 5.0), weight(2 * _KV_HEADS * dim, _HIDDEN, 0.3)))
            ),
            q_norm=None,
            k_norm=None,
            o=DenseLinear(weight(_HIDDEN, _HIDDEN, 6.0)),
            post_norm=norm(),
            gate_up=DenseLinear(weight(2 * _INNER, _HIDDEN, 1.5)),
            down=DenseLinear(weight(_HIDDEN, _INNER)),
        )
        for _ in range(_LAYERS)
    ]
    head = weight(VOCAB, _HIDDEN, 2.5)
    if head_bits is not None:
        step = head.abs().max() / (2 ** (head_bits - 1) - 1)
        head = (head / step).round() * step
    return Decoder(
        _spec(),
        embedding=embedding,
        layers=blocks,
        final_norm=torch.ones(_HIDDEN, dtype=torch.float64),
        lm_head=DenseLinear(head),
    )


def text_states(model: Decoder, tokens: Sequence[int]) -> dict[int, Tensor]:
    """Hidden states ``[tokens, hidden]`` of every layer, 0 the embeddings: one forward over a text."""
    rows = torch.arange(len(tokens))
    batch = StepBatch(torch.tensor(tokens), rows, rows, (SequenceRows(0, len(tokens), rows[:0]),), rows[-1:])
    return model.forward(batch, KvStore(model.spec, len(tokens), dtype=model.dtype), range(_LAYERS + 1))[1]


def text_logits(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """``[tokens, vocab]``: logits after each token of a text, in one forward."""
    rows = torch.arange(len(tokens))
    batch = StepBatch(torch.tensor(tokens), rows, rows, (SequenceRows(0, len(tokens), rows[:0]),), rows)
    return model.forward(batch, KvStore(model.spec, len(tokens), dtype=model.dtype))[0]


@functools.cache
def calibrated_scales() -> tuple[tuple[float, float], ...]:
    """Scales of an INT8 KV cache: the largest key and value of each layer on a random text, over 127."""
    model = specimen()
    tokens = torch.randint(VOCAB, (_MOST,), generator=torch.Generator().manual_seed(5)).tolist()
    rows = torch.arange(len(tokens))
    store = KvStore(model.spec, len(tokens), dtype=model.dtype)
    batch = StepBatch(torch.tensor(tokens), rows, rows, (SequenceRows(0, len(tokens), rows[:0]),), rows[-1:])
    model.forward(batch, store)
    pairs = [store.read(layer, slice(None)) for layer in range(_LAYERS)]
    return tuple((float(k.abs().max()) / INT8_MAX, float(v.abs().max()) / INT8_MAX) for k, v in pairs)


UNIT_SCALES = ((1.0, 1.0),) * _LAYERS


# --------------------------------------------------------------------------- engines


def open_specimen(
    drafter: Drafter | None = None,
    *,
    accept: Accept = rejection,
    model: Decoder | None = None,
    kv_format: KvFormat = "none",
    kv_scales: Sequence[tuple[float, float]] | None = None,
    store: type[KvStore] = KvStore,
) -> EmbeddedEngine:
    """An engine over the specimen (or ``model``), without drafts unless ``drafter`` is given."""
    model = model or specimen()

    def new_store(num_slots: int) -> KvStore:
        return store(model.spec, num_slots, dtype=model.dtype, kv_format=kv_format, scales=kv_scales)

    limits = Limits(
        max_batch_size=_BATCH, max_num_tokens=128, max_input_tokens=_MOST, max_seq_tokens=2 * _MOST
    )
    return EmbeddedEngine(
        model,
        new_store,
        num_pages=_BATCH * 2 * _MOST // _PAGE,
        page_tokens=_PAGE,
        limits=limits,
        drafter=drafter,
        accept=accept,
    )


def model_drafter() -> DraftModelDrafter:
    """A disturbed copy of the target drafts chains, drawn from its own law where the request samples."""
    model = specimen(noise=_NOISE)

    def new_store(num_slots: int) -> KvStore:
        return KvStore(model.spec, num_slots, dtype=model.dtype)

    return DraftModelDrafter(
        model,
        new_store,
        num_draft_tokens=DRAFT_TOKENS,
        num_pages=2 * _BATCH * 2 * _MOST // _PAGE,
        page_tokens=_PAGE,
        max_rows=128,
        vocab_size=VOCAB,
        sampled=True,
    )


class TreeDrafter(Stateless):
    """Trees over known answers: on each a wrong token first, then the right one with the next
    level below it. ``answers``: by request id; ``starts``: the lengths of their prompts."""

    def __init__(self, answers: Mapping[str, Sequence[int]], starts: Mapping[str, int]) -> None:
        self._answers, self._starts = answers, starts

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        return [self._tree(view) for view in sequences]

    def _tree(self, view: DraftView) -> Draft:
        done = len(view.tokens) - self._starts[view.id]
        right = self._answers[view.id][done : done + min(DRAFT_TOKENS, view.max_draft)]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in right:
            tokens += [(token + 7) % VOCAB, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return truncate(Draft(tuple(tokens), tuple(parents)), view.room)


class HeadDrafter:
    """One linear head that drafts one token from the target's hidden states, in the manner of Medusa.

    ``weight [vocab, features]`` reads the states of every layer at the last computed token, one after the
    other, and the embedding of the current token; see :func:`fit_head`.
    """

    hidden_layers = tuple(range(_LAYERS + 1))

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._states: dict[str, Tensor] = {}

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        drafts = []
        for view in sequences:
            state = self._states.get(view.id)
            if state is None or view.max_draft < 1:
                drafts.append(EMPTY_DRAFT)
                continue
            features = torch.cat((state, specimen().embedding[view.tokens[-1]]))
            drafts.append(chain([int((self._weight @ features).argmax())]))
        return drafts

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        """Keep the states behind the token that the current one follows."""
        for view, outcome, states in zip(sequences, accepted, hidden, strict=True):
            if outcome is None:
                continue
            known = len(view.tokens) - len(outcome.path) - 1 - view.start
            row = known + outcome.path[-1] if outcome.path else known - 1
            if row < len(states[0]):  # an answer that ended inside the path is not drafted for again
                self._states[view.id] = torch.cat([states[layer][row] for layer in self.hidden_layers])

    def release(self, sequence_id: str) -> None:
        self._states.pop(sequence_id, None)


def fit_head(model: Decoder, texts: Sequence[Sequence[int]]) -> Tensor:
    """The head that fits ``texts`` of ``model`` best (ridge regression): ``[vocab, features]``."""
    inputs: list[Tensor] = []
    wanted: list[int] = []
    for text in texts:
        states = text_states(model, text)
        joined = torch.cat([states[layer] for layer in range(_LAYERS + 1)], -1)[:-2]
        inputs.append(torch.cat((joined, model.embedding[torch.tensor(text[1:-1])]), -1))
        wanted += text[2:]
    x = torch.cat(inputs)
    y = torch.nn.functional.one_hot(torch.tensor(wanted), VOCAB).double()
    gram = x.T @ x + 0.1 * torch.eye(x.shape[1], dtype=x.dtype)
    solved: Tensor = torch.linalg.solve(gram, x.T @ y)
    return solved.T.contiguous()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch uses one thread: nothing here is large enough for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------- faults


def biased_residual(draft: Draft, law: TargetLaw, draw: Draw) -> Accepted:
    """As rejection, but what follows a refusal is drawn from q instead of max(p - q, 0)."""
    below, row = children(draft), 0
    while below[row]:
        node = below[row][0]
        x, p = draft.tokens[node], law.probs(row)
        if draft.probs is None:
            raise ValueError("this fault needs drawn candidates")
        q = draft.probs[node].double()
        accept = min(1.0, float(p[x]) / float(q[x]))
        if draw(torch.tensor([accept, 1.0 - accept], dtype=torch.float64)) != 0:
            return Accepted(path_to(draft, row - 1), draw(q))
        row = node + 1
    return Accepted(path_to(draft, row - 1), law.sample(row, draw))


def accept_always(draft: Draft, law: TargetLaw, draw: Draw) -> Accepted:
    """Every first candidate is kept, whatever the target thinks of it."""
    below, row = children(draft), 0
    while below[row]:
        row = below[row][0] + 1
    return Accepted(path_to(draft, row - 1), law.sample(row, draw))


class StaleStore(KvStore):
    """A cache that keeps what it once wrote to a slot: after a refusal the refused token's keys and values
    stay where the token that came instead should be. (Right while no slot is handed to another request.)"""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._written = torch.zeros((_LAYERS, self.num_slots), dtype=torch.bool)

    def write_both(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        fresh = ~self._written[layer, slots]
        super().write_both(layer, slots[fresh], kv[fresh])
        self._written[layer, slots] = True


@contextlib.contextmanager
def wrong_tree_mask() -> Iterator[None]:
    """Inside, a row of a draft attends to all rows before it instead of its ancestors."""
    with _planted("tree_mask", lambda draft: None):
        yield


@contextlib.contextmanager
def wrong_positions() -> Iterator[None]:
    """Inside, nodes of a draft are numbered through instead of by their depth."""
    with _planted("depths", lambda draft: tuple(range(1, len(draft) + 1))):
        yield


@contextlib.contextmanager
def _planted(name: str, function: Callable[[Draft], Any]) -> Iterator[None]:
    own = getattr(engine_module, name)
    setattr(engine_module, name, function)
    try:
        yield
    finally:
        setattr(engine_module, name, own)
