"""`python -m tests.corpus` writes the page of reports; with the number of a case it plays that one
and prints what fails, as a list."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from tests.corpus.case import How
from tests.corpus.cases import CASES
from tests.corpus.page import PAGE, page


def main(arguments: list[str]) -> None:
    if arguments:
        print(json.dumps(kinds(int(arguments[0]))))
        return
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


def kinds(number: int, how: dict[str, Any] | None = None) -> list[str]:
    """What fails in the case of that number."""
    logging.disable()
    return CASES[number].kinds(How(**how) if how else None)


if __name__ == "__main__":
    main(sys.argv[1:])
