"""Sources of prompts, tokenizers, and what brings pictures into prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rollfeed.types import Group, Message, Picture, PlaceholderRange, Prompt


class PromptPreprocessor(StrEnum):
    """The form that a question in text is given; messages stay as they are. Names as RLVE has them."""

    TINY_ZERO = "TinyZero"
    """Plain text: a dialogue whose assistant thinks, which is begun, and then answers in ``<answer></answer>``."""
    CHAT = "ChatTemplate_NoSystemPrompt"
    r"""One user turn of a chat, and no system prompt but one that the template has; answers are in ``\boxed{}``."""


class AnswerMarker(StrEnum):
    """The marks between which answers are asked for."""

    BOXED = r"\boxed{}"
    TAGS = "<answer></answer>"


class Learner(Protocol):
    """Learns from scored groups; its state is committed with the batch that they went into."""

    def learn(self, group: Group) -> None:
        """Learn from a group whose rollouts have all finished and are scored; by default nothing.

        It is told of each once, filtered out or not, and again only where the group was answered anew: by index, when
        the batch of its step has been cut and before the state is taken that is stored with it.
        """
        del group

    def end_step(self) -> None:
        """Draw conclusions from the groups of a step, all of which it has been told; by default none."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that :meth:`state_dict` returned."""


class PromptSource(Learner, Protocol):
    """A source of prompts. *Extension point*; inherit from it, and the source learns nothing unless it says how.

    A source hands out prompts in an order that depends on its settings and its state only: its position, and what it
    has learned. One that is an async context manager is entered when the run begins, and left when it ends.
    """

    async def draw(self, count: int) -> Sequence[Prompt]:
        """Return the next ``count`` prompts; fewer only when the source has ended.

        Raises:
            SourceFailedError: If it can make no more; what was drawn before is trained on, and the run fails then.
        """


@runtime_checkable
class HasMetrics(Protocol):
    """A source of prompts with figures of its own. *Extension point*, optional."""

    def metrics(self) -> Mapping[str, float]:
        """Return figures by name, when a batch has been cut and was learned from; they are among the batch's."""


