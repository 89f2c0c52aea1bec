"""The command line's frame: what it imports, how errors become messages and exit codes, completion."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import trtspec.cli
from trtspec.cli import COMMANDS, cli, main
from trtspec.cli.output import Progress, human_bytes, human_seconds, print_json
from trtspec.cli.verify import verify
from trtspec.cli.verify_help import SECTIONS, name_of
from trtspec.errors import GateFailed, InconclusiveError, InputError, MissingError, Problem, TrtspecError

HEAVY = ("torch", "pydantic", "yaml", "numpy", "transformers", "modelopt", "tokenizers", "jinja2", "grpc")


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trtspec", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch):
    """Put a verb ``probe`` with the given body into the table, by the table's own mechanism."""

    def add(body, *, as_json: bool = False):
        command = click.Command("probe", callback=body)
        if as_json:
            command = click.command("probe")(trtspec.cli.output.json_option(lambda as_json: body()))
        monkeypatch.setattr(trtspec.cli, "probe_command", command, raising=False)
        monkeypatch.setitem(COMMANDS, "probe", ("trtspec.cli:probe_command", "A probe."))

    return add


# --------------------------------------------------------------------------- imports and help


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["completion", "bash"], ["lnt"]])
def test_the_frame_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from trtspec.cli import main; code = main(sys.argv[1:]); "
        f"print('HEAVY', [m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert "HEAVY []" in done.stderr, done.stderr


def test_the_probe_for_heavy_imports_sees_them() -> None:
    """The test above must be able to fail: ``schema`` does need pydantic."""
    code = "import sys; from trtspec.cli import main; main(['schema']); print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("True\n")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_verb_of_the_table_exists_and_says_the_same(name: str) -> None:
    module, attribute = COMMANDS[name][0].split(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help
    assert all(isinstance(p, click.Argument) or getattr(p, "help", None) for p in command.params)


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, short) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(short)}$", text, re.M)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_verb_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: trtspec {name}")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trtspec {trtspec.__version__}\n"


