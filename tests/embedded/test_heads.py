"""Trained heads: every layout read alike, every misfit named, and the exact law of what they draft."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branches import law_of
from reference import full_forward
from safetensors.torch import load_file, save_file
from tiny import make_tiny_model
from tiny_engine import CPU, VOCAB, store_for, workload
from tiny_heads import (
    CHOICES,
    DRAFT_VOCAB,
    HIDDEN,
    LAYERS,
    NUM_HEADS,
    answer,
    draft_vocabulary,
    hidden_states,
    hydra_tensors,
    medusa_drafter,
    medusa_tensors,
    target,
    target_spec,
    write_heads,
)
from torch import Tensor

from trtspec.embedded import engine as engine_module
from trtspec.embedded.acceptance import Accepted, exact, rejection
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters import feature_drafter as feature_drafter_module
from trtspec.embedded.drafters.eagle import EagleHead
from trtspec.embedded.drafters.feature_drafter import FeatureDrafter
from trtspec.embedded.drafters.medusa import MedusaDrafter, head_logits, medusa_logits
from trtspec.embedded.drafters.trees import DynamicTree, chain_tree, static_tree
from trtspec.embedded.eagle_heads import EagleWeights, default_hidden_layers, load_eagle
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.heads import MedusaHead, MedusaHeads, inspect_heads, load_medusa
from trtspec.embedded.layers import DenseLinear
from trtspec.embedded.model import Decoder
from trtspec.embedded.sampling import Draw, TargetLaw
from trtspec.embedded.tree import Draft
from trtspec.embedded.weights import load_model
from trtspec.engine import Request, Sampling
from trtspec.errors import InputError, Problem
from trtspec.modelspec import read_modelspec
from trtspec.recipe import Limits

# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", ["modelopt", "original"])
def test_medusa_heads_compute_what_they_say(tmp_path: Path, layout: str) -> None:
    heads = load_medusa(write_heads("medusa", tmp_path, layout), target())
    tensors = medusa_tensors()
    x = hidden_states([5, 6, 7, 8])[LAYERS]
    assert not heads.grounded
    for at in range(len(heads.heads)):
        inner = (
            x @ tensors[f"medusa_heads.{at}.0.linear.weight"].T + tensors[f"medusa_heads.{at}.0.linear.bias"]
        )
        y = x + inner * torch.sigmoid(inner)
        output = tensors.get(f"medusa_heads.{at}.1.weight")
        wanted = target().lm_head(y) if output is None else y @ output.T
        torch.testing.assert_close(
            medusa_logits(heads, x, len(heads.heads))[at], wanted, rtol=1e-12, atol=1e-12
        )


def test_heads_that_share_a_projection_run_it_once() -> None:
    """Two of three heads share; a block of its own behind the common one; the same numbers as one by one."""
    calls = []

    class Counted:
        def __init__(self, linear: Any, name: str) -> None:
            self.linear, self.name = linear, name

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            calls.append((self.name, len(x)))
            return self.linear(x)

    shared, own = Counted(_linear(SMALL, 8, 1), "shared"), Counted(_linear(SMALL, 8, 2), "own")
    starts = [
        torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)
    ]
    later = ((_linear(8, 8, 6), None),)
    outputs = (shared, own, shared)
    alone = [
        MedusaHead(((DenseLinear(start), None), *later), output)
        for start, output in zip(starts, outputs, strict=True)
    ]
    heads = MedusaHeads(
        tuple(MedusaHead(later, output) for output in outputs), False, DenseLinear(torch.cat(starts))
    )
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for count in (1, 2, 3):
        calls.clear()
        found = medusa_logits(heads, x, count)
        assert (
            sorted(calls)
            == {1: [("shared", 5)], 2: [("own", 5), ("shared", 5)], 3: [("own", 5), ("shared", 10)]}[count]
        )
        for head, logits in zip(alone, found, strict=False):
            torch.testing.assert_close(logits, head_logits(head, x), rtol=1e-12, atol=1e-12)


def test_medusa_in_the_names_of_the_tensorrt_export(tmp_path: Path) -> None:
    tensors = {
        name.replace(".0.linear", ".medusa_layers.0.linear").replace(".1.weight", ".lm_head.weight"): value
        for name, value in medusa_tensors().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    heads = load_medusa(tmp_path, target())  # without a config.json, too
    assert len(heads.heads) == NUM_HEADS
    assert heads.heads[1].lm_head is target().lm_head


@pytest.mark.parametrize("layout", ["modelopt", "original"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_eagle_heads_are_read_from_every_layout(tmp_path: Path, kind: Any, layout: str) -> None:
    weights = load_eagle(write_heads(kind, tmp_path, layout), kind, target())
    assert weights.hidden_layers == ((LAYERS,) if kind == "eagle" else (1, 2, 3))
    if kind == "eagle3":
        assert weights.token_ids is not None
        assert torch.equal(weights.token_ids, draft_vocabulary())
        assert weights.spec.vocab_size == DRAFT_VOCAB
        assert weights.embedding is not target().embedding
    else:
        assert weights.embedding is target().embedding
        assert weights.lm_head is target().lm_head


def test_default_layers_are_the_same_in_every_counting() -> None:
    """ModelOpt's {1, N/2 - 1, N - 4} are layers whose outputs are meant: one more here."""
    for num_layers in (12, 28, 30, 32, 80):
        modelopt = {1, num_layers // 2 - 1, num_layers - 4}
        assert default_hidden_layers(num_layers) == tuple(sorted(i + 1 for i in modelopt))


def test_a_config_names_the_layers_in_two_ways(tmp_path: Path) -> None:
    folder = write_heads("eagle3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["eagle_config"]
    config["eagle_aux_hidden_state_layer_ids"] = [0, 2, 3]  # vLLM's counting
    (folder / "config.json").write_text(json.dumps(config))
    assert load_eagle(folder, "eagle3", target()).hidden_layers == (0, 2, 3)


# ---------------------------------------------------------------- what cannot be used


def broken(kind: str, folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> list[str]:
    write_heads(kind, folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    problems: list[Problem] = []
    told = "medusa" if kind in ("medusa", "hydra") else kind
    assert inspect_heads(folder, told, target_spec(), problems) is None  # type: ignore[arg-type]
    return [f"{problem.key}: {problem.message}" for problem in problems]


def test_all_problems_of_an_eagle3_head_come_at_once(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["d2t"][3] = VOCAB
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1]
        del tensors["norm.weight"]
        tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"].to(torch.int8)
        tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)
        config["vocab_size"] = VOCAB + 1
        config["hidden_act"] = "gelu"
        config["num_hidden_layers"] = 2

    told = "\n".join(broken("eagle3", tmp_path, change))
    for part in (
        "d2t: 1 draft tokens map outside the vocabulary of 65",
        "fc.weight: shape [256, 95], [256, 96] is needed",
        "norm.weight: missing",
        "layers.0.mlp.up_proj.weight: I8 values; allowed: F64, F32, F16, BF16",
        "layers.1.mlp.up_proj.weight: no part of the eagle3 heads",
        "vocab_size: 65, the target has 64",
        "hidden_act: 'gelu' is not supported",
        "num_hidden_layers: 2 layers",
    ):
        assert part in told


def test_a_map_with_two_draft_tokens_of_one_token_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        ids = torch.arange(DRAFT_VOCAB) + tensors["d2t"]
        ids[1] = ids[0]
        tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)

    assert "1 draft tokens share a target token" in broken("eagle3", tmp_path, change)[0]


def test_layers_that_the_target_does_not_have_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        # After the last layer only the normalised state is to be had, which is another one.
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, LAYERS - 1]

    [told] = broken("eagle3", tmp_path, change)
    assert "the target of 4 layers has -1 .. 2" in told


def test_problems_of_medusa_heads(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["medusa_heads.0.1.weight"] = torch.zeros(VOCAB - 1, HIDDEN)
        tensors["medusa_heads.4.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors["something"] = torch.zeros(1)
        config["medusa_num_heads"] = 5

    told = "\n".join(broken("medusa", tmp_path, change))
    for part in (
        "shape [63, 32], [64, 32] is needed",
        "without gaps",
        "5 heads, the weights have 4",
        "something: no part",
    ):
        assert part in told


def test_another_kind_of_hydra_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["hydra_head_arch"] = "prefix-mlp"

    assert "only 'mlp' is read" in broken("hydra", tmp_path, change)[0]


def problems_of(folder: Path, kind: Any) -> str:
    problems: list[Problem] = []
    assert inspect_heads(folder, kind, target_spec(), problems) is None
    return "\n".join(str(problem) for problem in problems)


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    assert "no such folder" in problems_of(tmp_path / "no", "medusa")
    (tmp_path / "config.json").write_text("{}")
    assert "no weights" in problems_of(tmp_path, "medusa")
    folder = write_heads("eagle3", tmp_path / "eagle3")
    assert "these are eagle3 heads; write speculation kind: eagle3" in problems_of(folder, "eagle")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs")
    assert "a git-lfs pointer, not weights" in problems_of(folder, "eagle3")
    make_tiny_model(tmp_path / "model", vocab=VOCAB, hidden=HIDDEN, tokenizer=False)
    assert "no heads that are known here" in problems_of(tmp_path / "model", "medusa")


class Innocent:
    def __reduce__(self) -> Any:
        return (print, ("this must never run",))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_heads("medusa", tmp_path, "original")
    torch.save({"0.0.linear.weight": Innocent()}, tmp_path / "medusa_lm_head.pt")
    assert "not a plain mapping of names to tensors" in problems_of(tmp_path, "medusa")
    assert "must never run" not in capsys.readouterr().out


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = write_heads("medusa", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["medusa_heads.0.0.linear.bias"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="NaN or infinite"):
        load_medusa(folder, target())


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    heads = MedusaHeads((MedusaHead((), target().lm_head),), grounded=False)
    with pytest.raises(InputError, match="2 levels for 1 heads"):
        MedusaDrafter(heads, target(), chain_tree(2))


# ---------------------------------------------------------------- what Medusa and Hydra draft


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_drafts_are_the_heads_best_tokens(kind: str) -> None:
    """Against a plain reading: node by node, from the hidden state that the current token was chosen at."""
    request = workload()[3]
    tokens = [*request.prompt_tokens, *answer(request)[:9]]
    drafter = medusa_drafter(kind)
    state = hidden_states(tokens[:-1])[LAYERS]
    view = DraftView("a", tokens, len(tokens), start=0, max_nodes=20)
    drafter.observe([view], [exact_outcome(tokens[-1])], [{LAYERS: state}], [torch.zeros(1, VOCAB)])
    [draft] = drafter.propose([view])
    tree = static_tree(CHOICES)
    wanted: list[int] = []
    paths: list[list[int]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        above = paths[parent] if parent >= 0 else []
        at = len(above)
        if kind == "medusa":
            t = medusa_tensors()
            x = state[-1]
            x = x + F.silu(
                t[f"medusa_heads.{at}.0.linear.weight"] @ x + t[f"medusa_heads.{at}.0.linear.bias"]
            )
            output = t.get(f"medusa_heads.{at}.1.weight")
            logits = target().lm_head(x[None])[0] if output is None else output @ x
        else:
            t = hydra_tensors()
            x = torch.cat([state[-1], *(target().embedding[i] for i in [tokens[-1], *above])])
            p = f"hydra_mlp.{at}.0."
            x = (
                t[f"{p}res_connection.weight"] @ x
                + t[f"{p}res_connection.bias"]
                + F.silu(t[f"{p}linear.weight"] @ x + t[f"{p}linear.bias"])
            )
            logits = t[f"hydra_lm_head.{at}.weight"] @ x + t[f"hydra_lm_head.{at}.bias"]
        token = int(logits.argsort(descending=True)[rank])
        wanted.append(token)
        paths.append([*above, token])
    assert draft.tokens == tuple(wanted)
    assert draft.parents == tree.parents


def exact_outcome(token: int) -> Accepted:
    return Accepted((), token)


# ---------------------------------------------------------------- the exact law of the whole engine

SMALL = 3


@functools.cache
def small_target() -> Decoder:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(
            Path(folder), vocab=SMALL, hidden=8, layers=1, heads=2, kv_heads=1, tokenizer=False, seed=4
        )
        spec = read_modelspec(Path(folder))
        return load_model(Path(folder), spec, dtype=torch.float64, device=CPU)


def _linear(outputs: int, inputs: int, seed: int) -> DenseLinear:
    generator = torch.Generator().manual_seed(seed)
    return DenseLinear(torch.randn(outputs, inputs, generator=generator, dtype=torch.float64) / inputs**0.5)


@functools.cache
def small_head() -> EagleHead:
    spec = small_target().spec
    return EagleHead(
        EagleWeights(
            spec=spec, hidden_layers=(1,), embedding=small_target().embedding, fc=_linear(8, 16, 1),
            input_norm=None, hidden_norm=None, qkv=_linear(16, 8, 2), o=_linear(8, 8, 3),
            post_norm=torch.ones(8, dtype=torch.float64), gate_up=_linear(32, 8, 4), down=_linear(8, 16, 5),
            norm=None, lm_head=small_target().lm_head, token_ids=None,
        )
    )  # fmt: skip


def small_drafter(
    shape: Any, *, samples: bool, kind: type[FeatureDrafter] = FeatureDrafter
) -> FeatureDrafter:
    return kind(small_head(), shape, num_pages=8, page_tokens=4, max_batch_size=1, samples=samples)


def small_medusa() -> MedusaDrafter:
    heads = MedusaHeads(tuple(MedusaHead((), _linear(SMALL, 8, 20 + at)) for at in range(2)), grounded=False)
    return MedusaDrafter(heads, small_target(), static_tree([(0,), (1,), (0, 0)]))


PROMPT = (1, 0, 2)
SMALL_SAMPLING = Sampling(temperature=1.3)


def emitted(
    monkeypatch: pytest.MonkeyPatch, drafter: Callable[[], Any], accept: Any, count: int
) -> dict[Any, float]:
    """The law of the engine's answer, over every draw of the target and of the drafter."""
    model = small_target()

    def program(draw: Draw) -> tuple[int, ...]:
        monkeypatch.setattr(engine_module, "generator_draw", lambda seed: draw)
        monkeypatch.setattr(feature_drafter_module, "generator_draw", lambda seed: draw)
        engine = EmbeddedEngine(
            model, store_for(model), num_pages=8, page_tokens=4, drafter=drafter(), accept=accept,
            limits=Limits(max_batch_size=1, max_input_tokens=8, max_seq_tokens=16, max_num_tokens=16),
        )  # fmt: skip
        engine.add(Request("a", PROMPT, count, SMALL_SAMPLING))
        said: list[int] = []
        while engine.in_flight:
            for output in engine.step():
                said += output.new_tokens
        return tuple(said)

    return law_of(program)


@functools.cache
def plain_law(count: int) -> dict[tuple[int, ...], float]:
    model = small_target()
    law = {}
    for said in itertools.product(range(SMALL), repeat=count):
        mass = 1.0
        for at, token in enumerate(said):
            logits = full_forward(model, store_for(model), [*PROMPT, *said[:at]])
            mass *= float(TargetLaw(logits, SMALL_SAMPLING).probs(0)[token])
        law[said] = mass
    return law


def distance(law: dict[Any, float], count: int) -> float:
    wanted = plain_law(count)
    assert law.keys() <= wanted.keys()
    return max(abs(law.get(answer, 0.0) - mass) for answer, mass in wanted.items())


CHAIN, TWINS = chain_tree(2), static_tree([(0,), (1,), (0, 0)])
DYNAMIC = DynamicTree(top_k=2, depth=2, num_nodes=3)
LAWFUL: dict[str, tuple[Callable[[], Any], Any, int]] = {
    "drawn-chain": (lambda: small_drafter(CHAIN, samples=True), rejection, 4),
    "drawn-siblings": (lambda: small_drafter(TWINS, samples=True), rejection, 3),
    "dynamic": (lambda: small_drafter(DYNAMIC, samples=False), rejection, 4),
    "static-exact": (lambda: small_drafter(TWINS, samples=False), exact, 4),
    "medusa": (small_medusa, rejection, 4),
}


@pytest.mark.parametrize("name", list(LAWFUL))
def test_the_exact_law_is_the_targets(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    drafter, accept, count = LAWFUL[name]
    assert distance(emitted(monkeypatch, drafter, accept, count), count) < 1e-12


class SaysTheBestWereDrawn(FeatureDrafter):
    """Picks the most likely tokens and hands them over as if they had been drawn from the law."""

    def propose(self, sequences: Any) -> list[Draft]:
        uniform = torch.full((SMALL,), 1 / SMALL, dtype=torch.float64)
        return [
            Draft(draft.tokens, draft.parents, uniform.expand(len(draft), -1)) if len(draft) else draft
            for draft in super().propose(sequences)
        ]


class ForgetsSiblings(FeatureDrafter):
    """Draws siblings in ascending order: the first no longer has the law it is said to have."""

    def propose(self, sequences: Any) -> list[Draft]:
        drafts = super().propose(sequences)
        return [
            Draft((*sorted(draft.tokens[:2]), *draft.tokens[2:2]), draft.parents[:2], draft.probs[:2])
            if draft.probs is not None and len(draft) >= 2
            else draft
            for draft in drafts
        ]


def test_laws_that_were_not_drawn_from_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, shape, samples, count in (
        (SaysTheBestWereDrawn, CHAIN, False, 3),
        (ForgetsSiblings, TWINS, True, 3),
    ):
        law = emitted(
            monkeypatch,
            lambda k=kind, s=shape, d=samples: small_drafter(s, samples=d, kind=k),
            rejection,
            count,
        )  # type: ignore[misc]
        assert distance(law, count) > 1e-3


def test_a_dynamic_tree_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="dynamic tree"):
        small_drafter(DYNAMIC, samples=True)
