"""A model's chat template: what it wants of messages, and its text.

Templates differ in what they take: a content as one text or as a list of parts, arguments of a tool's call as an object
or as JSON text. What one takes is found by trying: the conversation that is to be rendered is rendered with marks in
those places, once for each kind of message, and what becomes of the marks is looked at. So a template is judged by what
it does, in conversations that it accepts.

Invariant: rendering depends on the messages, the tools, the arguments and the date that was given, not on the clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from rollfeed.errors import CheckpointError, ConfigError
from rollfeed.prompts.messages import (
    arguments_as_object,
    arguments_as_text,
    check_parts,
    read_message,
    read_tools,
    with_arguments,
)
from rollfeed.types import Message
from rollfeed.types.text import text_of, well_formed

NO_TEMPLATE = "the model has no chat template: set apply_chat_template = false, or use a chat model"

_DATE = "strftime_now"
_OURS = ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "conversation", _DATE)
"""Arguments that are not the user's to set."""
_PRINTED, _DUMPED = "rollfeedmark", "rollfeedkey"
_RENDERING_DATES = threading.Lock()

_Messages = list[dict[str, Any]]
_Render = Callable[[_Messages], str]
_Kind = tuple[str, bool, bool]
"""Role, whether it is the first message, whether there are tools."""


class ChatTemplate:
    """Renders conversations with a transformers tokenizer's template; one thread at a time.

    ``arguments`` are further variables of the template, such as ``enable_thinking``; ``date`` is told to one that asks
    for it.

    Raises:
        ConfigError: If an argument is one that rendering sets itself.
        CheckpointError: If a template is not one.
    """

    def __init__(self, tokenizer: Any, *, arguments: Mapping[str, Any], date: datetime) -> None:
        check_arguments(arguments)
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        self.date = date
        texts = tokenizer.chat_template or ()
        self._texts = tuple(texts.values()) if isinstance(texts, Mapping) else (texts,) if texts else ()
        compile_template = getattr(tokenizer, "compile", None)
        self._compiled = [_compiled(text, compile_template) for text in self._texts]
        is_one = isinstance(tokenizer.chat_template, str)
        self._specials = {**tokenizer.special_tokens_map, "documents": None} if is_one else None
        """Variables that every template has besides; None where it is to be chosen among several."""
        self._takes_text: dict[_Kind, bool] = {}
        self._takes_parts: dict[_Kind, _Parts] = {}
        self._takes_argument_objects: dict[bool, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._texts)

    @property
    def asks_for_the_date(self) -> bool:
        """Whether what is rendered depends on the date."""
        return any(_DATE in text for text in self._texts)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any] | None,
        num_images: int,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text, the assistant's opening included unless it is not wanted.

        Raises:
            ConfigError: If there is no template, the messages are none, or it refuses them.
        """
        if not self:
            raise ConfigError(NO_TEMPLATE)
        check_arguments(arguments or {})
        try:
            read = [read_message(message, f"message {index}") for index, message in enumerate(messages)]
            check_parts(read, num_images=num_images)
            schemas = read_tools(tools) if tools else None
        except ValueError as error:
            raise ConfigError(str(error)) from None
        render = partial(
            self._apply,
            schemas,
            {**self._arguments, **(arguments or {}), "add_generation_prompt": add_generation_prompt},
        )
        try:
            return well_formed(render(self._fitted(read, render, has_tools=schemas is not None)))
        except ConfigError:
            raise
        except TemplateError as error:
            raise ConfigError(f"the model's chat template refuses the messages: {error}") from error
        except Exception as error:  # a template is a program of somebody else's
            cause = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the model's chat template fails on the messages: {cause}") from error

    def _apply(self, tools: Sequence[Any] | None, arguments: Mapping[str, Any], messages: _Messages) -> str:
        def rendered() -> str:
            if self._specials is not None and _are_texts(messages):
                # As transformers does it, which takes longer to see that texts are texts than to render them.
                return str(self._compiled[0].render(messages=messages, tools=tools, **{**self._specials, **arguments}))
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **arguments))

        if not self.asks_for_the_date:
            return rendered()
        # transformers keeps a compiled template for all tokenizers that have the same one.
        with _RENDERING_DATES:
            for template in self._compiled:
                template.environment.globals[_DATE] = self.date.strftime
            return rendered()

    def _fitted(self, messages: _Messages, render: _Render, *, has_tools: bool) -> _Messages:
        """Return the messages in the form that the template takes."""
        kinds = [(message["role"], index == 0, has_tools) for index, message in enumerate(messages)]
        if any("tool_calls" in message or "function_call" in message for message in messages):
            messages = self._with_fitted_arguments(messages, render, has_tools=has_tools)
        self._try_contents(messages, kinds, render)
        return [
            {**message, "content": self._content(message["content"], kind)}
            for message, kind in zip(messages, kinds, strict=True)
        ]

    def _with_fitted_arguments(self, messages: _Messages, render: _Render, *, has_tools: bool) -> _Messages:
        if has_tools not in self._takes_argument_objects:
            for form in (text_of, _one_part):
                probe = [{**message, "content": form(message["content"])} for message in messages]
                takes_objects = _takes_argument_objects(probe, render)
                if takes_objects is not None:
                    self._takes_argument_objects[has_tools] = takes_objects
                    break
        takes_objects = self._takes_argument_objects.get(has_tools, True)
        return [(arguments_as_object if takes_objects else arguments_as_text)(message) for message in messages]

    def _content(self, content: Any, kind: _Kind) -> Any:
        takes_text, takes_parts = self._takes_text.get(kind, True), self._takes_parts.get(kind, _Parts.NONE)
        if isinstance(content, str):
            return content if takes_text or takes_parts is _Parts.NONE else _one_part(content)
        if takes_parts is _Parts.ALL:
            return content
        if any(part["type"] != "text" for part in content):
            raise ConfigError(f"the model's chat template takes no parts in messages of the {kind[0]}, so no images")
        return text_of(content) if takes_text or takes_parts is _Parts.NONE else _one_part(content)

    def _try_contents(self, messages: _Messages, kinds: Sequence[_Kind], render: _Render) -> None:
        """Find out in which forms contents of these kinds are taken, where that is not known."""
        if all(
            kind in (self._takes_text if isinstance(message["content"], str) else self._takes_parts)
            for message, kind in zip(messages, kinds, strict=True)
            if message["content"]  # beside calls it is empty, and often not rendered
        ):
            return
        marks = [f"{_PRINTED}{index}x" for index in range(len(messages))]
        texts = _try(render, [{**each, "content": mark} for each, mark in zip(messages, marks, strict=True)])
        parts = None
        if any(not isinstance(each["content"], str) for each in messages) or not all(mark in texts for mark in marks):
            listed = [
                [{"type": "text", "text": mark + half, _DUMPED: _DUMPED + mark} for half in ("first", "second")]
                for mark in marks
            ]
            parts = _try(render, [{**each, "content": part} for each, part in zip(messages, listed, strict=True)])
        for kind, mark in zip(kinds, marks, strict=True):
            takes_text = mark in texts
            takes_parts = _Parts.of(parts or "", mark)
            if takes_text or takes_parts is not _Parts.NONE:
                self._takes_text.setdefault(kind, takes_text)
                if parts is not None:
                    self._takes_parts.setdefault(kind, takes_parts)


class _Parts(Enum):
    """The parts of a content that a template renders."""

    NONE = "none"
    FIRST = "first"
    """What is behind it would be lost."""
    ALL = "all"

    @classmethod
    def of(cls, text: str, mark: str) -> _Parts:
        """Return how many of two marked parts are in a text, as parts and not as they are written in Python or JSON."""
        if mark + "first" not in text or _DUMPED + mark in text:
            return cls.NONE
        return cls.ALL if mark + "second" in text else cls.FIRST


def _are_texts(messages: _Messages) -> bool:
    """Whether there are messages, of which all is text that a template gets under the name that it has."""
    named = ("reasoning_content", "reasoning", "thinking")
    return bool(messages) and all(
        type(value) is str and name not in named for message in messages for name, value in message.items()
    )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse variables of a template that rendering sets itself. Raises ConfigError with the first of them."""
    for name in _OURS:
        if name in arguments:
            raise ConfigError(f"chat_template_kwargs: {name} is not to be set; leave it out")


