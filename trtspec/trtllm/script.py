"""A plan as a bash script that a user pastes into NVIDIA's container: pure text, nothing is run here.

Run again, it goes on where it stopped: a finished step leaves a mark whose name depends on its command and on
all commands before it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import textwrap
from collections.abc import Iterator

from trtspec.recipe import (
    DraftModelSpeculation,
    Eagle3Speculation,
    EagleSpeculation,
    MedusaSpeculation,
    Recipe,
)
from trtspec.recipe_facts import drafted_positions
from trtspec.recipe_file import recipe_digest
from trtspec.trtllm.command import VARIABLES, Command
from trtspec.trtllm.launch import LAUNCH_FILE
from trtspec.trtllm.plan import TrtllmPlan, label

EXAMPLES_DIR = "/app/tensorrt_llm/examples"
"""Where NVIDIA's container has TensorRT-LLM's examples."""
_END = "TRTSPEC_END"
_VARIABLE = re.compile(r"\$\{(?:" + "|".join(VARIABLES) + r")\}")
_WIDTH = 110

_STEP = """\
step() {  # step KEY OUTPUT WHAT COMMAND...: once; what a run of this script left of OUTPUT is removed first
  local key=$1 output=$2 what=$3
  local mark="${WORK_DIR}/.made-${output##*/}"
  shift 3
  if [ -e "${WORK_DIR}/.done-${key}" ]; then
    echo "done before: ${what}"
    return
  fi
  if [ -e "${output}" ] && [ ! -e "${mark}" ]; then
    echo "error: ${output} is there and not made by this script; move it away, or set another WORK_DIR" >&2
    exit 2
  fi
  echo "== ${what}"
  touch -- "${mark}"
  rm -rf -- "${output}"
  "$@"
  touch -- "${WORK_DIR}/.done-${key}"
}
"""


def render_script(plan: TrtllmPlan) -> str:
    """The script for ``plan``, whose paths must be the variables that :class:`Paths` has by default."""
    return "\n".join(line for part in _parts(plan) for line in (*part, "")).rstrip("\n") + "\n"


def _parts(plan: TrtllmPlan) -> Iterator[list[str]]:
    yield ["#!/usr/bin/env bash", *_comments(plan)]
    yield ["set -euo pipefail"]
    yield _variables(plan)
    yield _version_check(plan)
    if any(command.program == "trtspec quantize" for command in plan.commands):
        yield _refusal(
            "command -v trtspec > /dev/null",
            "error: trtspec is not installed here; install it (its quantize command makes the checkpoint)",
        )
    if plan.commands:
        yield [_STEP.rstrip("\n")]
    yield from _steps(plan)
    for name, text in plan.files.items():
        yield _file(name, text)
    if plan.recipe.backend.kind == "tensorrt":
        yield _engine_check(plan)
    yield _epilogue(plan)


def _comments(plan: TrtllmPlan) -> list[str]:
    recipe = plan.recipe
    lines = [
        f"# {recipe.name}: backend {recipe.backend.kind}, TensorRT-LLM {plan.version}",
        f"# {label(plan.version)}.",
        f"# Recipe digest {recipe_digest(recipe)}.",
        "#",
        *_wrapped(
            f"Run it where TensorRT-LLM {plan.version} is, such as the image {plan.container} of NVIDIA's "
            "registry, on the GPU that will serve. Set the variables below first."
        ),
    ]
    for title, texts in (
        ("Warnings:", plan.warnings),
        ("What the recipe asks for, and what will be done:", plan.notes),
    ):
        if texts:
            lines += ["#", f"# {title}", *(line for text in texts for line in _wrapped(f"- {text}", "  "))]
    return lines


def _wrapped(text: str, hanging: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent=f"# {hanging}", break_on_hyphens=False
    )


# --------------------------------------------------------------------------- what must be there


def _variables(plan: TrtllmPlan) -> list[str]:
    recipe, used = plan.recipe, _used(plan)
    needed = {
        "MODEL_DIR": ("the 16-bit checkpoint", recipe.model.source),
        "DRAFT_DIR": ("the draft model's checkpoint", _draft_source(recipe)),
        "HEADS_DIR": ("the trained heads", _heads_source(recipe)),
    }
    written = "".join(plan.files.values())
    lines = []
    for name, (what, source) in needed.items():
        if name in used:
            message = f"error: set {name} to {what}: the folder of {source}"
            lines += _refusal(f'[ -d "${{{name}:-}}" ]', message, status=2)
            lines += _folder(name, f"${{{name}}}" in written)
    lines.append(f': "${{WORK_DIR:=${{PWD}}/{plan.recipe.name}}}"')
    lines += [*_folder("WORK_DIR", "${WORK_DIR}" in written), 'mkdir -p -- "${WORK_DIR}"']
    if "EXAMPLES_DIR" in used:
        lines.append(f': "${{EXAMPLES_DIR:={EXAMPLES_DIR}}}"')
    if "CALIB_DATASET" in used:
        lines.append(': "${CALIB_DATASET:=cnn_dailymail}"')
    return lines


def _folder(name: str, written: bool) -> list[str]:
    """``name`` made absolute, since servers start elsewhere than this script; where files are ``written``
    with it, YAML and Triton's configuration hold it between double quotes as it is."""
    lines = [f'[[ "${{{name}}}" = /* ]] || {name}="${{PWD}}/${{{name}}}"']
    if written:
        message = f"error: {name}: a quote, a backslash or a control character in the path; rename the folder"
        lines += _refusal(f'[[ "${{{name}}}" != *[\\"\\\\[:cntrl:]]* ]]', message, status=2)
    return lines


