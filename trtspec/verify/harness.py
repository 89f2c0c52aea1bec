"""Tasks of lm-evaluation-harness (0.4.x), run in this process over an engine, item by item.

The harness brings prompts, few-shot examples, filters and metrics; the engine brings log-likelihoods
(``Engine.score``) and greedy answers. Both engines see the same items, and the verdict is the paired one of
:mod:`trtspec.verify.noninferiority`, not the harness's unpaired standard errors. The harness is optional and
is imported only here. Data sets come from where its tasks say, usually a hub; ``--lm-eval-path``
names a folder of task files of one's own, whose data may be local.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.engine import Engine, Request, Sampling
from trtspec.errors import InputError, MissingError, Problem
from trtspec.ruler import run
from trtspec.text import Tokenizer
from trtspec.verify.tasks import cut

_OnDone = Callable[[], None]
_METRICS = ("exact_match", "acc_norm", "acc", "pass@1", "pass_at_1", "em", "f1", "bleu_acc")
"""Per-item scores in [0, 1], best known first: the first that an item has is compared."""
_MAX_NEW_TOKENS = 256
"""The harness's own default where a task sets no limit."""


@dataclass(frozen=True)
class HarnessItem:
    """``value`` in [0, 1] by ``metric`` (with the filter that made it); ``output`` if text was generated."""

    task: str
    id: str
    metric: str
    value: float
    output: str = ""
    tokens: tuple[int, ...] = ()


def require_harness() -> str:
    """The version of the harness that is installed. Raises MissingError if it is not there."""
    try:
        import lm_eval
    except ImportError as error:
        message = f"lm-evaluation-harness is missing ({error}); pip install 'lm_eval>=0.4.9,<0.5'"
        raise MissingError(message) from None
    return str(getattr(lm_eval, "__version__", "unknown"))


def run_harness(
    tasks: Sequence[str],
    writer: Engine,
    scorer: Engine,
    tokenizer: Tokenizer,
    *,
    draft_limit: int | None,
    limit: int | None = None,
    folder: Path | None = None,
    on_done: _OnDone = lambda: None,
) -> list[HarnessItem]:
    """Every item of ``tasks`` (at most ``limit`` of each), scored. ``writer`` generates, ``scorer`` gives
    log-likelihoods, as in :func:`trtspec.verify.tasks.score_items`.

    Raises MissingError without the harness or its data, InputError for tasks that it does not know or that
    give no score in [0, 1] an item.
    """
    require_harness()
    shown = sys.stderr

    def advance() -> None:
        with contextlib.redirect_stderr(shown):  # progress is ours, the rest is the harness's
            on_done()

    model = _model(writer, scorer, tokenizer, draft_limit, advance)
    return items_of(evaluate(model, tasks, limit=limit, folder=folder), model.answers)


def known_tasks(tasks: Sequence[str], folder: Path | None) -> Any:
    """The harness's manager of tasks. Raises MissingError without the harness, InputError for tasks that it
    does not know."""
    require_harness()
    manager = _manager(folder)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        message = f"lm-evaluation-harness knows no task {', '.join(unknown)}; see: lm_eval ls tasks"
        raise InputError(Problem(message, key="--lm-eval"))
    return manager


@functools.lru_cache(maxsize=1)  # it reads some ten thousand files
def _manager(folder: Path | None) -> Any:
    from lm_eval.tasks import TaskManager

    with _quiet():
        return TaskManager(include_path=None if folder is None else str(folder))


def evaluate(
    model: Any, tasks: Sequence[str], *, limit: int | None, folder: Path | None, as_chat: bool = False
) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """What the harness notes of every item of ``tasks``, by task. ``as_chat``: a server renders the chat.

    Raises what :func:`known_tasks` does, and MissingError for whatever goes wrong in the harness."""
    manager = known_tasks(tasks, folder)
    from lm_eval.evaluator import simple_evaluate

    with _quiet():
        try:
            results = simple_evaluate(
                model=model,
                tasks=list(tasks),
                limit=limit,
                log_samples=True,
                bootstrap_iters=0,
                task_manager=manager,
                apply_chat_template=as_chat,
                random_seed=0,
                numpy_random_seed=0,
                torch_random_seed=0,
                fewshot_random_seed=0,
            )
        except (InputError, MissingError):
            raise
        except Exception as error:  # data sets, task files and their code: any error of them ends here
            lines = str(error).strip().splitlines()
            message = (
                f"lm-evaluation-harness cannot run {', '.join(tasks)}: {type(error).__name__}: "
                f"{lines[0] if lines else ''}; its data sets must be in the cache or local (--lm-eval-path)"
            )
            raise MissingError(message) from None
    samples: Mapping[str, Sequence[Mapping[str, Any]]] = results["samples"]
    return samples


