"""Shell scripts, read and not run."""

from rollfeed.compat.convert.shell_scripts.script import Script, Word, read_script

__all__ = ["Script", "Word", "read_script"]
