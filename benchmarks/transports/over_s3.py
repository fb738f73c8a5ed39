"""x"""

from bars import Bar


def measure(n: int) -> list[Bar]:
    return []
