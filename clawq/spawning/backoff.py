"""How long to wait before something that keeps ending is started again."""


def backoff_s(in_a_row: int, first_s: float, longest_s: float) -> float:
    """Seconds before the next start: doubled with each end in a row.

    Args:
        in_a_row: ends without a life worth the name between them, this one included; 1 or more.
        first_s: after the first of them.
        longest_s: at the most.
    """
    # The exponent is bounded, or what ends for weeks would overflow it.
    return float(min(first_s * 2.0 ** min(in_a_row - 1, 20), longest_s))


__all__ = ["backoff_s"]
