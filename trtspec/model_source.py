"""Where a model is: a sample in the cache, a folder, or a hub id in the hub's local cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trtspec.errors import InputError, MissingError
from trtspec.user_files import shown_path, user_path

SAMPLE_NAMES = ("smollm2-135m-instruct",)
"""What ``trtspec fetch`` can put into the cache (:mod:`trtspec.sample` has the rest)."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def cache_folder() -> Path:
    """$TRTSPEC_CACHE, else $XDG_CACHE_HOME/trtspec, else ~/.cache/trtspec (not created here)."""
    if os.environ.get("TRTSPEC_CACHE"):
        return user_path(os.environ["TRTSPEC_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return user_path(os.environ["XDG_CACHE_HOME"]) / "trtspec"
    return user_path("~/.cache/trtspec")


def _hub_cache() -> Path:
    """Where huggingface_hub keeps snapshots: $HF_HUB_CACHE, else $HF_HOME/hub, else the cache folder's."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def find_model(source: str, base: Path, revision: str | None = None) -> Path | None:
    """The folder of a recipe's ``model.source`` if it is on this machine, else None.

    Looks where :func:`resolve_model` does, but only at names: no network, no import of huggingface_hub, no
    error. Whether the folder holds a model is for the reader of its config.json to say.
    """
    try:
        if source.startswith("sample:"):
            folder = cache_folder() / "models" / source.removeprefix("sample:")
            return folder if (folder / "config.json").is_file() else None
        folder = (Path(base) / Path(source).expanduser()).resolve()
        if folder.is_dir():
            return folder
        if not _HUB_ID.fullmatch(source):
            return None
        stored = _hub_cache() / f"models--{source.replace('/', '--')}"
        reference = stored / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision
        snapshot = stored / "snapshots" / commit if commit else None
        return snapshot if snapshot is not None and (snapshot / "config.json").is_file() else None
    except (OSError, ValueError, RuntimeError, InputError):  # impossible names, a loop of links, no home
        return None


def resolve_model(
    source: str, base: Path, revision: str | None = None, *, allow_network: bool | None = None
) -> Path:
    """The folder of a recipe's ``model.source``.

    ``sample:NAME`` is looked for in the cache; then a folder, relative to ``base``; else a hub id, found in
    the hub's local cache. The network is used only with ``allow_network`` (None: when the environment has
    TRTSPEC_ALLOW_NETWORK=1). Raises MissingError for what is not there yet, InputError for what is no model.
    """
    if source.startswith("sample:"):
        name = source.removeprefix("sample:")
        if name not in SAMPLE_NAMES:
            known = ", ".join(f"sample:{sample}" for sample in SAMPLE_NAMES)
            raise InputError(f"{source!r}: no such sample; allowed: {known}")
        if revision is not None:
            raise InputError(f"{source!r}: a revision is only for hub ids, found {revision!r}")
        folder = cache_folder() / "models" / name
        if not (folder / "config.json").is_file():
            raise MissingError(f"{source}: not in {folder.parent}; run: trtspec fetch {name}")
        return folder
    try:
        folder = (Path(base) / user_path(source)).resolve()
        found, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: links go round in a circle
        raise InputError(f"{shown_path(source)}: cannot be looked up: {error}") from None
    if found:
        if revision is not None:
            raise InputError(f"{source!r} is a folder; a revision is only for hub ids, found {revision!r}")
        return folder
    if exists:
        raise InputError(f"{source!r}: is a file; give the folder of a checkpoint")
    if not _HUB_ID.fullmatch(source):
        raise InputError(
            f"{source!r}: no such folder ({folder}); give a folder, sample:NAME or a hub id (org/name)"
        )
    if allow_network is None:
        allow_network = os.environ.get("TRTSPEC_ALLOW_NETWORK") == "1"
    return _resolve_hub(source, revision, allow_network)


def _resolve_hub(source: str, revision: str | None, allow_network: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise MissingError(
            f"{source}: reading hub models needs huggingface_hub; run: pip install huggingface_hub"
        ) from None
    try:
        return Path(
            snapshot_download(
                source,
                revision=revision,
                local_files_only=not allow_network,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"],
            )
        )
    except LocalEntryNotFoundError:
        at = f" at revision {revision}" if revision else ""
        how = f"huggingface-cli download {source}" + (f" --revision {revision}" if revision else "")
        raise MissingError(
            f"{source}{at}: not in the hub's local cache, and the network is "
            f"{'not reachable' if allow_network else 'not used'}; run: {how}"
            f"{'' if allow_network else ' (or set TRTSPEC_ALLOW_NETWORK=1)'}"
        ) from None
    except HfHubHTTPError as error:
        raise InputError(f"{source}: the hub answered: {error}") from None
