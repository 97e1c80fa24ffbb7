"""Keys of settings, as pages and tables name them."""

from rollfeed.config import Settings
from rollfeed.config.section import Section, section_in


def is_setting(key: str) -> bool:
    """Whether there is a setting of a dotted key."""
    section: type[Section] | None = Settings
    for part in key.split("."):
        if section is None or part not in section.model_fields:
            return False
        section = section_in(section.model_fields[part].annotation)
    return True