def _takes_argument_objects(messages: _Messages, render: _Render) -> bool | None:
    """Tell whether arguments of calls are taken as objects; None where they are not rendered at all."""
    marked = {_DUMPED: _PRINTED}
    objects = [with_arguments(message, lambda _: marked) for message in messages]
    text = _try(render, objects)
    if _PRINTED in text and str(marked) not in text:
        return True
    return False if _PRINTED in _try(render, [arguments_as_text(message) for message in objects]) else None


def _one_part(content: Any) -> Any:
    return [{"type": "text", "text": text_of(content)}]


def _try(render: _Render, messages: _Messages) -> str:
    """Return the text, or none where the template refuses."""
    try:
        return render(messages)
    except Exception:  # a template is a program of somebody else's
        return ""


def check_template(text: str) -> None:
    """Raise CheckpointError if a text is no chat template; says where."""
    _compiled(text)


def _compiled(text: str, compile_template: Callable[[str], Any] | None = None) -> Any:
    if not isinstance(text, str):
        raise CheckpointError(
            f"the model's chat template is {text!r:.40}, not a text; mend it in the checkpoint's folder"
        )
    try:
        return (compile_template or _compiled_by_transformers)(text)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"the model's chat template cannot be read: {error.message} (line {error.lineno}); mend it in the "
            "checkpoint's folder"
        ) from error


def _compiled_by_transformers(text: str) -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(text)
