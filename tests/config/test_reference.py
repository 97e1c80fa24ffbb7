from pathlib import Path

from docs.pages.settings import descriptions, render_reference

from rollfeed.config.section import section_in
from rollfeed.config.settings import Settings, flatten


def test_the_settings_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == render_reference(), (
        "run: python docs/pages/settings.py > docs/settings.md"
    )


def test_every_setting_is_described() -> None:
    page = render_reference()
    for name, section in Settings.model_fields.items():
        if name == "seed":
            continue
        found = section_in(section.annotation)
        assert found is not None
        described = descriptions(found)
        for key in found.model_fields:
            assert described.get(key), f"{name}.{key} has no description"
            assert f"`{name}.{key}`" in page


def test_every_number_is_bounded() -> None:
    """A number without bounds on both sides is a mistake that only shows when the run has started."""
    defaults = flatten(Settings.model_construct().model_dump())
    assert defaults
    for name, section in Settings.model_fields.items():
        found = section_in(section.annotation)
        fields = {name: section} if found is None else found.model_fields
        for key, info in fields.items():
            if any(kind in str(info.annotation) for kind in ("int", "float")) and "tuple" not in str(info.annotation):
                lower = any(hasattr(c, "ge") or hasattr(c, "gt") for c in info.metadata)
                upper = any(hasattr(c, "le") or hasattr(c, "lt") for c in info.metadata)
                assert lower, f"{name}.{key} has no lower bound"
                assert upper, f"{name}.{key} has no upper bound"
