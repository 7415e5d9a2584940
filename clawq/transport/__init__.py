"""Redis behind our own words: streams of fragments, weights, claims and the control record."""
