"""`python -m kvstate` is `kvstate`."""

from kvstate.cli import main

main()
