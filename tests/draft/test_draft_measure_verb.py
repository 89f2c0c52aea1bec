"""``trtspec draft measure`` on tiny engines: cells, the recipe written back, dead drafters, errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny_model

from trtspec.artifact import open_artifact, seal
from trtspec.build import build
from trtspec.cli import main
from trtspec.draft.acceptance import summarize
from trtspec.draft.choose import choose
from trtspec.draft.measure import cells, measure_cell
from trtspec.draft.rewrite import has_relative_paths, rewrite
from trtspec.errors import InputError
from trtspec.prompts import Prompt
from trtspec.recipe_file import load_recipe, parse_recipe, recipe_digest

RECIPE = """\
# What this recipe is for.
version: 1
name: {name}
model: {{source: model}}        # the target
backend: {{kind: embedded, dtype: float32, threads: 1}}
quantization: {quantization}
speculation:
  kind: {kind}                  # who drafts
{keys}limits: {{max_batch_size: 4, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 64}}
"""
SMALL = "calibration: {num_samples: 2, max_tokens: 64}"
DRAFT = f"""\
  model: {{source: model}}
  num_draft_tokens: 2           # to be chosen
  quantization: {{kind: w4a16_awq, group_size: 32, {SMALL}}}
"""
NGRAM = "  num_draft_tokens: 3\n  min_ngram: 16\n  max_ngram: 16\n"


def built(folder: Path, name: str, kind: str, keys: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(name=name, kind=kind, keys=keys, quantization="{kind: none}"))
    build(path, folder / "engines")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measure")
    make_tiny_model(folder / "model")
    lines = [
        {"id": f"p{at}", "task": ("chat", "code")[at % 2], "text": f"tell me {at} things about {at * 7}"}
        for at in range(6)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    built(folder, "never", "ngram", NGRAM)
    return folder


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Path:
    """An engine whose target and draft stand for quantized ones, sealed as a build does: four cells.

    Weights with noise do for this; ModelOpt's own would take a minute.
    """
    plain = open_artifact(build(plain_draft(folder), folder / "engines").folder)
    path = folder / "both.yaml"
    path.write_text(RECIPE.format(
        name="both", kind="draft_model", keys=DRAFT,
        quantization=f"{{kind: w4a16_awq, group_size: 32, {SMALL}}}",
    ))  # fmt: skip
    engine = folder / "engines" / "both"
    shutil.copytree(plain.folder, engine)
    shutil.copy(path, engine / "recipe.yaml")
    for name, seed in (("target", 1), ("draft", 2)):
        shutil.rmtree(engine / name, ignore_errors=True)
        shutil.copytree(folder / "model", engine / name)
        noisy(engine / name / "model.safetensors", seed)
    (engine / "manifest.json").unlink()
    changed = {"name": "both", "target": "target", "recipe_digest": recipe_digest(load_recipe(path))}
    seal(engine, plain.manifest.model_copy(update=changed))
    return path


def plain_draft(folder: Path) -> Path:
    path = folder / "plain-draft.yaml"
    keys = "  model: {source: model}\n"
    path.write_text(
        RECIPE.format(name="plain-draft", kind="draft_model", keys=keys, quantization="{kind: none}")
    )
    return path


def noisy(path: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: value * (1 + 0.1 * torch.randn(value.shape, generator=generator))
        for name, value in load_file(path).items()
    }
    save_file(tensors, path)


def command(folder: Path, path: Path, *more: str) -> list[str]:
    return [
        "draft", "measure", str(path), "--data", str(folder / "prompts.jsonl"), "--max-new-tokens", "20",
        "--engines-dir", str(folder / "engines"), *more,
    ]  # fmt: skip


def test_cells_choice_and_the_recipe_written_back(
    folder: Path, quantized: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, drawn = folder / "elsewhere" / "new.yaml", folder / "positions.svg"
    output.parent.mkdir()
    more = ["-o", str(output), "--svg", str(drawn), "--json"]
    assert main(command(folder, quantized, *more)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["trtspec"]["schema"] == "trtspec.draft_measure/1"
    cells = found["cells"]
    names = ("16 bit", "as in the recipe")
    assert [(cell["target"], cell["draft"]) for cell in cells] == [(t, d) for t in names for d in names]
    # The target in 16 bit drafts for itself: it says all that the target says.
    assert cells[0]["rate"]["value"] == 1.0
    assert cells[1]["rate"]["value"] < 1.0
    assert cells[1]["difference_to_first"]["length"]["value"] < 0
    assert cells[0]["difference_to_first"] is None
    own = cells[-1]
    assert own["prompts"] == 6
    assert list(own["by_task"]) == ["chat", "code"]
    assert sum(one["tokens"] for one in own["per_prompt"]) == own["tokens"]
    assert own["predicted"] == pytest.approx(own["length"]["value"], abs=0.2)
    assert not found["dead"]["is_dead"]
    choice = found["choice"]
    assert choice["current"]["changes"] == {"num_draft_tokens": 2}
    assert choice["replayed"]["length"]["value"] == pytest.approx(own["length"]["value"])
    assert choice["costs"][0][0] == 1
    assert choice["best"]["tokens_per_s"]["value"] > 0
    written = load_recipe(output)
    wanted = choice["best"]["changes"]["num_draft_tokens"]
    assert written.speculation.num_draft_tokens == wanted  # type: ignore[union-attr]
    assert written.model.source == "../model"
    text = output.read_text()
    assert found["written"]["comments_kept"]
    for comment in ("# What this recipe is for.", "# the target", "# who drafts", "# to be chosen"):
        assert comment in text
    assert drawn.read_text().startswith("<svg")
    assert main(command(folder, quantized, "-o", str(output))) == 2
    assert "exists; name another file, or give --force" in capsys.readouterr().err


def test_a_16_bit_draft_that_is_gone_is_said(
    folder: Path, quantized: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = folder / "engines" / "both"
    hidden = folder / "model-hidden"
    shutil.move(folder / "model", hidden)
    try:
        assert main(command(folder, engine, "--no-choose", "--tasks", "chat")) == 0
    finally:
        shutil.move(hidden, folder / "model")
    out = capsys.readouterr().out
    assert out.count("not measured: target") == 2
    assert "not there any more" in out
    assert "3 prompts" in out
    assert "What pays" not in out


def test_a_dead_drafter_is_called_dead(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "dead.yaml"
    svg = folder / "dead.svg"
    assert main(command(folder, folder / "never.yaml", "-o", str(output), "--svg", str(svg))) == 1
    out, err = capsys.readouterr()
    assert svg.exists() or "dead.svg: not written; no position was drafted" in err
    assert "dead drafter: acceptance length 1.000" in out
    assert "not written; nothing was chosen" in out
    assert not output.exists()


def test_a_dry_run_lists_the_cells(folder: Path, quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, quantized, "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "6 prompts" in out
    assert out.count("target ") == 4


def test_errors_name_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = folder / "never.yaml"

    def told(expected: int, path: Path, *more: str) -> str:
        assert main(command(folder, path, *more)) == expected
        return capsys.readouterr().err

    assert "--tasks: poetry: no such prompts; allowed: chat, code" in told(2, recipe, "--tasks", "poetry")
    assert "leave --no-choose out" in told(2, recipe, "--no-choose", "-o", str(folder / "x.yaml"))
    assert "is not built; run: trtspec build" in told(3, recipe, "--engines-dir", str(folder / "none"))
    changed = folder / "changed.yaml"
    changed.write_text(recipe.read_text().replace("num_draft_tokens: 3", "num_draft_tokens: 4"))
    assert "was built from another recipe" in told(2, changed)
    built(folder, "plain", "none", "")
    assert "there is no drafter to measure" in told(2, folder / "plain.yaml")


# --------------------------------------------------------------------------- rewriting

TREE = """\
version: 1
name: x
model: {source: ./m}
backend: {kind: embedded}
speculation:
  kind: medusa      # heads
  heads: ../h
  choices:
    - [0]
    - [1]
