"""``rollfeed completion``: a script by which a shell completes commands, options and keys of settings.

All is in the script, so that a key press starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote

from rollfeed.cli.arguments import Parsers, add_command
from rollfeed.config import Settings
from rollfeed.config.load import keys_of

_EPILOG = """\
examples:
  mkdir -p ~/.local/share/bash-completion/completions
  rollfeed completion bash > ~/.local/share/bash-completion/completions/rollfeed
  rollfeed completion zsh > ~/.rollfeed.zsh; echo 'source ~/.rollfeed.zsh' >> ~/.zshrc      behind its compinit
  rollfeed completion fish > ~/.config/fish/completions/rollfeed.fish
"""
_BASH = """\
_rollfeed() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" at=rollfeed words="" options="" each
  for each in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
    case "$at $each" in {paths}) at="$at $each";; esac
  done
  case "$at" in
{cases}
  esac
  [[ $word == -* ]] && words="$options"
  if [[ $before == --set ]]; then
    words={keys}
    compopt -o nospace 2>/dev/null
  elif [[ $before == -* && $word != -* ]]; then
    words=""
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _rollfeed rollfeed
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def register(commands: Parsers) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "completion", run, description="Print a completion script.", epilog=_EPILOG)
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="whose script")


def run(arguments: argparse.Namespace) -> int:
    """Print the script of a shell."""
    levels = list(_levels())
    keys = [f"{key}=" for key in keys_of(Settings)]
    if arguments.shell == "fish":
        print("\n".join(_fish(levels, keys)))
    else:
        print(f"{_ZSH if arguments.shell == 'zsh' else ''}{_bash(levels, keys)}", end="")
    return 0


@dataclass(frozen=True, slots=True)
class _Level:
    """The program, a command or an action, with what may follow it."""

    path: tuple[str, ...]
    options: dict[str, str]
    """By name, with what their help says."""
    words: dict[str, str]
    """Commands, actions and values, likewise."""


def _levels() -> Iterator[_Level]:
    from rollfeed.cli.main import build_parser  # which names this module

    top = _level((), build_parser(""))
    yield top
    for name in top.words:
        yield from _below((name,), _actions(build_parser(name))[name])


def _below(path: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[_Level]:
    yield _level(path, parser)
    for name, action in _actions(parser).items():
        yield from _below((*path, name), action)


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: each for action in found for name, each in action.choices.items()}


def _level(path: tuple[str, ...], parser: argparse.ArgumentParser) -> _Level:
    options, words = dict[str, str](), dict[str, str]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words |= {name: "" for name in action.choices}
            words |= {each.dest: each.help or "" for each in action._choices_actions}
        elif action.option_strings:
            options[action.option_strings[-1]] = (action.help or "").replace("%%", "%")
        else:
            words |= {str(choice): "" for choice in action.choices or ()}
    return _Level(path, options, words)


def _bash(levels: list[_Level], keys: list[str]) -> str:
    names = [(level, quote(" ".join(("rollfeed", *level.path)))) for level in levels]
    cases = [
        f"    {name}) words={quote(' '.join(level.words))}; options={quote(' '.join(level.options))};;"
        for level, name in names
    ]
    return _BASH.format(paths="|".join(name for _, name in names), cases="\n".join(cases), keys=quote(" ".join(keys)))


def _fish(levels: list[_Level], keys: list[str]) -> Iterator[str]:
    yield f"set -g __rollfeed_keys {' '.join(keys)}"
    for level in levels:
        at = " ".join(("rollfeed", *level.path))
        for name, told in level.words.items():
            yield f"complete -c rollfeed -f -n {_fish_at(f'{at}$')} -a {name} -d {_in_fish(told)}"
        for name, told in level.options.items():
            values = " -x -a '$__rollfeed_keys'" if name == "--set" else ""
            below = f"{at}{'$' if level.words else '( |$)'}"
            yield f"complete -c rollfeed -n {_fish_at(below)} -l {name[2:]} -d {_in_fish(told)}{values}"


def _fish_at(pattern: str) -> str:
    return _in_fish(f"string match -rq '^([^ ]*/)?{pattern}' -- (commandline -opc | string join ' ')")


def _in_fish(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"
