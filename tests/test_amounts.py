"""Bytes for people."""

import pytest

from clawq.amounts import bytes_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (99_949, "99.9 KB"),
        (99_960, "100 KB"),
        (999_499, "999 KB"),
        (999_999, "1 MB"),
        (97_000_000, "97 MB"),
        (1_073_741_824, "1.07 GB"),
        (9_996_000_000, "10 GB"),
        (10_500_000_000, "10.5 GB"),
        (100_000_000_000, "100 GB"),
        (10_500_000_000_000, "10.5 TB"),
        (3e19, "30000 PB"),
    ],
)
def test_bytes_are_told_in_three_figures_and_never_with_an_exponent(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_whatever_the_amount_there_is_no_exponent_and_no_1000_of_a_unit() -> None:
    for power in range(15):
        for factor in (1, 1.5, 9.994, 9.996, 99.94, 99.96, 999.4, 999.6):
            text = bytes_text(factor * 10**power)
            number, unit = text.split()
            assert "e" not in number
            assert unit
            assert float(number) < 1000
