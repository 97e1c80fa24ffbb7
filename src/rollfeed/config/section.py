"""The base of every settings section: frozen, strict, nothing unknown, and what may change when a run is resumed."""

from __future__ import annotations

from enum import Enum
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")


class Resume(Enum):
    """Whether a setting may be another when a run is resumed; a reason, as what follows its name, says why not."""

    FREE = "free"
    """It decides nothing in the run but how it is computed, watched and met when something fails."""
    FREE_UNLESS_DETERMINISTIC = "free unless deterministic"
    """It decides the rounding of what is sampled: fixed where ``rollout.deterministic`` promises the bytes."""
    ON_PURPOSE = "on purpose"
    """It decides how what is trained goes on, and is often changed on the way: on the command line, so that no edited
    file changes it unnoticed.
    """
    RANDOMNESS = "decides all that is random"
    MODEL = "decides which model samples and learns"
    PROMPTS = "decides which prompts come"
    BATCHES = "decides which answers are in a batch"
    ANSWERS = "decides how prompts are answered"
    REWARDS = "decides what answers are worth"
    WARM_UP = "decides what came before the first batch"
    SCHEDULE = "decides how many updates the schedule of the learning rate has"


Free: TypeAlias = Annotated[T, Resume.FREE]
FreeUnlessDeterministic: TypeAlias = Annotated[T, Resume.FREE_UNLESS_DETERMINISTIC]
OnPurpose: TypeAlias = Annotated[T, Resume.ON_PURPOSE]


class Section(BaseModel):
    """One table of a settings file. A field's documentation is the text below it.

    ``class Name(Section, resume=...)`` says what its keys may be when a run is resumed; a field whose type is
    annotated with a :class:`Resume` says it for itself, and a section without it is as the field that holds it.
    """

    resume: ClassVar[Resume | None] = None
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
    )

    def __init_subclass__(cls, *, resume: Resume | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.resume = resume

    def changed_values(self) -> dict[str, Any]:
        """Return the keys that are not at their defaults, with their values."""
        fields = type(self).model_fields.items()
        values = {name: (getattr(self, name), info.get_default(call_default_factory=True)) for name, info in fields}
        return {name: value for name, (value, default) in values.items() if value != default}

    @classmethod
    def resume_of(cls, key: str) -> Resume | None:
        """Return what a dotted key may be when a run is resumed; None for one that is not known."""
        name, _, rest = key.partition(".")
        info = cls.model_fields.get(name)
        if info is None:
            return cls.resume
        inner = section_in(info.annotation) if rest else None
        if get_origin(info.annotation) is dict:
            rest = rest.partition(".")[2]  # what follows the name of the table
        own = next((each for each in info.metadata if isinstance(each, Resume)), None)
        return (inner.resume_of(rest) if inner else None) or own or cls.resume


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section class inside ``X``, ``X | None``, ``tuple[X, ...]`` or ``dict[str, X]``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (tuple, dict, Union, UnionType):
        return next((found for inner in get_args(annotation) if (found := section_in(inner))), None)
    return None
