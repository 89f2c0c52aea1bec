"""The target's own answers to training prompts, with the hidden states that draft heads see.

Heads are trained on what the target says (self-distillation, as Medusa, arXiv 2401.10774 section 2.3, does it
for instruct models, and DistillSpec, arXiv 2310.08461, for drafts): the law they have to imitate is that of
the target, quantized as it will be served, not that of somebody's text.

The embedded engine answers all prompts in one in-flight batch. A drafter that drafts nothing writes down the
hidden states that pass by: a second forward over the answers, which would cost a quarter of the time again,
is not needed. What is finished is written in shards, each whole or not there, so that a run that was killed
goes on where it stopped.

A shard is a safetensors file: ``tokens [n] int32`` of its sequences one after the other, ``lengths``
and ``prompt_lengths [sequences] int32``, ``prompts [sequences] int32`` (which prompts they answer) and
``hidden [n, layers * hidden_size]`` in the target's dtype. The state of an answer's last token was never
computed; its row is zero.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from trtspec.artifact import json_digest
from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.embedded.tree import EMPTY_DRAFT, Draft
from trtspec.engine import Request, Sampling
from trtspec.errors import InputError, Problem
from trtspec.heads_layout import default_hidden_layers
from trtspec.quantize.calibration import Sample
from trtspec.recipe import KvFormat, Limits
from trtspec.text import Tokenizer
from trtspec.user_files import explain_os_error, read_user_json, write_user_file

HEADER = "answers.json"
FORMAT = 1
PROMPTS_PER_SHARD = 64

Progress = Callable[[str, int, int], None]
"""(step, done, total)."""


@dataclass(frozen=True)
class AnswerSettings:
    """How the target answers. ``max_prompt_tokens``: longer prompts are left out."""

    max_new_tokens: int = 160
    max_prompt_tokens: int = 512
    batch_size: int = 64
    temperature: float = 0.0
    seed: int = 0
    kv_format: KvFormat = "none"


@dataclass(frozen=True)
class Answer:
    """One sequence: prompt and answer together, and the states of its positions.

    ``hidden [tokens, layers * hidden_size]``: layer by layer as in ``Answers.layers``; the last row is zero.
    """

    prompt: int
    tokens: Tensor
    prompt_length: int
    hidden: Tensor


@dataclass(frozen=True)
class Answers:
    """A folder of answers that fits a target. ``layers`` are counted as :meth:`Decoder.forward` does."""

    folder: Path
    layers: tuple[int, ...]
    digest: str
    """Of the prompts, the target and the settings."""

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.safetensors"))

    def read(self) -> list[Answer]:
        """All answers, in the order of the prompts; the tensors of a shard share its memory."""
        return [answer for shard in self.shards() for answer in read_shard(shard)]


def encode_prompts(samples: Sequence[Sample], tokenizer: Tokenizer, max_tokens: int) -> list[tuple[int, ...]]:
    """The tokens of each prompt that has at most ``max_tokens``; a plain text is asked as a user's message.

    Raises InputError if none is left.
    """
    prompts = []
    for sample in samples:
        messages = sample.messages or ({"role": "user", "content": sample.text or ""},)
        if messages[-1]["role"] == "assistant":  # an answer that is there already: ours is wanted
            messages = messages[:-1]
        if not messages:
            continue
        if tokenizer.has_chat_template:
            tokens = tokenizer.encode_chat(messages)
        else:
            tokens = tokenizer.encode("\n\n".join(message["content"] for message in messages))
        if 0 < len(tokens) <= max_tokens:
            prompts.append(tuple(tokens))
    if not prompts:
        raise InputError(f"no prompt of 1 to {max_tokens} tokens; give others or raise the limit")
    return prompts


def recorded_layers(num_layers: int) -> tuple[int, ...]:
    """What every kind of heads needs: EAGLE-3's three layers and the last, behind the final norm."""
    return (*default_hidden_layers(num_layers), num_layers)


def answers_digest(prompts: Sequence[tuple[int, ...]], target_digest: str, settings: AnswerSettings) -> str:
    return json_digest({"prompts": prompts, "target": target_digest, **asdict(settings)})


def open_answers(folder: Path, layers: tuple[int, ...], digest: str) -> Answers:
    """The answers in ``folder``, which is made if it is not there.

    Raises InputError if it holds answers to other prompts, of another target or with other settings.
    """
    path = folder / HEADER
    header = {"format": FORMAT, "digest": digest, "layers": list(layers)}
    if path.exists():
        found = read_user_json(path)
        if found != header:
            message = (
                "holds answers to other prompts, of another target or with other settings; "
                "name another folder, or remove this one"
            )
            raise InputError(Problem(message, file=str(folder)))
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_os_error(error, folder) from None
        write_user_file(path, (json.dumps(header, indent=1) + "\n").encode())
    return Answers(folder, layers, digest)


def read_shard(path: Path) -> list[Answer]:
    try:
        tensors = load_file(path)
    except Exception as error:  # the library's own exception is no stable name
        message = f"not a whole safetensors file ({error}); remove it, it is made again"
        raise InputError(Problem(message, file=str(path))) from None
    answers, first = [], 0
    columns = zip(
        tensors["prompts"].tolist(),
        tensors["lengths"].tolist(),
        tensors["prompt_lengths"].tolist(),
        strict=True,
    )
    for prompt, length, prompt_length in columns:
        part = slice(first, first + length)
        first += length
        answers.append(Answer(prompt, tensors["tokens"][part], prompt_length, tensors["hidden"][part]))
    return answers


