"""All contracts, by the name of their golden file."""

from tests.golden import format_1, package, verbs
from tests.golden.golden import Contract

CONTRACTS: dict[str, Contract] = {**verbs.CONTRACTS, **package.CONTRACTS, **format_1.CONTRACTS}
