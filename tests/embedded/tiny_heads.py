"""Draft heads for a tiny random target, written to folders in every layout that is read.

They are made, not trained: random inner weights as features, and the last linear solved by least squares on
the answers that the target gives to the workload. So they are right often enough for drafts to be accepted
and wrong often enough for branches to be dropped.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from reference import generate_plainly
from safetensors.torch import save_file
from tiny import make_tiny_model
from tiny_engine import CPU, VOCAB, store_for, workload
from torch import Tensor

from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.drafters.eagle import EagleHead
from trtspec.embedded.drafters.eagle3 import Eagle3Head
from trtspec.embedded.drafters.feature_drafter import FeatureDrafter
from trtspec.embedded.drafters.medusa import MedusaDrafter
from trtspec.embedded.drafters.trees import DynamicTree, StaticTree, static_tree
from trtspec.embedded.eagle_heads import load_eagle
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.heads import load_medusa
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.embedded.tree import Draft
from trtspec.embedded.weights import load_model
from trtspec.engine import Request, Sampling, generate
from trtspec.modelspec import ModelSpec, read_modelspec
from trtspec.recipe import Limits

HIDDEN = 32
LAYERS = 4
EPS = 1e-5
NUM_HEADS = 3
INNER = 320
WIDE = 256
"""Hidden size of the EAGLE-3 head, which may differ from the target's."""
DRAFT_VOCAB = 48
CHOICES = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1))


def _target_folder() -> Path:
    folder = Path(_scratch().name) / "target"
    if not folder.exists():
        make_tiny_model(
            folder, vocab=VOCAB, hidden=HIDDEN, layers=LAYERS, heads=4, kv_heads=2, tokenizer=False
        )
    return folder


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def target() -> Decoder:
    return load_model(_target_folder(), target_spec(), dtype=torch.float64, device=CPU)


@functools.cache
def target_spec() -> ModelSpec:
    return read_modelspec(_target_folder())


@functools.cache
def _answers(sampling: Sampling) -> dict[Request, tuple[int, ...]]:
    """What the target says to the workload without any drafting; one is held to full forwards."""
    requests = workload(sampling)
    found = {
        request: completion.tokens
        for request, completion in zip(requests, generate(heads_engine(), requests), strict=True)
    }
    assert found[requests[6]] == generate_plainly(target(), store_for(target()), requests[6])
    return found


def answer(request: Request) -> tuple[int, ...]:
    return _answers(request.sampling)[request]


def hidden_states(tokens: list[int], model: Decoder | None = None) -> dict[int, Tensor]:
    """Of every layer ``[tokens, hidden]``: one full forward of the target."""
    model = model or target()
    rows = torch.arange(len(tokens))
    batch = StepBatch(torch.tensor(tokens), rows, rows, (SequenceRows(0, len(tokens), rows[:0]),), rows[-1:])
    return model.forward(batch, store_for(model)(len(tokens)), range(LAYERS + 1))[1]


def texts() -> list[list[int]]:
    return [[*request.prompt_tokens, *answer(request)] for request in workload()]


# -------------------------------------------------------------------------- making heads


