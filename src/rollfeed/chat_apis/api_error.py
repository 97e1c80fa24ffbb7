"""A request that is refused, or that failed, before an API gives it its form."""

from __future__ import annotations

from enum import StrEnum


class ErrorKind(StrEnum):
    """The kinds of errors that all APIs tell apart."""

    INVALID_REQUEST = "invalid_request"
    AUTHENTICATION = "authentication"
    PERMISSION = "permission"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    RATE_LIMIT = "rate_limit"
    OVERLOADED = "overloaded"
    API_ERROR = "api_error"


class ApiError(Exception):
    """An error that a client is told; each API says status and form (:meth:`~rollfeed.chat_apis.ChatApi.error`).

    Args:
        message: One line.
        kind: Decides status and type.
        param: The field of the body that it is about, such as ``messages[2].content``.
        code: What programs recognise it by, such as ``context_length_exceeded``.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: ErrorKind = ErrorKind.INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code

    @classmethod
    def too_long(cls, prompt_tokens: int, context_length: int) -> ApiError:
        """Return the error of a prompt without room for an answer, worded as agents look for it."""
        return cls(
            f"prompt is too long: {prompt_tokens} tokens > {context_length} maximum: this model's maximum context "
            f"length is {context_length} tokens",
            param="messages",
            code="context_length_exceeded",
        )

    @classmethod
    def unknown_model(cls, name: str, served: str) -> ApiError:
        """Return the error of a model that is not served."""
        return cls(
            f"the model {name:.200} is not served here: ask for {served}",
            kind=ErrorKind.NOT_FOUND,
            param="model",
            code="model_not_found",
        )
