"""The loop that trains heads: batches, AdamW, validation, checkpoints, early stop.

What happens is a function of data, settings and seed alone (with the same torch and number of threads): a
training that was killed and goes on from its checkpoint ends with the same bits. Wall-clock time decides
nothing but where ``max_minutes`` stops.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtspec.artifact import json_digest
from trtspec.draft.checkpoint import load_checkpoint, save_checkpoint
from trtspec.draft.features import Batch, Examples, batch_plan, make_batch
from trtspec.draft.train_eagle import EagleTraining
from trtspec.draft.train_medusa import MedusaTraining
from trtspec.errors import InputError

Training = MedusaTraining | EagleTraining


@dataclass(frozen=True)
class TrainSettings:
    """``rows``: padded positions of a batch. The learning rate rises over ``warmup`` of all steps and falls
    by a cosine to a twentieth. ``patience``: evaluations without a better acceptance length after which
    training stops; None: never."""

    epochs: float = 4.0
    learning_rate: float = 1e-3
    warmup: float = 0.04
    rows: int = 2048
    clip: float = 1.0
    weight_decay: float = 0.01
    seed: int = 0
    evaluations: int = 10
    patience: int | None = 4
    checkpoint_steps: int = 25


@dataclass(frozen=True)
class Acceptance:
    """On answers kept back. ``rates[j]``: level j's best candidate is what the target says, given that all
    before were; ``near[j]``: it is among the four best."""

    rates: tuple[float, ...]
    near: tuple[float, ...]

    @property
    def length(self) -> float:
        """Tokens per step of a chain, the target's own included."""
        length, joint = 1.0, 1.0
        for rate in self.rates:
            joint *= rate
            length += joint
        return length


@dataclass(frozen=True)
class Trained:
    """``parameters`` are those of the best evaluation."""

    parameters: dict[str, Tensor]
    acceptance: Acceptance
    curve: tuple[dict[str, Any], ...]
    trained_tokens: int
    epochs: float
    seconds: float
    cpu_seconds: float
    stopped: str | None
    """Why before its end: "no better acceptance", "time"; None: it ran to its end."""


def train(
    training: Training,
    examples: Examples,
    settings: TrainSettings,
    checkpoint: Path,
    *,
    max_minutes: float | None = None,
    progress: Callable[[str, int, int], None] = lambda step, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Trained:
    """Train to the end, going on from ``checkpoint`` if there is one.

    An exception of ``progress``, which is called after every step, ends the training; what the last
    checkpoint holds is kept. Raises InputError for another training's checkpoint.
    """
    answers = examples.train
    steps_per_epoch = len(batch_plan(answers, settings.rows, settings.seed, 0))
    total = max(1, round(settings.epochs * steps_per_epoch))
    evaluate_at = {
        max(1, round(total * i / settings.evaluations)) for i in range(1, settings.evaluations + 1)
    }
    fingerprint = _fingerprint(training, examples, settings)
    parameters = {name: value.requires_grad_() for name, value in training.start(settings.seed).items()}
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        foreach=False,
    )
    state = load_checkpoint(checkpoint, fingerprint)
    if state is None:
        point = _point(0, 0, None, validate(training, parameters, examples))
        state = {
            "step": 0, "seen": 0, "losses": [], "curve": [point], "since_best": 0, "seconds": 0.0, "cpu": 0.0,
            "best": {name: value.detach().clone() for name, value in parameters.items()},
            "best_at": 0,
        }  # fmt: skip
        say(_line(point))
    else:
        for name, value in state["parameters"].items():
            parameters[name].data.copy_(value)
        optimizer.load_state_dict(state["optimizer"])
        say(f"going on after step {state['step']} of {total}")
    started, cpu_started = time.perf_counter(), time.process_time()
    before = state["seconds"], state["cpu"]
    first_step, stopped = state["step"], None
    plans: dict[int, list[list[int]]] = {}

    def save(step: int) -> None:
        state.update(
            fingerprint=fingerprint,
            step=step,
            parameters={name: value.detach() for name, value in parameters.items()},
            optimizer=optimizer.state_dict(),
            seconds=before[0] + time.perf_counter() - started,
            cpu=before[1] + time.process_time() - cpu_started,
        )
        save_checkpoint(checkpoint, state)

    progress("training", first_step, total)
    for step in range(first_step, total):
        epoch = step // steps_per_epoch
        if epoch not in plans:
            plans = {epoch: batch_plan(answers, settings.rows, settings.seed, epoch)}
        plan = plans[epoch]
        chosen = plan[(step % steps_per_epoch) % len(plan)]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, total, settings.warmup)
        with _autocast(training):
            loss = training.loss(parameters, make_batch([answers[at] for at in chosen]))
        if not math.isfinite(float(loss.detach())):
            raise InputError(
                f"training: the loss of step {step + 1} is not a finite number; lower --learning-rate "
                f"({settings.learning_rate:g}) and remove {checkpoint} if there is one"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip, foreach=False)
        optimizer.step()
        state["losses"].append(float(loss.detach()))
        state["seen"] += sum(len(answers[at].tokens) - answers[at].prompt_length for at in chosen)
        done = step + 1
        progress("training", done, total)
        if done in evaluate_at:
            found = validate(training, parameters, examples)
            losses = state["losses"]
            point = _point(done, state["seen"], sum(losses) / len(losses), found)
            best = state["curve"][state["best_at"]]["acceptance_length"]
            state["curve"].append(point)
            state["losses"] = []
            state["since_best"] += 1
            if found.length > best:
                state["since_best"], state["best_at"] = 0, len(state["curve"]) - 1
                state["best"] = {name: value.detach().clone() for name, value in parameters.items()}
            say(_line(point))
            if settings.patience is not None and state["since_best"] >= settings.patience:
                stopped = "no better acceptance"
        out_of_time = max_minutes is not None and before[0] + time.perf_counter() - started > 60 * max_minutes
        if stopped is None and out_of_time and done < total:
            stopped = "time"
        if stopped or done == total or done % settings.checkpoint_steps == 0:
            save(done)
        if stopped:
            break
    if stopped == "time" and state["losses"]:
        found = validate(training, parameters, examples)
        losses = state["losses"]
        state["curve"].append(_point(state["step"], state["seen"], sum(losses) / len(losses), found))
        if found.length > state["curve"][state["best_at"]]["acceptance_length"]:
            state["best"] = {name: value.detach().clone() for name, value in parameters.items()}
            state["best_at"] = len(state["curve"]) - 1
    best_point = state["curve"][state["best_at"]]
    return Trained(
        parameters=state["best"],
        acceptance=Acceptance(tuple(best_point["acceptance"]), tuple(best_point["near"])),
        curve=tuple(state["curve"]),
        trained_tokens=state["seen"],
        epochs=state["step"] / steps_per_epoch,
        seconds=state["seconds"],
        cpu_seconds=state["cpu"],
        stopped=stopped,
    )


