"""Tasks of lm-evaluation-harness (0.4.x) over an endpoint, item by item.

OpenAI-compatible servers are asked by the harness's own ``local-completions`` (log-likelihoods need a server
that tells those of a prompt, and a tokenizer folder to count tokens with) or, where there are only chats,
``local-chat-completions``; Triton by an adapter over this package's client, which generates only. No hub is
asked: data sets must be in the cache, or local (``--lm-eval-path``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, MissingError, TrtspecError
from trtspec.prompts import Chat
from trtspec.text import Tokenizer
from trtspec.verify import harness
from trtspec.verify.arrivals import closed_loop
from trtspec.verify.endpoint import Endpoint, Reply, SamplingParams, ask
from trtspec.verify.harness import HarnessItem, evaluate, items_of
from trtspec.verify.tasks import cut

_NEW_TOKENS = 256
"""The harness's own default where a task sets no limit."""
_RETRIES = 3
_PROMPT_TOKENS = 1_000_000
"""What the harness may send: servers refuse what is too long, which it would otherwise cut at 2,048."""


class _CannotScore(MissingError):
    """The task needs log-likelihoods that this server does not tell."""


@dataclass(frozen=True)
class HarnessRun:
    """``skip``: why the task cannot be asked; ``error``: why it has no answers."""

    items: tuple[HarnessItem, ...] = ()
    skip: str = ""
    error: str = ""


def known_tasks(tasks: Sequence[str], folder: Path | None) -> None:
    """Refuse what the harness does not know. Raises InputError for it, MissingError without the harness.

    Turns the hub off for this process, before the harness's packages read whether it is on."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        os.environ[name] = "1"
    harness.known_tasks(tasks, folder)


def harness_at(
    endpoint: Endpoint,
    task: str,
    *,
    continues: bool,
    no_scores: str,
    tokenizer: Tokenizer | None,
    limit: int | None,
    folder: Path | None,
    concurrency: int,
) -> HarnessRun:
    """Every item of ``task`` (at most ``limit``), scored. ``continues``: text is continued, else chats are
    answered; ``no_scores``: why no text can be scored, "" if it can."""
    try:
        if endpoint.protocol == "triton":
            model = _triton(endpoint, no_scores, concurrency)
        else:
            model = _openai(endpoint, continues, no_scores, tokenizer, concurrency)
        samples = evaluate(model, [task], limit=limit, folder=folder, as_chat=not continues)
        return HarnessRun(tuple(items_of(samples, {})))
    except _CannotScore as error:
        return HarnessRun(skip=str(error))
    except InputError:
        raise
    except TrtspecError as error:
        return HarnessRun(error=str(error).splitlines()[0])


def _openai(
    endpoint: Endpoint, continues: bool, no_scores: str, tokenizer: Tokenizer | None, concurrency: int
) -> Any:
    """The harness's own client of completions, or of chats."""
    try:
        from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
    except ImportError as error:
        raise _without_client(error) from None
    scheme = "https" if endpoint.tls else "http"
    base = f"{scheme}://{endpoint.host}:{endpoint.port}{endpoint.prefix}/v1"
    # A header of our own, or it would send whatever OPENAI_API_KEY holds.
    header = {"Accept": "application/json"}
    if endpoint.api_key:
        header["Authorization"] = f"Bearer {endpoint.api_key}"
    reason = no_scores
    if continues and not reason and tokenizer is None:
        reason = "log-likelihoods of the harness need the model's tokenizer (--tokenizer DIR)"

    class Completions(LocalCompletionsAPI):  # type: ignore[misc]
        """With our reader of the tokenizer's folder, as over an engine, instead of transformers'."""

        def __init__(self, **options: Any) -> None:
            super().__init__(tokenizer_backend="None", **options)
            self.tokenizer = tokenizer
            self.tokenized_requests = tokenizer is not None

        @property
        def eot_token_id(self) -> int | None:
            return None if tokenizer is None else min(tokenizer.eos_token_ids, default=0)

        @property
        def prefix_token_id(self) -> int | None:
            if tokenizer is None:
                return None
            bare = tokenizer.encode("")
            return bare[0] if bare else self.eot_token_id

        def tok_encode(self, string: Any, add_special_tokens: bool | None = None, **_: Any) -> Any:
            if tokenizer is None:
                return [string]
            if not isinstance(string, str):
                return [self.tok_encode(one) for one in string]
            tokens, bare = tokenizer.encode(string), tokenizer.encode("")
            if add_special_tokens is False and bare and tokens[: len(bare)] == bare:
                return tokens[len(bare) :]
            return tokens

        def loglikelihood(self, requests: Sequence[Any], **options: Any) -> Any:
            if reason:
                raise _CannotScore(f"needs log-likelihoods: {reason}")
            return super().loglikelihood(requests, **options)

        def loglikelihood_rolling(self, requests: Sequence[Any], **options: Any) -> Any:
            if reason:
                raise _CannotScore(f"needs log-likelihoods: {reason}")
            return super().loglikelihood_rolling(requests, **options)

    class Chats(LocalChatCompletion):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any], **options: Any) -> Any:
            raise _CannotScore("needs log-likelihoods: chat completions tell none of a given text")

    shared = {
        "model": endpoint.model,
        "num_concurrent": max(2, concurrency),  # its other client, for one, follows the proxies of the shell
        "max_retries": _RETRIES,
        "timeout": max(1, round(endpoint.timeout_s)),
        "header": header,
        "max_length": _PROMPT_TOKENS,
    }
    try:
        if not continues:
            return Chats(base_url=f"{base}/chat/completions", tokenizer_backend=None, **shared)
        return Completions(base_url=f"{base}/completions", **shared)
    except ImportError as error:
        raise _without_client(error) from None


