"""Keys of servers: settings name an environment variable with one, and the key itself is stored and shown nowhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from rollfeed.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_HIDDEN = b"<key>"
REFUSING_STATUSES = (401, 403)
"""What servers answer where a key is missing or wrong: another try cannot help."""


def _checked_name(name: str) -> str:
    if _VARIABLE.fullmatch(name) is None:
        # Not repeated in the message: it may be the key.
        raise ValueError("not the name of an environment variable: put the key into one, and its name here")
    return name


KeyVariable: TypeAlias = Annotated[str, AfterValidator(_checked_name)]
"""Name of an environment variable that holds a key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The key of one server, or that there is none."""

    setting: str
    """The setting that names the variable."""
    variable: str | None = None
    value: str | None = field(default=None, repr=False)

    @classmethod
    def read(cls, variable: str | None, *, setting: str) -> ApiKey:
        """Return the key in an environment variable; without one, no key.

        Raises:
            ConfigError: If the variable has no key in it.
        """
        if variable is None:
            return cls(setting)
        key = os.environ.get(variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"{setting} = {variable!r}: the environment has no key in it; set it, or remove the setting"
            )
        return cls(setting, variable, key)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of every request."""
        return {} if self.value is None else {"Authorization": f"Bearer {self.value}"}

    def refusal(self, status: int) -> str:
        """Return what to tell about a status of :data:`REFUSING_STATUSES`."""
        if self.variable is None:
            return f"HTTP {status}: name the variable that holds the key as {self.setting}"
        return f"HTTP {status}: the key in ${self.variable} was refused; {self.setting} names the variable"

    def hidden(self, content: bytes) -> bytes:
        """Return what a server said, without the key, which it may repeat."""
        return content if self.value is None else content.replace(self.value.encode(), _HIDDEN)
