"""Facts about a checkpoint folder, read from config.json and tensor headers without torch.

Also whether its weight files are whole (:func:`check_weight_files`), so that a bad folder is refused in
milliseconds instead of after minutes of loading.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from trtspec.config_values import ConfigValues, shown_value
from trtspec.errors import InputError, Problem
from trtspec.tensor_headers import TensorHeader, read_json, read_tensor_headers

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

QUANT_ALGOS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A8_SQ_PER_CHANNEL",
    "W8A16",
)
INT4_ALGOS = ("W4A16_AWQ", "W4A8_AWQ")
FP8_ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
KV_ALGOS = ("FP8", "INT8")

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
GENERATION_CONFIG = "generation_config.json"

DTYPES = ("float64", "float32", "float16", "bfloat16")
_MAX_LAYERS = 1000
"""The deepest published decoders have 126; names are made for every layer that a config claims."""
_MAX_ROPE_THETA = 1e12


@dataclass(frozen=True)
class QuantSpec:
    """How the weights of a ModelOpt unified export are quantized (hf_quant_config.json).

    ``group_size`` is the number of input features that share a scale (4-bit formats only);
    ``exclude_modules`` are glob patterns on module names that stayed in 16 bit.
    """

    algo: str | None
    kv_algo: str | None
    group_size: int | None
    exclude_modules: tuple[str, ...]
    producer: str

    def covers(self, module: str) -> bool:
        """Whether the linear ``module`` (``model.layers.0.mlp.up_proj``) is stored quantized."""
        return self.algo is not None and not any(
            fnmatch.fnmatchcase(module, pattern) for pattern in self.exclude_modules
        )


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder of one of :data:`FAMILIES`."""

    architecture: str
    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None for plain RoPE; else has ``rope_type`` in :data:`ROPE_TYPES` and that type's keys."""
    rms_norm_eps: float
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int | None
    """A row attends to itself and at most ``sliding_window - 1`` rows before it; None: all."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Of the unquantized weights, as config.json names it."""
    quant: QuantSpec | None

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied output projection counted once."""
        return sum(math.prod(shape) for shape in _plain_tensors(self).values())


# --------------------------------------------------------------------------- config.json


def read_modelspec(folder: Path) -> ModelSpec:
    """The model in ``folder``.

    Raises InputError with every problem of config.json and hf_quant_config.json: missing or unreadable
    files, an unknown architecture, bad or unsupported values.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(Problem("no such folder; give a Hugging Face checkpoint folder", file=str(folder)))
    problems: list[Problem] = []
    path = folder / CONFIG
    values = read_json(path, problems)
    if values is None:
        if not path.exists():
            problems = [Problem("missing; the folder is not a Hugging Face checkpoint", file=str(path))]
        raise InputError(problems)
    config = ConfigValues(values, path, problems)
    architectures = values.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    family = FAMILIES.get(architecture)
    if family is None:
        config.bad(
            "architectures", f"{shown_value(architectures)} is not supported; one of {', '.join(FAMILIES)}"
        )
        raise InputError(problems)

    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    known = not problems  # what stands in for a missing size is not compared
    if family == "qwen3":
        head_dim = config.integer("head_dim", 128)  # its config class's own default
    else:
        if known and values.get("head_dim") is None and hidden % heads:
            config.bad("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = config.integer("head_dim", max(1, hidden // heads))
    if known and heads % kv_heads:
        config.bad("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if known and head_dim % 2:
        config.bad("head_dim", f"{head_dim} is odd; rotary embeddings need an even size")
    if values.get("hidden_act", "silu") != "silu":
        config.bad("hidden_act", f"{values['hidden_act']!r} is not supported; only 'silu'")
    if family != "qwen2":
        config.refuse_if("attention_bias", "biases on all four attention projections")
    config.refuse_if("mlp_bias", "biases in the feed-forward layers")
    max_positions = config.integer("max_position_embeddings", maximum=1 << 30)
    rope_theta, rope_scaling = _read_rope(config, max_positions)
    sliding_window = _read_sliding_window(config, family, max_positions)
    spec = ModelSpec(
        architecture=architecture,
        family=family,
        num_layers=config.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6, 1e-12, 1.0),
        max_positions=max_positions,
        tie_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=sliding_window,
        eos_token_ids=_read_eos(folder, config, problems),
        dtype=_read_dtype(config),
        quant=_read_quant(folder, config, problems),
    )
    if problems:
        raise InputError(problems)
    return spec


def _read_dtype(config: ConfigValues) -> str:
    key = "dtype" if config.values.get("dtype") else "torch_dtype"
    value = config.values.get(key) or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    if name not in DTYPES:
        config.bad(key, f"{shown_value(value)} is not supported; one of {', '.join(DTYPES)}")
        return "float32"
    return name


def read_rope(
    values: Mapping[str, Any], file: Path, problems: list[Problem], max_positions: int
) -> tuple[float, dict[str, Any] | None]:
    """(rope_theta, rope_scaling) of any config.json, draft heads' too; what is wrong goes to ``problems``."""
    return _read_rope(ConfigValues(values, file, problems), max_positions)


def _read_rope(config: ConfigValues, max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and the scaling, from ``rope_theta`` + ``rope_scaling`` (transformers 4) or
    ``rope_parameters`` (transformers 5). Newer files may hold both; they must then agree."""
    values = config.values
    for key in ("rope_parameters", "rope_scaling"):
        if values.get(key) is not None and not isinstance(values[key], dict):
            config.bad(key, f"{values[key]!r} is not a mapping")
            return 10000.0, None
    parameters: dict[str, Any] = dict(values.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        config.bad("rope_parameters", "one setting per layer type is not supported; a single mapping is")
        return 10000.0, None
    theta = config.number("rope_theta", 10000.0, 1.0, _MAX_ROPE_THETA)
    if "rope_theta" in parameters:
        new = ConfigValues(parameters, Path(config.file), config.problems)
        new_theta = new.number("rope_theta", theta, 1.0, _MAX_ROPE_THETA)
        if values.get("rope_theta") is not None and new_theta != theta:
            config.bad("rope_theta", f"{theta} contradicts rope_parameters.rope_theta {new_theta}")
        theta = new_theta
    section = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    scaling = {k: v for k, v in (values.get("rope_scaling") or parameters).items() if k != "rope_theta"}
    partial = scaling.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        config.bad("partial_rotary_factor", f"{shown_value(partial)} is not supported; only 1.0")
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        config.bad(
            f"{section}.rope_type",
            f"{shown_value(rope_type)} is not supported; one of {', '.join(ROPE_TYPES)}",
        )
        return theta, None
    if rope_type == "default":
        return theta, None
    scaling.setdefault("original_max_position_embeddings", max_positions)
    # Only the long end of the scale is stretched: factors below 1 exist in no checkpoint.
    bounds = {"factor": (1.0, 1e6), "original_max_position_embeddings": (1.0, 2.0**30)}
    if rope_type == "llama3":
        bounds |= {"low_freq_factor": (1e-6, 1e6), "high_freq_factor": (1e-6, 1e6)}
    for key, (low, high) in bounds.items():
        value = scaling.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            message = f"{shown_value(value)} is not a number from {low:g} to {high:g}; {rope_type!r} needs it"
            config.bad(f"{section}.{key}", message)
    for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
        value = scaling.get(key)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1e6
        if value is not None and not good:
            config.bad(f"{section}.{key}", f"{shown_value(value)} is not a number from 0 to 1e+06")
    return theta, {"rope_type": rope_type, **scaling}


def _read_sliding_window(config: ConfigValues, family: Family, max_positions: int) -> int | None:
    values = config.values
    window = values.get("sliding_window")
    if family == "llama" or window is None:
        return None
    if family in ("qwen2", "qwen3") and not config.flag("use_sliding_window"):
        return None
    window = config.integer("sliding_window", maximum=1 << 30)
    if window >= max_positions:
        return None
    if family in ("qwen2", "qwen3"):
        config.bad(
            "use_sliding_window",
            f"a window of {window} in only some layers is not supported; set use_sliding_window to false "
            "(exact for texts that fit the window)",
        )
    return window


def _read_eos(folder: Path, config: ConfigValues, problems: list[Problem]) -> tuple[int, ...]:
    """The union of generation_config.json and config.json: chat models list the turn's end in only one."""
    tokens: set[int] = set()
    path = folder / GENERATION_CONFIG
    generation = (read_json(path, problems) or {}) if path.exists() else {}
    for values, file in ((generation, path), (config.values, Path(config.file))):
        value = values.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token in listed:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                message = f"{shown_value(token)} is not a token id"
                problems.append(Problem(message, file=str(file), key="eos_token_id"))
            elif isinstance(size := config.values.get("vocab_size"), int) and token >= size > 0:
                message = f"{shown_value(token)} is not a token of this model, which has {shown_value(size)}"
                problems.append(Problem(message, file=str(file), key="eos_token_id"))
            else:
                tokens.add(token)
    return tuple(sorted(tokens))


def _read_quant(folder: Path, config: ConfigValues, problems: list[Problem]) -> QuantSpec | None:
    path = folder / QUANT_CONFIG
    inline = config.values.get("quantization_config")
    if not path.exists():
        if not inline:
            return None
        method = inline.get("quant_method") if isinstance(inline, dict) else inline
        if method == "modelopt":
            remedy = f"{QUANT_CONFIG} is missing beside it; export again with ModelOpt"
        else:
            remedy = "only ModelOpt exports are; start from the 16-bit checkpoint"
        config.bad("quantization_config.quant_method", f"{shown_value(method)} cannot be run: {remedy}")
        return None
    values = read_json(path, problems)
    if values is None:
        return None
    quantization = values.get("quantization")
    if not isinstance(quantization, dict):
        problems.append(Problem("missing or not a mapping", file=str(path), key="quantization"))
        return None
    section = ConfigValues(quantization, path, problems)
    algo, kv_algo = quantization.get("quant_algo"), quantization.get("kv_cache_quant_algo")
    if algo is not None and (not isinstance(algo, str) or algo not in QUANT_ALGOS):
        section.bad(
            "quantization.quant_algo",
            f"{shown_value(algo)} is not supported; one of {', '.join(QUANT_ALGOS)}",
        )
        algo = None
    if kv_algo is not None and (not isinstance(kv_algo, str) or kv_algo not in KV_ALGOS):
        section.bad(
            "quantization.kv_cache_quant_algo",
            f"{shown_value(kv_algo)} is not supported; null, {' or '.join(KV_ALGOS)}",
        )
    if algo is not None and quantization.get("has_zero_point"):
        section.bad("quantization.has_zero_point", "weights with zero points are not supported")
    exclude = quantization.get("exclude_modules") or []
    if not isinstance(exclude, list) or not all(isinstance(pattern, str) for pattern in exclude):
        section.bad(
            "quantization.exclude_modules", f"{shown_value(exclude)} is not a list of module name patterns"
        )
        exclude = []
    group_size = None
    if algo in INT4_ALGOS:
        if quantization.get("group_size") is None:
            group_size = _infer_group_size(folder)
            if group_size is None:
                section.bad("quantization.group_size", "missing, and no 4-bit weight to infer it from")
        else:
            group_size = section.integer("group_size")
    producer = values.get("producer")
    if not isinstance(producer, dict):
        producer = {}
    name = (
        " ".join(shown_value(producer[k]).strip("'") for k in ("name", "version") if k in producer)
        or "unknown"
    )
    return QuantSpec(algo, kv_algo, group_size, tuple(exclude), name)


def _infer_group_size(folder: Path) -> int | None:
    """K / number of scales of the first packed 4-bit weight: ModelOpt leaves the key out of some files."""
    headers, _ = read_tensor_headers(folder)
    for name, header in headers.items():
        weight = headers.get(name.removesuffix("_scale"))
        if name.endswith(".weight_scale") and weight and len(header.shape) == len(weight.shape) == 2:
            return weight.shape[1] // header.shape[1] if header.shape[1] else None
    return None


# --------------------------------------------------------------------------- tensors


def _plain_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the unquantized model."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"{p}self_attn.{name}_proj.weight"] = (rows, hidden)
            if spec.qkv_bias:
                tensors[f"{p}self_attn.{name}_proj.bias"] = (rows,)
        tensors[f"{p}self_attn.o_proj.weight"] = (hidden, q)
        if spec.qk_norm:
            tensors[f"{p}self_attn.q_norm.weight"] = (spec.head_dim,)
            tensors[f"{p}self_attn.k_norm.weight"] = (spec.head_dim,)
        tensors[f"{p}mlp.gate_proj.weight"] = (inner, hidden)
        tensors[f"{p}mlp.up_proj.weight"] = (inner, hidden)
        tensors[f"{p}mlp.down_proj.weight"] = (hidden, inner)
        tensors[f"{p}input_layernorm.weight"] = (hidden,)
        tensors[f"{p}post_attention_layernorm.weight"] = (hidden,)
    tensors["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        tensors["lm_head.weight"] = (spec.vocab_size, hidden)
    return tensors


def linear_modules(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Name -> (output, input) size of every linear, the output projection included when not tied."""
    return {
        name.removesuffix(".weight"): cast(tuple[int, int], shape)
        for name, shape in _plain_tensors(spec).items()
        if name.endswith("_proj.weight") or name == "lm_head.weight"
    }


def expected_tensors(spec: ModelSpec) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """(required, optional): name -> shape of the tensors of the checkpoint as it is stored.

    The stored shapes of ModelOpt unified exports: 4-bit weights [N/2, K] with scales [N, K/group], FP8 per
    tensor with scalar scales, the other formats with scales [N]; ``pre_quant_scale`` [K] where AWQ and
    SmoothQuant did not fold it into the layer before.
    """
    required, optional = _plain_tensors(spec), dict[str, tuple[int, ...]]()
    quant = spec.quant
    if quant is None:
        return required, optional
    for module, (rows, columns) in linear_modules(spec).items():
        if quant.algo is not None and quant.covers(module):
            if quant.algo in INT4_ALGOS:
                group = quant.group_size or columns
                required[f"{module}.weight"] = (rows // 2, columns)
                required[f"{module}.weight_scale"] = (rows, columns // group)
            else:
                required[f"{module}.weight_scale"] = () if quant.algo == "FP8" else (rows,)
            if quant.algo == "W4A8_AWQ":
                required[f"{module}.weight_scale_2"] = ()
            if quant.algo in ("FP8", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL"):
                required[f"{module}.input_scale"] = ()
            if quant.algo in (*INT4_ALGOS, "W8A8_SQ_PER_CHANNEL"):
                optional[f"{module}.pre_quant_scale"] = (columns,)
    if quant.kv_algo is not None:
        for i in range(spec.num_layers):
            optional[f"model.layers.{i}.self_attn.k_proj.k_scale"] = ()
            optional[f"model.layers.{i}.self_attn.v_proj.v_scale"] = ()
    return required, optional


def check_weight_files(folder: Path) -> list[Problem]:
    """What is wrong with the weight files of ``folder``, from names, sizes and headers only.

    Beyond :func:`read_tensor_headers`: tensors that the model of config.json lacks, has too many, or has
    in another shape. A folder whose config.json cannot be read gives that as its problems.
    """
    folder = Path(folder)
    headers, problems = read_tensor_headers(folder)
    try:
        spec = read_modelspec(folder)
    except InputError as error:
        return [*error.problems, *problems]
    if not headers or problems:
        return problems
    return _compare_tensors(spec, headers, folder)


def _compare_tensors(spec: ModelSpec, headers: Mapping[str, TensorHeader], folder: Path) -> list[Problem]:
    required, optional = expected_tensors(spec)
    linears = linear_modules(spec)
    problems: list[Problem] = []
    if spec.quant and spec.quant.algo in INT4_ALGOS and spec.quant.group_size:
        for module, (rows, columns) in linears.items():
            if spec.quant.covers(module) and (columns % spec.quant.group_size or rows % 2):
                message = f"input size {columns} is not a multiple of group size {spec.quant.group_size}"
                problems.append(Problem(message, file=str(folder), key=module))
    missing = [name for name in required if name not in headers]
    for name in missing[:8]:
        problems.append(Problem(f"missing; a tensor {list(required[name])} is needed", str(folder), key=name))
    if len(missing) > 8:
        problems.append(Problem(f"{len(missing) - 8} more tensors are missing", file=str(folder)))
    for name, header in headers.items():
        shape = required.get(name, optional.get(name))
        if shape is None:
            # Old Llama checkpoints carry the rotary frequencies, and tied ones a copy of the embedding.
            tied_copy = name == "lm_head.weight" and spec.tie_embeddings
            if not name.endswith("rotary_emb.inv_freq") and not tied_copy:
                message = f"not a tensor of {spec.architecture} as {CONFIG} describes it"
                problems.append(Problem(message, file=str(header.file), key=name))
        elif header.shape != shape and not math.prod(header.shape) == math.prod(shape) == 1:
            message = f"shape {list(header.shape)}; {CONFIG} implies {list(shape)}"
            problems.append(Problem(message, file=str(header.file), key=name))
        elif header.dtype not in (stored := _stored_dtypes(spec, linears, name)):
            message = f"stored as {header.dtype}; {' or '.join(stored)} is needed"
            problems.append(Problem(message, file=str(header.file), key=name))
    return problems


def _stored_dtypes(spec: ModelSpec, linears: Collection[str], name: str) -> tuple[str, ...]:
    module, _, kind = name.rpartition(".")
    quant = spec.quant
    if quant is None or kind != "weight" or module not in linears or not quant.covers(module):
        return ("F64", "F32", "F16", "BF16")
    return ("U8",) if quant.algo in INT4_ALGOS else ("F8_E4M3",) if quant.algo in FP8_ALGOS else ("I8",)
