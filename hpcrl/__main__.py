"""`python -m hpcrl`, where the command is not on PATH."""

from hpcrl.cli import main

main()
