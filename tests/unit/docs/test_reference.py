"""The documentation agrees with the source, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.reference import PAGES

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_generated_page_is_current(name: str):
    page = (ROOT / "docs" / "reference" / name).read_text()
    assert page == PAGES[name](), "run: python -m pipeline.reference"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(document: Path):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target
