"""The model repository and the tensors in it: what clients of NVIDIA's server rely on.

One file, because requests, answers and repository are one contract: what is sent is what is declared.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import TRTSPEC

from trtspec.cli.serve import _checked_url
from trtspec.cli.serve import generate as cli_generate
from trtspec.engine import Sampling
from trtspec.errors import InputError, MissingError
from trtspec.serve.client import _inputs, generate
from trtspec.serve.launch import EXIT_TIMEOUT_S, load_failure, new_server_id, plain_temp_folder
from trtspec.serve.preflight import (
    Addresses,
    base_environment,
    find_installation,
    host_problem,
    library_problem,
    numpy_problem,
    port_problems,
    pth_problems,
    python_links,
    resolve_host,
)
from trtspec.serve.protocol import (
    BOUNDS,
    INPUTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    NEVER_SENT,
    OUTPUTS,
    TEXT_DELTA,
    Generate,
    Stop,
    TensorSpec,
    parse,
    tensors,
)
from trtspec.serve.repository import render

pytest.importorskip("tritonclient.grpc")
SERVING = Path(__file__).parents[2] / "docs" / "serving.md"
GOLDEN = Path(__file__).parent.parent / "golden" / "config.pbtxt"


def test_golden_config() -> None:
    files = render("tensorrt_llm", Path("/engines/demo"), "demo", "sha256:0", "exact acceptance (strict)")
    assert sorted(files) == ["tensorrt_llm/1/model.py", "tensorrt_llm/config.pbtxt"]
    assert files["tensorrt_llm/config.pbtxt"].decode() == GOLDEN.read_text()


def test_config_reads_back_as_what_triton_must_do() -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    folder = Path('/engines/an odd "name"\\')
    text = render("m", folder, "demo", "sha256:0", "exact acceptance (strict)")["m/config.pbtxt"].decode()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("m", "python", 0)
    assert config.model_transaction_policy.decoupled
    assert [group.kind for group in config.instance_group] == [model_config_pb2.ModelInstanceGroup.KIND_CPU]
    assert config.parameters["engine_dir"].string_value == str(folder)
    assert config.parameters["engine_name"].string_value == "demo"
    assert config.parameters["recipe_digest"].string_value == "sha256:0"
    assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]
    assert [tensor.name for tensor in config.output] == [spec.name for spec in OUTPUTS]


def test_model_file_only_imports_the_package() -> None:
    source = render("m", Path("/e"), "e", "sha256:0", "x")["m/1/model.py"].decode()
    compile(source, "model.py", "exec")
    assert "from trtspec.serve.triton_model import TritonPythonModel" in source


def test_names_are_unique_and_what_is_never_sent_is_declared() -> None:
    for specs in (INPUTS, OUTPUTS):
        assert len({spec.name for spec in specs}) == len(specs)
    assert {spec.name for spec in OUTPUTS} >= NEVER_SENT


# --------------------------------------------------------------------------- requests

requests = st.builds(
    Generate,
    prompt=st.text(),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.none() | st.floats(0, 10, width=32),
    top_k=st.none() | st.integers(0, 2**31 - 1),
    top_p=st.none() | st.floats(0, 1, width=32),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    streaming=st.booleans(),
    exclude_input=st.booleans(),
    return_perf_metrics=st.booleans(),
    return_finish_reason=st.booleans(),
    return_stop_reason=st.booleans(),
)


@given(requests)
def test_what_a_client_writes_is_what_the_server_reads(request: Generate) -> None:
    assert parse(tensors(request)) == request


@given(requests)
def test_a_dropped_tensor_is_noticed(request: Generate) -> None:
    """The round trip above has teeth: without any one of its tensors it fails."""
    sent = tensors(request)
    for name in sent:
        rest = {other: values for other, values in sent.items() if other != name}
        if name == "text_input":
            with pytest.raises(InputError, match="text_input: missing"):
                parse(rest)
        else:
            assert parse(rest) != request


TEXT: dict[str, list[Any]] = {"text_input": [b"a"]}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "text_input: missing; send the prompt as one string"),
        ({"text_input": [b"a", b"b"]}, "text_input: 2 prompts; send exactly one in a request"),
        ({"text_input": []}, "text_input: 0 prompts"),
        ({"text_input": [b"ab\xff"]}, "text_input: not valid UTF-8 at byte 2"),
        ({**TEXT, "sampling_param_max_tokens": [0]}, "sampling_param_max_tokens: 0 is too small; at least 1"),
        ({**TEXT, "sampling_param_temperature": [-0.5]}, "sampling_param_temperature: -0.5 is too small"),
        ({**TEXT, "sampling_param_temperature": [float("nan")]}, "sampling_param_temperature: nan"),
        ({**TEXT, "sampling_param_temperature": [float("inf")]}, "sampling_param_temperature: inf"),
        ({**TEXT, "sampling_param_top_p": [1.5]}, "sampling_param_top_p: 1.5 is too large; at most 1"),
        ({**TEXT, "sampling_param_top_k": [-1]}, "sampling_param_top_k: -1 is too small"),
        ({**TEXT, "sampling_param_best_of": [2]}, "sampling_param_best_of: only 1 is supported"),
        (
            {**TEXT, "sampling_param_frequency_penalty": [0.5]},
            "sampling_param_frequency_penalty: penalties are",
        ),
        (
            {**TEXT, "sampling_param_presence_penalty": [-1.0]},
            "sampling_param_presence_penalty: penalties are",
        ),
        ({**TEXT, "return_cumulative_logprob": [True]}, "return_cumulative_logprob: not supported"),
        ({**TEXT, "sampling_param_stop": [b"x", b""]}, "sampling_param_stop: an empty stop string"),
        ({**TEXT, "sampling_param_stop": [b"\xe4"]}, "sampling_param_stop: not valid UTF-8 at byte 0"),
        ({**TEXT, "sampling_param_stop": [b"x"] * 5000}, "sampling_param_stop: 5,000 strings; at most 128"),
        ({**TEXT, "sampling_param_stop": [b"x" * 1025]}, "sampling_param_stop: a string of 1,025 characters"),
        ({**TEXT, "streaming": [True, False]}, "streaming: 2 values; send exactly one"),
    ],
)
def test_bad_requests(inputs: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(inputs)
    assert str(caught.value).startswith(message)


BEYOND = [
    *((field, bounds.high * 2 + 1) for field, bounds in BOUNDS.items()),
    *((field, bounds.low - 1) for field, bounds in BOUNDS.items()),
    ("max_tokens", 2**32 + 3),
    ("top_k", 2**32 + 1),
    ("seed", 2**63),
    ("temperature", 1e300),
    *((field, value) for field in ("temperature", "top_p") for value in (float("nan"), float("inf"))),
]


@pytest.mark.parametrize(("field", "value"), BEYOND)
def test_no_number_is_changed_on_its_way(field: str, value: float) -> None:
    """Beyond the bounds the command line, the client and the server refuse alike; none wraps around."""
    tensor = f"sampling_param_{field}"
    with pytest.raises(InputError, match=f"^{tensor}: .* is (too|not)"):
        tensors(replace(Generate("a"), **{field: value}))
    with pytest.raises(InputError, match=f"^{tensor}: .* is (too|not)"):
        parse({**TEXT, tensor: [value]})
    with pytest.raises(click.UsageError, match="is not"):
        cli_generate.make_context("generate", ["a", f"--{field.replace('_', '-')}", str(value)])


@pytest.mark.parametrize("end", ["low", "high"])
def test_the_bounds_themselves_are_taken(end: str) -> None:
    """By the command line, on the wire (numpy's types included) and by the engine's own check."""
    values = {field: getattr(bounds, end) for field, bounds in BOUNDS.items()}
    options = [word for field in values for word in (f"--{field.replace('_', '-')}", str(values[field]))]
    read = cli_generate.make_context("generate", ["a", *options]).params
    assert {field: read[field] for field in values} == values
    request = Generate("a", **values)
    sent = {tensor.name(): tensor for tensor in _inputs(request)}
    for field, value in values.items():
        raw = sent[f"sampling_param_{field}"]._get_content()
        dtype = {"INT32": "<i4", "UINT64": "<u8", "FP32": "<f4"}[sent[f"sampling_param_{field}"].datatype()]
        assert np.frombuffer(raw, dtype)[0] == value
    pytest.importorskip("torch")
    from trtspec.embedded.engine import _sampling_problems

    assert (
        _sampling_problems(
            Sampling(values["temperature"], values["top_k"], values["top_p"] or 1.0, values["seed"])
        )
        == []
    )
    assert _sampling_problems(Sampling(seed=2**63)) != []


@pytest.mark.parametrize("option", ["--idle-timeout", "--temperature"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1", "x"])
def test_odd_numbers_are_usage_errors(option: str, value: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        cli_generate.make_context("generate", ["a", option, value])
    assert option in caught.value.format_message()


def test_text_that_is_not_utf8_is_not_sent() -> None:
    with pytest.raises(InputError) as caught:
        tensors(Generate("ab\udcff", stop=("\ud800",)))
    assert [problem.key for problem in caught.value.problems] == ["text_input", "sampling_param_stop"]


def test_neutral_values_of_unsupported_parameters_are_fine() -> None:
    neutral = {
        "sampling_param_best_of": [1],
        "sampling_param_frequency_penalty": [0.0],
        "sampling_param_presence_penalty": [0.0],
        "return_cumulative_logprob": [False],
    }
    assert parse({**TEXT, **neutral}) == Generate("a")


def test_all_problems_at_once() -> None:
    with pytest.raises(InputError) as caught:
        parse({"sampling_param_top_p": [2.0], "sampling_param_best_of": [3]})
    assert [problem.key for problem in caught.value.problems] == [
        "text_input",
        "sampling_param_top_p",
        "sampling_param_best_of",
    ]


def test_stop_request_needs_no_prompt() -> None:
    assert parse({"stop": [True]}) == Stop()
    assert parse({**TEXT, "stop": [False]}) == Generate("a")


def test_text_delta_is_a_request_parameter() -> None:
    assert parse(TEXT, {TEXT_DELTA: True}) == Generate("a", text_delta=True)
    with pytest.raises(InputError, match="text_delta: 'yes' is neither true nor false"):
        parse(TEXT, {TEXT_DELTA: "yes"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(
            (spec.name.removeprefix("sampling_param_"), spec.name)
            for spec in INPUTS
            if "_param_" in spec.name
        ),
        ("max_new_tokens", "sampling_param_max_tokens"),
        ("stop_words", "sampling_param_stop"),
        ("random_seed", "sampling_param_seed"),
        ("stream", "streaming"),
        ("Temperature", "sampling_param_temperature"),
        ("textinput", "text_input"),
        ("text-delta", "text_delta"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_nearest(name: str, meant: str) -> None:
    if name == "stop":  # an input of its own, so never a parameter over HTTP
        return
    with pytest.raises(InputError, match=f"^{name}: unknown parameter; did you mean {meant}\\?$"):
        parse(TEXT, {name: 5})
    with pytest.raises(InputError, match=f"^{name}: "):
        parse({"stop": [True]}, {name: 5})


def test_odd_parameters_get_a_short_answer() -> None:
    with pytest.raises(InputError, match=r"^温度 🙂: unknown parameter; docs/serving\.md lists"):
        parse(TEXT, {"温度 🙂": 1})
    with pytest.raises(InputError, match="this is an input, not a parameter"):
        parse(TEXT, {"streaming": True})
    with pytest.raises(InputError, match="992 more unknown parameters") as caught:
        parse(TEXT, {f"{number}" * 10_000: number for number in range(1000)})
    assert len(str(caught.value)) < 2000


def test_tritons_own_parameters_pass() -> None:
    own = {"id": "a", "priority": 1, "timeout": 5, "triton_enable_empty_final_response": True}
    assert parse(TEXT, own) == Generate("a")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Generate(""), Sampling(temperature=0.0, seed=7)),
        (Generate("", temperature=0.0, top_p=0.9), Sampling(temperature=0.0, top_p=0.9, seed=7)),
        (Generate("", temperature=0.7), Sampling(temperature=0.7, seed=7)),
        (Generate("", top_k=40), Sampling(temperature=1.0, top_k=40, seed=7)),
        (Generate("", top_p=0.9, seed=3), Sampling(temperature=1.0, top_p=0.9, seed=3)),
        (Generate("", temperature=0.7, top_k=1), Sampling(temperature=0.0, top_k=1, seed=7)),
        (Generate("", temperature=0.7, top_p=0.0), Sampling(temperature=0.0, top_p=1.0, seed=7)),
        (Generate("", top_k=0), Sampling(temperature=1.0, top_k=0, seed=7)),
    ],
)
def test_sampling_defaults_are_those_of_the_llm_api(request_: Generate, expected: Sampling) -> None:
    assert request_.sampling(fresh_seed=7) == expected


# --------------------------------------------------------------------------- preflight


@pytest.mark.parametrize(
    ("version", "fine"), [("1.26.4", True), ("2.0.0", False), ("2.4.6", False), (None, False)]
)
def test_numpy_two_is_refused(version: str | None, fine: bool) -> None:
    problem = numpy_problem(version)
    assert (problem is None) == fine
    if version == "2.0.0":
        assert problem is not None
        assert "pip install 'numpy<2'" in problem


def test_equal_ports_are_refused() -> None:
    addresses = Addresses("127.0.0.1", 18999, 18998, 18997)
    assert not any("must differ" in problem for problem in port_problems(addresses))
    assert "the ports must differ" in port_problems(replace(addresses, grpc_port=18999))[0]


def test_an_address_of_another_machine_is_refused() -> None:
    assert host_problem("127.0.0.1") is None
    assert "192.0.2.1 cannot be listened on" in str(host_problem("192.0.2.1"))


def test_hosts_become_ipv4_addresses() -> None:
    assert resolve_host("localhost").startswith("127.")
    assert resolve_host("0.0.0.0") == "0.0.0.0"


@pytest.mark.parametrize(
    "host",
    ["", "nosuch.invalid", "::1", "[::1]", "a b", "a\nb", "x" * 70, "a\0b", "127.0.0.1:8000", "\udcff"],
)
def test_a_host_that_is_none_is_bad_input(host: str) -> None:
    with pytest.raises(InputError, match=r"use 127\.0\.0\.1, or 0\.0\.0\.0") as caught:
        resolve_host(host)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8001", "[::1]:1", "my_host.example:65535"])
def test_addresses_of_servers(url: str) -> None:
    assert _checked_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:99999",
        "127.0.0.1:0",
        "127.0.0.1:\u0661",
        "a\nb:1",
        "a b:1",
        ":1",
        "a:",
        "::1:1",
        "http://a:1",
    ],
)
def test_what_is_no_address_of_a_server(url: str) -> None:
    with pytest.raises(InputError, match="is not host:port") as caught:
        _checked_url(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("greeting", "found"),
    [
        (b"HTTP/1.0 404 no\r\n\r\n", "that is an HTTP port"),
        (b"SSH-2.0-x\r\n", "what listens there does not speak gRPC"),
        (b"", "what listens there does not speak gRPC"),
    ],
)
def test_a_server_of_another_kind_is_not_called_absent(greeting: bytes, found: str) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                while True:
                    caller = listener.accept()[0]
                    with caller, contextlib.suppress(OSError):
                        caller.sendall(greeting)
                        caller.shutdown(socket.SHUT_WR)
                        while caller.recv(4096):
                            pass

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(InputError, match=found):
            generate(f"127.0.0.1:{listener.getsockname()[1]}", "m", Generate("a"))


@pytest.mark.triton
def test_missing_libraries_are_named(tmp_path: Path) -> None:
    """A copied stub has lost the libraries that lie beside the original."""
    try:
        stub = find_installation().stub
    except MissingError as missing:
        pytest.skip(str(missing))
    environment = {"PATH": "/usr/bin:/bin"}
    assert library_problem(stub, environment) is None or "libpython" in str(
        library_problem(stub, environment)
    )
    copy = tmp_path / stub.name
    shutil.copy(stub, copy)
    assert "libcudart" in str(library_problem(copy, environment))
    (tmp_path / "text").write_text("no program")
    assert "ldd cannot read it" in str(library_problem(tmp_path / "text", environment))


# --------------------------------------------------------------------------- names beyond ASCII


def test_path_files_that_end_the_models_python_are_named(tmp_path: Path) -> None:
    (tmp_path / "fine.pth").write_text("/opt/packages\n")
    assert pth_problems([tmp_path]) == []
    (tmp_path / "odd.pth").write_text("/opt/包\n", encoding="utf-8")
    (problem,) = pth_problems([tmp_path])
    assert problem.startswith(f"{tmp_path / 'odd.pth'} names a folder")


@pytest.mark.parametrize(
    ("name", "plain"), [("plain", True), ("with space", False), ("临时🙂", False), ("$x", False)]
)
def test_the_servers_folder_has_a_plain_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, plain: bool
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    chosen = plain_temp_folder()
    assert (chosen == str(folder)) == plain
    assert os.access(chosen, os.W_OK)


def test_the_model_sees_plain_names_only(tmp_path: Path) -> None:
    runtime = Path("/tmp/runtime")
    environment = base_environment(1, runtime)
    for name in ("PATH", "PYTHONHOME", "PYTHONPATH"):
        for place in environment.get(name, str(runtime)).split(os.pathsep):
            assert place.startswith((str(runtime), "/usr/bin", "/bin"))
    links = python_links()
    assert links["python/bin"].samefile(Path(sys.prefix) / "bin")
    assert all(target.exists() for target in links.values())


# --------------------------------------------------------------------------- docs/serving.md


def table(title: str) -> list[list[str]]:
    """Rows of the table in docs/serving.md whose first column is called ``title``."""
    lines = iter(SERVING.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"| {title} |"):
            next(lines)
            rows = itertools.takewhile(lambda row: row.startswith("|"), lines)
            return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in rows]
    raise AssertionError(f"no table {title}")


@pytest.mark.parametrize(("title", "specs"), [("input", INPUTS), ("output", OUTPUTS)])
def test_documented_tensors_are_those_of_the_model(title: str, specs: tuple[TensorSpec, ...]) -> None:
    documented = [row[:3] for row in table(title)]
    assert documented == [[spec.name, spec.data_type, "[n]" if spec.dims == -1 else "[1]"] for spec in specs]


def test_documented_meanings_agree_with_the_code() -> None:
    assert [row[0] for row in table("input") if row[3] == "required"] == [
        spec.name for spec in INPUTS if not spec.optional
    ]
    assert {row[0] for row in table("output") if row[3] == "never"} == NEVER_SENT
    assert [row[0] for row in table("parameter")] == [TEXT_DELTA, "id"]
    text = SERVING.read_text(encoding="utf-8")
    assert f"at most {MAX_STOPS}, of at most {MAX_STOP_CHARS:,} characters" in text
    assert f"may finish within {EXIT_TIMEOUT_S} s" in text


# --------------------------------------------------------------------------- the server's log

LOADED = "I1129 21:42:12 1 model_lifecycle.cc:839] \"successfully loaded 'm'\""
REFUSED = (
    "E1129 21:42:12.700563 12614 model_lifecycle.cc:642] \"failed to load 'm' version 1: Internal: "
    'InputError: recipe.yaml:3: \\"x\\" is bad; do that\\nsecond line\\n\\nAt:\\n  /a/b.py(39): bad\\n"\n'
    "+---+\n"
)


def test_the_reason_of_a_failed_load_is_found_in_the_log() -> None:
    assert load_failure(LOADED) is None
    assert load_failure(f"{LOADED}\n{REFUSED}I1129 more") == (
        "InputError",
        'recipe.yaml:3: "x" is bad; do that\nsecond line',
    )


def test_no_server_id_begins_another() -> None:
    """Shared memory is deleted by prefix: trtspec-12 must not take that of trtspec-123 along."""
    ids = {new_server_id() for _ in range(3)}
    assert len(ids) == 3
    assert all(one.endswith("-") for one in ids)


# --------------------------------------------------------------------------- standard streams


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        ([b"\xff\xfe"], b""),
        ([b"a", b"--stop", b"\xff"], b""),
        ([b"a", b"--model-name", b"\xff"], b""),
        ([b"a", b"--url", b"\xff:1"], b""),
        ([b"-"], b"ab\xff"),
        ([], b""),
        ([], None),
    ],
)
@pytest.mark.parametrize("locale", ["C.UTF-8", "POSIX"])
def test_what_is_no_text_is_refused_in_one_line(
    arguments: list[bytes], stdin: bytes | None, locale: str
) -> None:
    """Arguments and standard input that are not UTF-8, an empty and a closed standard input (None)."""
    command = [*TRTSPEC, "generate", "--url", "127.0.0.1:1", *arguments]
    if stdin is None:
        command = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    environment = {**os.environ, "LC_ALL": locale}
    done = subprocess.run(command, input=stdin, capture_output=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1
