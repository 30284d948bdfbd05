"""A rank that never calls."""

from ranks.failure_cases import PATIENCE as SECONDS
from ranks.failure_cases import silent

__all__ = ["CASES", "SECONDS"]
CASES = {"silent": silent}
