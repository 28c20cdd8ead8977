"""The command line: what people type, checked, and answered in one line where it is wrong.

`app` holds the commands and the exit codes, `options` the options that several of them share,
`prompts` reads what is to be continued, `generate` continues it, `results` writes it down for
programs, `stats` says what it cost, `terminal` is the manners of a terminal program. Nothing heavy
is imported before a command needs it: `--help`, `plan` and `models` load neither torch nor extras.
"""

from nanoserve.cli.app import main

__all__ = ["main"]
