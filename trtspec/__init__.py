"""trtspec: from a checkpoint to a served, verified, quantized and speculating LLM.

The command line is the public surface (``trtspec --help``); the recipe schema is
:mod:`trtspec.recipe`; the engine contract is :mod:`trtspec.engine`.
"""

__version__ = "0.1.0"