class Tokenizer(Protocol):
    """Text to ids and back. Safe to call from several threads at once."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response."""

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` can be used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]:
        """Return token ids. Rendered chat text takes ``add_special_tokens=False``."""

    def encode_with_offsets(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return token ids ``(P,)`` of rendered text, and where each begins and ends in it, in characters ``(P, 2)``.

        Raises:
            ConfigError: If the tokenizer cannot tell.
        """

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        """Return text; bytes that are not complete UTF-8 become U+FFFD."""

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        num_images: int = 0,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the chat template's text, the assistant's opening included unless it is not wanted.

        Args:
            messages: As people have them: contents as text or parts, arguments of calls as objects or JSON text.
            tools: Definitions of tools, where there are any.
            template_kwargs: Variables of the template, before those that the tokenizer was made with.
            num_images: Images that come with the messages; parts of other kinds than text are refused beyond them.
            add_generation_prompt: Whether the text ends with the opening of an assistant's turn.

        Raises:
            ConfigError: If there is no chat template, or it refuses the messages.
        """


class PictureStore(Protocol):
    """Keeps the bytes of pictures, each once, under their hash. Safe to call from several threads at once."""

    def put(self, picture: Picture, content: bytes, *, origin: Path | None = None) -> Picture:
        """Keep the bytes of a picture, unless they are there; return the picture.

        With ``origin``, a file that has just these bytes, they may be read from there.
        """

    def has(self, picture: Picture) -> bool:
        """Whether the bytes of a picture can be read."""

    def read(self, picture: Picture) -> bytes:
        """Return the bytes of a picture.

        Raises:
            RunFailedError: If they are not there any more, or are others.
        """


class PictureLoading(Protocol):
    """Loads pictures and videos as people give them, within limits, and keeps their bytes."""

    def load(self, given: Any, *, folder: Path | None = None) -> Picture:
        """Return a picture.

        Args:
            given: A path, a URL, a data URI, bytes, an object of PIL, or a mapping with one of these as ``path``,
                ``url`` or ``bytes``, as data sets of Hugging Face and messages have it.
            folder: Where paths are relative to; None takes no paths, for what comes from a policy or a client.

        Raises:
            ValueError: If it cannot be read, or is of a kind or size that is not taken; says what is wrong.
        """

    def load_video(self, given: Any, *, folder: Path | None = None) -> tuple[Picture, ...]:
        """Return frames of a video: a list of pictures, a folder of them, an animation or a file; raises as `load`."""


class PictureProcessor(Protocol):
    """Puts pictures into the tokens of a model, and makes the arrays that its vision tower takes.

    A prompt's text has one placeholder a picture; a model's tokens have as many as its tower makes of the picture.
    Safe to call from several threads at once.
    """

    store: PictureStore

    @property
    def mark(self) -> str:
        """The text that stands for a picture where there is no chat template."""

    def expand(
        self, token_ids: NDArray[np.int32], pictures: Sequence[Picture], *, is_prompt: bool = True
    ) -> NDArray[np.int32]:
        """Return tokens in which each placeholder has become the tokens of its picture. ``(P,)``.

        Unless it is a prompt, placeholders behind those of the pictures are tokens that a policy has sampled.

        Raises:
            ValueError: If there are more pictures than placeholders, or fewer.
        """

    def collapse(self, token_ids: NDArray[np.int32], pictures: Sequence[Picture]) -> NDArray[np.int32]:
        """Return what :meth:`expand` was given, for servers that expand by themselves; raises as :meth:`locate`."""

    def locate(self, token_ids: NDArray[np.int32], pictures: Sequence[Picture]) -> tuple[PlaceholderRange, ...]:
        """Return where each picture is among expanded tokens ``(P,)``.

        Raises:
            ValueError: If they have no place for one, or a further place behind all. A single placeholder there is a
                token that a policy has sampled.
        """

    def data_uri(self, picture: Picture) -> str:
        """Return a picture as servers are sent it. Raises RunFailedError if its bytes are not there."""

    def noise(self, picture: Picture) -> str:
        """Return a picture of noise of the same size, to ask whether a server looks at what it is sent."""

    def pixels(self, pictures: Sequence[Picture]) -> Mapping[str, NDArray[Any]]:
        """Return what the vision tower takes of pictures, by the names of the model's parameters; not to be written to.

        Shapes are those of the model's processor in transformers.

        Raises:
            RunFailedError: If the bytes of one are not there, or cannot be decoded.
        """


class PictureInput(NamedTuple):
    """The two ends of a picture's way into a prompt."""

    loader: PictureLoading
    pictures: PictureProcessor | None
    """None where the model takes none."""


class Rendered(NamedTuple):
    """Fields of a :class:`~rollfeed.types.Prompt` that has been made ready."""

    text: str
    token_ids: NDArray[np.int32]
    """``(P,)``."""
    messages: tuple[Message, ...] | None
    """None for raw text."""
    tools: tuple[Mapping[str, Any], ...] | None
    """Those that it may call."""
    images: tuple[Picture, ...] = ()
    """In the order of their places."""


class PromptRenderer(Protocol):
    """Makes a prompt ready: renders it, tokenises it once, and holds the length limit."""

    loader: PictureLoading | None
    """Loads pictures; None where there are none."""

    def render(
        self,
        content: str | Sequence[Message],
        *,
        apply_chat_template: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Picture] = (),
        videos: Sequence[Sequence[Picture]] = (),
        folder: Path | None = None,
    ) -> Rendered:
        """Return the text, its tokens, and what they were made of; without tools of its own, it has those of the run.

        Args:
            content: A question, or messages; parts of these may bring pictures themselves.
            apply_chat_template: Whether it goes through the chat template.
            tools: Those that it may call.
            images: For the places ``<image>`` and the parts that bring none.
            videos: Frames of each, for the places ``<video>``.
            folder: Where paths in parts are relative to; None takes no paths.

        Raises:
            ConfigError: If it cannot be rendered.
        """

    def check_template(self) -> None:
        """Return when there is a chat template. Raises ConfigError if there is none."""

    def fits(self, token_ids: NDArray[np.int32]) -> bool:
        """Whether the prompt is within ``rollout_max_prompt_len`` tokens."""