# --------------------------------------------------------------------------- errors and exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GateFailed("slow"), 1),
        (InputError("bad"), 2),
        (MissingError("no GPU"), 3),
        (InconclusiveError("more"), 4),
    ],
)
def test_errors_of_ours_are_lines_with_their_exit_code(
    verb, error: TrtspecError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise error

    verb(body)
    assert main(["probe"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {error}\n"


def test_every_problem_is_a_line(verb, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise InputError([Problem("wrong", "r.yaml", 3, "a.b"), Problem("worse", "r.yaml", 9)])

    verb(body)
    assert main(["probe"]) == 2
    assert capsys.readouterr().err == "error: r.yaml:3: a.b: wrong\nerror: r.yaml:9: worse\n"


def test_errors_are_json_when_json_was_asked(verb, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise InputError([Problem("wrong", "r.yaml", 3, "a.b"), Problem("worse")])

    verb(body, as_json=True)
    assert main(["probe", "--json"]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "trtspec": {"schema": "trtspec.error/1", "version": trtspec.__version__},
        "exit_code": 2,
        "problems": [
            {"file": "r.yaml", "line": 3, "key": "a.b", "message": "wrong"},
            {"file": None, "line": None, "key": None, "message": "worse"},
        ],
    }


def test_a_wrong_flag_beside_json_is_json_too(verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(lambda: None, as_json=True)
    assert main(["probe", "--nonsense", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_bug_is_one_line_and_a_traceback_only_on_demand(verb, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise RuntimeError("first\nsecond")

    verb(body)
    assert main(["probe"]) == 70
    assert capsys.readouterr().err == (
        "error: RuntimeError: first second; this is a bug; --debug shows the traceback\n"
    )
    assert main(["--debug", "probe"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_debug_by_environment(
    verb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb(lambda: 1 // 0)
    monkeypatch.setenv("TRTSPEC_DEBUG", "1")
    assert main(["probe"]) == 70
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("TRTSPEC_DEBUG", "0")
    assert main(["probe"]) == 70
    assert "Traceback" not in capsys.readouterr().err


def test_a_missing_package_names_the_extra(verb, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise ModuleNotFoundError("No module named 'modelopt.torch'", name="modelopt.torch")

    verb(body)
    assert main(["probe"]) == 3
    assert "pip install 'trtspec[quantize]'" in capsys.readouterr().err

    def broken() -> None:
        raise ModuleNotFoundError("No module named 'trtspec.nothing'", name="trtspec.nothing")

    verb(broken)
    assert main(["probe"]) == 70


@pytest.mark.parametrize("kind", [KeyboardInterrupt, click.Abort, EOFError])
def test_an_interrupt_is_130(verb, kind: type[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise kind

    verb(body)
    assert main(["probe"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (1, 1), (4, 4), ("text", 0)])
def test_a_verb_may_return_its_exit_code(verb, result: object, code: int) -> None:
    verb(lambda: result)
    assert main(["probe"]) == code


def test_a_verb_may_exit_through_click(verb) -> None:
    verb(lambda: click.get_current_context().exit(4))
    assert main(["probe"]) == 4


def test_file_errors_of_click_are_bad_input(verb) -> None:
    """click ends them with 1, which here means a failed gate."""

    def body() -> None:
        raise click.FileError("x", "gone")

    verb(body)
    assert main(["probe"]) == 2


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lnt"]) == 2
    assert "no verb 'lnt'; did you mean lint?" in capsys.readouterr().err
    assert main(["zzz"]) == 2
    assert "no verb 'zzz'; see trtspec --help" in capsys.readouterr().err
    assert main(["lint", "--nonsense"]) == 2
    assert "--nonsense" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["lint"]) == 2
    assert "no file given" in capsys.readouterr().err


def test_a_closed_pipe_is_quiet() -> None:
    for arguments in (["schema"], ["--help"]):
        with subprocess.Popen(
            [sys.executable, "-m", "trtspec", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdout.close()
            assert child.stderr.read() == b""
            assert child.wait(60) == 141


def test_an_interrupt_from_the_keyboard() -> None:
    code = (
        "import os, signal, click, trtspec.cli as c\n"
        "c.probe = click.Command('probe', callback=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "c.COMMANDS['probe'] = ('trtspec.cli:probe', '')\n"
        "raise SystemExit(c.main(['probe']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr.strip() == "interrupted"


def test_output_survives_a_terminal_with_few_characters(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("version: 1\nname: чат\n", encoding="utf-8")
    done = _run("lint", str(path), PYTHONIOENCODING="latin-1")
    assert done.returncode == 2
    assert "\\u0447" in done.stdout
    assert "bug" not in done.stderr


# --------------------------------------------------------------------------- colour, completion, output


def test_colour_only_where_wanted(
    verb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        click.echo(click.style("x", fg="red"))

    verb(body)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["probe"])
    assert capsys.readouterr().out == "\x1b[31mx\x1b[0m\n"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as inner:
            inner.setenv(name, value)
            main(["probe"])
            assert capsys.readouterr().out == "x\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_TRTSPEC_COMPLETE" in script
    assert f"{shell}_complete" in script
    assert "%(" not in script


def test_bash_accepts_the_script_and_completes(tmp_path: Path) -> None:
    script = _run("completion", "bash").stdout
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    done = _run(_TRTSPEC_COMPLETE="bash_complete", COMP_WORDS="trtspec li", COMP_CWORD="1")
    assert done.stdout.splitlines() == ["plain,lint", "plain,list"]
    done = _run(_TRTSPEC_COMPLETE="bash_complete", COMP_WORDS="trtspec init --spec", COMP_CWORD="2")
    assert done.stdout.splitlines() == ["plain,--speculation"]
    done = _run(_TRTSPEC_COMPLETE="bash_complete", COMP_WORDS="trtspec init --speculation me", COMP_CWORD="3")
    assert done.stdout.splitlines() == ["plain,medusa"]


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json("x", {"value": float("nan")})
    print_json("x", {"value": 1})
    assert json.loads(capsys.readouterr().out)["trtspec"]["schema"] == "trtspec.x/1"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1024**2 - 1, "1.0 MiB"),
     (5 * 1024**3, "5.0 GiB"), (2000 * 1024**4, "2000.0 TiB"), (-2048, "-2.0 KiB")],
)  # fmt: skip
def test_sizes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0124, "12 ms"), (0.9996, "1.0 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (75.2, "1 min 15 s"),
     (3600, "1 h 0 min"), (7290, "2 h 1 min")],
)  # fmt: skip
def test_times_for_people(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_progress_without_a_terminal_is_one_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        for done in range(100):
            progress("calibrate", done, 100)
        progress.say("note")
        progress("export")
    out, err = capsys.readouterr()
    assert out == ""
    assert [re.sub(r"in .*", "in T", line) for line in err.splitlines()] == [
        "calibrate ...", "note", "calibrate: done in T", "export ...", "export: done in T"
    ]  # fmt: skip


def test_progress_of_a_failed_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with Progress() as progress:
            progress("calibrate", 1, 2)
            raise InputError("x")

    with pytest.raises(InputError):
        fail()
    assert "calibrate: stopped after" in capsys.readouterr().err


def test_progress_on_a_terminal_redraws_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with Progress() as progress:
        progress("calibrate", 5, 10)
        progress("calibrate", 10, 10)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "[##########          ] 5/10" in re.sub(r"\x1b\[\w", "", err)


def test_a_quiet_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet=True) as progress:
        progress("calibrate", 1, 2)
        progress.say("note")
    assert capsys.readouterr() == ("", "")


def test_the_group_is_a_click_group() -> None:
    """Other code may invoke verbs through it; it lists them without importing any."""
    assert cli.list_commands(click.Context(cli)) == list(COMMANDS)
    assert cli.get_command(click.Context(cli), "nothing") is None


def test_the_help_of_verify_shows_every_option_under_one_title():
    listed = [name for names in SECTIONS.values() for name in names]
    options = [param for param in verify.get_params(click.Context(verify)) if isinstance(param, click.Option)]
    assert sorted(listed) == sorted(map(name_of, options))
    text = CliRunner().invoke(verify, ["--help"]).output
    for option in options:
        assert len(re.findall(rf"^  .*(?<![\w-]){option.opts[-1]}(?![\w-])", text, re.MULTILINE)) >= 1, (
            option.opts
        )
