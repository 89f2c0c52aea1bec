"""The rendered repositories in a real Triton, NVIDIA's models replaced: wiring, names, shapes, types."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from test_repositories import DRAFT, EAGLE3, MEDUSA, recipe_of, rendered

from trtspec.errors import MissingError
from trtspec.recipe import Recipe
from trtspec.serve.preflight import base_environment, find_installation, python_files, python_links

pytestmark = pytest.mark.triton
STAND_IN = '''\
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with one tensor for every output that is asked for: its name, or ones."""

    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.batched = self.config["max_batch_size"] > 0
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(self.config)

    def tensor(self, output):
        shape = [1] * self.batched + [max(1, int(size)) for size in output["dims"]]
        kind = pb_utils.triton_string_to_numpy(output["data_type"])
        if output["data_type"] == "TYPE_STRING":
            return pb_utils.Tensor(output["name"], np.full(shape, output["name"].encode(), object))
        return pb_utils.Tensor(output["name"], np.ones(shape, kind))

    def execute(self, requests):
        answers = []
        for request in requests:
            wanted = set(request.requested_output_names())
            tensors = [self.tensor(o) for o in self.config["output"] if o["name"] in wanted]
            answer = pb_utils.InferenceResponse(output_tensors=tensors)
            answers.append(answer)
            if self.decoupled:
                sender = request.get_response_sender()
                sender.send(answer)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None if self.decoupled else answers
'''


def small(recipe: Recipe) -> Recipe:
    """One copy of each model, for a small machine."""
    return recipe.model_copy(update={"limits": recipe.limits.model_copy(update={"max_batch_size": 1})})


class Triton:
    def __init__(self, port: int, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.port, self.popen, self.log = port, popen, log

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.popen.poll() is None:
            try:
                if self.ask("GET", "/v2/health/ready")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(self.log.read_text()[-3000:])


@contextmanager
def serving(folder: Path, files: dict[str, str]) -> Iterator[Triton]:
    try:
        installation = find_installation()
    except MissingError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        probes = [stack.enter_context(closing(socket.socket())) for _ in range(2)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    for name, text in files.items():
        path = folder / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, content in python_files(folder).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name, target in python_links().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (*installation.backend.iterdir(), installation.stub):
        if file.is_file():
            (backend / file.name).symlink_to(file)
    prefix = f"trtspec-test-{os.getpid()}-"
    argv = [
        str(installation.server),
        f"--model-repository={folder / 'models'}",
        f"--backend-directory={folder / 'backends'}",
        "--disable-auto-complete-config",
        "--http-address=127.0.0.1",
        f"--http-port={ports[0]}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={ports[1]}",
        "--allow-metrics=false",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        "--exit-timeout-secs=5",
    ]
    log = folder / "log"
    with log.open("wb") as output:
        popen = subprocess.Popen(
            argv, stdout=output, stderr=output, env=base_environment(1, folder), start_new_session=True
        )
    try:
        yield Triton(ports[0], popen, log)
    finally:
        popen.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            popen.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        for leftover in Path("/dev/shm").glob(f"{prefix}*"):
            leftover.unlink(missing_ok=True)


def with_stand_ins(files: dict[str, str]) -> dict[str, str]:
    """The same repository, its engine a Python model: NVIDIA's backend is not here."""
    made = {name: text.replace('backend: "tensorrtllm"', 'backend: "python"') for name, text in files.items()}
    for name in files:
        folder, _, file = name.partition("/")
        if file == "config.pbtxt":
            made[f"{folder}/1/model.py"] = "" if folder == "ensemble" else STAND_IN
    return made


@pytest.mark.parametrize("name", [DRAFT, MEDUSA])
def test_engines_repository_loads_and_its_ensemble_answers(tmp_path: Path, name: str) -> None:
    recipe = small(recipe_of(name))
    with serving(tmp_path, with_stand_ins(rendered(recipe, "1.2.1"))) as triton:
        triton.wait()
        body = {"text_input": "Hello", "max_tokens": 4, "temperature": 0.5, "seed": 1, "min_tokens": 2}
        status, answer = triton.ask("POST", "/v2/models/ensemble/generate", body)
        assert (status, json.loads(answer)["text_output"]) == (200, "OUTPUT"), answer
        bls = {"text_input": "Hello", "max_tokens": 4, "num_draft_tokens": 4, "stream": False}
        status, answer = triton.ask("POST", "/v2/models/tensorrt_llm_bls/generate", bls)
        assert (status, json.loads(answer)["text_output"]) == (200, "text_output"), answer
        status, answer = triton.ask("GET", "/v2/models/tensorrt_llm/config")
        assert json.loads(answer)["parameters"]["gpt_model_path"]["string_value"] == "/engine"


def test_a_miswired_ensemble_is_refused_by_triton_too(tmp_path: Path) -> None:
    """What our own check catches is what Triton would refuse: the two agree on a planted fault."""
    files = with_stand_ins(rendered(small(recipe_of(MEDUSA)), "1.2.1"))
    wrong = 'key: "input_lengths" value: "_REQUEST_INPUT_LEN"'
    assert wrong in files["ensemble/config.pbtxt"]
    files["ensemble/config.pbtxt"] = files["ensemble/config.pbtxt"].replace(
        wrong, 'key: "input_lengths" value: "_NOBODY_GIVES"'
    )
    with serving(tmp_path, files) as triton:
        assert triton.popen.wait(60) != 0
        assert "_NOBODY_GIVES" in triton.log.read_text()


def test_the_llm_api_repository_loads_and_answers(tmp_path: Path) -> None:
    files = with_stand_ins(rendered(recipe_of(EAGLE3), "1.2.1"))
    with serving(tmp_path, files) as triton:
        triton.wait()
        body = {"text_input": "Hello", "sampling_param_max_tokens": 4}
        status, answer = triton.ask("POST", "/v2/models/tensorrt_llm/generate", body)
        assert (status, json.loads(answer)["text_output"]) == (200, "text_output"), answer
