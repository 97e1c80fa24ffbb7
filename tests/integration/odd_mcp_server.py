"""An MCP server, spoken to over its input and output, whose tools do what servers should not."""

import json
import sys
import time

NAMES = ("fine", "die", "late", "flood", "image", "refuse", "nonsense")
SCHEMA = {"type": "object", "properties": {}}


def answer(request: dict) -> dict | None:
    match request["method"]:
        case "initialize":
            version = request["params"]["protocolVersion"]
            return {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "odd", "version": "1"},
            }
        case "tools/list":
            tools = [{"name": name, "description": name, "inputSchema": SCHEMA} for name in NAMES]
            tools[0]["annotations"] = {"readOnlyHint": True}
            return {"tools": tools}
        case "tools/call":
            return call(request["params"]["name"])
    return None


def call(name: str) -> dict:
    match name:
        case "die":
            sys.exit(1)
        case "late":
            time.sleep(0.5)
        case "flood":
            return {"content": [{"type": "text", "text": "a" * 5_000_000}]}
        case "image":
            return {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}
        case "refuse":
            return {"content": [{"type": "text", "text": "not today"}], "isError": True}
        case "nonsense":
            print("this is no JSON", flush=True)
    return {"content": [{"type": "text", "text": f"{name} it is"}]}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result = answer(asked)
    reply = {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **reply}), flush=True)
