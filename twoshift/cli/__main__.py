"""``python -m twoshift.cli``: the command line, where its script is not on the path."""

from twoshift.cli import main

main()