@torch.no_grad()
def validate(training: Training, parameters: Mapping[str, Tensor], examples: Examples) -> Acceptance:
    """Acceptance by level on the answers kept back, teacher-forced: what a greedy chain accepts there."""
    hits: list[int] = []
    near: list[int] = []
    tried: list[int] = []
    answers = sorted(examples.validation, key=lambda answer: len(answer.tokens))
    for first in range(0, len(answers), 16):
        batch: Batch = make_batch(answers[first : first + 16])
        with _autocast(training):
            levels = training.matches(parameters, batch)
        so_far = torch.ones_like(batch.taught)
        for level, (ranks, usable) in enumerate(levels):
            if level == len(hits):
                hits, near, tried = [*hits, 0], [*near, 0], [*tried, 0]
            asked = so_far & usable
            tried[level] += int(asked.sum())
            near[level] += int((asked & (ranks < 4)).sum())
            so_far = asked & (ranks == 0)
            hits[level] += int(so_far.sum())
    return Acceptance(
        tuple(hit / max(1, n) for hit, n in zip(hits, tried, strict=True)),
        tuple(hit / max(1, n) for hit, n in zip(near, tried, strict=True)),
    )


def _schedule(step: int, total: int, warmup: float) -> float:
    rising = max(1, round(warmup * total))
    if step < rising:
        return (step + 1) / rising
    share = (step - rising) / max(1, total - rising)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share))


@contextlib.contextmanager
def _autocast(training: Training) -> Iterator[None]:
    """16-bit products where the target computes in 16 bit: weights and their steps stay in float32."""
    embedding = training.target.embedding
    if embedding.dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(embedding.device.type, embedding.dtype, cache_enabled=True):
            yield
    else:
        yield


def _fingerprint(training: Training, examples: Examples, settings: TrainSettings) -> str:
    """Of all that the weights are a function of, but the target's values, which made the answers."""
    facts = {
        name: value
        for name, value in vars(training).items()
        if isinstance(value, (int, float, str)) and name != "target"
    }
    tokens = torch.cat([answer.tokens for answer in (*examples.train, *examples.validation)])
    return json_digest(
        {
            "kind": training.kind,
            "training": facts,
            "settings": asdict(settings),
            "vocab": training.vocab.tolist(),
            "tokens": len(tokens),
            "content": int((tokens.long() * torch.arange(1, len(tokens) + 1)).sum()),
        }
    )


def _point(step: int, seen: int, loss: float | None, found: Acceptance) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": seen,
        "loss": loss,
        "acceptance": list(found.rates),
        "near": list(found.near),
        "acceptance_length": found.length,
    }


def _line(point: Mapping[str, Any]) -> str:
    loss = "" if point["loss"] is None else f"loss {point['loss']:.3f}, "
    rates = " ".join(f"{rate:.3f}" for rate in point["acceptance"])
    near = " ".join(f"{rate:.2f}" for rate in point["near"])
    return (
        f"step {point['step']}, {point['tokens']:,} tokens: {loss}"
        f"acceptance length {point['acceptance_length']:.3f} "
        f"(by level {rates}; among the best four {near})"
    )
