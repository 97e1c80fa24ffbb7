"""A small MCP server: facts about a few countries, over standard input and output, or over HTTP on a port.

python server.py            as a command of [[tools.mcp]]
python server.py --port 0   prints its URL
"""

import argparse
import socket

import uvicorn
from mcp.server import MCPServer
from mcp_types import ToolAnnotations

CAPITALS = {"france": "Paris", "japan": "Tokyo", "peru": "Lima", "kenya": "Nairobi", "norway": "Oslo"}
MILLIONS = {"france": 68, "japan": 124, "peru": 34, "kenya": 55, "norway": 6}

server = MCPServer("countries", log_level="WARNING")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def capital(country: str) -> str:
    """Return the capital of a country."""
    return CAPITALS[country.lower()]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def population(country: str) -> int:
    """Return how many million people live in a country."""
    return MILLIONS[country.lower()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int)
    port = parser.parse_args().port
    if port is None:
        server.run("stdio")
    else:
        listener = socket.create_server(("127.0.0.1", port))
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
        uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="warning")).run(sockets=[listener])
