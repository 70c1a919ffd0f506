"""Every case of the corpus."""

from __future__ import annotations

from typing import Final

from tests.corpus.case import Case
from tests.corpus.cases_admission import ADMISSION
from tests.corpus.cases_events import EVENTS
from tests.corpus.cases_eviction import EVICTION
from tests.corpus.cases_failures import FAILURES
from tests.corpus.cases_flight import FLIGHT
from tests.corpus.cases_keys import KEYS
from tests.corpus.cases_memory import MEMORY
from tests.corpus.cases_mirrors import MIRRORS
from tests.corpus.cases_sharing import SHARING
from tests.corpus.cases_spans import SPANS
from tests.corpus.cases_spilling import SPILLING

CASES: Final[tuple[Case, ...]] = (
    *ADMISSION,
    *MEMORY,
    *FAILURES,
    *FLIGHT,
    *SHARING,
    *SPANS,
    *SPILLING,
    *MIRRORS,
    *EVICTION,
    *KEYS,
    *EVENTS,
)