def _without_client(error: ImportError) -> MissingError:
    return MissingError(
        f"the client of lm-evaluation-harness does not load ({error}); pip install 'lm_eval[api]>=0.4.9,<0.5'"
    )


def _triton(endpoint: Endpoint, no_scores: str, concurrency: int) -> Any:
    """An adapter that generates; its base class is there only with the harness."""
    from lm_eval.api.model import TemplateLM

    class TritonModel(TemplateLM):  # type: ignore[misc]
        backend = "causal"
        tokenizer_name = "trtspec"

        @property
        def eot_token_id(self) -> int:
            return 0

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            raise _CannotScore(f"needs log-likelihoods: {no_scores}")

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> Any:
            raise _CannotScore(f"needs log-likelihoods: {no_scores}")

        _loglikelihood_tokens = loglikelihood
        loglikelihood_rolling = loglikelihood

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            def send(number: int, due: float | None) -> str:
                context, options = requests[number].args
                params = SamplingParams()
                if options.get("do_sample") and float(options.get("temperature", 0.0)) > 0:
                    params = SamplingParams(temperature=float(options["temperature"]), seed=number)
                until = options.get("until") or []
                ends = [until] if isinstance(until, str) else list(until)
                new = int(options.get("max_gen_toks", options.get("max_new_tokens", _NEW_TOKENS)))
                chat = Chat(f"lm-eval-{number}", ({"role": "user", "content": context},))
                reply = _asked(endpoint, chat, new, params)
                return cut(reply.text, [one for one in ends if one])

            return closed_loop(send, len(requests), concurrency)

    return TritonModel()


def _asked(endpoint: Endpoint, chat: Chat, new_tokens: int, params: SamplingParams) -> Reply:
    for _ in range(_RETRIES):
        reply = ask(endpoint, chat, max_tokens=new_tokens, clock=lambda: 0.0, params=params)
        if not reply.timed.error:
            return reply
    raise MissingError(f"{endpoint.url}: {reply.timed.error}")
