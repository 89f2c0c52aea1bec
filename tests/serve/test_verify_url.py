"""``trtspec verify --url`` against a real tritonserver."""

from __future__ import annotations

import pytest

pytest.importorskip("tritonclient.grpc")

from servers import MODEL, Server

from trtspec.errors import InputError, MissingError
from trtspec.prompts import Chat
from trtspec.serve.preflight import find_installation
from trtspec.verify.endpoint import connect
from trtspec.verify.endpoint_check import EndpointSettings, verify_endpoints
from trtspec.verify.gates import Verdict

pytestmark = pytest.mark.triton

try:
    find_installation()
except MissingError as missing:
    pytest.skip(str(missing), allow_module_level=True)


def test_a_server_equals_itself_and_a_drafting_baseline_is_none(server: Server) -> None:
    url = f"http://{server._address('http')}"
    found = connect(url, timeout_s=20)
    assert (found.protocol, found.model) == ("triton", MODEL)
    texts = ["one two one two " * (1 + i % 3) + str(i) for i in range(6)]
    chats = [Chat(f"p{i}", ({"role": "user", "content": text},)) for i, text in enumerate(texts)]
    settings = EndpointSettings(max_new_tokens=12, rounds=2, requests=12, concurrency=3)
    report = verify_endpoints(found, found, chats, settings)
    checks = {check.name: check for check in report.checks}
    assert "identical on 6 prompts" in checks["lossless"].summary
    drafts = checks["acceptance"].measured > 1
    assert checks["lossless"].verdict is (Verdict.PASS if drafts else Verdict.INCONCLUSIVE)
    assert checks["evidence"].verdict is Verdict.INCONCLUSIVE  # one server under both names
    assert checks["token_counter"].verdict is Verdict.MEASURED
    assert checks["acceptance"].measured >= 1
    assert checks["latency_url"].evidence["rates"]["failed"] == 0
    if checks["acceptance"].measured > 1.01:
        assert checks["baseline_without_speculation"].verdict is Verdict.ERROR
    with pytest.raises(InputError, match="no model 'other'"):
        connect(url, model="other", timeout_s=20)
