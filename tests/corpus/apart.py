"""Cases played on copies of the sources, each in a process of its own.

These processes are forked from one that has imported what is not ours and nothing that is: that
is most of what a process costs to start. `python -m tests.corpus.apart` is that one; the class is
its other end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from traceback import format_exc
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import asdict

if TYPE_CHECKING:
    from tests.corpus.case import How

ROOT: Final = Path(__file__).parent.parent.parent
NOT_OURS: Final = ("attrs", "msgspec", "networkx", "numpy")


class Apart:
    """Plays cases in processes of their own. Use it as a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def kinds(self, number: int, folder: Path, how: How | None = None) -> list[str]:
        """What fails in the case of that number with the sources in that folder."""
        asked, answer = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answer is not None
        wanted = None if how is None else asdict(how)
        print(json.dumps([number, str(folder), wanted]), file=asked, flush=True)
        found = json.loads(answer.readline())
        assert isinstance(found, list), found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()


def main() -> None:
    for name in NOT_OURS:
        import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _answer(*json.loads(line))
        os.waitpid(child, 0)


def _answer(number: int, folder: str, how: dict[str, Any] | None) -> None:
    """Print what fails, as a list; or, as text, why that is not known. Does not return."""
    sys.path.insert(0, folder)
    answer: list[str] | str
    try:
        from tests.corpus.__main__ import kinds

        answer = kinds(number, how)
    except BaseException:
        answer = format_exc()
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
