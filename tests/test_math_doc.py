"""docs/math.md prints no number that is not recomputed here."""

from __future__ import annotations

import csv
import doctest
import math
import re
from pathlib import Path

import pytest

from trtspec.verify.endpoint_verdict import ALPHA, PARAMETERS_ALPHA
from trtspec.verify.power import INTENDED, LOOKS, PRODUCED, bias_size, look_levels, power_of

DOC = Path(__file__).resolve().parents[1] / "docs" / "math.md"
TEXT = DOC.read_text(encoding="utf-8")


def failures(text: str) -> int:
    """How many of the document's Python examples give something else than what is printed."""
    test = doctest.DocTestParser().get_doctest(text, {}, "math.md", str(DOC), 0)
    assert len(test.examples) > 40
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.REPORT_NDIFF)
    runner.run(test, out=lambda line: None)
    return runner.summarize(verbose=False).failed


def speedup(alpha_or_length: float, num_draft: int, c: float, q_t: float, q_d: float) -> float:
    return alpha_or_length / (1 / q_t + num_draft / (c * q_d))


def test_every_example_gives_what_is_printed() -> None:
    assert failures(TEXT) == 0


@pytest.mark.parametrize(
    ("printed", "wrong"),
    [
        ("\n3.3616\n", "\n3.3617\n"),
        ("[2.4011, 4.8023,", "[2.4011, 4.8022,"),
        ("[0.3566, 0.3434,", "[0.3556, 0.3444,"),
        ("0.8 (6, 2.4696", "0.8 (5, 2.4696"),
        ("\n4.087\n", "\n4.086\n"),
    ],
)
def test_a_wrong_digit_is_seen(printed: str, wrong: str) -> None:
    assert printed in TEXT
    assert failures(TEXT.replace(printed, wrong)) > 0


def test_the_table_of_speedups() -> None:
    rows = re.findall(r"^\| ([\d.]+) \| (\d+) \| ([\d.]+) \| ([\d.]+), ([\d.]+) \| ([\d.]+) \|$", TEXT, re.M)
    assert len(rows) == 8
    for length, num_draft, c, q_t, q_d, printed in rows:
        exact = (1 - 0.8**5) / (1 - 0.8) if length == "3.3616" else float(length)
        value = speedup(exact, int(num_draft), float(c), float(q_t), float(q_d))
        decimals = len(printed.split(".")[1])
        assert f"{value:.{decimals}f}" == printed


def loss_of_an_unquantized_draft(alpha: float, num_draft: int, c: float) -> float:
    length = sum(alpha**i for i in range(num_draft + 1))
    return 1 - speedup(length, num_draft, c, 2, 1) / speedup(length, num_draft, c, 2, 2)


def bias_of_2026() -> float:
    return bias_size(INTENDED, PRODUCED)


# Every decimal of the running text. Inputs are chosen for an example or cited with their source beside
# them; the rest is recomputed.
INPUTS = {".6", ".3", ".1", ".09", ".7296", ".5208", ".3545", "3.1"}
INPUTS |= {"0.01", "0.04", "0.99", "10.16", "63.04", "26.80"}
INPUTS |= {"97.5", "0.025"}  # the two sides of 95 %
COMPUTED = {
    "0.994": lambda: {round(power_of(6000, bias_of_2026(), 3, look_levels(LOOKS)[-1]), 3)},
    "0.005": lambda: {round(bias_of_2026(), 3)},
    "0.004": lambda: {round(ALPHA, 6)},
    "0.002": lambda: {round(PARAMETERS_ALPHA, 6)},
    ".4": lambda: {4 / 10, 5 / 12.5},
    "22.2": lambda: {
        round(100 * loss_of_an_unquantized_draft(alpha, num_draft, c), 1)
        for alpha in (0.3, 0.8, 0.95)
        for num_draft, c in ((4, 10), (5, 12.5))
    },
}
FROM_SHARED_DATA = {"8.5", "62.4", "1.1", "1.2", "1.3", "1.8"}


SIX_CURVES = {
    "DeepSeek-V4-Pro MTP",
    "DSV4-0813 DSpark",
    "Kimi-K2.5 EAGLE3",
    "Kimi-K3 DSpark",
    "MiniMax-M3 EAGLE3",
    "Qwen3.5-397B MTP",
}


def prose(text: str) -> str:
    """The document without its examples, tables, arXiv ids and section numbers."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"^\|.*$", "", text, flags=re.M)
    return re.sub(r"arXiv \d{4}\.\d{5}|[Ss]ection \d+(\.\d+)*", "", text)


def decimals(text: str) -> set[str]:
    return set(re.findall(r"\d*\.\d+", prose(text)))


def test_every_decimal_of_the_text_is_accounted_for() -> None:
    assert decimals(TEXT) == INPUTS | COMPUTED.keys() | FROM_SHARED_DATA
    # A new number that nobody computes would be seen.
    assert "2.71" in decimals(TEXT + "about 2.71 times\n")


@pytest.mark.parametrize("printed", COMPUTED)
def test_numbers_of_the_text(printed: str) -> None:
    assert COMPUTED[printed]() == {float(printed)}


def test_one_alpha_from_the_first_position_overstates_published_curves(shared_data: Path) -> None:
    with (shared_data / "oracles" / "inferencex_golden_al.csv").open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["model_draft"] in SIX_CURVES and row["thinking"] != "off"
        ]
    assert len(rows) == 6
    over = [100 * (sum((float(row["K1"]) - 1) ** i for i in range(9)) / float(row["K8"]) - 1) for row in rows]
    assert (f"{min(over):.1f}", f"{max(over):.1f}") == ("8.5", "62.4")


def test_fits_of_the_cost_of_a_round(shared_data: Path) -> None:
    """Least squares on each model's chains of 3 and 5; the suspect rows (speedup over acceptance length)
    and the model they belong to are left out."""
    points: dict[str, list[tuple[int, float]]] = {}
    with (shared_data / "oracles" / "specbundle_rows.csv").open() as file:
        for row in csv.DictReader(file):
            if row["topk"] == "1" and row["steps"] in ("3", "5") and "Scout" not in row["model"]:
                cost = float(row["accept_length"]) / float(row["speedup"])
                points.setdefault(row["model"], []).append((int(row["steps"]), cost))
    at_zero = {}
    for model, pairs in points.items():
        three, five = (sum(d for k, d in pairs if k == at) / sum(k == at for k, _ in pairs) for at in (3, 5))
        at_zero[model] = three - 3 * (five - three) / 2
    dense = {model: a for model, a in at_zero.items() if model.startswith("Llama-3")}
    experts = [a for model, a in at_zero.items() if model not in dense]
    assert (len(dense), len(experts)) == (2, 4)
    assert (f"{min(dense.values()):.1f}", f"{max(dense.values()):.1f}") == ("1.1", "1.2")
    assert (f"{min(experts):.1f}", f"{max(experts):.1f}") == ("1.3", "1.8")
    (llama_8b,) = (a for model, a in dense.items() if "8B" in model)
    assert math.isclose(llama_8b, 1.152, abs_tol=0.005)


def test_links_lead_to_headings() -> None:
    anchors = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (.*)$", TEXT, re.M)
    }
    links = re.findall(r"\]\(#([^)]*)\)", TEXT)
    assert len(links) == 14
    assert set(links) == anchors
