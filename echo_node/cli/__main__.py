"""Run the command line by `python -m echo_node.cli`."""

from echo_node.__main__ import main

main()
