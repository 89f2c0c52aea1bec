"""TensorRT-LLM: what its versions know, what a recipe becomes there, and how to run it.

Everything but :mod:`trtspec.trtllm.runtime` is pure: it renders and checks without
TensorRT-LLM and without a GPU.
"""
