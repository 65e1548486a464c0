"""docs/refused.md is what tests/refusals.py raises."""

import pathlib

import pytest
from refusals import CASES, HEAD, Case, entry, message, normalized

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "refused.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the cases write; the models in it are made once."""
    return tmp_path_factory.mktemp("refusals")


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases], ids=lambda case: case.what)
def test_each_case_raises_what_the_page_says(case):
    assert entry(case) in PAGE.read_text(encoding="utf-8"), "python tests/refusals.py > docs/refused.md"


def test_the_page_has_these_cases_and_no_others():
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(HEAD)
    headings = [line for line in page.splitlines() if line.startswith(("## ", "**"))]
    assert headings == [
        line for section, cases in CASES.items() for line in (f"## {section}", *(f"**{case.what}**" for case in cases))
    ]


@pytest.mark.parametrize("code", ["weight + 1", "qsub quantize --help"])
def test_what_is_not_refused_is_no_case(code):
    with pytest.raises(AssertionError, match="raises nothing|succeeds"):
        message(Case("Nothing", code))


def test_paths_and_addresses_are_left_out(folder):
    assert normalized(f"{folder}/w.safetensors at 0x7f00ff00ff00") == "w.safetensors at 0x..."
