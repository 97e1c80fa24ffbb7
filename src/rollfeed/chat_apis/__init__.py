"""The APIs through which assistants' turns are asked for: requests read, replies, events and errors in their forms."""

from collections.abc import Mapping

from rollfeed.chat_apis.anthropic_messages import AnthropicMessages
from rollfeed.chat_apis.api_error import ApiError, ErrorKind
from rollfeed.chat_apis.asked import Asked, ToolChoice
from rollfeed.chat_apis.chat_api import ChatApi, stream_of
from rollfeed.chat_apis.openai_chat import OpenAIChat
from rollfeed.chat_apis.openai_responses import OpenAIResponses
from rollfeed.chat_apis.said import (
    Finish,
    Said,
    SaidCall,
    TokenLogprob,
    call_openings,
    next_call,
    opens_thought,
    said_of,
    said_so_far,
    token_logprobs,
)

CHAT_APIS: Mapping[str, ChatApi] = {api.path: api for api in (OpenAIChat(), OpenAIResponses(), AnthropicMessages())}
"""All of them, by the path of the endpoint."""

__all__ = [
    "CHAT_APIS",
    "AnthropicMessages",
    "ApiError",
    "Asked",
    "ChatApi",
    "ErrorKind",
    "Finish",
    "OpenAIChat",
    "OpenAIResponses",
    "Said",
    "SaidCall",
    "TokenLogprob",
    "ToolChoice",
    "call_openings",
    "next_call",
    "opens_thought",
    "said_of",
    "said_so_far",
    "stream_of",
    "token_logprobs",
]
