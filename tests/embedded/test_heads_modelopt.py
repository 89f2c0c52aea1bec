"""Our EAGLE-3 against ModelOpt's own module: its export is read as it meant it, its drafts are ours.

ModelOpt 0.47 runs the layer's input norm over the hidden state too, before the hidden norm; the authors'
code and the engines that serve its exports (SGLang, TensorRT-LLM) do not, and neither do we. An input norm
without weights of its own makes no difference there, so that is where the two must agree; with weights, our
head must agree as soon as it repeats the extra norm, so that nothing else differs.

Imports ModelOpt and transformers (about ten seconds), hence one test in a file of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import full_forward
from tiny import make_tiny_model
from tiny_engine import CPU, store_for

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.eagle3 import Eagle3Head
from trtspec.embedded.drafters.feature_drafter import FeatureDrafter
from trtspec.embedded.drafters.trees import chain_tree
from trtspec.embedded.eagle_heads import load_eagle
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.layers import rms_norm
from trtspec.embedded.weights import load_model
from trtspec.heads_check import check_heads, read_target
from trtspec.modelspec import read_modelspec

LAYERS, VOCAB, DRAFT_VOCAB = 6, 96, 64


class NormsTwice(Eagle3Head):
    def forward(self, features: torch.Tensor, batch: StepBatch, store: KvStore) -> torch.Tensor:
        input_norm, hidden_norm, _ = self._norms
        eps = self.spec.rms_norm_eps
        embedded = rms_norm(self.weights.embedding.index_select(0, batch.tokens), input_norm, eps)
        hidden = rms_norm(rms_norm(features, input_norm, eps), hidden_norm, eps)
        return self._layer(torch.cat((embedded, hidden), -1), features, batch, store)


def test_eagle3_drafts_are_modelopts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("modelopt.torch.speculative")
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(
        tmp_path / "target", vocab=VOCAB, hidden=32, layers=LAYERS, heads=4, kv_heads=2, tokenizer=False
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = dict(EAGLE3_DEFAULT_CFG["config"])
    settings["eagle_use_torch_compile"] = False
    settings["eagle_export_rope_scaling"] = {}
    settings["eagle_architecture_config"] = settings.get("eagle_architecture_config", {}) | {
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "draft_vocab_size": DRAFT_VOCAB, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    mtsp.convert(model, [("eagle", settings)])
    torch.manual_seed(0)
    module = model.eagle_module
    with torch.no_grad():
        for name, value in module.named_parameters():
            if "input_layernorm" in name:
                value.fill_(1.0)
            elif "norm" in name:
                value.copy_(1.0 + 0.1 * torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) * 1.5 / value.shape[-1] ** 0.5)
        kept = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        module.d2t.copy_(kept - torch.arange(DRAFT_VOCAB))
    model.eval()
    compare(model, folder, tmp_path / "plain", Eagle3Head, monkeypatch)
    with torch.no_grad():
        weight = module.layers[0].input_layernorm.weight
        weight.copy_(1.0 + 0.3 * torch.randn_like(weight))
    compare(model, folder, tmp_path / "twice", NormsTwice, monkeypatch)
    with pytest.raises(AssertionError):
        compare(model, folder, tmp_path / "once", Eagle3Head, monkeypatch)
    default_export_is_caught(model, folder, tmp_path / "default")


def default_export_is_caught(model: Any, folder: Path, heads: Path) -> None:
    """What ModelOpt's exporter writes unless told otherwise: yarn of factor 32, for a target without."""
    from modelopt.torch.export import export_speculative_decoding
    from modelopt.torch.speculative.config import EagleConfig

    assert model.eagle_export_rope_scaling == {}
    target = read_target(folder)
    export_speculative_decoding(model, export_dir=heads)
    assert check_heads(heads, target, "eagle3").problems == ()
    model.eagle_export_rope_scaling = EagleConfig().eagle_export_rope_scaling
    export_speculative_decoding(model, export_dir=heads)
    [problem] = check_heads(heads, target, "eagle3").problems
    assert "yarn of factor 32.0, the target has none; ModelOpt's exporter" in problem.message


def compare(
    model: Any, folder: Path, heads: Path, kind: type[Eagle3Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Export the head, draft with it and with ModelOpt; same tokens, same logits."""
    from modelopt.torch.export import export_speculative_decoding

    export_speculative_decoding(model, export_dir=heads)
    told = json.loads((heads / "config.json").read_text())
    assert told["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]  # {1, N/2 - 1, N - 4}

    target = load_model(folder, read_modelspec(folder), dtype=torch.float32, device=CPU)
    head = kind(load_eagle(heads, "eagle3", target))
    assert head.hidden_layers == (2, 3)
    theirs: list[torch.Tensor] = []
    ours: list[torch.Tensor] = []
    forward, logits_of = model._eagle_forward, head.logits

    def spy_on_modelopt(*arguments: Any, **options: Any) -> Any:
        found = forward(*arguments, **options)
        theirs.append(found[2][0, -1])
        return found

    def spy_on_ours(outputs: torch.Tensor) -> torch.Tensor:
        ours.append(logits_of(outputs)[0])
        return ours[-1]

    monkeypatch.setattr(head, "logits", lambda outputs: spy_on_ours(outputs)[None])
    steps = 4
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(0, VOCAB, (20,), generator=generator).tolist()
        with monkeypatch.context() as patch:
            patch.setattr(model, "_eagle_forward", spy_on_modelopt)
            current, wanted = model.pseudo_speculative_generate(torch.tensor([prompt]), steps=steps)
        logits = full_forward(target, store_for(target), prompt)
        assert int(logits.argmax()) == int(current)
        rows = torch.arange(len(prompt))
        batch = StepBatch(
            torch.tensor(prompt), rows, rows, (SequenceRows(0, len(prompt), rows[:0]),), rows[-1:]
        )
        _, hidden = target.forward(batch, store_for(target)(len(prompt)), head.hidden_layers)
        drafter = FeatureDrafter(head, chain_tree(steps), num_pages=8, page_tokens=8, max_batch_size=1)
        view = DraftView("a", [*prompt, int(current)], steps)
        drafter.observe([view], [Accepted((), int(current))], [hidden], [logits])
        [draft] = drafter.propose([view])
        assert list(draft.tokens) == wanted[0].tolist()
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=0, atol=2e-4)
