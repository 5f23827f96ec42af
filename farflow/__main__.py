"""``python -m farflow`` is the ``farflow`` command."""

from farflow.cli import main

main()