# limits below
limits: {max_batch_size: 1, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 64}
"""
PATHS = ((0,), (1,), (0, 0))


@pytest.mark.parametrize(
    "text",
    [
        TREE,
        TREE.replace("  choices:\n    - [0]\n    - [1]\n", ""),
        TREE.replace("  choices:\n    - [0]\n    - [1]\n", "  choices: null  # default\n"),
        TREE.replace("  choices:\n    - [0]\n    - [1]\n", "  choices: [\n    [0],\n    [1]]\n"),
        TREE.split("speculation:")[0] + "speculation: {kind: medusa, heads: ../h}\n# limits below\n",
    ],
    ids=["block list", "absent", "null", "flow over lines", "flow mapping"],
)
def test_only_the_key_changes(text: str) -> None:
    found = rewrite(text, {"choices": PATHS}, None, Path())
    assert found.comments_kept
    assert "# limits below" in found.text
    before, after = parse_recipe(text), parse_recipe(found.text)
    assert after == found.recipe
    assert after.speculation.choices == PATHS  # type: ignore[union-attr]
    assert after.model_copy(update={"speculation": before.speculation}) == before
    again = rewrite(found.text, {"choices": PATHS}, None, Path())
    assert again.text == found.text


def test_a_text_that_cannot_be_edited_is_written_anew() -> None:
    found = rewrite('{"version": 1, "name": "x", "model": {"source": "m"}, "backend": {"kind": "embedded"}}',
                    {}, None, Path())  # fmt: skip
    assert found.comments_kept
    bare = "version: 1\nname: x\nmodel: {source: m}\nbackend: {kind: embedded}\n"
    with_key = rewrite(bare + "speculation: {kind: ngram}\n", {"num_draft_tokens": 9}, None, Path())
    assert with_key.recipe.speculation.num_draft_tokens == 9  # type: ignore[union-attr]


def test_a_shape_that_breaks_a_rule_is_refused() -> None:
    with pytest.raises(InputError, match="num_draft_tokens"):
        rewrite(TREE.replace("kind: medusa", "kind: ngram").replace("  heads: ../h\n", "").replace(
            "  choices:\n    - [0]\n    - [1]\n", ""), {"num_draft_tokens": 99}, None, Path())  # fmt: skip


def test_relative_paths_follow_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipes" / "m").mkdir(parents=True)
    (tmp_path / "h").mkdir()
    found = rewrite(TREE, {"choices": PATHS}, tmp_path / "recipes", tmp_path / "new" / "deep")
    assert found.recipe.model.source == "../../recipes/m"
    assert found.recipe.speculation.heads == "../../h"  # type: ignore[union-attr]
    assert found.comments_kept
    assert has_relative_paths(found.recipe)
    assert not has_relative_paths(parse_recipe(TREE.replace("./m", "owner/name").replace("../h", "/h")))


# --------------------------------------------------------------------------- every kind of heads

KINDS = {
    "medusa": "{kind: medusa, heads: heads}",
    "medusa with choices": "{kind: medusa, heads: heads, choices: [[0], [1], [0, 0]]}",
    "eagle": "{kind: eagle, heads: heads, depth: 3, top_k: 2, num_draft_tokens: 5}",
    "eagle with choices": "{kind: eagle, heads: heads, depth: 2, choices: [[0], [1], [0, 0]]}",
    "eagle3 with a tree": "{kind: eagle3, heads: heads, num_draft_tokens: 6, top_k: 2, depth: 3}",
    "lookahead": "{kind: lookahead, window: 3, ngram: 3, verification_set: 3}",
}


@pytest.mark.parametrize("name", list(KINDS))
def test_every_kind_gets_a_choice_that_its_recipe_can_hold(tmp_path: Path, name: str) -> None:
    """Heads of random weights: what is chosen matters little, that it is a recipe matters."""
    make_tiny_model(tmp_path / "model", layers=4)
    random_heads(tmp_path / "heads", name.split()[0])
    text = (
        "version: 1\nname: tiny\nmodel: {source: model}\nbackend: {kind: embedded, dtype: float32}\n"
        f"speculation: {KINDS[name]}\n"
        "limits: {max_batch_size: 4, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 64}\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    cell = cells(open_artifact(build(path, tmp_path / "engines").folder))[-1]
    prompts = [Prompt(f"p{at}", (at + 3, 4, 5, at + 3, 4, 5)) for at in range(4)]
    measured = measure_cell(cell, prompts, max_new_tokens=16)
    assert measured.contradictions == ()
    found = choose(cell, prompts, max_new_tokens=16)
    own, replayed = summarize(measured.answers).length.value, found.replayed.length.value
    assert replayed == pytest.approx(own)
    assert found.none.length == 1.0
    for option in (found.current, found.best, *found.options):
        assert option.changes is not None
        assert option.tokens_per_s.value > 0
        again = rewrite(text, option.changes, None, tmp_path)
        assert again.comments_kept


def random_heads(folder: Path, kind: str) -> None:
    folder.mkdir()
    if kind == "lookahead":
        return
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    third = kind == "eagle3"
    config: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    tensors = {f"{head}.0.linear.weight": 0.1 * weight(64, 64) for head in range(2)}
    if kind != "medusa":
        config = {
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "vocab_size": 320, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "num_hidden_layers": 1,
        }  # fmt: skip
        p, width = "layers.0.", 128 if third else 64
        tensors = {
            f"{p}self_attn.q_proj.weight": weight(64, width),
            f"{p}self_attn.k_proj.weight": weight(32, width),
            f"{p}self_attn.v_proj.weight": weight(32, width),
            f"{p}self_attn.o_proj.weight": weight(64, 64),
            f"{p}mlp.gate_proj.weight": weight(96, 64),
            f"{p}mlp.up_proj.weight": weight(96, 64),
            f"{p}mlp.down_proj.weight": weight(64, 96),
            f"{p}post_attention_layernorm.weight": torch.ones(64),
            "fc.weight": weight(64, (3 if third else 2) * 64),
        }
    if third:
        config |= {
            "draft_vocab_size": 200,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }
        tensors |= {
            "layers.0.input_layernorm.weight": torch.ones(64),
            "layers.0.hidden_norm.weight": torch.ones(64),
            "norm.weight": torch.ones(64),
            "lm_head.weight": weight(200, 64),
            "d2t": torch.arange(200) // 2,
        }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
