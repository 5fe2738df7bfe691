"""How many mutants there were and what became of them; tests/proof/conftest.py prints it at the end of a run."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts by architecture."""

    rows: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, name: str, **counts: int) -> None:
        self.rows[name] = counts

    def lines(self) -> Iterator[str]:
        """Yield a line for each architecture, and one for all."""
        for name, counts in self.rows.items():
            yield f"{name}: {_words(counts)}"
        total = Counter()
        for counts in self.rows.values():
            total.update(counts)
        yield f"all: {_words(total)}"


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in counts.items())


TALLY = Tally()