def _random(*shape: int, gain: float = 1.0, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * gain / shape[-1] ** 0.5


def _solve(inputs: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """The [out, in] weight that maps inputs [n, in] to wanted [n, out] best."""
    gram = inputs.T @ inputs + ridge * torch.eye(inputs.shape[1], dtype=inputs.dtype)
    return torch.linalg.solve(gram, inputs.T @ wanted).T.contiguous()


def _one_hot(tokens: list[int], size: int = VOCAB) -> Tensor:
    return 20.0 * F.one_hot(torch.tensor(tokens), size).double()


@functools.cache
def medusa_tensors() -> dict[str, Tensor]:
    """In ModelOpt's names; head 1 has no output projection and so uses the target's."""
    found: dict[str, Tensor] = {}
    for head in range(NUM_HEADS):
        weight, bias = _random(HIDDEN, HIDDEN, gain=2.0, seed=head), _random(HIDDEN, seed=50 + head)
        found[f"medusa_heads.{head}.0.linear.weight"] = weight
        found[f"medusa_heads.{head}.0.linear.bias"] = bias
        inputs, wanted = [], []
        for text in texts():
            states = hidden_states(text)[LAYERS]
            inputs.append(states[: len(text) - 2 - head])
            wanted += text[2 + head :]
        x = torch.cat(inputs)
        x = x + F.silu(F.linear(x, weight, bias))
        if head != 1:
            found[f"medusa_heads.{head}.1.weight"] = _solve(x, _one_hot(wanted), 1e-3)
    return found


@functools.cache
def hydra_tensors() -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    embedding = target().embedding
    for head in range(NUM_HEADS):
        width = HIDDEN * (head + 2)
        linear = _random(HIDDEN, width, gain=2.0, seed=100 + head)
        residual = _random(HIDDEN, width, gain=2.0, seed=200 + head)
        found[f"hydra_mlp.{head}.0.linear.weight"] = linear
        found[f"hydra_mlp.{head}.0.linear.bias"] = _random(HIDDEN, seed=300 + head)
        found[f"hydra_mlp.{head}.0.res_connection.weight"] = residual
        found[f"hydra_mlp.{head}.0.res_connection.bias"] = _random(HIDDEN, seed=400 + head)
        inputs, wanted = [], []
        for text in texts():
            states, embedded = hidden_states(text)[LAYERS], embedding[torch.tensor(text)]
            length = len(text) - 2 - head
            parts = [states[:length], *(embedded[at : at + length] for at in range(1, head + 2))]
            inputs.append(torch.cat(parts, -1))
            wanted += text[2 + head :]
        x = torch.cat(inputs)
        x = F.linear(x, residual, found[f"hydra_mlp.{head}.0.res_connection.bias"]) + F.silu(
            F.linear(x, linear, found[f"hydra_mlp.{head}.0.linear.bias"])
        )
        x = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), -1)
        solved = _solve(x, _one_hot(wanted), 1e-3)
        found[f"hydra_lm_head.{head}.weight"] = solved[:, :-1].contiguous()
        found[f"hydra_lm_head.{head}.bias"] = solved[:, -1].contiguous()
    return found


def eagle_config(third: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "hidden_size": WIDE if third else HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 8 if third else 4,
        "num_key_value_heads": 4 if third else 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "rope_theta": 5000.0,
        "hidden_act": "silu",
    }
    if third:
        config |= {
            "draft_vocab_size": DRAFT_VOCAB,
            "target_hidden_size": HIDDEN,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
        }
    return config


def draft_vocabulary() -> Tensor:
    """[DRAFT_VOCAB]: the most frequent tokens of the texts, ascending."""
    counts = torch.bincount(torch.tensor([token for text in texts() for token in text]), minlength=VOCAB)
    return counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB].sort().values


@functools.cache
def eagle_tensors() -> dict[str, Tensor]:
    """EAGLE-1 in the authors' names. ``down_proj`` is solved so that the output is the next feature."""
    found = _layer("layers.0.", HIDDEN, HIDDEN, heads=4, kv_heads=2, seed=1000)
    found["fc.weight"] = _random(HIDDEN, 2 * HIDDEN, gain=1.4, seed=1)
    found["fc.bias"] = _random(HIDDEN, seed=2)
    found["layers.0.mlp.down_proj.weight"] = torch.zeros(HIDDEN, INNER, dtype=torch.float64)
    inputs, wanted = [], []
    for text in texts():
        states = hidden_states(text)[LAYERS]
        outputs, inner = reference_eagle(found, eagle_config(False), text[1:], states[:-1])
        inputs.append(inner)
        wanted.append(states[1:] - outputs)
    found["layers.0.mlp.down_proj.weight"] = _solve(torch.cat(inputs), torch.cat(wanted), 1e-3)
    return found


