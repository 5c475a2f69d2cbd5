"""The run that the unit tests of the page show."""

from tests.unit.ui.conftest import run, scene

__all__ = ["run", "scene"]
