"""Version ranges agree with PEP 440's own implementation where both are defined."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.versions import parse_range, parse_version

VERSIONS = [
    "0.16",
    "0.17",
    "0.21.0",
    "1.0rc1",
    "1.0",
    "1.1",
    "1.2.0rc4",
    "1.2.0",
    "1.2.1",
    "1.3.0rc1",
    "1.3",
    "2",
]
_comparison = st.builds(
    lambda operator, version: operator + version,
    st.sampled_from([">=", "<=", ">", "<", "==", "!="]),
    st.sampled_from(VERSIONS),
)
_ranges = st.lists(_comparison, min_size=1, max_size=3).map(",".join)


@settings(max_examples=300, deadline=None)
@given(_ranges, st.sampled_from(VERSIONS))
def test_admits_what_packaging_admits(text: str, version: str) -> None:
    specifiers = pytest.importorskip("packaging.specifiers")
    # PEP 440 keeps candidates of V out of "<V" and "<=V" alike unless named; numbers alone decide here.
    if "rc" in version or "rc" in text:
        return
    assert parse_range(text).admits(version) == specifiers.SpecifierSet(text).contains(version)


@settings(max_examples=300, deadline=None)
@given(_ranges, _ranges, st.sampled_from(VERSIONS))
def test_within_and_empty_follow_from_membership(inner: str, outer: str, version: str) -> None:
    a, b = parse_range(inner), parse_range(outer)
    if a.is_empty():
        assert not a.admits(version)
    if a.within(b) and a.admits(version) and parse_version(version) not in b.excluded:
        assert b.admits(version)


def test_candidates_sort_before_their_release() -> None:
    assert parse_version("1.2") < parse_version("1.3.0rc1") < parse_version("1.3") < parse_version("1.3.1rc2")
    assert not parse_range(">=1.3").admits("1.3.0rc9")


@pytest.mark.parametrize(
    "text", ["", "1.2", ">=", ">=x", "~=1.2", ">=1.2,", ">=1.2.3.4", ">=١.٢", ">=1.0 <2", ">= 1.0 rc1"]
)
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="found"):
        parse_range(text)


@pytest.mark.parametrize("text", [">=1.2,<1.2", ">1.2,<=1.2", "==1.2,!=1.2", ">=2,<1", "==1.0,==1.1"])
def test_what_no_version_satisfies(text: str) -> None:
    assert parse_range(text).is_empty()
