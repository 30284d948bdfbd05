"""A rank that dies in the middle."""

from ranks.failure_cases import PATIENCE as SECONDS
from ranks.failure_cases import dies

__all__ = ["CASES", "SECONDS"]
CASES = {"dies": dies}
