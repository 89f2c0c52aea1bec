"""The LLM of engines has a module of its own, from 1.0 to 1.2."""

from tensorrt_llm import LLM

__all__ = ["LLM"]
