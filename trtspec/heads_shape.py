"""Whether the tensors and the config.json of draft heads fit together and fit a target. No torch.

Everything here is decided from names, headers and the draft vocabulary; no weights are read.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtspec.config_values import shown_value
from trtspec.errors import Problem
from trtspec.heads_layout import Heads, default_hidden_layers, named_hidden_layers
from trtspec.modelspec import ModelSpec, read_rope

FLOATS = ("F64", "F32", "F16", "BF16")
_IDS = ("I64", "I32")
_MAX_SIZE = 1 << 30
"""Of anything that a config.json of heads counts; a wrong number must not cost memory."""


@dataclass(frozen=True)
class MedusaShape:
    """``blocks[i]``: the numbers of head i's residual blocks; ``own_output[i]``: whether it has an output
    projection, or uses the target's. ``grounded`` (Hydra): head i sees the embeddings of the i + 1 tokens in
    between."""

    blocks: tuple[tuple[int, ...], ...]
    own_output: tuple[bool, ...]
    grounded: bool


@dataclass(frozen=True)
class EagleShape:
    """The one decoder layer of an EAGLE head."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    hidden_layers: tuple[int, ...] | None
    """The target's layers that it sees, counted as the states after so many layers; None: no target given."""
    spec: ModelSpec | None
    """The layer's geometry, ``vocab_size`` that of its output; None without a target."""


class _Tensors:
    """Holds tensors against shapes and collects what is wrong."""

    def __init__(self, heads: Heads, problems: list[Problem]) -> None:
        self.heads, self.problems = heads, problems
        self.seen: set[str] = set()

    def bad(self, name: str, message: str) -> None:
        self.problems.append(self.heads.problem(name, message))

    def want(
        self, name: str, *shape: int | None, optional: bool = False, dtypes: tuple[str, ...] = FLOATS
    ) -> bool:
        """Whether the tensor is there; a problem if it lacks without being optional, or is another. None
        stands for any size."""
        self.seen.add(name)
        needed = [size if size is not None else "any" for size in shape]
        header = self.heads.tensors.get(name)
        if header is None:
            if not optional:
                self.bad(name, f"missing; {needed} is needed")
            return False
        if len(header.shape) != len(shape) or any(
            b is not None and a != b for a, b in zip(header.shape, shape, strict=False)
        ):
            self.bad(
                name,
                f"shape {list(header.shape)}, {needed} is needed; "
                "heads work only with the target they were trained for",
            )
        if header.dtype not in dtypes:
            self.bad(name, f"{header.dtype} values; allowed: {', '.join(dtypes)}")
        return True

    def refuse_others(self, what: str) -> None:
        for name in self.heads.tensors:
            if name not in self.seen and "inv_freq" not in name:
                self.bad(name, f"no part of the {what} that are read here; remove it, or say which format")


def read_shape(heads: Heads, target: ModelSpec | None, problems: list[Problem]) -> MedusaShape | EagleShape:
    """The geometry of ``heads``; what is wrong in itself, or with ``target``, goes to ``problems``."""
    if heads.kind == "medusa":
        return _medusa_shape(heads, target, problems)
    return _eagle_shape(heads, target, problems)


def embedded_problems(heads: Heads) -> list[Problem]:
    """Why the embedded engine cannot run heads that are sound: settings of its forward pass that they do not
    have in common."""
    problems: list[Problem] = []

    def bad(key: str, message: str) -> None:
        problems.append(Problem(message, file=str(heads.config_file), key=key))

    if heads.kind != "eagle3":
        return problems
    inner = heads.config.get("eagle_config")
    if isinstance(inner, dict) and inner.get("use_aux_hidden_state") is False:
        message = "false; heads without the target's inner layers are not read"
        bad("eagle_config.use_aux_hidden_state", message)
    if heads.config.get("norm_before_residual"):
        bad("norm_before_residual", "true; only heads whose residual is the feature before its norm are read")
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        if heads.config.get(key):
            bad(key, "true; heads with this norm are not read")
    return problems


# --------------------------------------------------------------------------- Medusa and Hydra