def items_of(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], answers: Mapping[str, tuple[int, ...]]
) -> list[HarnessItem]:
    """An item for each document, by the first score in [0, 1] that it has. ``answers``: tokens by text.

    Raises InputError for a task without such a score."""
    found: list[HarnessItem] = []
    for task, rows in samples.items():
        chosen: dict[str, HarnessItem] = {}
        for row in rows:
            metric = next((name for name in _METRICS if _is_share(row.get(name))), None)
            if metric is None:
                numbers = ", ".join(str(name) for name in row.get("metrics", [])) or "none"
                message = f"{task}: no score in [0, 1] an item (its metrics: {numbers}); take another task"
                raise InputError(Problem(message, key="--lm-eval"))
            name, value = str(row["doc_id"]), float(row[metric])
            label = f"{metric},{row.get('filter', 'none')}"
            output = row["resps"][0][0] if row.get("resps") and isinstance(row["resps"][0][0], str) else ""
            # Of several filters the first counts, as in the harness's own table.
            chosen.setdefault(name, HarnessItem(task, name, label, value, output, answers.get(output, ())))
        found += chosen.values()
    return found


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1


def _model(
    writer: Engine, scorer: Engine, tokenizer: Tokenizer, draft_limit: int | None, on_done: _OnDone
) -> Any:
    """The engine as the harness sees a model. A class of the harness's own kind, made here because its base
    class is there only with the harness."""
    from lm_eval.api.model import TemplateLM

    stops = tokenizer.eos_token_ids
    longest = scorer.max_seq_tokens

    class EngineModel(TemplateLM):  # type: ignore[misc]
        backend = "causal"
        tokenizer_name = "trtspec"

        def __init__(self) -> None:
            super().__init__()
            self.answers: dict[str, tuple[int, ...]] = {}
            """Tokens of each text that was generated."""

        @property
        def eot_token_id(self) -> int:
            return min(stops)

        @property
        def prefix_token_id(self) -> int:
            bare = tokenizer.encode("")
            return bare[0] if bare else self.eot_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            tokens = tokenizer.encode(string)
            bare = tokenizer.encode("")
            if add_special_tokens is False and bare and tokens[: len(bare)] == bare:
                return tokens[len(bare) :]
            return tokens

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            found = []
            for _, context, continuation in requests:
                # As the harness's own models do: what does not fit is cut from the left.
                tokens = [*context, *continuation][-longest:]
                first = len(tokens) - len(continuation)
                if first < 1:
                    message = f"{len(continuation)} tokens to score; limits.max_seq_tokens is {longest}"
                    raise InputError(Problem(message, key="--lm-eval"))
                scores = scorer.score(tokens)
                greedy = scores.top_tokens[first - 1 :] == tokens[first:]
                found.append((math.fsum(scores.logprobs[first - 1 :]), greedy))
                on_done()
            return found

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            found = []
            for request in requests:
                tokens = [self.prefix_token_id, *self.tok_encode(request.args[0], add_special_tokens=False)]
                total = 0.0
                for start in range(1, len(tokens), longest - 1):
                    total += math.fsum(scorer.score(tokens[start - 1 : start + longest - 1]).logprobs)
                found.append(total)
                on_done()
            return found

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            asked, ends = [], []
            for number, request in enumerate(requests):
                context, options = request.args
                if options.get("do_sample") and float(options.get("temperature", 0.0)) > 0:
                    sampling = Sampling(temperature=float(options["temperature"]), seed=number)
                else:
                    sampling = Sampling()
                until = options.get("until") or []
                ends.append([until] if isinstance(until, str) else list(until))
                new = int(options.get("max_gen_toks", options.get("max_new_tokens", _MAX_NEW_TOKENS)))
                new = min(new, longest - 1)
                tokens = self.tok_encode(context)[-(longest - new) :]
                asked.append(Request(f"lm-eval-{number}", tuple(tokens), new, sampling, stops))
            texts = []
            answers = run(writer, asked, draft_limit=draft_limit, on_answer=on_done).answers
            for answer, until in zip(answers, ends, strict=True):
                text = tokenizer.decode([token for token in answer.tokens if token not in stops])
                text = cut(text, [one for one in until if one])
                self.answers[text] = answer.tokens
                texts.append(text)
            return texts

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return tokenizer.render_chat(chat_history)

    return EngineModel()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness prints tables and progress bars; a verdict's own output must stay readable."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
