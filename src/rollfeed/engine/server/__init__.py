"""The embedded engine as a server that speaks SGLang's protocol, and OpenAI's."""

from rollfeed.engine.server.application import serve
from rollfeed.engine.server.service import ServedModel, Service

__all__ = ["ServedModel", "Service", "serve"]
