"""One training from prompts to a folder of heads: what ``trtspec draft train`` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch

from trtspec.artifact import open_artifact
from trtspec.draft.answers import (
    Answers,
    AnswerSettings,
    answers_digest,
    encode_prompts,
    generate_answers,
    open_answers,
    recorded_layers,
)
from trtspec.draft.checkpoint import HeadsRecord, write_heads
from trtspec.draft.curves import curve_svg
from trtspec.draft.features import frequent_tokens, read_examples, target_of
from trtspec.draft.train_eagle import EagleTraining
from trtspec.draft.train_medusa import MedusaTraining
from trtspec.draft.training import Training, TrainSettings, train
from trtspec.embedded.machine import default_threads, torch_device
from trtspec.embedded.weights import load_model
from trtspec.errors import InputError, MissingError
from trtspec.folders import refuse_existing, refuse_replacing
from trtspec.heads_layout import is_heads_file
from trtspec.modelspec import read_modelspec
from trtspec.plan_inputs import hashed
from trtspec.quantize.calibration import read_samples
from trtspec.recipe_file import load_recipe
from trtspec.text import Tokenizer
from trtspec.user_files import explain_os_error

Kind = Literal["medusa", "eagle", "eagle3"]
BUILTIN = "builtin"

DEFAULT_EPOCHS = {"medusa": 5.0, "eagle": 5.0, "eagle3": 5.0}
DEFAULT_VOCAB = {"medusa": 6144, "eagle": 6144, "eagle3": 6144}
"""Tokens that the loss runs over; EAGLE-3's draft vocabulary."""


@dataclass(frozen=True)
class TrainingJob:
    """What is asked for. ``target_recipe``: an engine, or the recipe of one that is built, whose quantized
    target answers and is imitated. ``work`` keeps answers (unless ``answers`` names a folder) and the
    checkpoint."""

    kind: Kind
    model: Path
    data: str
    out: Path
    work: Path
    answers: Path | None = None
    target_recipe: Path | None = None
    max_prompts: int | None = None
    max_tokens: int | None = None
    vocab: int | None = None
    num_heads: int = 4
    num_layers: int = 1
    num_steps: int = 3
    hard_share: float = 0.5
    max_minutes: float | None = None
    dtype: str | None = None
    device: str = "cpu"
    replace: bool = False
    answer_settings: AnswerSettings = field(default_factory=AnswerSettings)
    train_settings: TrainSettings = field(default_factory=TrainSettings)


def prompts_path(data: str) -> str:
    """The file of ``data``: ``builtin`` are the package's own training prompts."""
    return (
        str(resources.files("trtspec").joinpath("data/training_prompts.jsonl")) if data == BUILTIN else data
    )


def run_training(
    job: TrainingJob,
    progress: Callable[[str, int, int], None] = lambda step, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> HeadsRecord:
    """Answers, training, heads; each part goes on where an earlier call for the same ``work`` stopped.

    Sets torch's thread count for the process. Raises InputError for what does not fit, MissingError for what
    the machine lacks.
    """
    answers_in = job.answers or job.work / "answers"
    if job.replace:
        refuse_replacing(job.out, is_heads_file, spare=(job.model, job.work, answers_in))
    else:
        refuse_existing(job.out)
    device = torch_device(job.device)
    torch.set_num_threads(default_threads())
    target_dir, recipe_digest, settings = _target(job)
    spec = read_modelspec(target_dir)
    tokenizer = Tokenizer.load(job.model)
    samples = read_samples(prompts_path(job.data))
    prompts = encode_prompts(samples, tokenizer, settings.max_prompt_tokens)[: job.max_prompts]
    dtype = (
        getattr(torch, job.dtype)
        if job.dtype
        else (torch.bfloat16 if spec.dtype != "float32" else torch.float32)
    )
    source = hashed(target_dir, None, say)
    model = load_model(target_dir, spec, dtype=dtype, device=device)
    target = target_of(model, job.model)

    digest = answers_digest(prompts, source.digest, settings)
    try:
        job.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, job.work) from None
    answers: Answers = open_answers(answers_in, recorded_layers(spec.num_layers), digest)
    stops = tokenizer.eos_token_ids
    took = generate_answers(model, prompts, answers, settings, stops, progress)
    if took["tokens"]:
        rate, cpu_rate = took["tokens"] / took["wall_s"], took["tokens"] / max(took["cpu_s"], 1e-9)
        say(f"{took['tokens']:,.0f} tokens answered: {rate:.0f} a second, {cpu_rate:.0f} a CPU second")

    examples = read_examples(answers, job.max_tokens)
    vocab = frequent_tokens(examples, job.vocab or DEFAULT_VOCAB[job.kind], spec.vocab_size)
    training: Training
    if job.kind == "medusa":
        training = MedusaTraining(target, vocab, job.num_heads, job.num_layers, job.hard_share)
    else:
        training = EagleTraining(job.kind, target, vocab, job.num_steps, job.hard_share)
    say(
        f"{len(examples.train):,} answers, {examples.num_tokens:,} tokens to learn; "
        f"{len(examples.validation)} answers kept back"
    )
    trained = train(
        training,
        examples,
        job.train_settings,
        job.work / f"{job.kind}.checkpoint",
        max_minutes=job.max_minutes,
        progress=progress,
        say=say,
    )
    tensors, config, weights_file = training.export(trained.parameters)
    kept: dict[str, Any] = {
        "train": asdict(job.train_settings),
        "answers": asdict(settings),
        "num_steps": job.num_steps if job.kind != "medusa" else None,
        "num_heads": job.num_heads if job.kind == "medusa" else None,
        "hard_share": job.hard_share,
        "stopped": trained.stopped,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }
    return write_heads(
        job.out,
        tensors,
        config,
        weights_file,
        {
            "kind": job.kind,
            "base_model": str(target_dir),
            "base_digest": source.digest,
            "target_recipe": recipe_digest,
            "tokenizer_digest": tokenizer.digest,
            "data_digest": digest,
            "num_answers": len(examples.train),
            "answer_tokens": examples.num_tokens,
            "trained_tokens": trained.trained_tokens,
            "epochs": trained.epochs,
            "draft_vocab_size": len(vocab) if job.kind == "eagle3" else None,
            "seed": job.train_settings.seed,
            "acceptance": trained.acceptance.rates,
            "acceptance_length": trained.acceptance.length,
            "training_s": trained.seconds,
            "training_cpu_s": trained.cpu_seconds,
            "settings": kept,
            "curve": trained.curve,
        },
        curve_svg(job.kind, trained.curve),
        replace=job.replace,
    )


def _target(job: TrainingJob) -> tuple[Path, str | None, AnswerSettings]:
    """(the folder of the target that answers, digest of its recipe, the settings with its KV format)."""
    if job.target_recipe is None:
        return job.model, None, job.answer_settings
    folder = job.target_recipe
    if folder.is_file():
        recipe = load_recipe(folder)
        folder = Path("engines") / recipe.name
        if not folder.is_dir():
            raise MissingError(
                f"{folder}: the engine of {job.target_recipe} is not built; run: "
                f"trtspec build {job.target_recipe}"
            )
    found = open_artifact(folder)
    kv_format = found.recipe.quantization.kv_cache
    if kv_format == "nvfp4":
        raise InputError(f"{folder}: kv_cache nvfp4 is not run by the embedded engine")
    return (
        found.target_dir,
        found.manifest.recipe_digest,
        replace(job.answer_settings, kv_format=kv_format),
    )