def _write_shard(path: Path, answers: Sequence[Answer]) -> None:
    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    tensors = {
        "tokens": torch.cat([answer.tokens for answer in answers]),
        "lengths": column([len(answer.tokens) for answer in answers]),
        "prompt_lengths": column([answer.prompt_length for answer in answers]),
        "prompts": column([answer.prompt for answer in answers]),
        "hidden": torch.cat([answer.hidden for answer in answers]),
    }
    write_user_file(path, save(tensors))


# --------------------------------------------------------------------------- generating


class StateRecorder:
    """A drafter that drafts nothing and keeps the hidden states of each sequence."""

    def __init__(self, layers: tuple[int, ...], width: int, max_tokens: int, dtype: torch.dtype) -> None:
        self.hidden_layers = layers
        self._shape, self._dtype = (max_tokens, len(layers) * width), dtype
        self._states: dict[str, Tensor] = {}

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        return [EMPTY_DRAFT] * len(sequences)

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        for view, states in zip(sequences, hidden, strict=True):
            kept = self._states.get(view.id)
            if kept is None:
                kept = self._states[view.id] = torch.zeros(self._shape, dtype=self._dtype)
            rows = torch.cat([states[layer] for layer in self.hidden_layers], -1)
            kept[view.start : view.start + len(rows)] = rows

    def take(self, sequence_id: str, length: int) -> Tensor:
        """``[length, layers * width]`` of a sequence that ended; its last row is zero."""
        states = self._states.pop(sequence_id)[:length].clone()
        states[-1] = 0
        return states

    def release(self, sequence_id: str) -> None:
        """Nothing: the states are taken when the last output arrives, which is after this."""


def generate_answers(
    model: Decoder,
    prompts: Sequence[tuple[int, ...]],
    answers: Answers,
    settings: AnswerSettings,
    stop_tokens: frozenset[int],
    progress: Progress = lambda step, done, total: None,
) -> dict[str, float]:
    """Answer the prompts whose shards are not there; {"tokens", "wall_s", "cpu_s"} of this run.

    The last shard may hold fewer prompts. Memory: the KV of a batch and the states of what is in flight.
    """
    shards = [
        range(first, min(first + PROMPTS_PER_SHARD, len(prompts)))
        for first in range(0, len(prompts), PROMPTS_PER_SHARD)
    ]
    missing = [at for at in range(len(shards)) if not _shard_path(answers, at).exists()]
    waiting = [prompt for at in missing for prompt in shards[at]]
    started, cpu = time.perf_counter(), time.process_time()
    tokens = 0
    if waiting:
        max_tokens = settings.max_prompt_tokens + settings.max_new_tokens
        recorder = StateRecorder(answers.layers, model.spec.hidden_size, max_tokens, model.dtype)
        engine = _engine(model, recorder, settings, max_tokens)
        done: dict[int, dict[int, Answer]] = {at: {} for at in missing}
        outputs: dict[str, list[int]] = {}
        total, finished = len(prompts), len(prompts) - len(waiting)
        waiting.reverse()
        progress("answers", finished, total)
        while waiting or engine.in_flight:
            while waiting and engine.in_flight < settings.batch_size:
                prompt = waiting.pop()
                sampling = Sampling(settings.temperature, seed=settings.seed + prompt)
                outputs[str(prompt)] = []
                engine.add(
                    Request(str(prompt), prompts[prompt], settings.max_new_tokens, sampling, stop_tokens)
                )
            for output in engine.step():
                said = outputs[output.request_id]
                said += output.new_tokens
                if output.finish_reason is None:
                    continue
                prompt, known = int(output.request_id), (*prompts[int(output.request_id)], *said)
                tokens += len(said)
                del outputs[output.request_id]
                answer = Answer(
                    prompt,
                    torch.tensor(known, dtype=torch.int32),
                    len(prompts[prompt]),
                    recorder.take(output.request_id, len(known)),
                )
                at = prompt // PROMPTS_PER_SHARD
                done[at][prompt] = answer
                finished += 1
                progress("answers", finished, total)
                if len(done[at]) == len(shards[at]):
                    _write_shard(_shard_path(answers, at), [done[at][p] for p in shards[at]])
                    done[at] = {}
        engine.close()
    return {
        "tokens": float(tokens),
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
    }


def _shard_path(answers: Answers, at: int) -> Path:
    return answers.folder / f"shard-{at:05}.safetensors"


def _engine(
    model: Decoder, recorder: StateRecorder, settings: AnswerSettings, max_tokens: int
) -> EmbeddedEngine:
    """Built for throughput: no prefix cache, whose hits would leave states unseen; whole prompts at once."""
    page_tokens = 32
    limits = Limits(
        max_batch_size=settings.batch_size,
        max_input_tokens=settings.max_prompt_tokens,
        max_seq_tokens=max_tokens,
        max_num_tokens=settings.batch_size + settings.max_prompt_tokens,
    )
    options: dict[str, Any] = {"dtype": model.dtype, "kv_format": settings.kv_format}
    new_store = partial(KvStore, model.spec, scales=model.kv_scales, device=model.device, **options)
    return EmbeddedEngine(
        model,
        new_store,
        num_pages=settings.batch_size * -(-max_tokens // page_tokens),
        page_tokens=page_tokens,
        prefix_cache=False,
        limits=limits,
        drafter=recorder,
    )
