"""Conversations of several turns: what follows a sampled turn, which tokens are learned, and what a template keeps."""

from rollfeed.conversations.answered import AnsweredPrompt, answer_tokens, answered_prompt
from rollfeed.conversations.arguments import fit_arguments
from rollfeed.conversations.audit import audit_template
from rollfeed.conversations.chat import Chat, Span
from rollfeed.conversations.conversation import Conversation
from rollfeed.conversations.dialogue import Dialogue, FollowUp, TurnPlace
from rollfeed.conversations.learned import LossMaskType, conversation_tokens
from rollfeed.conversations.syntax import CallSyntax, call_syntax
from rollfeed.conversations.text_pieces import TextPieces
from rollfeed.conversations.written_calls import Call, SaidTurn, UnreadableCall, names_in, read_json, read_turn

__all__ = [
    "AnsweredPrompt",
    "Call",
    "CallSyntax",
    "Chat",
    "Conversation",
    "Dialogue",
    "FollowUp",
    "LossMaskType",
    "SaidTurn",
    "Span",
    "TextPieces",
    "TurnPlace",
    "UnreadableCall",
    "answer_tokens",
    "answered_prompt",
    "audit_template",
    "call_syntax",
    "conversation_tokens",
    "fit_arguments",
    "names_in",
    "read_json",
    "read_turn",
]
