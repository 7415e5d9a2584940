"""Amounts of bytes as people read them, everywhere the same: 512 B, 97 MB, 1.07 GB, 10.5 GB, 1.2 TB."""

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def bytes_text(count: float) -> str:
    """Bytes for people: three figures at most, never an exponent; units are powers of 1000."""
    amount, unit = float(count), 0
    # What would be rounded to 1000 of a unit is 1 of the next.
    while abs(amount) >= 999.5 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    # The bounds are those from which on rounding gives one more figure before the point.
    places = 0 if unit == 0 or abs(amount) >= 99.95 else 1 if abs(amount) >= 9.995 else 2
    text = f"{amount:.{places}f}"
    return f"{text.rstrip('0').rstrip('.') if places else text} {_UNITS[unit]}"