def _medusa_shape(heads: Heads, target: ModelSpec | None, problems: list[Problem]) -> MedusaShape:
    tensors, config = _Tensors(heads, problems), heads.config
    blocks: dict[int, set[int]] = {}
    outputs: set[int] = set()
    for name in heads.tensors:
        parts = name.split(".")
        if not parts[0].isdecimal():
            continue
        if parts[1] == "lm_head":
            outputs.add(int(parts[0]))
        else:
            blocks.setdefault(int(parts[0]), set()).add(int(parts[1]))
    if heads.hydra:
        _check_hydra(heads, problems)
    numbers = sorted(blocks.keys() | outputs)
    if numbers != list(range(len(numbers))):
        message = f"heads {numbers}; they must be numbered from 0 without gaps"
        problems.append(Problem(message, file=str(heads.folder)))
    told = config.get("medusa_num_heads", config.get("hydra_num_heads"))
    if told is None and isinstance(config.get("medusa"), dict):
        told = config["medusa"].get("num_medusa_heads")
    if told is not None and told != len(numbers):
        message = f"{shown_value(told)} heads, the weights have {len(numbers)}; copy the folder again"
        problems.append(Problem(message, file=str(heads.config_file), key="medusa_num_heads"))
    layers = config.get("medusa_num_layers")
    for head in numbers if layers is not None else ():
        if len(blocks.get(head, ())) != layers:
            message = f"{shown_value(layers)} layers, head {head} has {len(blocks.get(head, ()))}"
            problems.append(Problem(message, file=str(heads.config_file), key="medusa_num_layers"))
    for key in ("hidden_size", "vocab_size"):
        mine, theirs = config.get(key), getattr(target, key, None)
        if theirs is not None and isinstance(mine, int) and mine != theirs:
            message = f"{mine}, the target has {theirs}; these heads are another target's"
            problems.append(Problem(message, file=str(heads.config_file), key=key))
    grounded = heads.hydra and bool(config.get("grounded_heads", True))
    size, vocab = (target.hidden_size, target.vocab_size) if target else _sizes_of(heads)
    for head in numbers:
        for at, block in enumerate(sorted(blocks.get(head, ()))):
            name = f"{head}.{block}."
            first = grounded and at == 0
            width = size * (head + 2) if first and size is not None else size
            tensors.want(f"{name}linear.weight", size, width)
            tensors.want(f"{name}linear.bias", size, optional=True)
            if first:
                tensors.want(f"{name}res_connection.weight", size, width)
                tensors.want(f"{name}res_connection.bias", size, optional=True)
        if head in outputs:
            tensors.want(f"{head}.lm_head.weight", vocab, size)
            tensors.want(f"{head}.lm_head.bias", vocab, optional=True)
        if head not in blocks and grounded:
            problems.append(heads.problem(f"hydra_mlp.{head}", "missing; every Hydra head has a block"))
    tensors.refuse_others("Medusa heads")
    return MedusaShape(
        tuple(tuple(sorted(blocks.get(head, ()))) for head in numbers),
        tuple(head in outputs for head in numbers),
        grounded,
    )


def _sizes_of(heads: Heads) -> tuple[int | None, int | None]:
    """(hidden size, vocabulary) that heads have by themselves."""
    output = next((h for name, h in heads.tensors.items() if name.endswith(".lm_head.weight")), None)
    block = next((h for name, h in heads.tensors.items() if name.endswith(".linear.weight")), None)
    hidden = block.shape[0] if block and block.shape else None
    return hidden, output.shape[0] if output and output.shape else None


def _check_hydra(heads: Heads, problems: list[Problem]) -> None:
    architecture, offset = heads.config.get("hydra_head_arch", "mlp"), heads.config.get("hidden_state_offset")
    file = str(heads.config_file)
    if architecture != "mlp" or any(name.startswith("prefix") for name in heads.tensors):
        message = f"{shown_value(architecture)}; only 'mlp' is read here"
        problems.append(Problem(message, file=file, key="hydra_head_arch"))
    if offset:
        message = f"{shown_value(offset)}; only 0 is read here"
        problems.append(Problem(message, file=file, key="hidden_state_offset"))


# --------------------------------------------------------------------------- EAGLE


