"""A server's own counters of generated and drafted tokens: vLLM's, from ``/metrics``."""

from __future__ import annotations

import re

from trtspec.verify.endpoint import Endpoint
from trtspec.verify.http_stream import Refused, Silent, get

_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:generation_tokens_total": "generated",
}
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_POSITION = re.compile(r'position="(\d+)"')


def draft_counters(endpoint: Endpoint) -> dict[str, float] | None:
    """vLLM's counters; None where the URL shows none.

    ``generated``, ``drafts`` (steps that drafted), ``drafted``, ``accepted`` and, where it speculates,
    ``accepted_at_I`` (drafts that were accepted up to position I, from 0). A vLLM that does not speculate
    registers no draft counters (``SpecDecodingProm``, read in 0.32): 0 then.
    """
    if endpoint.protocol != "openai":
        return None
    try:
        status, body = get(endpoint, "/metrics")
    except (Silent, Refused):
        return None
    if status != 200:
        return None
    found: dict[str, float] = {}
    for line in body.decode("utf-8", "replace").splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        labels, _, last = rest.rpartition(" ")
        key = _COUNTERS.get(name)
        if name == _BY_POSITION and (position := _POSITION.search(labels)):
            key = f"accepted_at_{position.group(1)}"
        if key is None:
            continue
        try:
            value = float(last)
        except ValueError:
            continue
        if not 0 <= value < 1e300:
            return None  # no counter; what else stands there tells nothing either
        found[key] = found.get(key, 0.0) + value  # over the engines of one server
    if "generated" in found and not {"drafts", "accepted"} & set(found):
        return {**found, "drafts": 0.0, "drafted": 0.0, "accepted": 0.0}
    return found if {"drafts", "accepted"} <= set(found) else None


def grown(before: dict[str, float] | None, after: dict[str, float] | None) -> dict[str, float] | None:
    """By how much the counters grew; None where one of both is not known."""
    if before is None or after is None:
        return None
    return {key: after[key] - before.get(key, 0.0) for key in after}