def _used(plan: TrtllmPlan) -> set[str]:
    commands = (*plan.commands, *((plan.serve,) if plan.serve else ()))
    texts = [word for command in commands for word in command.argv] + list(plan.files.values())
    return {name for name in VARIABLES if any(f"${{{name}}}" in text for text in texts)}


def _draft_source(recipe: Recipe) -> str:
    return recipe.speculation.model.source if isinstance(recipe.speculation, DraftModelSpeculation) else ""


def _heads_source(recipe: Recipe) -> str:
    speculation = recipe.speculation
    if isinstance(speculation, MedusaSpeculation | EagleSpeculation | Eagle3Speculation):
        return speculation.heads
    return ""


def _version_check(plan: TrtllmPlan) -> list[str]:
    wrong = f"error: this script is for TensorRT-LLM {plan.version}, found ${{found}}; render it for that one"
    return [
        "found=$(python3 -c 'import tensorrt_llm; print(tensorrt_llm.__version__)' | tail -n 1) || {",
        "  echo 'error: TensorRT-LLM is not installed here, or does not load (above)' >&2",
        "  exit 3",
        "}",
        'case "${found}" in',
        f"  {plan.version} | {plan.version}.post* | {plan.version}+*) ;;",
        f'  *) echo "{wrong}" >&2; exit 3 ;;',
        "esac",
    ]


def _refusal(condition: str, message: str, status: int = 3) -> list[str]:
    return [f"{condition} || {{", f"  echo {_quoted(message)} >&2", f"  exit {status}", "}"]


# --------------------------------------------------------------------------- steps and files


def _steps(plan: TrtllmPlan) -> Iterator[list[str]]:
    chain = hashlib.sha256(f"{plan.version} {plan.recipe.model.source}".encode())
    for number, command in enumerate(plan.commands, start=1):
        if command.program == "test":
            yield _refusal(_call(command), f"error: {command.what}")
            continue
        chain.update("\0".join(command.argv).encode())
        what = f"{number}/{len(plan.commands)} {command.program}: {command.what}"
        head = f"step {chain.hexdigest()[:12]} {_quoted(command.output or '/nonexistent')} {_quoted(what)}"
        yield [head + " \\", *_continued(command)]


def _call(command: Command) -> str:
    return " ".join(_quoted(word) for word in command.argv)


def _continued(command: Command) -> list[str]:
    """The command over several lines, an option with its values on each."""
    lines: list[list[str]] = [[]]
    for word in command.argv:
        if word.startswith("-") and lines[-1]:
            lines.append([])
        lines[-1].append(_quoted(word))
    first, *others = (" ".join(line) for line in lines)
    return " \\\n".join([f"  {first}", *(f"    {other}" for other in others)]).split("\n")


def _file(name: str, text: str) -> list[str]:
    folder = name.rpartition("/")[0]
    lines = [f'mkdir -p -- "${{WORK_DIR}}/{folder}"'] if folder else []
    body = _escaped(text, r"[\\`$]").rstrip("\n")
    end = _END
    while end in body.splitlines():  # a file that is a script of its own may use the word
        end += "_"
    return [*lines, f'cat > "${{WORK_DIR}}/{name}" <<{end}', body, end]


def _engine_check(plan: TrtllmPlan) -> list[str]:
    """What the builder changes silently must not be what drafting needs: read it back from the engine."""
    build = next(command for command in plan.commands if command.program == "trtllm-build")
    options = dict(zip(build.options, build.options[1:], strict=False))
    paged = options["--use_paged_context_fmha"] == "enable"
    drafted = drafted_positions(plan.recipe.speculation)
    lines = [
        f"python3 - {_quoted(plan.model)} <<'{_END}'",
        "import json, sys",
        'built = json.load(open(f"{sys.argv[1]}/config.json"))["build_config"]',
        "wrong = []",
    ]
    for key, least in (("max_draft_len", drafted), ("max_batch_size", plan.recipe.limits.max_batch_size)):
        lines += [
            f'if built.get("{key}", 0) < {least}:',
            f"    wrong.append(f\"{key} is {{built.get('{key}')}}, wanted {least}\")",
        ]
    if paged:
        lines += [
            'if built.get("plugin_config", {}).get("use_paged_context_fmha") is False:',
            '    wrong.append("paged context attention was switched off")',
        ]
    return [
        *lines,
        'print("engine:", "; ".join(wrong) or "built as asked")',
        "sys.exit(1 if wrong else 0)",
        _END,
    ]


def _epilogue(plan: TrtllmPlan) -> list[str]:
    ways = []
    if plan.serve is not None:
        ways.append(f"serve it with: {' '.join(plan.serve.argv)}")
    if LAUNCH_FILE in plan.files:
        ways.append(f"serve it with Triton: bash ${{WORK_DIR}}/{LAUNCH_FILE}")
    return [f"echo {_quoted(way)}" for way in ways or [f"made: {plan.model}; Triton cannot serve it"]]


# --------------------------------------------------------------------------- quoting


def _quoted(word: str) -> str:
    """``word`` for bash; the script's own variables are expanded, nothing else is."""
    if _VARIABLE.search(word) is None:
        return shlex.quote(word)
    return f'"{_inside_quotes(word)}"'


def _inside_quotes(text: str) -> str:
    return _escaped(text, r'[\\`$"]')


def _escaped(text: str, special: str) -> str:
    """``text`` with a backslash before every ``special`` character that is not part of a variable."""
    pieces, end = [], 0
    for match in _VARIABLE.finditer(text):
        pieces += [re.sub(special, r"\\\g<0>", text[end : match.start()]), match.group()]
        end = match.end()
    return "".join([*pieces, re.sub(special, r"\\\g<0>", text[end:])])