def _eagle_shape(heads: Heads, target: ModelSpec | None, problems: list[Problem]) -> EagleShape:
    third, config, path = heads.kind == "eagle3", heads.config, heads.config_file
    tensors = _Tensors(heads, problems)

    def bad(key: str, message: str) -> None:
        problems.append(Problem(message, file=str(path), key=key))

    def integer(key: str, default: int) -> int:
        value = config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            bad(key, f"{shown_value(value)} is not a whole number of at least 1")
            return default
        if value > _MAX_SIZE:
            bad(key, f"{shown_value(value)} exceeds {_MAX_SIZE}")
            return default
        return value

    if not path.exists():
        problems.append(Problem("missing; EAGLE heads need it for their sizes and rope", file=str(path)))
    hidden = integer("hidden_size", target.hidden_size if target else _rows(heads, "fc.weight"))
    rows = _rows(heads, "layers.0.self_attn.q_proj.weight")
    num_heads = integer("num_attention_heads", target.num_heads if target else 1)
    kv_heads = integer("num_key_value_heads", num_heads)
    head_dim = integer("head_dim", max(1, (hidden if target or num_heads > 1 else rows) // num_heads))
    vocab = integer("vocab_size", target.vocab_size if target else _rows(heads, "lm_head.weight"))
    draft_vocab = integer("draft_vocab_size", vocab) if third else vocab
    inner = integer(
        "intermediate_size",
        target.intermediate_size if target else _rows(heads, "layers.0.mlp.gate_proj.weight"),
    )
    num_layers = integer("num_hidden_layers", 1)
    if num_heads % kv_heads:
        bad("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {num_heads}")
    if head_dim % 2:
        bad("head_dim", f"{head_dim} is odd; rotary embeddings need an even size")
    if num_layers != 1:
        bad("num_hidden_layers", f"{num_layers} layers; heads of one layer are read here")
    if target and vocab != target.vocab_size:
        bad("vocab_size", f"{vocab}, the target has {target.vocab_size}; these heads are another target's")
    if draft_vocab > vocab:
        bad("draft_vocab_size", f"{draft_vocab} exceeds the vocabulary of {vocab}")
    if target and not third and hidden != target.hidden_size:
        bad("hidden_size", f"{hidden}, the target has {target.hidden_size}; these heads are another target's")
    told = config.get("target_hidden_size") if third else None
    if target and told not in (None, target.hidden_size):
        bad(
            "target_hidden_size",
            f"{shown_value(told)}, the target has {target.hidden_size}; these heads are another target's",
        )
    if config.get("hidden_act", "silu") != "silu":
        bad("hidden_act", f"{shown_value(config['hidden_act'])} is not supported; only 'silu'")
    if not isinstance(config.get("eagle_config") or {}, dict):
        bad("eagle_config", f"{shown_value(config['eagle_config'])} is not a mapping")
    if config.get("quantization_config"):
        bad("quantization_config", "quantized heads are not read here; export them in 16 bit")
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < 1:
        bad("rms_norm_eps", f"{shown_value(eps)} is not a small positive number")
        eps = 1e-6
    positions = integer("max_position_embeddings", target.max_positions if target else 2048)
    theta, scaling = read_rope(config, path, problems, positions)

    hidden_layers: tuple[int, ...] | None = None
    target_hidden = target.hidden_size if target else told if isinstance(told, int) else hidden
    inputs: int | None = 2 * hidden
    if target is not None:
        hidden_layers = (target.num_layers,)
    if third:
        inputs = None
        if target is not None:
            named = _hidden_layers(config, target, problems, str(path))
            hidden_layers, inputs = named, len(named) * target_hidden
    tensors.want("fc.weight", hidden, inputs)
    tensors.want("fc.bias", hidden, optional=True)
    tensors.want("embed_tokens.weight", vocab, hidden, optional=hidden == target_hidden)
    width = 2 * hidden if third else hidden
    known = target is not None or config.get("num_attention_heads") is not None
    for name, count in (("q", num_heads), ("k", kv_heads), ("v", kv_heads)):
        size = count * head_dim if known else None
        tensors.want(f"layers.0.self_attn.{name}_proj.weight", size, width)
        tensors.want(f"layers.0.self_attn.{name}_proj.bias", size, optional=True)
    tensors.want("layers.0.self_attn.o_proj.weight", hidden, num_heads * head_dim if known else None)
    tensors.want("layers.0.mlp.gate_proj.weight", inner, hidden)
    tensors.want("layers.0.mlp.up_proj.weight", inner, hidden)
    tensors.want("layers.0.mlp.down_proj.weight", hidden, inner)
    tensors.want("layers.0.input_layernorm.weight", hidden, optional=not third)
    tensors.want("layers.0.post_attention_layernorm.weight", hidden)
    if third:
        tensors.want("layers.0.hidden_norm.weight", hidden)
        tensors.want("norm.weight", hidden)
        same_output = draft_vocab == vocab and hidden == target_hidden
        tensors.want("lm_head.weight", draft_vocab, hidden, optional=same_output)
        if tensors.want("d2t", draft_vocab, optional=draft_vocab == vocab, dtypes=_IDS):
            _check_draft_vocabulary(heads, draft_vocab, vocab, problems)
        tensors.want("t2d", vocab, optional=True, dtypes=("BOOL", "U8", "I8", *_IDS))
    else:
        tensors.want("lm_head.weight", vocab, hidden, optional=True)
    tensors.refuse_others(f"{heads.kind} heads")
    spec = None
    if target is not None:
        spec = replace(
            target,
            num_layers=1,
            hidden_size=hidden,
            intermediate_size=inner,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=draft_vocab,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(eps),
            tie_embeddings=False,
            sliding_window=None,
            quant=None,
        )
    return EagleShape(hidden, vocab, draft_vocab, num_layers, hidden_layers, spec)


def _rows(heads: Heads, name: str) -> int:
    header = heads.tensors.get(name)
    return header.shape[0] if header and header.shape and header.shape[0] > 0 else 1


def _hidden_layers(
    config: Mapping[str, Any], target: ModelSpec, problems: list[Problem], file: str
) -> tuple[int, ...]:
    key, listed, shift = named_hidden_layers(config)
    if not listed:
        return default_hidden_layers(target.num_layers)
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        problems.append(Problem(f"{shown_value(listed)} is not a list of layer numbers", file=file, key=key))
        return default_hidden_layers(target.num_layers)
    # The state after the last layer is only to be had normalised, which is another one.
    last = target.num_layers - 1
    if any(not 0 <= i + shift <= last for i in listed):
        message = f"{listed}; the target of {target.num_layers} layers has {-shift} .. {last - shift}"
        problems.append(Problem(message, file=file, key=key))
    return tuple(i + shift for i in listed)


# --------------------------------------------------------------------------- the draft vocabulary


def draft_vocabulary(heads: Heads) -> list[int] | None:
    """The target's id of each draft token; None for heads that draft the whole vocabulary.

    ``d2t[i]`` is what is added to draft id i.
    """
    header = heads.tensors.get("d2t")
    if header is None or header.dtype not in _IDS:
        return None
    offsets = array("q" if header.dtype == "I64" else "i", header.read())
    return [at + offset for at, offset in enumerate(offsets)]


def drafted_mask(ids: list[int], vocab: int) -> bytes:
    """``t2d``: one byte for each token of the target, 1 where it can be drafted."""
    mask = bytearray(vocab)
    for token in ids:
        mask[token] = 1
    return bytes(mask)


def _check_draft_vocabulary(heads: Heads, draft_vocab: int, vocab: int, problems: list[Problem]) -> None:
    if heads.tensors["d2t"].shape != (draft_vocab,):
        return
    ids = draft_vocabulary(heads)
    if ids is None:
        return
    outside = sum(not 0 <= token < vocab for token in ids)
    shared = len(ids) - len(set(ids))
    if outside:
        message = f"{outside} draft tokens map outside the vocabulary of {vocab}; the map is another's"
        problems.append(heads.problem("d2t", message))
    elif shared:
        problems.append(heads.problem("d2t", f"{shared} draft tokens share a target token; damaged map"))
    mask = heads.tensors.get("t2d")
    if mask is None or mask.shape != (vocab,) or mask.dtype != "BOOL" or outside:
        return
    told, meant = mask.read(), drafted_mask(ids, vocab)
    if told != meant:
        differing = sum(bool(a) != bool(b) for a, b in zip(told, meant, strict=True))
        message = f"differs from d2t in {differing} tokens; the maps are of two different heads"
        problems.append(heads.problem("t2d", message))
