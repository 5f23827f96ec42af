"""Small words of the commands: counts and times as people say them. Needs nothing installed."""


def counted(number: int, what: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def human_age(seconds: float) -> str:
    """``12 s``, ``3 min``, ``2 h``, ``5 d``; what is not past is ``0 s``."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