@functools.cache
def eagle3_tensors() -> dict[str, Tensor]:
    """EAGLE-3 in ModelOpt's names, with embeddings of its own width. ``lm_head`` is solved."""
    found = _layer("layers.0.", WIDE, 2 * WIDE, heads=8, kv_heads=4, seed=2000)
    found["fc.weight"] = _random(WIDE, 3 * HIDDEN, seed=3)
    found["embed_tokens.weight"] = _random(VOCAB, WIDE, gain=WIDE**0.5, seed=4)
    found["layers.0.hidden_norm.weight"] = 1.0 + 0.1 * _random(WIDE, gain=WIDE**0.5, seed=5)
    found["layers.0.input_layernorm.weight"] = 1.0 + 0.1 * _random(WIDE, gain=WIDE**0.5, seed=6)
    found["norm.weight"] = 1.0 + 0.1 * _random(WIDE, gain=WIDE**0.5, seed=7)
    ids = draft_vocabulary()
    found["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    place = {int(token): at for at, token in enumerate(ids)}
    inputs, wanted = [], []
    for text in texts():
        states = hidden_states(text)
        fused = F.linear(torch.cat([states[i] for i in (1, 2, 3)], -1), found["fc.weight"])
        outputs, _ = reference_eagle(found, eagle_config(True), text[1:], fused[:-1])
        for at, token in enumerate(text[2:]):
            if token in place:
                inputs.append(F.rms_norm(outputs[at], (WIDE,), found["norm.weight"], EPS))
                wanted.append(place[token])
    found["lm_head.weight"] = _solve(torch.stack(inputs), _one_hot(wanted, DRAFT_VOCAB), 1e-3)
    return found


def _layer(
    prefix: str, hidden: int, width: int, *, heads: int, kv_heads: int, seed: int
) -> dict[str, Tensor]:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return {
        f"{attention}q_proj.weight": _random(heads * 8, width, seed=seed),
        f"{attention}k_proj.weight": _random(kv_heads * 8, width, seed=seed + 1),
        f"{attention}v_proj.weight": _random(kv_heads * 8, width, seed=seed + 2),
        f"{attention}o_proj.weight": _random(hidden, heads * 8, seed=seed + 3),
        f"{mlp}gate_proj.weight": _random(INNER, hidden, gain=1.5, seed=seed + 4),
        f"{mlp}up_proj.weight": _random(INNER, hidden, gain=1.5, seed=seed + 5),
        f"{mlp}down_proj.weight": _random(hidden, INNER, seed=seed + 6),
        f"{prefix}post_attention_layernorm.weight": 1.0
        + 0.1 * _random(hidden, gain=hidden**0.5, seed=seed + 7),
    }


# -------------------------------------------------------------------------- references, written plainly


def reference_eagle(
    tensors: dict[str, Tensor], config: dict[str, Any], tokens: list[int], features: Tensor
) -> tuple[Tensor, Tensor]:
    """The head's outputs at pairs (tokens[t], features[t]), positions 0, 1, ..., and the inputs of down_proj.

    Everything at once with a full causal mask and no cache; the textbook formulas.
    """
    third = "layers.0.hidden_norm.weight" in tensors
    p, heads, kv_heads, dim = "layers.0.", config["num_attention_heads"], config["num_key_value_heads"], 8
    embedded = tensors.get("embed_tokens.weight", target().embedding)[torch.tensor(tokens)]

    def norm(x: Tensor, name: str) -> Tensor:
        return tensors[name] * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()

    if third:
        residual = features
        parts = norm(embedded, f"{p}input_layernorm.weight"), norm(features, f"{p}hidden_norm.weight")
        x = torch.cat(parts, -1)
    else:
        residual = F.linear(torch.cat((embedded, features), -1), tensors["fc.weight"], tensors["fc.bias"])
        x = residual
    length = len(tokens)
    q = (x @ tensors[f"{p}self_attn.q_proj.weight"].T).view(length, heads, dim)
    k = (x @ tensors[f"{p}self_attn.k_proj.weight"].T).view(length, kv_heads, dim)
    v = (x @ tensors[f"{p}self_attn.v_proj.weight"].T).view(length, kv_heads, dim)
    q, k = _rotated(q, config["rope_theta"]), _rotated(k, config["rope_theta"])
    group = heads // kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
    x = residual + out.reshape(length, -1) @ tensors[f"{p}self_attn.o_proj.weight"].T
    y = norm(x, f"{p}post_attention_layernorm.weight")
    gate, up = y @ tensors[f"{p}mlp.gate_proj.weight"].T, y @ tensors[f"{p}mlp.up_proj.weight"].T
    inner = gate * torch.sigmoid(gate) * up
    return x + inner @ tensors[f"{p}mlp.down_proj.weight"].T, inner


def _rotated(x: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    exponents = torch.arange(0, 2 * half, 2, dtype=torch.int64).float() / (2 * half)
    angles = torch.arange(len(x), dtype=torch.float32)[:, None] * (1.0 / theta**exponents)
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def reference_features(kind: str, tokens: list[int]) -> Tensor:
    """[tokens, feature], from one full forward of the target."""
    states = hidden_states(tokens)
    if kind == "eagle":
        return states[LAYERS]
    return torch.cat([states[i] for i in (1, 2, 3)], -1) @ eagle3_tensors()["fc.weight"].T


def reference_draft(kind: str, shape: str, tokens: list[int], max_depth: int, max_nodes: int) -> Draft:
    """The draft as the papers define it, every path computed anew from the known tokens."""
    known = reference_features(kind, tokens[:-1])

    @functools.cache
    def below(path: tuple[int, ...]) -> tuple[Tensor, list[int], list[float]]:
        """The head's output at the end of a path of tokens; candidates below it with log probabilities."""
        features, said = known, list(tokens[1:])
        for at, token in enumerate(path):
            features = torch.cat((features, below(path[:at])[0][None]))
            said.append(token)
        if kind == "eagle":
            output = reference_eagle(eagle_tensors(), eagle_config(False), said, features)[0][-1]
            logits = target().lm_head(output[None])[0]
            ids = list(range(VOCAB))
        else:
            tensors = eagle3_tensors()
            output = reference_eagle(tensors, eagle_config(True), said, features)[0][-1]
            normed = tensors["norm.weight"] * output / (output.pow(2).mean() + EPS).sqrt()
            logits = tensors["lm_head.weight"] @ normed
            ids = draft_vocabulary().tolist()
        logs = logits.log_softmax(-1)
        order = logs.argsort(descending=True).tolist()
        return output, [ids[i] for i in order], [float(logs[i]) for i in order]

    tree = SHAPES[shape]
    if isinstance(tree, StaticTree):
        paths: list[tuple[int, ...]] = []
        for parent, rank, depth in zip(tree.parents, tree.ranks, tree.depths, strict=True):
            above = () if parent < 0 else paths[parent]
            paths.append((*above, below(above)[1][rank] if depth <= max_depth else -1))
        kept = [node for node, depth in enumerate(tree.depths) if depth <= max_depth][:max_nodes]
        number = {node: at for at, node in enumerate(kept)} | {-1: -1}
        chosen = [paths[node] for node in kept]
        return Draft(tuple(p[-1] for p in chosen), tuple(number[tree.parents[node]] for node in kept))
    values: dict[tuple[int, ...], float] = {}
    layer: list[tuple[int, ...]] = [()]
    for _ in range(min(tree.depth, max_depth)):
        children = []
        for path in layer:
            _, best, logs = below(path)
            for token, log in zip(best[: tree.top_k], logs, strict=False):
                values[(*path, token)] = values.get(path, 0.0) + log
                children.append((*path, token))
        layer = sorted(children, key=lambda path: -values[path])[: tree.top_k]
    chosen = sorted(values, key=lambda path: -values[path])[: min(tree.num_nodes, max_nodes)]
    return Draft(
        tuple(path[-1] for path in chosen),
        tuple(chosen.index(path[:-1]) if len(path) > 1 else -1 for path in chosen),
    )


# -------------------------------------------------------------------------- folders and drafters


def write_heads(kind: str, folder: Path, layout: str = "modelopt") -> Path:
    """Heads of ``kind`` in ``folder``; ``layout`` original: the authors' file and names."""
    folder.mkdir(parents=True, exist_ok=True)
    original = layout == "original"
    if kind == "medusa":
        tensors = medusa_tensors()
        if original:
            tensors = {name.removeprefix("medusa_heads."): value for name, value in tensors.items()}
        config: dict[str, Any] = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}
    elif kind == "hydra":
        tensors = hydra_tensors()
        config = {"hydra_num_heads": NUM_HEADS, "hydra_head_arch": "mlp", "grounded_heads": True}
    else:
        tensors = eagle_tensors() if kind == "eagle" else eagle3_tensors()
        config = eagle_config(kind == "eagle3")
        if original and kind == "eagle3":
            tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, draft_vocabulary(), True)
    (folder / "config.json").write_text(json.dumps(config))
    pickled = {"medusa": "medusa_lm_head.pt", "hydra": "hydra_lm_head.pt"}.get(kind, "pytorch_model.bin")
    if original:
        torch.save(tensors, folder / pickled)
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@functools.cache
def heads_folder(kind: str) -> Path:
    return write_heads(kind, Path(_scratch().name) / kind)


