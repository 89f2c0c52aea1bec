"""config.pbtxt: a Triton model's configuration as data, and its text.

No template and no protobuf library: every field that is written is a field of a dataclass here, so the text
has nothing left to fill in. Fields come in the order of Triton's model_config.proto; a comment stands above
what it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ENGINE_NAME = "engine_name"
RECIPE_DIGEST = "recipe_digest"
"""The parameter that tells a client which recipe it is talking to."""
ACCEPTANCE = "acceptance"
"""How drafts are accepted, and whether that is strict or approximate, in words."""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True)
class TensorConfig:
    """An input or output. ``data_type`` as Triton writes it (``TYPE_INT32``), ``dims`` without the batch."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False
    scalar: bool = False
    """``reshape { shape: [ ] }``: one value a request, handed on without its dimension."""
    ragged: bool = False
    """``allow_ragged_batch``: requests of one batch may differ in length."""


def tensor_from_line(line: str) -> TensorConfig:
    """``NAME TYPE [DIMS] flags``, the flags out of optional, scalar, ragged: how tables write a tensor."""
    name, data_type, dims, *flags = line.split()
    sizes = tuple(int(size) for size in dims.strip("[]").split(","))
    return TensorConfig(name, data_type, sizes, "optional" in flags, "scalar" in flags, "ragged" in flags)


@dataclass(frozen=True)
class Queue:
    """Triton's dynamic batching and the queue before it."""

    preferred_batch_size: int
    max_queue_size: int
    """Requests waiting before new ones are refused; 0: no bound."""
    max_delay_us: int = 0


@dataclass(frozen=True)
class Step:
    """A step of an ensemble: tensors of ``model_name`` mapped to names of the ensemble."""

    model_name: str
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclass(frozen=True)
class ModelConfig:
    """One model. ``backend`` None: an ensemble, made of ``steps``."""

    name: str
    backend: str | None
    max_batch_size: int
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]
    instances: int | None = None
    """Copies of the model, on the CPU as Triton sees it; None: Triton's default (or an ensemble)."""
    decoupled: bool | None = None
    """Whether a request may get any number of answers; None: Triton's default, exactly one."""
    queue: Queue | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    comments: Mapping[str, str] = field(default_factory=dict)
    """Why a parameter has its value, by the parameter's name; ``""``: about the model."""
    steps: tuple[Step, ...] = ()


def to_pbtxt(config: ModelConfig) -> str:
    """The text of config.pbtxt, ending with a newline. Deterministic."""
    return "\n".join(_lines(config)) + "\n"


def _lines(config: ModelConfig) -> Iterator[str]:
    yield from _comment(config.comments.get("", ""))
    yield f"name: {quoted(config.name)}"
    if config.backend is None:
        yield 'platform: "ensemble"'
    yield f"max_batch_size: {config.max_batch_size}"
    for kind, tensors in (("input", config.inputs), ("output", config.outputs)):
        for tensor in tensors:
            yield from _tensor(kind, tensor)
    if config.instances is not None:
        yield from ("instance_group {", f"  count: {config.instances}", "  kind: KIND_CPU", "}")
    if config.queue is not None:
        yield "dynamic_batching {"
        yield f"  preferred_batch_size: {config.queue.preferred_batch_size}"
        yield f"  max_queue_delay_microseconds: {config.queue.max_delay_us}"
        yield from (
            "  default_queue_policy {",
            f"    max_queue_size: {config.queue.max_queue_size}",
            "  }",
            "}",
        )
    for key, value in config.parameters.items():
        yield from _comment(config.comments.get(key, ""))
        yield from ("parameters {", f"  key: {quoted(key)}", "  value {")
        yield from (f"    string_value: {quoted(value)}", "  }", "}")
    if config.steps:
        yield "ensemble_scheduling {"
        for step in config.steps:
            yield from ("  step {", f"    model_name: {quoted(step.model_name)}", "    model_version: -1")
            for kind, names in (("input_map", step.input_map), ("output_map", step.output_map)):
                for key, value in names.items():
                    yield f"    {kind} {{ key: {quoted(key)} value: {quoted(value)} }}"
            yield "  }"
        yield "}"
    if config.backend is not None:
        yield f"backend: {quoted(config.backend)}"
    if config.decoupled is not None:
        flag = "true" if config.decoupled else "false"
        yield from ("model_transaction_policy {", f"  decoupled: {flag}", "}")


def _tensor(kind: str, tensor: TensorConfig) -> Iterator[str]:
    yield f"{kind} {{"
    yield f"  name: {quoted(tensor.name)}"
    yield f"  data_type: {tensor.data_type}"
    yield from (f"  dims: {size}" for size in tensor.dims)
    if tensor.scalar:
        yield "  reshape { shape: [ ] }"
    if tensor.ragged:
        yield "  allow_ragged_batch: true"
    if tensor.optional:
        yield "  optional: true"
    yield "}"


def _comment(text: str) -> Iterator[str]:
    return (f"# {line}".rstrip() for line in text.splitlines())


def quoted(text: str) -> str:
    """A string of protobuf's text format: quotes, backslashes and control characters escaped."""
    shown = "".join(_ESCAPES.get(c) or (c if c.isprintable() else _octal(c)) for c in text)
    return f'"{shown}"'


def _octal(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))
