"""The converter of options files."""

from __future__ import annotations

from typing import Any

from tensorrt_llm import SpeculativeConfig


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any], llm_args_dict: dict[str, Any]
) -> dict[str, Any]:
    if "speculative_config" in llm_args_dict:
        llm_args_dict["speculative_config"] = SpeculativeConfig(llm_args_dict["speculative_config"])
    return {**llm_args, **llm_args_dict}
