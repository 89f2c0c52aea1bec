"""Put a run of ``make demo`` into the READMEs: ``make demo > log 2>&1; python scripts/transcript.py log``.

Left out: progress, digests, what starts and stops; the home folder is ``~``. The Chinese one shows a part.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEFT_OUT = re.compile(
    r"hashing|import:|quantize: calibrate|check: read|\S+ digest|starting Triton|stopping|stopped"
    r"|loading the engines|\d+ prompts; about|demo:|.*\.\.\.$|.*: done in "
)
EXCERPT = re.compile(r"workload |-+  -|code  |all  ")


def cleaned(log: str) -> list[str]:
    lines = log[log.index("$ trtspec build") :].replace(str(Path.home()), "~").splitlines()
    kept = [line.rstrip() for line in lines if not LEFT_OUT.match(line)]
    while kept and not kept[-1]:
        kept.pop()
    return [*kept, "", "$ echo $?", "0"]


def excerpt(lines: list[str]) -> list[str]:
    """The rows of the code prompt from the comparison of drafters."""
    start = next(at for at, line in enumerate(lines) if line.startswith("$ trtspec bench drafters"))
    table = lines[start : lines.index("", start + 4)]
    return [lines[start], *(line for line in table if EXCERPT.match(line))]


def replaced(text: str, fence: str, first: str, lines: list[str]) -> str:
    """``text`` with the block between ``fence`` and its end that begins with ``first``."""
    begin = text.index(f"{fence}console\n{first}")
    end = text.index(f"\n{fence}\n", begin)
    return text[:begin] + f"{fence}console\n" + "\n".join(lines) + text[end:]


def main(log: Path) -> None:
    lines = cleaned(log.read_text(encoding="utf-8"))
    for name, fence, first, shown in (
        ("README.md", "~~~", "$ trtspec build", lines),
        ("README.zh-CN.md", "```", "$ trtspec bench drafters", excerpt(lines)),
    ):
        path = ROOT / name
        path.write_text(replaced(path.read_text(encoding="utf-8"), fence, first, shown), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