@functools.cache
def eagle_head(kind: str) -> EagleHead:
    if kind == "eagle":
        return EagleHead(load_eagle(heads_folder("eagle"), "eagle", target()))
    return Eagle3Head(load_eagle(heads_folder("eagle3"), "eagle3", target()))


SHAPES: dict[str, StaticTree | DynamicTree] = {
    "chain": static_tree([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]),
    "static": static_tree(CHOICES),
    "dynamic": DynamicTree(top_k=3, depth=3, num_nodes=9),
}


def feature_drafter(kind: str, shape: str, **options: Any) -> FeatureDrafter:
    settings: dict[str, Any] = {"num_pages": 300, "page_tokens": 4, "max_batch_size": 8} | options
    return FeatureDrafter(settings.pop("head", eagle_head(kind)), SHAPES[shape], **settings)


def medusa_drafter(kind: str = "medusa") -> MedusaDrafter:
    return MedusaDrafter(load_medusa(heads_folder(kind), target()), target(), static_tree(CHOICES))


def drafter_of(method: str, **options: Any) -> Any:
    """``medusa``, ``hydra``, ``eagle-static``, ``eagle3-chain`` ..."""
    kind, _, shape = method.partition("-")
    return feature_drafter(kind, shape, **options) if shape else medusa_drafter(kind)


METHODS = ("medusa", "hydra", "eagle-static", "eagle-dynamic", "eagle3-chain", "eagle3-dynamic")


def heads_engine(
    *, page_tokens: int = 4, kv_tokens: int = 1024, batch: int = 8, rows: int = 256, **options: Any
) -> EmbeddedEngine:
    model = target()
    limits = Limits(max_batch_size=batch, max_num_tokens=rows, max_input_tokens=128, max_seq_tokens=256)
    kind = options.pop("engine", EmbeddedEngine)
    return kind(
        model,
        functools.partial(KvStore, model.spec, dtype=model.dtype, device=model.device),
        num_pages=kv_tokens // page_tokens,
        page_tokens=page_tokens,
        limits=limits,
        **options,
    )
