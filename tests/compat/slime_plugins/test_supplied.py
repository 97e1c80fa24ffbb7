import importlib
import re
from pathlib import Path

import pytest

from rollfeed.compat.slime_plugins.supplied import PACKAGES, SUPPLIED, NotSuppliedError, names_of, supply_names

DOCS = Path(__file__).parents[3] / "docs" / "slime-plugins.md"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_supplied_name_is_there_under_both_packages(package: str) -> None:
    supply_names()
    for module in SUPPLIED:
        found = importlib.import_module(f"{package}.{module}")
        for name in names_of(module):
            assert getattr(found, name) is not None


def test_the_documentation_has_the_names_that_are_supplied() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (`.*`) \|$", DOCS.read_text(), re.MULTILINE)
    told = {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows if module in SUPPLIED}
    assert told == {module: set(names_of(module)) for module in SUPPLIED}


def test_a_module_that_is_not_supplied_is_named() -> None:
    supply_names()
    with pytest.raises(NotSuppliedError, match=r"slime\.utils\.accelerator is not supplied .*utils\.types"):
        importlib.import_module("slime.utils.accelerator")


def test_a_name_that_is_not_supplied_is_named() -> None:
    supply_names()
    with pytest.raises(NotSuppliedError, match=r"slime\.utils\.types\.ParamInfo is not supplied .* has Sample"):
        from slime.utils.types import ParamInfo  # noqa: F401


def test_an_installed_slime_goes_first(tmp_path: Path) -> None:
    """In another process: what is imported here stays imported."""
    import subprocess
    import sys

    package = tmp_path / "slime" / "utils"
    package.mkdir(parents=True)
    (tmp_path / "slime" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "types.py").write_text("class Sample: marker = 'real'\n")
    code = (
        "from rollfeed.compat.slime_plugins.supplied import sample_class\n"
        "print(sample_class().marker)\n"
        "import slime.utils.misc\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3] / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "real\n"
    assert "ModuleNotFoundError: No module named 'slime.utils.misc'" in done.stderr


def test_a_run_without_plug_ins_of_slime_starts_without_what_these_need() -> None:
    """In another process: what is imported here stays imported."""
    import subprocess
    import sys

    code = "import sys, rollfeed.app; print([name for name in sys.modules if 'slime_plugins.names' in name])"
    path = {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
