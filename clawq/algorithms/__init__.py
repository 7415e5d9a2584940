"""The learners' algorithms; each comes in through the entry point group `clawq.algorithms`."""
