"""Conversations of several turns: what follows a sampled turn, which tokens are learned, and what a template keeps."""

from rollfeed.conversations.answered import AnsweredPrompt, answer_tokens, answered_prompt
from rollfeed.conversations.audit import TemplateAudit, audit_template
from rollfeed.conversations.chat import Chat, Span, Suffix
from rollfeed.conversations.conversation import Conversation, FollowUp
from rollfeed.conversations.learned import LossMaskType, conversation_tokens

__all__ = [
    "AnsweredPrompt",
    "Chat",
    "Conversation",
    "FollowUp",
    "LossMaskType",
    "Span",
    "Suffix",
    "TemplateAudit",
    "answer_tokens",
    "answered_prompt",
    "audit_template",
    "conversation_tokens",
]
