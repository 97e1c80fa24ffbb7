"""Finishes the virtual environments of the real servers: ``python environments.py vllm|sglang VENV``.

Packages are looked for by name and version that are not needed on a CPU, or go by another name there; a few
lines of metadata answer that.
"""

from __future__ import annotations

import sys
from pathlib import Path

CLAIMED = {
    # `vllm serve` asks for the version of "vllm", whatever its wheel is called, and knows by it that there is no GPU.
    "vllm": {"vllm": "0.32.0+cpu"},
    "sglang": {"sglang-kernel": "0.4.10", "torchvision": "0.26.0"},
}


def claim(site_packages: Path, name: str, version: str) -> None:
    """Have a distribution of this name and version found."""
    folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def main() -> None:
    """Claim what the server asks for."""
    server, environment = sys.argv[1:]
    (site_packages,) = Path(environment).glob("lib/python3*/site-packages")
    for name, version in CLAIMED[server].items():
        claim(site_packages, name, version)


if __name__ == "__main__":
    main()
