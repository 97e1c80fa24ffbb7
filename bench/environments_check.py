"""Write what `rollfeed env check` says of a package's environments as a table: `bench/environments_rlve.json`, and
with a Python that has reasoning-gym `bench/environments_reasoning_gym.json`.

    nice -n 10 python bench/environments_check.py 'rlve/*' --output bench/environments_rlve.json
    nice -n 10 .venv-reasoning-gym/bin/python bench/environments_check.py 'rg/*' \
        --output bench/environments_reasoning_gym.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollfeed.benchmarks.machine import machine

OPTIONS = ["--problems", "10", "--timeout", "20", "--workers", "1", "--quiet", "--json"]


def row(report: dict[str, Any]) -> dict[str, Any]:
    """Return an environment's outcome, the levels that passed, and why others did not."""
    levels = report["levels"]
    found = {
        "id": report["id"],
        "outcome": report["outcome"],
        "passed": [level["level"] for level in levels if level["outcome"] == "passed"],
    }
    if not_passed := [
        {"level": level["level"], "outcome": level["outcome"], "reasons": level["reasons"]}
        for level in levels
        if level["outcome"] != "passed"
    ]:
        found["not_passed"] = not_passed
    return found | ({"error": report["error"]} if report["error"] else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    command = ["rollfeed", "env", "check", arguments.ids, *OPTIONS]
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    rows = [row(each) for each in report["environments"]]
    first = sum(bool(each["levels"]) and each["levels"][0]["outcome"] == "passed" for each in report["environments"])
    head = {
        "command": " ".join(command),
        "seed": 0,
        "machine": machine(),
        "environments": len(rows),
        "passed_at_first_level": first,
        "failed": report["failed"],
        "quarantined_at_a_level": sum("quarantined" in str(each.get("not_passed")) for each in rows),
    }
    lines = ",\n".join(json.dumps(each) for each in rows)
    text = json.dumps(head, indent=1).removesuffix("\n}")
    arguments.output.write_text(f'{text},\n "rows": [\n{lines}\n ]\n}}\n')
    print(f"{first} of {len(rows)} pass at their first level")


if __name__ == "__main__":
    main()
