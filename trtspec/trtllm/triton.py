"""The Triton model repository of a GPU-backend recipe, as text: pure, so it can be shown without a GPU.

``tensorrt`` recipes get the C++ ``tensorrtllm`` backend (:mod:`trtspec.trtllm.triton_cpp`), ``pytorch`` recipes
NVIDIA's Python ``llmapi`` model. The Python files of both come from NVIDIA's container; the script that
:mod:`trtspec.trtllm.launch` renders copies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtspec.recipe import Recipe


def render_repository(
    recipe: Recipe,
    version: str,
    *,
    engine_dir: str,
    tokenizer_dir: str,
    draft_engine_dir: str | None = None,
    llm_options: Mapping[str, Any] | None = None,
    num_heads: int | None = None,
) -> dict[str, str]:
    """The files of a model repository for TensorRT-LLM ``version``, by path below its root.

    ``engine_dir``, ``tokenizer_dir``, ``draft_engine_dir`` are paths inside the container. On ``pytorch``
    ``engine_dir`` is the checkpoint that LLM() loads, and ``llm_options`` are LLM()'s other keyword arguments
    (the YAML of ``trtllm-serve``, as a mapping). ``num_heads``: Medusa heads or EAGLE levels that the engine has,
    if known. Deterministic. InputError with all problems.
    """
    raise NotImplementedError
