"""A rank that stops in the middle."""

from ranks.failure_cases import PATIENCE as SECONDS
from ranks.failure_cases import stalls

__all__ = ["CASES", "SECONDS"]
CASES = {"stalls": stalls}
